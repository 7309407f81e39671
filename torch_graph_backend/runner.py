"""CompiledGraph: what Dynamo calls. Admit, pick a key, fill, replay, hand out; or answer eagerly with a reason.

Contract (C2, C6). Every call is counted once. A call that cannot run the plan runs the Dynamo graph as it came, which
is what eager mode would have answered. No forward is run twice: everything that can refuse a call is asked before the
first step runs; from then on an exception is the user's own and the graph stays usable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torch_graph_backend.admission import Bounds, Inputs, Keys, grad_reason, mode_reason
from torch_graph_backend.codegen import Program, generate
from torch_graph_backend.config import Config
from torch_graph_backend.entry import Entry, FirstFrame
from torch_graph_backend.errors import StrictModeError
from torch_graph_backend.ledger import Ledger, log
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.plan import Plan
from torch_graph_backend.recorders.base import CaptureBackend
from torch_graph_backend.shape_key import ShapeKey
from torch_graph_backend.validate import bucket_reason

#: After this many re-records because a changed input moved, the operations on it run eagerly instead.
MAX_MOVES = 3


class CompiledGraph:
    """One Dynamo graph. ``plan`` is ``None`` if it could not be normalised; ``reason`` says why nothing is captured."""

    def __init__(self, gm: GraphModule, name: str, config: Config, reason: Reason | None) -> None:
        self.gm, self.name, self.config, self.reason = gm, name, config, reason
        self.ledger = Ledger(name)
        self.plan: Plan | None = None
        self.seconds: dict[str, float] = {}
        self.entries: dict[ShapeKey, Entry] = {}
        self.lock: Any = threading.RLock()
        self.turns_grad_on = False
        self.running = False

    def adopt(
        self, plan: Plan, normal: NormalGraph, written: Sequence[int], recorder: CaptureBackend, lock: Any
    ) -> None:
        """Take a plan into use; also called again when a plan had to be made anew."""
        self.plan, self.normal, self.recorder, self.lock = plan, normal, recorder, lock
        self.turns_grad_on = normal.turns_grad_on
        self.reason = self.reason or plan.reason
        self.entries = {}
        self.program: Program = generate(plan, normal)
        self.inputs = Inputs(plan, normal, written)
        symbols = [s.symbol for s in (*plan.bucketed, *plan.exact_in_key)]
        ladders = [self.config.ladder_for(s.source) for s in plan.bucketed]
        self.keys = Keys(plan, ladders, Bounds.of(normal.fake_mode, symbols, plan.conditions))
        self.weights = {i for i, p in enumerate(normal.placeholders) if p.meta.get("static")}

    # -- calls ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        reason = self.reason or grad_reason(args, self.turns_grad_on) or mode_reason()
        if reason is not None:
            return self.eagerly(reason, args)
        with self.lock:
            found = self.admit(list(args))
            if isinstance(found, Reason):
                return self.eagerly(found, args)
            entry, sizes = found
            self.running = True
            try:
                return self.run(entry, sizes, list(args))
            finally:
                self.running = False

    def eagerly(self, reason: Reason, args: Sequence[Any]) -> Any:
        """The Dynamo graph as it came; counted, logged once a code, refused if the user asked for strictness."""
        if self.config.strict:
            raise StrictModeError(reason, f"a call of {self.name}")
        self.ledger.count_eager(reason)
        return self.gm.forward(*args)

    def admit(self, args: list[Any]) -> tuple[Entry, tuple[int, ...]] | Reason:
        """The entry that serves this call, or why none does. Runs nothing of the user's."""
        if self.running:  # the lock lets the same thread in again
            return Reason("busy", "the graph called itself, from inside one of its breaks")
        reason = self.recorder.can_run()
        if reason is not None:
            return reason
        sizes = self.program.sizes_of(args)
        picked = self.keys.pick(sizes)
        if isinstance(picked, Reason):
            return picked
        reason = self.inputs.slot_reason(args, sizes) or self.inputs.alias_reason(args, sizes)
        if reason is not None:
            return reason
        key, bucket = picked
        entry = self.entries.get(key)
        if entry is None:
            made = self.make_entry(key, bucket, sizes)
            if isinstance(made, Reason):
                return made
            entry = self.entries[key] = made
        elif entry.recordings is not None and entry.moved(args):
            self.address_moved(entry, args)
            return self.admit(args)
        if entry.recordings is None:
            reason = entry.refused or self.inputs.pinned_reason(args, sizes)
            if reason is not None:
                return reason
        return entry, sizes

    def make_entry(self, key: ShapeKey, bucket: Sequence[int], sizes: tuple[int, ...]) -> Entry | Reason:
        """Allocate the static memory of a key, unless the cap is reached or the bucket is not valid."""
        assert self.plan is not None
        if len(self.entries) >= self.config.max_recordings:
            text = f"{self.name} keeps {len(self.entries)} keys already"
            return Reason("recording-cap", text, fix="raise max_recordings, or use fewer buckets")
        at = {s.symbol: v for s, v in zip(self.plan.symbols, sizes, strict=True)}
        at.update({s.symbol: b for s, b in zip(self.plan.bucketed, bucket, strict=True)})
        try:
            entry = Entry(key, self.plan, self.normal, self.program, self.recorder, at)
        except (torch.OutOfMemoryError, MemoryError) as error:
            text = f"the buffers of key {key} could not be allocated: {error}"
            return Reason("out-of-memory", text, fix="use fewer or smaller buckets")
        entry.refused = bucket_reason(entry)
        return entry

    def run(self, entry: Entry, sizes: tuple[int, ...], args: list[Any]) -> Any:
        """Run the plan: uncaptured on a first call, recorded on the second, replayed from then on."""
        replay = entry.recordings is not None or (threading.get_ident() in entry.ran_on and self.record(entry, args))
        if replay:
            with self.recorder.replay_session():
                out = self.program.run(args, sizes, entry.frame(sizes))
        else:
            out = self.program.run(args, sizes, FirstFrame(entry, sizes, args))
            entry.ran_on.add(threading.get_ident())
        real, computed = self.rows(entry, sizes)
        if replay or entry.uncaptured is None:
            self.ledger.count_run(entry.key, replay, real, computed)
        else:
            self.ledger.count_eager(entry.uncaptured)
        return out

    def rows(self, entry: Entry, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Real and computed rows: products of the bucketed sizes (1 and 1 if nothing is bucketed)."""
        real = computed = 1
        for i in self.keys.bucketed:
            real *= sizes[i]
            computed *= entry.size_args[i]
        return real, computed

    def record(self, entry: Entry, args: list[Any]) -> bool:
        """Record a key; a failure is logged once and the key runs uncaptured from then on (C7)."""
        if entry.uncaptured is not None:
            return False
        start = time.perf_counter()
        try:
            entry.record(args, self.config.progress)
        except Exception as error:
            entry.forget()
            entry.uncaptured = Reason("capture-failed", f"recording key {entry.key} failed: {error}")
            log.warning("%s: %s", self.name, entry.uncaptured, exc_info=error)
            return False
        self.ledger.count_recording(entry.key, time.perf_counter() - start)
        return True

    def address_moved(self, entry: Entry, args: list[Any]) -> None:
        """A pinned tensor lies elsewhere: its recordings are dropped; inputs that keep moving are unpinned."""
        moved = entry.moved(args)
        names = [self.inputs.plan.placeholders[i] for i in moved[:3]]
        log.info("%s: %s moved; recording again", self.name, ", ".join(names))
        if self.weights & set(moved):
            for other in self.entries.values():  # the old weights must not stay alive in any recording
                other.forget()
        entry.moves += 1
        entry.forget()
        if entry.moves >= MAX_MOVES and not self.weights & set(moved):
            self.unpin([self.normal.placeholders[i].name for i in moved])

    def unpin(self, names: Sequence[str]) -> None:
        """Make the plan again with the operations on these inputs eager; replaced by the backend when it compiles."""

    def close(self) -> None:
        """Drop every recording and buffer; later calls run eagerly."""
        with self.lock:
            self.entries.clear()
            self.reason = self.reason or Reason("disabled", "the graph was closed")
