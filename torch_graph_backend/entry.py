"""One key of one compiled graph: its static buffers, its recordings, and the frames that run the plan on them.

Contract (C2). The first call on a key runs the segments' Python on the same buffers that the recording will use and
returns that answer. ``record`` executes nothing. A ``Frame`` is the plan at one real size: ``fill`` writes the slots,
``segment`` launches (or, on a first call, runs) one segment and hands out its cuts, ``bridge`` checks and copies
eager results, ``own`` copies an output whose memory turns out to be ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from torch_graph_backend.codegen import Program
from torch_graph_backend.errors import BridgeMismatch
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import data_ptrs_equal
from torch_graph_backend.plan import CapturedSegment, Cut, EagerRegion, Plan, Ref
from torch_graph_backend.progress import shown
from torch_graph_backend.recorders.base import CaptureBackend, Recording
from torch_graph_backend.shape_key import ShapeKey
from torch_graph_backend.slots import CutView, Filler, Sizes, Window, buffer_strides, evaluate

#: Frames kept per key: one per real size seen. A bucket of the default ladder covers at most an eighth of its size.
_FRAMES = 64


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Entry:
    """Static memory and recordings of one key.

    ``ran_on`` holds the threads that made a first call: a thread records only after a first run of its own, which
    makes what libraries keep per thread (cuBLAS handles) and cannot make inside a recording.
    """

    def __init__(
        self, key: ShapeKey, plan: Plan, normal: NormalGraph, program: Program, recorder: CaptureBackend, bucket: Sizes
    ) -> None:
        self.key, self.plan, self.normal, self.program, self.recorder = key, plan, normal, program, recorder
        self.bucket = bucket
        self.size_args = tuple(bucket[s.symbol] for s in plan.symbols)
        self.slots = [self._buffer(s.spec) for s in plan.slots]
        self.bridges = [self._buffer(b.spec) for b in plan.bridges]
        self.slot_windows = [Window.at(s.spec.padding, bucket) for s in plan.slots]
        self.bridge_windows = [Window.at(b.spec.padding, bucket) for b in plan.bridges]
        self.cut_windows = [Window.at(c.spec.padding, bucket) for c in plan.cuts]
        self.cuts_after: dict[int, list[tuple[int, Cut]]] = {}
        for i, cut in enumerate(plan.cuts):
            self.cuts_after.setdefault(cut.after, []).append((i, cut))
        self.bridges_after: dict[int, list[int]] = {}
        for i, b in enumerate(plan.bridges):
            self.bridges_after.setdefault(b.after, []).append(i)
        self.ran_on: set[int] = set()
        self.uncaptured: Reason | None = None
        self.refused: Reason | None = None
        self.recordings: dict[int, Recording] | None = None
        self.static: dict[str, torch.Tensor] = {}
        self.pins: tuple[list[int], list[int]] = ([], [])
        self.moves = 0
        self.frames: OrderedDict[tuple[int, ...], Frame] = OrderedDict()
        self.owned = {_storage(t) for t in (*self.slots, *self.bridges)} - {0}

    def _buffer(self, spec: Any) -> torch.Tensor:
        exact = frozenset(s.symbol for s in self.plan.symbols if s.kind == "exact")
        shape, stride = buffer_strides(spec, self.bucket, exact)
        return self.recorder.allocate(shape, stride, spec.dtype)

    # -- segments ------------------------------------------------------------------------------------------------

    def inputs(self, step: CapturedSegment, args: Sequence[Any], values: dict[str, Any]) -> list[Any]:
        """The tensors one segment reads, at their static addresses."""
        return [self._resolve(ref, args, values) for _, ref in step.inputs]

    def _resolve(self, ref: Ref, args: Sequence[Any], values: dict[str, Any]) -> Any:
        if ref.kind == "arg":
            return args[int(ref.key)]
        if ref.kind == "slot":
            return self.slots[int(ref.key)]
        if ref.kind == "bridge":
            return self.bridges[int(ref.key)]
        if ref.kind == "const":
            return self.normal.constants[str(ref.key)]
        return values[str(ref.key)]

    def run_segment(self, step: CapturedSegment, args: Sequence[Any], values: dict[str, Any]) -> None:
        """Run a segment's Python at the bucket's size (a first call)."""
        with self.recorder.capture_session(self._writes_inference(args)):
            outputs = self.program.steps[step.index](*self.size_args, *self.inputs(step, args, values))
        values.update(zip(step.outputs, outputs, strict=True))

    def _writes_inference(self, args: Sequence[Any]) -> bool:
        """Whether a segment changes a tensor made under inference mode: only inference mode may do that."""
        return any(args[i].is_inference() for i in self.plan.mutated)

    def record(self, args: Sequence[Any], progress: bool = False) -> None:
        """Record all segments in order. On an error nothing is kept and the error is raised."""
        recordings: dict[int, Recording] = {}
        values: dict[str, Any] = {}
        with self.recorder.record_session(self._writes_inference(args)):
            for step in shown(self.plan.segments, f"recording {self.key}", progress):
                fn, sizes = self.program.steps[step.index], self.size_args
                tensors = self.inputs(step, args, values)
                made = self.recorder.capture_one(lambda *t, fn=fn, sizes=sizes: fn(*sizes, *t), tensors)
                recordings[step.index] = made
                values.update(zip(step.outputs, made.outputs, strict=True))
        self.recordings, self.static = recordings, values
        theirs = {_storage(args[i]) for i in self.plan.pinned}  # a captured view of an argument is not ours
        self.owned |= {_storage(t) for t in values.values() if isinstance(t, torch.Tensor)} - {0} - theirs
        pinned = [i for i in self.plan.pinned if args[i].numel()]
        self.pins = ([args[i].data_ptr() if i in pinned else 0 for i in range(len(args))], pinned)
        self.frames.clear()

    def forget(self) -> None:
        """Drop the recordings (an address moved); the next call on this key is a first call again."""
        self.recordings, self.static = None, {}
        self.ran_on.clear()
        self.frames.clear()

    def moved(self, args: list[Any]) -> list[int]:
        """Pinned arguments that are not where they were recorded."""
        pointers, which = self.pins
        if data_ptrs_equal(args, pointers, which):
            return []
        return [i for i in which if args[i].data_ptr() != pointers[i]]

    # -- frames --------------------------------------------------------------------------------------------------

    def frame(self, sizes: tuple[int, ...]) -> Frame:
        """The replay frame of one real size, cached."""
        found = self.frames.get(sizes)
        if found is None:
            found = self.frames[sizes] = Frame(self, sizes)
            if len(self.frames) > _FRAMES:
                self.frames.popitem(last=False)
        else:
            self.frames.move_to_end(sizes)
        return found


class Frame:
    """The plan at one real size, replaying. Only buffers and views are held, nothing of the caller."""

    def __init__(self, entry: Entry, sizes: tuple[int, ...]) -> None:
        self.entry = entry
        plan = entry.plan
        self.sizes: dict[Any, int] = {s.symbol: v for s, v in zip(plan.symbols, sizes, strict=True)}
        self.slot_args = [s.arg for s in plan.slots]
        self.slot_filler = Filler(entry.slots, entry.slot_windows, self.sizes)
        self.bridge_fillers = {k: self._bridge_filler(which) for k, which in entry.bridges_after.items()}
        self.views = (
            {k: [self._cut(i, c) for i, c in cuts] for k, cuts in entry.cuts_after.items()} if self.replays else {}
        )

    @property
    def replays(self) -> bool:
        return self.entry.recordings is not None

    def _bridge_filler(self, which: list[int]) -> tuple[list[int], Filler, list[tuple[int, ...]]]:
        e = self.entry
        filler = Filler([e.bridges[i] for i in which], [e.bridge_windows[i] for i in which], self.sizes)
        return which, filler, [tuple(r.shape) for r in filler.real]

    def _cut(self, index: int, cut: Cut) -> CutView:
        return CutView(self.value(cut.value), cut.spec, self.entry.cut_windows[index], cut.private, self.sizes)

    def value(self, name: str) -> torch.Tensor:
        return self.entry.static[name]

    # -- called by the generated driver --------------------------------------------------------------------------

    def fill(self, args: Sequence[Any]) -> None:
        """Write every slot: real rows from the caller's arguments, tails from row 0."""
        self.slot_filler.fill([args[i] for i in self.slot_args])

    def segment(self, index: int) -> list[torch.Tensor]:
        """Replay a segment and take its cuts."""
        e = self.entry
        assert e.recordings is not None
        e.recorder.replay(e.recordings[index])
        return [view.take() for view in self.views.get(index, ())]

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
        return _storage(tensor) in self.entry.owned


class FirstFrame(Frame):
    """The plan at one real size on a first call: segments run as Python, on the same buffers."""

    def __init__(self, entry: Entry, sizes: tuple[int, ...], args: Sequence[Any]) -> None:
        self.args = args
        self.values: dict[str, Any] = {}
        super().__init__(entry, sizes)

    @property
    def replays(self) -> bool:
        return False

    def value(self, name: str) -> torch.Tensor:
        return self.values[name]

    def segment(self, index: int) -> list[torch.Tensor]:
        step = self.entry.plan.steps[index]
        assert isinstance(step, CapturedSegment)
        self.entry.run_segment(step, self.args, self.values)
        return [self._cut(i, c).take() for i, c in self.entry.cuts_after.get(index, ())]


def expected_shape(spec: Any, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a spec at the given sizes."""
    return tuple(evaluate(s, sizes) for s in spec.shape)
