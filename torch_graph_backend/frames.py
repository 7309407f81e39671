"""Frames: the plan of one key at one real size, as the generated driver sees it.

Contract (C3, C5). ``fill`` writes the slots, ``segment`` launches (or runs) one segment and hands out its cuts,
``bridge`` checks and copies eager results, ``own`` copies an output whose memory turns out to be ours. A ``Frame``
replays; a ``FirstFrame`` runs every segment as Python, on the same buffers; a ``PartialFrame`` replays all but demoted
segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_graph_backend.errors import BridgeMismatch
from torch_graph_backend.plan import CapturedSegment, Cut, EagerRegion
from torch_graph_backend.recorders.fill_choice import make_filler
from torch_graph_backend.slots import CutView, Filler, evaluate, take_all
from torch_graph_backend.strides import apart, different

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry


class Frame:
    """The plan at one real size, replaying. Only buffers and views are held, nothing of the caller.

    ``cached``: frames of this kind serve many calls, so that preparing their fills pays.
    """

    cached: ClassVar[bool] = True

    def __init__(self, entry: Entry, sizes: tuple[int, ...]) -> None:
        self.entry = entry
        self.owned = entry.owned
        self.counts = entry.counts
        plan = entry.plan
        self.sizes: dict[Any, int] = {s.symbol: v for s, v in zip(plan.symbols, sizes, strict=True)}
        self.direct = self._direct()
        self.slot_args = [s.arg for s in plan.slots]
        self._fill_plan()
        self.bridge_fillers = {k: self._bridge_filler(which) for k, which in entry.bridges_after.items()}
        self.views: dict[int, list[CutView]] = {}
        if self.replays:
            self.views = {k: [self._cut(i, c) for i, c in cuts] for k, cuts in entry.cuts_after.items()}

    @property
    def replays(self) -> bool:
        return True

    @property
    def launches(self) -> int:
        """Operations that filled the slots of the last call."""
        return self.slot_filler.launches + self.other_launches

    def _fill_plan(self) -> None:
        """How the slots and the counts are filled at this real size."""
        e = self.entry
        plan, registry = e.plan, e.registry
        for slot, buffer, window in zip(plan.slots, e.slots, e.slot_windows, strict=True):
            registry.check_slice(slot.arg, buffer, window, self.sizes)
        computed = [k for k, s in enumerate(plan.slots) if s.arg in registry.computed]
        tails = [s.policy.tail(s.pad_value) for s in plan.slots]
        counts = list(zip(e.counts, plan.counts, strict=True))
        numbers = [(t, self.sizes[c.symbol]) for t, c in counts if c.symbol is not None]
        self.reads_numbers = len(numbers) < len(counts)
        specs = [s.spec for s in plan.slots] if self.cached else None
        self.slot_filler = make_filler(e.slots, e.slot_windows, self.sizes, specs, computed, tails, numbers)
        self.other_launches = len(counts) - len(numbers)
        self.post_fill = registry.post_fills(plan, self.slot_filler.real)

    def _direct(self) -> dict[int, torch.Tensor]:
        """Real rows that eager code writes itself, as it would see them: those with eager's strides."""
        e = self.entry
        planned = [(i, b) for i, b in enumerate(e.plan.bridges) if b.direct]
        views = {i: CutView(e.bridges[i], b.spec, e.bridge_windows[i], False, self.sizes) for i, b in planned}
        return {i: v.source for i, v in views.items() if not v.copy}

    def _bridge_filler(self, which: list[int]) -> tuple[list[int], Filler, list[tuple[int, ...]]]:
        e = self.entry
        filled = [k for k, i in enumerate(which) if i in self.direct]
        filler = Filler([e.bridges[i] for i in which], [e.bridge_windows[i] for i in which], self.sizes, filled)
        return which, filler, [tuple(r.shape) for r in filler.real]

    def _cut(self, index: int, cut: Cut) -> CutView:
        return CutView(self.value(cut.value), cut.spec, self.entry.cut_windows[index], cut.private, self.sizes)

    def value(self, name: str) -> torch.Tensor:
        return self.entry.static[name]

    # -- called by the generated driver --------------------------------------------------------------------------

    def fill(self, args: Sequence[Any]) -> None:
        """Write every slot, real rows from the caller's arguments and tails by their policy; and every count."""
        if self.reads_numbers:
            self.entry.write_numbers(args)
        post_fill = self.post_fill
        between = None if post_fill is None else lambda: post_fill(args)
        self.slot_filler.fill([args[i] for i in self.slot_args], between)

    def segment(self, index: int) -> list[torch.Tensor]:
        """Replay a segment and take its cuts."""
        e = self.entry
        e.recorder.replay(e.recordings[index])
        return take_all(self.views.get(index, ()))

    def rows(self, index: int) -> torch.Tensor:
        """Uninitialised memory for eager code to fill: the real rows of a bridge, or memory of its own."""
        found = self.direct.get(index)
        if found is not None:
            return found
        spec = self.entry.plan.bridges[index].spec
        stride = tuple(evaluate(s, self.sizes) for s in spec.stride)
        shape = tuple(evaluate(s, self.sizes) for s in spec.shape)
        return torch.empty_strided(shape, stride, dtype=spec.dtype, device=self.entry.bridges[index].device)

    def bridge(self, index: int, values: Sequence[Any]) -> None:
        """Check eager results and copy them into their bridges (C3: never broadcast, never cast)."""
        which, filler, shapes = self.bridge_fillers[index]
        for i, value, shape in zip(which, values, shapes, strict=True):
            buffer = self.entry.bridges[i]
            good = isinstance(value, torch.Tensor) and value.dtype is buffer.dtype and tuple(value.shape) == shape
            if not good or value.device != buffer.device:
                raise self._mismatch(i, value, shape)
        filler.fill(values)

    def _mismatch(self, index: int, value: Any, shape: tuple[int, ...]) -> BridgeMismatch:
        bridge = self.entry.plan.bridges[index]
        buffer = self.entry.bridges[index]
        region = next(s for s in self.entry.plan.steps if isinstance(s, EagerRegion) and s.index == bridge.after)
        op = next((o for o in region.ops if o.value == bridge.value), region.ops[-1])
        expected = f"{buffer.dtype} {list(shape)} on {buffer.device}"
        got = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
        return BridgeMismatch(op.op, expected, got, where=op.where)

    def own(self, value: Any) -> Any:
        """An eager result as the caller may keep it: copied if it lies in memory that the next call overwrites."""
        if isinstance(value, torch.Tensor):
            return value.clone() if self._ours(value) else value
        if isinstance(value, (tuple, list)):
            return type(value)([self.own(v) for v in value])
        return value

    def _ours(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
            return any(self._ours(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        if tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() in self.owned


class FirstFrame(Frame):
    """The plan at one real size, uncaptured: segments run as Python, on the same buffers."""

    cached = False

    def __init__(self, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any]) -> None:
        self.args = args
        self.values: dict[str, Any] = {}
        super().__init__(entry, sizes)
        self.pool = entry.recorder.has_room(entry.demand)
        self.owned = set(entry.owned)
        self.theirs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor) and _has_memory(a)}

    @property
    def replays(self) -> bool:
        return False

    def _cut(self, index: int, cut: Cut) -> CutView:
        private = cut.private or cut.value in self.entry.plan.held
        return CutView(self.value(cut.value), cut.spec, self.entry.cut_windows[index], private, self.sizes)

    def value(self, name: str) -> torch.Tensor:
        return self.values[name]

    def launch(self, step: CapturedSegment) -> Sequence[Any]:
        """The outputs of a segment."""
        return self.run(step)

    def run(self, step: CapturedSegment) -> Sequence[Any]:
        """A segment as Python, in ordinary memory if the pool has no room for it."""
        return self.entry.run_segment(step, self.args, self.values, self.pool)

    def segment(self, index: int) -> list[torch.Tensor]:
        step = self.entry.plan.steps[index]
        assert isinstance(step, CapturedSegment)
        outputs = self.launch(step)
        self.values.update(zip(step.outputs, outputs, strict=True))
        if self.entry.recorder.first_runs_in_pool:  # then a replay of another key may write there
            made = {t.untyped_storage().data_ptr() for t in outputs if isinstance(t, torch.Tensor)}
            self.owned |= made - self.theirs
        cuts = take_all([self._cut(i, c) for i, c in self.entry.cuts_after.get(index, ())])
        self._let_go(index)
        return cuts

    def bridge(self, index: int, values: Sequence[Any]) -> None:
        e = self.entry
        for i, value in zip(self.bridge_fillers[index][0], values, strict=True):
            planned = e.plan.bridges[i]
            stride = tuple(evaluate(s, self.sizes) for s in planned.spec.stride)
            ours = planned.direct or planned.value not in e.bridged or not isinstance(value, torch.Tensor)
            if not ours and value.dim() == len(stride) and apart(value.shape, value.stride(), stride):
                e.mislaid = e.mislaid or different(planned.value, value.stride(), stride)
        super().bridge(index, values)

    def _let_go(self, index: int) -> None:
        """Drop what no later step reads. (A cut that a later step takes from it is a reader.)"""
        for step in self.entry.plan.segments:
            for name, last in zip(step.outputs, step.last_reads, strict=True):
                if last <= index:
                    self.values.pop(name, None)


class PartialFrame(Frame):
    """A replay of a key of which some segments are demoted: those run as Python, at every call."""

    cached = False

    def __init__(self, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any]) -> None:
        self.args = args
        super().__init__(entry, sizes)

    def segment(self, index: int) -> list[torch.Tensor]:
        step = self.entry.plan.steps[index]
        assert isinstance(step, CapturedSegment)
        self.launch(step)
        return take_all(self.views.get(index, ()))

    def launch(self, step: CapturedSegment) -> None:
        """Replay a segment, or run it if it is demoted; its outputs lie in static memory then."""
        e = self.entry
        demoted = e.demoted.get(step.index)
        if demoted is None:
            e.recorder.replay(e.recordings[step.index])
        else:
            demoted.take(e.run_segment(step, self.args, e.static, pool=False))


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
