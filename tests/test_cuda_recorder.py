"""``CudaRecorder`` by itself, on a GPU: empty graphs, work of other threads, what must not be recorded, and a device
that is really full."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_graph_backend as tgb
from torch_graph_backend.recorders.cuda import CudaRecorder

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


@torch.no_grad()
def test_a_device_that_is_full() -> None:
    """Recordings of many sizes beside a program that needs nearly all memory: every call that eager code could serve is
    served, with eager's answer, and there is nothing left of the shortage afterwards."""
    torch.manual_seed(0)
    net = Wide().cuda()
    fast = torch.compile(net, backend="bcg", options={"buckets": [256 * k for k in range(1, 9)], "max_bytes": 2**40})
    inputs = [mark(torch.randn(256 * k - 3, 64, device="cuda")) for k in range(1, 9)]
    wanted = [net(x) for x in inputs]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    net(inputs[-1])
    needed = torch.cuda.max_memory_reserved() - before  # by one eager call
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((before + 1.5 * needed) / total)
        for _ in range(3):
            for k in (0, 7, 3, 7, 1, 7, 2, 5, 7, 4, 6, 7):
                torch.testing.assert_close(fast(inputs[k]), wanted[k], rtol=1e-5, atol=1e-6)
        short = tgb.stats(net)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert short.eager.get("out-of-memory", 0) > 0, f"memory was not short: {short}"
    assert short.replays > 0, short
    for _ in range(12):  # eager answers to a key that ran out of memory come to an end
        for x, want in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(fast(x), want, rtol=1e-5, atol=1e-6)
    last = tgb.stats(net)
    for x, want in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(fast(x), want, rtol=1e-5, atol=1e-6)
    assert tgb.stats(net).replays - last.replays == len(inputs), tgb.stats(net)


def mark(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
