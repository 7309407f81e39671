"""``CudaRecorder``: one ``torch.cuda.CUDAGraph`` per segment, one pool and one capture stream per device.

Contract. First runs and recordings happen on the recorder's own stream, in its pool's order; replays are launched on
the caller's current stream. What is not obvious, and why:

* a first run allocates from the pool, on the capture stream: what it frees there the recording uses again.
* while anybody allocates for a graph, torch's allocator does not give back what it keeps of memory that eager code has
  freed (torch 2.11 to 2.14): the pool would be out of memory on a device that has some. So ``has_room`` gives it back
  beforehand, and a first run that might need more runs in ordinary memory.
* an alias of a boundary value is built from its address: the pool may give the block to a later recording, which is
  sound because every replay writes it anew before reading it, and one call runs at a time.
* ``capture_begin``/``capture_end`` by hand: ``torch.cuda.graph`` synchronises and empties the allocator's cache at
  every capture (0.66 ms against 0.32 ms a segment, measured on an H200).
* error mode ``thread_local``: another thread may allocate or synchronise while we record.
* the cuBLAS workspaces are dropped before and after a recording session, as PyTorch's own graph trees do: a workspace
  allocated inside a capture belongs to the pool, and must not be used outside it, nor the reverse.
* the garbage collector is off while recording: a tensor freed by it would be freed inside the capture.
* a capture can be ended from outside: another thread that synchronises the whole device ends all of its captures. The
  segment is recorded once more.
* a capture that cannot be ended leaves torch's allocator of pinned memory recording into the pool, and a later capture
  into it would raise: the recorder goes on with a pool of its own.
* while a recording runs, random CUDA calls of *other* threads raise on torch 2.11 (the default generator belongs to the
  capture, whatever is captured); recordings are short, and ahead of time where that matters.
* a segment all of whose kernels ran on nothing (tensors without entries) records an empty graph, which is not launched.
* an event orders a replay after the previous one when the caller changed streams: the buffers are shared.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from torch_graph_backend.errors import CaptureError, ReplayError
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import (
    allocate_to_pool,
    clear_cublas_workspaces,
    cuda_alias,
    cuda_bytes,
    cuda_settings,
    end_allocate_to_pool,
    pool_segments,
)
from torch_graph_backend.recorders.base import CaptureBackend, Recording, Segment

EMPTY = "The CUDA Graph is empty"
#: In the first error of a segment whose capture something else has ended. (What it does itself says "not permitted".)
ENDED = "StreamCaptureInvalidated"
#: In the error of a driver that has no memory for a graph.
DRIVER_FULL = "CUDA error: out of memory"
#: How often a segment is recorded before that counts as its own failure.
ATTEMPTS = 4

#: Bytes beyond the tensors: workspaces of libraries, kernels that are loaded, what the allocator rounds up.
SPARE = 256 * 2**20

#: Graphs whose capture could not be ended: on torch 2.11 the allocator of pinned memory keeps their address.
_unended: list[torch.cuda.CUDAGraph] = []


def _end(graph: torch.cuda.CUDAGraph) -> bool:
    """End a capture: whether anything was recorded. (A warning is the only way in which torch 2.11 to 2.13 say so.)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    others = [w for w in caught if EMPTY not in str(w.message)]
    for w in others:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    return len(others) == len(caught)


class CudaRecorder(CaptureBackend):
    """Records segments on one CUDA device. Not re-entrant: the caller holds the device's lock."""

    first_runs_in_pool = True
    frees_parts = False  # the allocator frees the blocks of a pool when nobody records into it or replays from it

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._recording = False
        self._keeper: torch.cuda.CUDAGraph | None = None
        #: Pools that cannot be recorded into any more, and what keeps their memory for the recordings that have it.
        self._left: list[tuple[tuple[int, int], torch.cuda.CUDAGraph | None]] = []

    def _ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of every piece of memory of the pool, and of those that were left."""
        pools = [*self._left, (self.pool, self._keeper)]
        return [piece for pool, keeper in pools if keeper is not None for piece in pool_segments(pool)]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._ranges())

    @property
    def device_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def has_room(self, nbytes: int) -> bool:
        """Blocks that are free in the pool are not counted: whether they are large enough cannot be told."""
        if self._free() < nbytes + SPARE:
            self.trim()
            return self._free() >= nbytes + SPARE
        return True

    def _free(self) -> int:
        """Bytes that the allocator may ask the driver for: what the device has, within the process's share of it."""
        free, total = torch.cuda.mem_get_info(self.device)
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(int(free), int(share * total) - torch.cuda.memory_reserved(self.device))

    def can_run(self) -> Reason | None:
        if self._recording or torch.cuda.is_current_stream_capturing():
            return Reason("already-capturing")
        if torch.cuda.current_device() == self.device.index:
            return None
        with torch.cuda.device(self.device):  # replays are launched on the current stream of this device
            return Reason("already-capturing") if torch.cuda.is_current_stream_capturing() else None

    def settings(self) -> Hashable:
        return cuda_settings()

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=self.device).zero_()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return cuda_alias(tensor)

    def poison(self, live: Sequence[torch.Tensor], byte: int) -> None:
        kept = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in live)})
        for address, nbytes in self._ranges():
            start, end = address, address + nbytes
            for low, high in kept:
                if start < low < end:
                    cuda_bytes(self.device, start, low - start).fill_(byte)
                if start < high and low < end:
                    start = min(max(start, high), end)
            if start < end:
                cuda_bytes(self.device, start, end - start).fill_(byte)

    @contextlib.contextmanager
    def capture_session(self, inference: bool = False, pool: bool = True) -> Iterator[None]:
        with self._modes_and_stream(inference):
            self._hold_pool()
            with allocate_to_pool(self.device, self.pool) if pool else contextlib.nullcontext():
                yield

    @contextlib.contextmanager
    def _modes_and_stream(self, inference: bool) -> Iterator[None]:
        collecting, caching = gc.isenabled(), torch.is_autocast_cache_enabled()
        gc.disable()
        torch.set_autocast_cache_enabled(False)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.inference_mode(inference), torch.no_grad(), torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)
            torch.set_autocast_cache_enabled(caching)
            if collecting:
                gc.enable()

    @contextlib.contextmanager
    def record_session(self, inference: bool = False) -> Iterator[None]:
        """See the base class: workspaces of the outside must not be used inside a capture, nor the reverse."""
        with self._modes_and_stream(inference):
            self._hold_pool()
            torch.cuda.current_blas_handle()  # handles are made a thread, and cannot be made while capturing
            clear_cublas_workspaces()
            try:
                yield
            finally:
                clear_cublas_workspaces()

    def _hold_pool(self) -> None:
        """An empty graph that keeps the pool in use: a pool whose last graph is gone cannot be captured into again
        while a tensor still lies in it (an assertion of the allocator, seen on torch 2.11)."""
        if self._keeper is None:
            self._keeper = torch.cuda.CUDAGraph()
            self._capture(self._keeper, tuple, ())

    def capture_one(self, segment: Segment, args: Sequence[Any], weak: Sequence[torch.Tensor] = ()) -> Recording:
        if self._recording:
            raise CaptureError("CudaRecorder.capture_one", "this recorder is recording")
        self._recording = True
        try:
            with torch.cuda.stream(self.stream):
                graph, outputs, filled = self._capture_again(segment, args)
        finally:
            self._recording = False
        self._graphs.add(graph)
        return Recording(outputs=outputs, handle=graph, kernels=int(filled))

    def _capture_again(
        self, segment: Segment, args: Sequence[Any]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Any, ...], bool]:
        """A capture, or the next one where something else has ended it: nothing has run, so it may be tried again."""
        for left in reversed(range(ATTEMPTS)):
            graph = torch.cuda.CUDAGraph()
            try:
                return graph, *self._capture(graph, segment, args)
            except RuntimeError as error:
                if left == 0 or ENDED not in str(error):
                    raise
        raise AssertionError("unreachable")

    def _capture(
        self, graph: torch.cuda.CUDAGraph, segment: Segment, args: Sequence[Any]
    ) -> tuple[tuple[Any, ...], bool]:
        """The results of a segment, and whether the graph has anything to launch."""
        begun = False
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            begun = True
            results = segment(*args)
            filled = _end(graph)
        except BaseException as error:
            self._abandon(graph, begun)
            if isinstance(error, RuntimeError) and DRIVER_FULL in str(error):  # torch's own error is for tensors alone
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return (results,) if isinstance(results, torch.Tensor) else tuple(results), filled

    def _abandon(self, graph: torch.cuda.CUDAGraph, begun: bool) -> None:
        """End a broken capture; the exception that broke it is the one the user sees.

        A capture that fails to begin or to end leaves the default generator believing that it is being captured, and
        every later random call of the process would raise; a complete empty capture brings it back.
        """
        try:
            graph.capture_end()
        except RuntimeError:  # its end stops half-way, with both allocators still on the pool
            with contextlib.suppress(RuntimeError):
                end_allocate_to_pool(self.device, self.pool, release=begun)
            self._leave_pool(graph)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        empty = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError):
            empty.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            _end(empty)
            self._keeper = self._keeper or empty

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """Go on with another pool. Recordings keep their memory in this one until ``cleanup``."""
        _unended.append(graph)
        self._left.append((self.pool, self._keeper))
        self.pool, self._keeper = torch.cuda.graph_pool_handle(), None

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last[0] != current:
            current.wait_event(self._last[1])
        try:
            yield
        finally:
            event = self._last[1] if self._last is not None else torch.cuda.Event()
            event.record(current)
            self._last = (current, event)

    def replay(self, recording: Recording) -> None:
        if recording.handle not in self._graphs:
            raise ReplayError("this segment")
        if recording.kernels:
            recording.handle.replay()

    def cleanup(self) -> None:
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs = weakref.WeakSet()
        self._last = self._keeper = None
        self._left.clear()
        self.pool = torch.cuda.graph_pool_handle()
