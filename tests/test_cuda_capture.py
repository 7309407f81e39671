"""Captures that break, with graphs that are none: what ``CudaRecorder`` does runs on every machine.

``Device`` behaves as torch 2.11 does (read in its sources, and seen on an H200): a capture that cannot be ended leaves
the generator capturing and the allocator of pinned memory recording into the pool.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from failure_harness import Injected
from torch import Tensor

from torch_graph_backend.recorders import cuda
from torch_graph_backend.recorders.cuda import ATTEMPTS, CudaRecorder

INVALIDATED = "operation failed due to a previous error during capture: cudaErrorStreamCaptureInvalidated"
NOT_PERMITTED = "operation not permitted when stream is capturing: cudaErrorStreamCaptureUnsupported"


@pytest.mark.parametrize("step", ["begin", "segment", "end", ""])
@pytest.mark.parametrize("kind", [Injected, KeyboardInterrupt])
def test_a_capture_that_breaks_anywhere_is_ended_once(step: str, kind: type[BaseException]) -> None:
    """The first exception is the one that comes out."""
    done: list[str] = []

    def does(name: str) -> None:
        done.append(name)
        if name == step:
            raise kind(name)

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            does("begin")

        def capture_end(self) -> None:
            does("end")

    recorder = CudaRecorder.__new__(CudaRecorder)
    recorder.pool = (0, 0)
    recorder._abandon = lambda graph, begun: done.append("abandon")  # type: ignore[method-assign]
    out = torch.ones(2)

    def segment(*_: Any) -> Tensor:
        does("segment")
        return out

    everything = ["begin", "segment", "end"]
    if not step:
        assert recorder._capture(Graph(), segment, ()) == ((out,), True)
        assert done == everything
        return
    with pytest.raises(kind, match=step):
        recorder._capture(Graph(), segment, ())
    assert done == [*everything[: everything.index(step) + 1], "abandon"]


class Device:
    """What captures of a process share."""

    def __init__(self) -> None:
        self.pinned: set[tuple[int, int]] = set()
        self.pools: list[tuple[int, int]] = []
        self.uses: dict[tuple[int, int], int] = {}
        self.capturing = False  # the generator
        self.graph: Any = None  # whose capture is going on
        self.ended = False  # it was, from outside

    def invalidate(self) -> None:
        self.ended = True

    def begin(self, graph: Any, pool: tuple[int, int]) -> None:
        self.capturing = True
        if pool in self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pinned.add(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1
        graph.pool, self.graph, self.ended = pool, graph, False
        self.pools.append(pool)

    def end(self, graph: Any) -> None:
        if self.graph is not graph:
            raise RuntimeError("capture_end() called before capture_begin()")
        self.graph = None
        if self.ended:
            raise RuntimeError(INVALIDATED)
        self.pinned.remove(graph.pool)
        self.capturing = False

    def release(self, pool: tuple[int, int]) -> None:
        self.uses[pool] -= 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, pools = Device(), itertools.count(1)

    class Graph:
        def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            made.begin(self, pool)

        def capture_end(self) -> None:
            made.end(self)

        def reset(self) -> None:
            pass

    def end_allocate(_: Any, pool: tuple[int, int], release: bool) -> None:
        if release:
            made.release(pool)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(cuda, "end_allocate_to_pool", end_allocate)
    monkeypatch.setattr(cuda, "pool_segments", lambda pool: [(pool[1], 100)])
    monkeypatch.setattr(cuda, "_unended", [])
    return made


def recorder_on(device: Device) -> CudaRecorder:
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder._hold_pool()
    assert device.uses == {recorder.pool: 1}
    return recorder


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("times", range(1, ATTEMPTS + 1))
def test_a_capture_that_is_ended_from_outside_is_made_again(device: Device, times: int, inside: bool) -> None:
    """Another thread synchronises the device: the next operation fails, or the end. Would catch: a segment that is
    demoted for it, a generator or a pool that is left broken, an answer of the broken attempt."""
    recorder, out, tries = recorder_on(device), torch.ones(2), itertools.count(1)

    def segment(*_: Any) -> Tensor:
        if next(tries) <= times:
            device.invalidate()
            if inside:
                raise RuntimeError(INVALIDATED)
        return out

    if times < ATTEMPTS:
        found = recorder.capture_one(segment, ())
        assert found.outputs[0] is out
        assert next(tries) == times + 2
    else:
        with pytest.raises(RuntimeError, match="Invalidated"):
            recorder.capture_one(segment, ())
    assert not device.capturing
    assert recorder.capture_one(lambda: out, ()).handle.pool == recorder.pool
    assert recorder.nbytes == 100 * (1 + times), "memory of recordings in pools that were left counts"
    assert len(set(device.pools)) == 1 + times
    left = [n for pool, n in device.uses.items() if pool != recorder.pool]
    assert left == [1] * times, "the use of the keeper alone"


def test_what_a_segment_does_itself_is_not_tried_again(device: Device) -> None:
    recorder, tries = recorder_on(device), []

    def segment(*_: Any) -> Tensor:
        tries.append(1)
        device.invalidate()
        raise RuntimeError(NOT_PERMITTED)

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.capture_one(segment, ())
    assert len(tries) == 1
    assert not device.capturing
    assert recorder.capture_one(lambda: torch.ones(1), ()).handle.pool == recorder.pool


def test_an_exception_of_python_leaves_the_pool_as_it_was(device: Device) -> None:
    recorder = recorder_on(device)
    pool = recorder.pool
    with pytest.raises(Injected):
        recorder.capture_one(lambda: (_ for _ in ()).throw(Injected("once")), ())
    assert not device.capturing
    assert recorder.pool == pool
    assert recorder.nbytes == 100


def test_cleaning_up_gives_back_the_pools_that_were_left(device: Device) -> None:
    recorder, tries = recorder_on(device), itertools.count()

    def segment(*_: Any) -> Tensor:
        if next(tries) == 0:
            device.invalidate()
            raise RuntimeError(INVALIDATED)
        return torch.ones(1)

    recorder.capture_one(segment, ())
    assert recorder.nbytes == 200
    recorder.cleanup()
    assert recorder.nbytes == 0
    assert recorder.pool not in device.pools


@pytest.mark.parametrize(
    ("free", "share", "reserved", "kept", "room"),
    [
        (10, 1.0, 60, 50, True),
        (3, 1.0, 80, 50, True),  # what the allocator keeps is given back
        (3, 1.0, 80, 1, False),  # and is not enough
        (50, 0.5, 49, 40, True),  # the device has some, the process's share of it is used up
        (50, 0.5, 49, 2, False),
    ],
)
def test_room_in_the_pool(
    monkeypatch: pytest.MonkeyPatch, free: int, share: float, reserved: int, kept: int, room: bool
) -> None:
    """GiB of a device of 100: ``free`` at the driver, ``reserved`` by torch, of which it ``kept`` some unused. 5 are
    asked for."""
    state = {"free": free, "reserved": reserved}
    gib, emptied = 2**30, []

    def empty_cache() -> None:
        emptied.append(True)
        state["free"] += kept
        state["reserved"] -= kept

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"] * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state["reserved"] * gib)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    recorder = CudaRecorder.__new__(CudaRecorder)
    recorder.device = torch.device("cuda", 0)
    assert recorder.has_room(5 * gib) is room
    assert bool(emptied) is (min(free, int(100 * share) - reserved) < 5 + 0.25)


def test_a_driver_without_memory_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so in an error of its own, which is no fault of the segment."""

    class Graph:
        def capture_begin(self, **_: Any) -> None: ...

        def capture_end(self) -> None:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    recorder = CudaRecorder.__new__(CudaRecorder)
    recorder.pool = (0, 0)
    recorder._abandon = lambda graph, begun: None  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        recorder._capture(Graph(), lambda: torch.ones(2), ())
