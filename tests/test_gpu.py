"""On a CUDA device: the same plans through ``CudaRecorder``, and what only a real CUDA graph can get wrong."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_graph_backend as tgb
from torch_graph_backend.plan import CapturedSegment
from torch_graph_backend.recorders.cuda import CudaRecorder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Block(torch.nn.Module):
    """Two linears around attention over the tokens, which stays eager when the tokens are padded."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (x.shape[-1],))).chunk(3, -1)
        a = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)
        return x + self.out(a[0, 0]).relu()


def tokens(n: int, width: int = 64) -> torch.Tensor:
    x = torch.randn(n, width, device="cuda")
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def model(layers: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(layers))).cuda().eval()


def churn() -> list[torch.Tensor]:
    """Allocate and fill many blocks, so that freed graph memory, if any, is overwritten."""
    return [torch.full((2**k,), float("nan"), device="cuda") for k in range(8, 22)]


@torch.no_grad()
def test_replays_equal_eager_in_any_order_while_memory_churns() -> None:
    """Would catch a boundary value freed too early, and buckets that overwrite each other."""
    net = model()
    fast = torch.compile(net, backend="bcg")
    sizes = [70, 9, 33, 10, 71, 9, 34, 70, 200, 9, 33, 72, 199, 10, 200, 33]
    for n in sizes:
        x = tokens(n)
        keep = churn()
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
        del keep
        churn()
    stats = tgb.stats(net)
    assert stats.replays == stats.calls - stats.first_calls
    assert stats.replays >= len(sizes) // 2
    assert stats.padding_waste > 0


@torch.no_grad()
def test_kept_outputs_never_change() -> None:
    net = model(1)
    fast = torch.compile(net, backend="bcg")
    kept = []
    for n in (9, 9, 10, 9, 11, 9):
        x = tokens(n)
        kept.append((fast(x), net(x)))
    for got, expected in kept:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_calls_on_different_streams_are_ordered() -> None:
    """The static buffers are shared: a replay on another stream must wait for the last one."""
    net = model(2)
    fast = torch.compile(net, backend="bcg")
    xs = [tokens(64) for _ in range(6)]
    expected = [net(x) for x in xs]
    for x in xs[:2]:
        fast(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 3]):
            got.append(fast(x))
    torch.cuda.synchronize()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_threads_call_one_model_while_another_allocates() -> None:
    net = model(1)
    fast = torch.compile(net, backend="bcg")
    # Inputs and answers are made beforehand: on torch 2.11 random calls of other threads raise during any capture.
    xs = [tokens(16) for _ in range(20)]
    expected = [net(x) for x in xs]
    fast(xs[0])
    errors: list[BaseException] = []
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            assert torch.ones(1000, device="cuda").sum().item() == 1000

    def caller() -> None:
        with torch.no_grad():
            for x, y in zip(xs, expected, strict=True):
                torch.testing.assert_close(fast(x), y, rtol=1e-4, atol=1e-5)

    def guarded(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=guarded, args=(busy,))
    callers = [threading.Thread(target=guarded, args=(caller,)) for _ in range(3)]
    for t in (other, *callers):
        t.start()
    for t in callers:
        t.join()
    stop.set()
    other.join()
    assert not errors, errors[0]
    assert tgb.stats(net).replays >= 50
    torch.randn(3, device="cuda")  # the generator is as usable as before


@torch.no_grad()
def test_a_caller_that_is_capturing_gets_the_eager_answer() -> None:
    """A graph cannot be replayed into a capture by Python that also fills slots; the caller records eager kernels."""
    net = model(1)
    fast = torch.compile(net, backend="bcg")
    x = tokens(32)
    for _ in range(3):
        fast(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        net(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = fast(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, net(x), rtol=1e-4, atol=1e-5)
    assert tgb.stats(net).eager["already-capturing"] == 1


@torch.no_grad()
def test_a_failed_recording_demotes_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: the answer is eager's, the failure is counted, and everything else replays."""
    net = model(2)
    fast = torch.compile(net, backend="bcg")
    inner = CudaRecorder._capture
    calls = {"n": 0}

    def failing(self: CudaRecorder, graph: Any, segment: Any, args: Any) -> tuple[Any, ...]:
        def broken(*tensors: Any) -> Any:
            segment(*tensors)
            raise RuntimeError("injected")

        calls["n"] += 1
        return inner(self, graph, broken if calls["n"] == 3 else segment, args)

    monkeypatch.setattr(CudaRecorder, "_capture", failing)
    for n in (9, 9, 9, 70, 70, 70):
        x = tokens(n)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    stats = tgb.stats(net)
    assert (stats.replays, sum(stats.eager.values())) == (4, 0)
    (reason,) = [r for keys in stats.keys.values() for count in keys.values() for r in count.demoted]
    assert "injected" in reason.text


@torch.no_grad()
def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        net = model(2)
        fast = torch.compile(net, backend="bcg")
        for n in (64, 64, 128, 128):
            fast(tokens(n))
        del fast, net
        torch._dynamo.reset()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 32 * 2**20


def test_looking_at_the_pool_keeps_its_id() -> None:
    """Would catch a snapshot that gives up references to the pool's numbers: they were freed while in use (Python keeps
    only those up to 256), and the process died much later."""
    while torch.cuda.graph_pool_handle()[1] <= 300:
        pass
    recorder = CudaRecorder(torch.device("cuda", 0))
    with recorder.capture_session():
        kept = torch.ones(1000, device="cuda")
    before = [sys.getrefcount(n) for n in recorder.pool]
    for _ in range(20):
        assert recorder.nbytes >= kept.nbytes
        recorder.poison([kept], 0xFF)
    assert [sys.getrefcount(n) for n in recorder.pool] == before
    assert kept.sum().item() == 1000


def test_a_break_that_works_on_a_stream_of_its_own() -> None:
    """A break starts slow work on a side stream and a later break waits for it, as eager code may: what the work reads
    is the break's own, although segments of this call and of the next ones run meanwhile."""
    side, pending = torch.cuda.Stream(), []

    def start(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about 10 ms: segments that come later would have overwritten x
            pending.append(x * 2)
        x.record_stream(side)
        return x + 1

    def finish(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(side)
        return x + pending.pop()

    with torch.library._scoped_library("tgb_side_test", "DEF") as lib, torch.no_grad():
        for name, function in (("start", start), ("finish", finish)):
            lib.define(f"{name}(Tensor x) -> Tensor")
            lib.impl(name, function, "CUDA")
            lib.impl(name, torch.empty_like, "Meta")
        ops = torch.ops.tgb_side_test
        first, second = (torch.nn.Linear(64, 64).cuda() for _ in range(2))

        def f(x: torch.Tensor) -> torch.Tensor:
            h = ops.start(torch.relu(first(x)) * 2)
            for _ in range(4):
                h = torch.relu(second(h)) - h
            return ops.finish(h) * 3

        fast = torch.compile(f, backend="bcg")
        for n in (9, 10, 11, 33, 9, 34, 12, 40, 10):
            x = tokens(n)
            got = fast(x)
            torch.testing.assert_close(got, f(x), rtol=1e-4, atol=1e-4)
        assert tgb.stats(f).replays >= 5
        assert sum(isinstance(s, CapturedSegment) for s in tgb.plans(f)[-1].steps) == 3


@contextlib.contextmanager
def convolutions(precision: str) -> Iterator[None]:
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_the_precision_of_convolutions_is_not_frozen() -> None:
    """Dynamo does not guard cuDNN's TF32: a recording made with it must not answer a call without it."""
    torch.manual_seed(0)
    convs = [torch.nn.Conv1d(64, 64, 3, padding=1) for _ in range(2)]
    net = torch.nn.Sequential(convs[0], torch.nn.ReLU(), convs[1]).cuda().eval()
    fast = torch.compile(net, backend="bcg")
    answers = []
    with torch.no_grad():
        x = torch.randn(8, 64, 128, device="cuda")
        for precision_ in ("ieee", "tf32", "ieee", "tf32"):
            with convolutions(precision_):
                for _ in range(3):
                    got = fast(x)
                    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-6)
                answers.append(got)
    assert tgb.stats(net).replays >= 8
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1]), "the setting makes no difference: the test shows nothing"


def test_the_state_inside_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """What recording needs of the process, inside; and everything as it was, outside, also after an exception."""
    from torch_graph_backend.recorders import cuda as module

    recorder = CudaRecorder(torch.device("cuda", 0))
    cleared: list[bool] = []
    monkeypatch.setattr(module, "clear_cublas_workspaces", lambda: cleared.append(gc.isenabled()))

    def state() -> tuple[Any, ...]:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        return gc.isenabled(), *modes, torch.cuda.current_stream().cuda_stream

    for session, workspaces in ((recorder.capture_session, 0), (recorder.record_session, 2)):
        for inference in (False, True):
            for around in (torch.inference_mode, torch.no_grad, torch.enable_grad):
                with around():
                    before = state()
                    cleared.clear()
                    with contextlib.suppress(KeyError), session(inference):
                        assert state() == (False, inference, False, False, recorder.stream.cuda_stream)
                        own = recorder.allocate((4, 2), (2, 1), torch.float32)
                        assert not own.is_inference()
                        raise KeyError
                    assert state() == before
                    assert len(cleared) == workspaces
                    at = own.untyped_storage().data_ptr()
                    if session == recorder.record_session:  # the other one allocates from the pool
                        assert not any(start <= at < start + n for start, n in recorder._ranges())
    recorder.cleanup()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("current", [0, 1])
@torch.no_grad()
def test_a_model_on_each_device(current: int) -> None:
    """First calls, recordings and replays in turn on two devices, whatever device is current; outputs are kept."""
    nets = [model(2).to(torch.device("cuda", at)) for at in (0, 1)]
    fasts = [torch.compile(net, backend="bcg") for net in nets]
    kept = []
    for n in (9, 10, 70, 9, 71, 10, 33, 72, 9, 34):
        for at, (net, fast) in enumerate(zip(nets, fasts, strict=True)):
            x = torch.randn(n, 64, device=torch.device("cuda", at))
            torch._dynamo.maybe_mark_dynamic(x, 0)
            with torch.cuda.device(current):
                got = fast(x)
                assert torch.cuda.current_device() == current
            assert got.device == x.device
            kept.append((got, net(x)))
    for got, want in kept:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for net in nets:
        assert tgb.stats(net).replays >= 5
        assert not tgb.stats(net).eager
