"""The option ``audit``: what the plan relies on is tried out, with other contents in every padded row.

Contract (C2, C4). A captured segment of an audited call runs several times: as it is, with each of ``FILLS`` in the
padded rows that it reads, and at the real size. What it gives in real rows, and all memory that it changes, must be the
same bit by bit (at the real size: but for rounding). Everything it touched is put back before each run, so the call has
the effects of one eager call. A segment that does not pass is answered by its own operations on the real rows, at the
real size, and the first operation that went wrong is named (``audit_blame``): the plan is made anew without it.

A segment that is merely not deterministic (atomics) gives other bits for the same fill: such results are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_graph_backend.audit_blame import REPEATS, blame
from torch_graph_backend.audit_compare import close
from torch_graph_backend.audit_rows import FILLS, Bounds, Layouts, jumps
from torch_graph_backend.audit_trial import REAL_SIZE, TRASH_ROW, Trial
from torch_graph_backend.frames import FirstFrame, PartialFrame
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.plan import CapturedSegment
from torch_graph_backend.recorders.base import SHORTAGE
from torch_graph_backend.slots import take_all

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry


class Auditor:
    """Which calls of one graph are audited. ``option``: see ``Config.audit``; ``declared``: what ``None`` asks for."""

    def __init__(self, option: str | None, layouts: Layouts, declared: bool) -> None:
        mode = option or ("capture" if declared else "off")
        self.on = mode != "off"
        self.every = int(mode.partition(":")[2]) if mode.startswith("every:") else 0
        self.layouts = layouts

    def due(self, entry: Entry, sizes: tuple[int, ...]) -> tuple[bool, ...]:
        """Whether a call is to be audited: which of its sizes are padded, and nothing if it is not.

        The first call of a key, and the first replay, each with rows of padding; for each set of sizes that are padded,
        since an audit only tells of those. Then every N-th replay, if that was asked for.
        """
        if not self.on:
            return ()
        bucketed = [s.kind == "bucketed" for s in entry.plan.symbols]
        padded = tuple(a < b and c for a, b, c in zip(sizes, entry.size_args, bucketed, strict=True))
        again = self.every and entry.recorded and (entry.replays + 1) % self.every == 0
        return padded if any(padded) and (again or (entry.recorded, padded) not in entry.audited) else ()

    def frame(self, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any]) -> AuditedFirst | AuditedReplay | None:
        """The frame of a call that is to be audited; ``None`` if this one is not."""
        padded = self.due(entry, sizes)
        if not padded:
            return None
        entry.audited.add((entry.recorded, padded))
        entry.program.watch_breaks()
        audit = Audit(self, entry, sizes, args)
        return (AuditedReplay if entry.recorded else AuditedFirst)(entry, sizes, args, audit)


class Audit:
    """One audited call. ``failed``: the operations that went wrong, by node; ``tried``: how many segments were,
    ``untried``: why others could not be; ``seconds`` spent on top of the call."""

    def __init__(self, auditor: Auditor, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any]) -> None:
        self.entry, self.sizes, self.args = entry, sizes, args
        nodes = {n.name: n for n in entry.normal.graph.nodes}
        symbols = [s.symbol for s in entry.plan.bucketed]
        self.bounds = Bounds(nodes, auditor.layouts, symbols, entry.bucket)
        self.failed: dict[str, Reason] = {}
        self.tried, self.untried = 0, list[Reason]()
        self.last: Trial | None = None
        self.seconds = 0.0

    def check(self, step: CapturedSegment, values: dict[str, Any], run: Any) -> Sequence[Any] | None:
        """Try a segment out. ``None`` if it passes, and memory is as it was; else its outputs, with eager's answer."""
        start = time.perf_counter()
        try:
            self.last = None
            trial = self.trial(step, values, run)
            if isinstance(trial, Trial):
                self.last = trial
                failed = self.try_out(trial)
            else:
                failed = trial
            if isinstance(failed, Reason):
                self.untried.append(failed)
                return None
            self.tried += 1
            if not failed:
                return None
            self.failed.update(failed)
            assert isinstance(trial, Trial)
            return trial.settle()
        finally:
            self.seconds += time.perf_counter() - start

    def tidy(self) -> None:
        """Rows that nobody reads are left as eager code would: a later segment may turn out to read them."""
        if self.last is not None:
            self.last.empty_trash()
            self.last = None

    def trial(self, step: CapturedSegment, values: dict[str, Any], run: Any) -> Trial | Reason:
        """A reason where there is no memory for it, or where the place of some padding is not known."""
        try:
            made = Trial(self.entry, self.sizes, self.args, self.bounds, step, values, run)
        except SHORTAGE:
            return self.not_tried(step, "there was no memory for it")
        return made if made.possible else self.not_tried(step, "the place of some padding in it is not known")

    def not_tried(self, step: CapturedSegment, why: str) -> Reason:
        where = next((op.where for op in step.ops if op.where), "")
        return Reason("not-audited", f"segment {step.index} of key {self.entry.key}: {why}", where)

    def try_out(self, trial: Trial) -> dict[str, Reason] | Reason:
        """The operations of a segment that went wrong, or why it could not be tried; memory is as it was."""
        try:
            how = self.fault(trial, jumps(trial.step, self.bounds.nodes))
            if how is None:
                return self.not_tried(trial.step, "it cannot run with other contents in its padded rows")
            return blame(trial, how) if how else {}
        except SHORTAGE:
            return self.not_tried(trial.step, "there was no memory for it")
        finally:
            trial.restore()

    def fault(self, trial: Trial, jumping: bool) -> str | None:
        """The first fill under which real rows or memory differ; empty if none does; ``None`` if none could run."""
        base = trial.attempt()
        ran = 0
        for how in ((TRASH_ROW,) if trial.trash else ()) + FILLS:
            try:
                seen = trial.attempt(how)
            except SHORTAGE:
                raise
            except Exception as error:  # a value that can be in no padded row; it says nothing about leaks
                log.debug("segment %d cannot run with %s in padded rows: %s", trial.step.index, how, error)
                continue
            ran += 1
            suspects = [k for k, (a, b) in enumerate(zip(base, seen, strict=True)) if not trial.alike(a, b)]
            if suspects and self.repeatable(trial, how, base, seen, suspects):
                return how
        if jumping:
            return "" if ran else None
        if trial.step.index in self.entry.compiled:
            base = trial.plain()  # how far Inductor's rounding is from that of plain kernels is no matter of padding
        real = trial.attempt(REAL_SIZE)
        return "" if all(close(a, b, trial.scale) for a, b in zip(base, real, strict=True)) else REAL_SIZE

    @staticmethod
    def repeatable(
        trial: Trial, how: str, base: list[torch.Tensor], seen: list[torch.Tensor], suspects: list[int]
    ) -> bool:
        """Whether some result that differs is the same whenever its fill is."""
        for fill, first in [("", base), (how, seen)] * REPEATS:
            again = trial.attempt(fill)
            suspects = [k for k in suspects if trial.alike(first[k], again[k])]
        return bool(suspects)


class AuditedReplay(PartialFrame):
    """A replay that is audited."""

    def __init__(self, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any], audit: Audit) -> None:
        self.audit = audit
        super().__init__(entry, sizes, args)

    def segment(self, index: int) -> list[torch.Tensor]:
        e = self.entry
        step = e.plan.steps[index]
        assert isinstance(step, CapturedSegment)

        def run() -> Sequence[Any]:
            self.launch(step)
            return [e.static[name] for name in step.outputs]

        if self.audit.check(step, e.static, run) is None:
            cuts = super().segment(index)
        else:
            cuts = take_all(self.views.get(index, ()))
        self.audit.tidy()
        return cuts


class AuditedFirst(FirstFrame):
    """A first call that is audited: its segments run as Python, with the kernels that the recording will have."""

    def __init__(self, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any], audit: Audit) -> None:
        self.audit = audit
        super().__init__(entry, sizes, args)

    def launch(self, step: CapturedSegment) -> Sequence[Any]:
        settled = self.audit.check(step, self.values, lambda: self.run(step))
        outputs = self.run(step) if settled is None else settled
        self.audit.tidy()
        return outputs
