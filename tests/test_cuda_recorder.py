"""``CudaRecorder`` by itself, on a GPU: empty graphs, work of other threads, what must not be recorded, and a device
that is really full."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torch_graph_backend as tgb
from torch_graph_backend.recorders.cuda import CudaRecorder
from torch_graph_backend.shortage import FIRST_REST

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 2**20


@pytest.fixture
def recorder() -> Iterator[CudaRecorder]:
    made = CudaRecorder(torch.device("cuda", 0))
    yield made
    made.cleanup()


def recorded(recorder: CudaRecorder, segment: Callable[..., Any], *args: torch.Tensor) -> Any:
    """The first run, then the recording."""
    with recorder.capture_session():
        segment(*args)
    with recorder.record_session():
        return recorder.capture_one(segment, args)


def test_a_segment_without_kernels_is_not_launched(recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations on tensors without entries launch nothing; neither warns, nor costs a launch."""
    launched: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (launched.append(graph), replay(graph)))
    nothing, x = torch.empty(0, 4, device="cuda"), torch.ones(3, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty = recorded(recorder, lambda a: torch.relu(a * 2 + 1), nothing)
        full = recorded(recorder, lambda a: torch.relu(a * 2 + 1), x)
    assert (empty.kernels, full.kernels) == (0, 1)
    assert empty.outputs[0].shape == (0, 4)
    x.fill_(5)
    with recorder.replay_session():
        recorder.replay(empty)
        recorder.replay(full)
    assert full.outputs[0].tolist() == [11.0] * 3
    assert launched == [full.handle]


@pytest.mark.parametrize("whole_device", [False, True])
def test_other_threads_work_while_a_segment_is_recorded(recorder: CudaRecorder, whole_device: bool) -> None:
    """The error mode is ``thread_local``: with ``global`` the other thread's calls would raise and end the capture.
    Synchronising the whole device ends it in any mode (and raises there): the segment is recorded once more."""
    x = torch.ones(8, device="cuda")
    seen: list[Any] = []

    def elsewhere() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                fresh = torch.full((40 * MIB,), 3.0, device="cuda")  # asks the driver for memory
                seen.append(fresh[:4].sum().item())  # waits for its stream
                if whole_device:
                    torch.cuda.synchronize()
        except BaseException as error:
            seen.append(error)

    def segment(a: torch.Tensor) -> torch.Tensor:
        out = a * 2
        if torch.cuda.is_current_stream_capturing() and not seen:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return out + 1

    found = recorded(recorder, segment, x)
    assert seen[0] == 12.0
    assert len(seen) == 1 + whole_device
    x.fill_(4)
    with recorder.replay_session():
        recorder.replay(found)
    assert found.outputs[0].tolist() == [9.0] * 8
    assert torch.rand(4, device="cuda").shape == (4,)


def test_waiting_for_the_device_is_not_recorded(recorder: CudaRecorder) -> None:
    """An operation that waits fails the recording; the recorder, and the random generator, work afterwards."""
    x = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError, match=r"captur"):
        recorded(recorder, lambda a: a * a.sum().item(), x)
    torch.cuda.synchronize()
    assert torch.rand(4, device="cuda").shape == (4,)
    good = recorded(recorder, lambda a: a + 1, x)
    with recorder.replay_session():
        recorder.replay(good)
    assert good.outputs[0].tolist() == [2.0] * 8


class Wide(torch.nn.Module):
    """Much memory for intermediate results that live at once, little for weights."""

    def __init__(self, copies: int = 24) -> None:
        super().__init__()
        self.up, self.copies = torch.nn.Linear(64, 4096, bias=False), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = [self.up(x * (k + 1)) for k in range(self.copies)]
        out = wide[0]
        for w in reversed(wide):
            out = torch.tanh(out + w)
        return out.mean(1)


SIZES = [256 * k for k in range(1, 9)]


class Full:
    """``Wide`` and inputs of many sizes, and a process that gets so many times what the largest eager call takes."""

    def __init__(self, net: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.net = (net or Wide()).cuda()
        self.fast = torch.compile(self.net, backend="bcg", options={"buckets": SIZES, "max_bytes": 2**40})
        self.inputs = [mark(torch.randn(n - 3, 64, device="cuda")) for n in SIZES]
        self.wanted = [self.net(x) for x in self.inputs]
        gc.collect()
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        self.net(self.inputs[-1])
        self.needed = torch.cuda.max_memory_reserved() - self.before

    @contextlib.contextmanager
    def limited(self, share: float) -> Iterator[None]:
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            torch.cuda.set_per_process_memory_fraction((self.before + share * self.needed) / total)
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def check(self, order: Iterable[int]) -> tgb.Stats:
        for k in order:
            torch.testing.assert_close(self.fast(self.inputs[k]), self.wanted[k], rtol=1e-5, atol=1e-6)
        return tgb.stats(self.net)


@torch.no_grad()
@pytest.mark.parametrize(
    ("share", "order"), [(1.04, (0, 7, 3, 7, 1, 7, 2, 5, 7, 4, 6, 7)), (1.5, range(8))], ids=["tight", "growing"]
)
def test_a_device_that_is_full(share: float, order: Sequence[int]) -> None:
    """Recordings of many sizes beside a program that needs nearly all memory: every call that eager code could serve is
    served, with eager's answer, and there is nothing left of the shortage afterwards."""
    full = Full()
    torch.cuda.empty_cache()
    with full.limited(share):
        for _ in range(3):
            short = full.check(order)
    assert short.eager.get("out-of-memory", 0) > 0, f"memory was not short: {short}"
    for _ in range(4 * FIRST_REST):  # eager answers to a key that ran out of memory come to an end
        last = full.check(range(8))
    assert full.check(range(8)).replays - last.replays == 8, tgb.stats(full.net)


class Counting(Wide):
    """A call that changes something cannot be begun twice: it must not run out of memory that eager code would get."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


@torch.no_grad()
def test_memory_that_the_allocator_keeps() -> None:
    """All free memory of the device lies in the cache of torch's allocator, which gives none of it to a pool: what it
    keeps is given back before a first run and a recording."""
    full = Full(Counting())
    with full.limited(2.2):  # the allocator keeps what one call needs; the recording needs it once more, and some
        kept = torch.empty(int(1.1 * full.needed), dtype=torch.uint8, device="cuda")
        del kept
        full.net.calls.zero_()
        stats = full.check([7, 7, 7, 6, 6, 6])
    assert full.net.calls.item() == 6
    assert stats.eager == {}
    assert stats.replays == 4, stats  # the second call of each is the first replay


def mark(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
