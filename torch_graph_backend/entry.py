"""One key of one compiled graph: its static buffers, its recordings, and where every boundary value lies.

Contract (C1, C2). The first call on a key runs the segments' Python on the same buffers that the recording will use
and returns that answer; ``record`` executes nothing. Slots and bridges lie in the device's arena. A boundary value of a
recorded segment lies in the recorder's pool and is held only until its last reader has been recorded: ``static`` has
aliases that keep no memory. Arguments are read in place and compared by address; they are not kept alive either.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_graph_backend.buffer_registry import BufferRegistry
from torch_graph_backend.codegen import Program
from torch_graph_backend.demotion import Demoted, demote
from torch_graph_backend.device_state import DeviceState
from torch_graph_backend.frames import FirstFrame, Frame, PartialFrame
from torch_graph_backend.inductor_segment import CompiledSegment
from torch_graph_backend.instances import Instance
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import StorageWeakRef, data_ptrs_equal
from torch_graph_backend.plan import CapturedSegment, Cut, Plan, Ref
from torch_graph_backend.progress import shown
from torch_graph_backend.recorders.base import SHORTAGE, Recording, Segment
from torch_graph_backend.shape_key import ShapeKey
from torch_graph_backend.slots import Sizes, Window, buffer_strides
from torch_graph_backend.strides import compared, mislaid
from torch_graph_backend.verify import CheckedFrame
from torch_graph_backend.warmup import warm_breaks

#: Frames kept per key: one per real size seen. A bucket of the default ladder covers at most an eighth of its size.
_FRAMES = 64


class Entry:
    """Static memory and recordings of one key.

    ``ran_on`` holds the threads that made a first call: a thread records only after a first run of its own, which
    makes what libraries keep per thread (cuBLAS handles) and cannot make inside a recording. ``demoted`` segments could
    not be recorded and run as Python at every call. ``compiled`` segments run Inductor's code; ``plain`` says why
    others of a small key do not; ``prepared``: both are decided. ``audited``: whether a replay was, and which sizes
    were padded then (``audit``). ``nbytes``: memory that had to be allocated for this key.
    """

    def __init__(
        self,
        key: ShapeKey,
        plan: Plan,
        normal: NormalGraph,
        program: Program,
        state: DeviceState,
        bucket: Sizes,
        instance: Instance,
        registry: BufferRegistry,
    ) -> None:
        self.instance, self.registry = instance, registry
        self.key, self.plan, self.normal, self.program, self.state = key, plan, normal, program, state
        self.recorder = state.recorder
        self.bucket = bucket
        self.size_args = tuple(bucket[s.symbol] for s in plan.symbols)
        exact = frozenset(s.symbol for s in plan.symbols if s.kind == "exact")
        specs = [*(s.spec for s in plan.slots), *(b.spec for b in plan.bridges)]
        layouts = [(*buffer_strides(spec, bucket, exact), spec.dtype) for spec in specs]
        kept = [i for i, s in enumerate(plan.slots) if s.policy.survives]
        shared = [i for i in range(len(specs)) if i not in kept]
        self.own = state.arena.own([layouts[i] for i in kept])
        self.lease = state.arena.take([*(layouts[i] for i in shared), *(((), (), c.dtype) for c in plan.counts)])
        at = dict(zip(kept, self.own.buffers, strict=True))
        at |= dict(zip(shared, self.lease.buffers[: len(shared)], strict=True))
        self.slots = [at[i] for i in range(len(plan.slots))]
        self.bridges = [at[i] for i in range(len(plan.slots), len(specs))]
        self.counts = list(self.lease.buffers[len(shared) :])
        for slot, buffer in zip(plan.slots, self.slots, strict=True):
            slot.policy.start(buffer, slot.pad_value)
        self.slot_windows = [Window.at(s.spec.padding, bucket) for s in plan.slots]
        self.bridge_windows = [Window.at(b.spec.padding, bucket) for b in plan.bridges]
        self.cut_windows = [Window.at(c.spec.padding, bucket) for c in plan.cuts]
        self.cuts_after: dict[int, list[tuple[int, Cut]]] = {}
        for i, cut in enumerate(plan.cuts):
            self.cuts_after.setdefault(cut.after, []).append((i, cut))
        self.bridges_after: dict[int, list[int]] = {}
        for i, b in enumerate(plan.bridges):
            self.bridges_after.setdefault(b.after, []).append(i)
        self.buffer_storages = {storage_of(t) for t in (*self.lease.buffers, *self.own.buffers)}
        self.last_used = 0
        self.nbytes = self.lease.nbytes + self.own.nbytes
        self.moves = self.replays = 0
        self.rest = self.rests = 0
        self.verify = False
        self.refused: Reason | None = None
        #: Shape, stride, dtype and device of what segments return at the bucket, by name; and why that is not so.
        self.planned: dict[str, list[Any]] = {}
        #: Bytes that its segments ask for at most, all together.
        self.demand = 0
        self.mislaid: Reason | None = None
        #: Values whose layout the first run compares with the plan's, captured ones and eager ones.
        self.compared, self.bridged = compared(plan, normal.graph)
        self.forget()

    def forget(self) -> None:
        """Drop the recordings (an address moved); the next call on this key is a first call again."""
        self.ran_on: set[int] = set()
        self.uncaptured: Reason | None = None
        self.audited: set[tuple[bool, tuple[bool, ...]]] = set()
        self.recordings: dict[int, Recording] = {}
        self.recorded = False
        self.demoted: dict[int, Demoted] = {}
        self.compiled: dict[int, CompiledSegment] = {}
        self.plain: dict[int, Reason] = {}
        self.prepared = False
        self.static: dict[str, Any] = {}
        self.held: dict[str, Any] = {}
        self.pins: tuple[list[int], list[int]] = ([], [])
        self.layouts: list[tuple[int, tuple[int, ...]]] = []
        self.watched: list[StorageWeakRef] = []
        self.owned = set(self.buffer_storages)
        self.frames: OrderedDict[tuple[int, ...], Frame] = OrderedDict()

    # -- segments ------------------------------------------------------------------------------------------------

    def inputs(self, step: CapturedSegment, args: Sequence[Any], values: dict[str, Any]) -> list[Any]:
        """The tensors one segment reads, at their static addresses."""
        return [self._resolve(ref, args, values) for _, ref in step.inputs]

    def _resolve(self, ref: Ref, args: Sequence[Any], values: dict[str, Any]) -> Any:
        if ref.kind == "arg":
            return args[int(ref.key)]
        if ref.kind == "slot":
            return self.slots[int(ref.key)]
        if ref.kind == "count":
            return self.counts[int(ref.key)]
        if ref.kind == "bridge":
            return self.bridges[int(ref.key)]
        if ref.kind == "const":
            return self.normal.constants[str(ref.key)]
        return values[str(ref.key)]

    def run_segment(
        self, step: CapturedSegment, args: Sequence[Any], values: dict[str, Any], pool: bool = True
    ) -> tuple[Any, ...]:
        """Run a segment's Python at the bucket's size; ``pool``: no other segment of this call is replayed, and the
        pool has room."""
        with self.recorder.capture_session(self.writes_inference(args), pool):
            made = tuple(self.body(step)(*self.inputs(step, args, values)))
        pairs = [(name, value) for name, value in zip(step.outputs, made, strict=True) if name in self.compared]
        self.mislaid = self.mislaid or mislaid(pairs, (self.planned.get(name, []) for name, _ in pairs))
        return made

    def body(self, step: CapturedSegment) -> Segment:
        """What computes a segment from its inputs: Inductor's code, or the plan's own operations."""
        found = self.compiled.get(step.index)
        return found if found is not None else functools.partial(self.program.steps[step.index], *self.size_args)

    def writes_inference(self, args: Sequence[Any]) -> bool:
        """Whether a segment changes a tensor made under inference mode: only inference mode may do that."""
        return any(args[i].is_inference() for i in self.plan.mutated)

    def write_counts(self, sizes: Sizes, args: Sequence[Any]) -> None:
        """Tell operations the real sizes, and numbers of the caller's: one small kernel each, no copy from the host."""
        for buffer, count in zip(self.counts, self.plan.counts, strict=True):
            if count.symbol is not None:
                buffer.fill_(sizes[count.symbol])
        self.write_numbers(args)

    def write_numbers(self, args: Sequence[Any]) -> None:
        """Of these the numbers of the caller's alone. (Frames fill the sizes together with the slots.)"""
        for buffer, count in zip(self.counts, self.plan.counts, strict=True):
            if count.symbol is None:  # rounded as kernels round one: beyond the largest float is infinity, not an error
                buffer.fill_(args[count.arg].to(count.dtype).item())

    def warm_up(self, args: Sequence[Any]) -> None:
        """Run the segments alone, on zeros (declared values where there are some: a length of zero takes other paths,
        or divides by zero), and the warm-ups of break ops: kernels are loaded and chosen. Changes what the segments
        change."""
        kept = [b.clone() for b in self.own.buffers]
        for buffer in (*self.lease.buffers, *self.own.buffers):
            buffer.zero_()
        for slot, buffer in zip(self.plan.slots, self.slots, strict=True):
            if slot.pad_value != 0:
                buffer.fill_(slot.pad_value)
        self.write_counts(self.bucket, args)
        pool = self.recorder.has_room(self.demand)
        values: dict[str, Any] = {}
        warmed: set[Any] = set()
        for step in self.plan.steps:
            if isinstance(step, CapturedSegment):
                values.update(zip(step.outputs, self.run_segment(step, args, values, pool), strict=True))
            else:
                warm_breaks(self, step, args, warmed)
        for buffer, was in zip(self.own.buffers, kept, strict=True):
            buffer.copy_(was)
        self.ran_on.add(threading.get_ident())

    # -- recording -----------------------------------------------------------------------------------------------

    def record(self, args: Sequence[Any], progress: bool = False) -> None:
        """Record all segments in order. A segment that cannot be recorded is demoted; if none can, the first one's
        error is raised. After any error nothing is kept."""
        before = self.recorder.nbytes
        values: dict[str, Any] = {}
        pinned = [args[i] for i in self.plan.pinned]
        errors: list[Exception] = []
        self.recorder.has_room(self.demand)  # makes some if it can; a recording that lacks some says so
        try:
            with self.recorder.record_session(self.writes_inference(args)):
                for step in shown(self.plan.segments, f"recording {self.key}", progress):
                    self._let_go(values, step.index)
                    outputs = self._record_one(step, self.inputs(step, args, values), pinned, errors)
                    values.update(zip(step.outputs, outputs, strict=True))
                    self.static.update((n, self._aliases(v)) for n, v in zip(step.outputs, outputs, strict=True))
            if errors and not self.recordings:
                raise errors[0]
            self.held = {n: values[n] for n in self.plan.held if n in values}
            self.nbytes += max(0, self.recorder.nbytes - before)
            self._pin(args)
        except BaseException:
            self.forget()
            raise
        self.recorded = True

    def _record_one(
        self, step: CapturedSegment, inputs: list[Any], weak: list[torch.Tensor], errors: list[Exception]
    ) -> Sequence[Any]:
        try:
            made = self._captured(step, inputs, weak)
        except SHORTAGE:
            raise  # memory is not the segment's fault
        except Exception as error:
            errors.append(error)
            log.debug("segment %d of key %s could not be recorded", step.index, self.key, exc_info=error)
            self.demoted[step.index], outputs = demote(self, step, inputs, error)
            return outputs
        # Its outputs would keep their memory: the aliases below are enough.
        self.recordings[step.index] = replace(made, outputs=())
        return made.outputs

    def _captured(self, step: CapturedSegment, inputs: list[Any], weak: list[torch.Tensor]) -> Recording:
        """Record a segment; one whose compiled code cannot be recorded goes back to plain kernels."""
        try:
            return self.recorder.capture_one(self.body(step), inputs, weak)
        except SHORTAGE:
            raise
        except Exception as error:
            if self.compiled.pop(step.index, None) is None:
                raise
            text = f"the compiled code of segment {step.index} could not be recorded: {error}"
            self.plain[step.index] = Reason("inductor-failed", text)
            log.warning("%s", text, exc_info=error)
            try:
                return self.recorder.capture_one(self.body(step), inputs, weak)
            except Exception as second:
                raise second from error  # what is logged of it shows both

    def _let_go(self, values: dict[str, Any], index: int) -> None:
        """Drop the values whose last reader comes before step ``index``."""
        for step in self.plan.segments:
            for name, last in zip(step.outputs, step.last_reads, strict=True):
                if last < index and name not in self.plan.held:
                    values.pop(name, None)

    def _aliases(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [self._aliases(v) for v in value]
        return self.recorder.alias(value) if isinstance(value, torch.Tensor) else value

    def _pin(self, args: Sequence[Any]) -> None:
        theirs = {storage_of(args[i]) for i in self.plan.pinned}  # a captured view of an argument is not ours
        ours = {storage_of(t) for t in self.static.values() if isinstance(t, torch.Tensor)}
        handed_out = {storage_of(t) for t in self.held.values() if isinstance(t, torch.Tensor)}
        self.owned = (self.buffer_storages | ours) - {0} - theirs - handed_out
        # The weights are the instance's, which is chosen before the entry; Dynamo guards their layout.
        moving = [i for i in self.plan.pinned if not self.normal.placeholders[i].meta.get("static")]
        self.layouts = [(i, args[i].stride()) for i in moving]
        self.watched = [StorageWeakRef(args[i].untyped_storage()) for i in moving]
        pinned = [i for i in moving if args[i].numel()]
        self.pins = ([args[i].data_ptr() if i in pinned else 0 for i in range(len(args))], pinned)

    def dead(self) -> bool:
        """Whether memory that the recordings work on, a cache of the caller's, is gone."""
        return any(ref.expired() for ref in self.watched)

    def rest_for(self, calls: int) -> None:
        """Let this key rest for so many calls; twice as many as the last time, if it rested before."""
        self.rest = self.rests = max(calls, 2 * self.rests)

    def resting(self) -> Reason | None:
        """Counts one call down."""
        if self.rest == 0:
            return None
        self.rest -= 1
        return Reason("out-of-memory", f"key {self.key} ran out of memory lately")

    def moved(self, args: list[Any]) -> list[int]:
        """Pinned arguments that are not where, or not laid out as, they were recorded."""
        pointers, which = self.pins
        restrided = [i for i, stride in self.layouts if args[i].stride() != stride]
        if not restrided and data_ptrs_equal(args, pointers, which):
            return []
        return restrided + [i for i in which if args[i].data_ptr() != pointers[i]]

    # -- frames --------------------------------------------------------------------------------------------------

    def frame(self, sizes: tuple[int, ...], args: Sequence[Any]) -> Frame:
        """The replay frame of one real size, cached."""
        if self.demoted:
            return PartialFrame(self, sizes, args)
        if self.verify:
            return CheckedFrame(self, sizes)
        found = self.frames.get(sizes)
        if found is None:
            found = self.frames[sizes] = Frame(self, sizes)
            if len(self.frames) > _FRAMES:
                self.frames.popitem(last=False)
        else:
            self.frames.move_to_end(sizes)
        return found

    def first_frame(self, sizes: tuple[int, ...], args: Sequence[Any]) -> FirstFrame:
        """The frame of a call that runs uncaptured."""
        return FirstFrame(self, sizes, args)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor, or a view of it, lies in."""
    return tensor.untyped_storage().data_ptr()
