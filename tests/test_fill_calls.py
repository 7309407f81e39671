"""Whole calls whose slots one kernel fills, bit for bit those with grouped copies: every policy, changing sizes,
sources and slots that move, threads, streams, devices, a caller that captures.

On a GPU as they are; on a machine without one under Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import fill_calls
import pytest
import torch
from graph_harness import compiled
from interpreted import CUDA, INTERPRETED, run_again

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.policies import PaddingPolicy as P

pytest.importorskip("triton", reason="needs Triton, which a CPU build of PyTorch comes without")

HERE = INTERPRETED or CUDA
inside = pytest.mark.skipif(not HERE, reason="test_under_the_interpreter runs it")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


@pytest.mark.skipif(HERE, reason="this is the inner run, or there is a GPU")
def test_under_the_interpreter() -> None:
    """All of this file that needs no GPU."""
    run_again(__file__, skipped=r"\d+", timeout=900)


# -- the same bits -----------------------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("policy", list(P))
@pytest.mark.parametrize("count", [2, 10, pytest.param(40, marks=gpu)])
def test_every_policy(count: int, policy: P) -> None:
    assert fill_calls.compared(count, [policy], DEVICE, sizes=fill_calls.SIZES if CUDA else (5, 3, 12, 5, 16)) == ""


@inside
def test_forty_slots_of_all_policies() -> None:
    assert fill_calls.compared(40, list(P), DEVICE, sizes=fill_calls.SIZES if CUDA else (5, 3, 12)) == ""


@inside
def test_slots_that_move() -> None:
    """A plan that is made anew takes other memory: the table of the old place is not used for it."""

    def replan(f: Any, k: int) -> None:
        if k in (2, 5):
            held.append(fill_calls.entries(f))  # their memory is not free: the new slots lie elsewhere
            for graph in registry.graphs_of(f):
                graph.replan()

    held: list[Any] = []
    assert fill_calls.compared(10, list(P), DEVICE, sizes=(5, 12, 5, 6, 12, 5), around=replan) == ""
    assert held[0]


@inside
def test_another_layout_at_the_same_address() -> None:
    """Dynamo or admission keep it from the table of the first layout; rows that are not aligned are copied."""
    f = fill_calls.model(2)
    with fill_calls.chosen(True, "cpu"), compiled(f, buckets=[8]) as g:
        args = fill_calls.sources(2, 5, DEVICE, 1)
        for _ in range(4):
            same(g(*args), f(*args))
        memory = torch.randn(5, 8, device=DEVICE)
        for first in (memory[:, :4], memory[:, 4:], memory[:, ::2], args[0].t().contiguous().t()):
            for _ in range(3):
                same(g(first, args[1]), f(first, args[1]))
        wide = torch.randn(24, device=DEVICE)
        for at in (0, 1, 2, 3):  # contiguous, but not aligned to eight bytes
            first = wide[at : at + 20].view(5, 4)
            for _ in range(3):
                before = tgb.stats(g).fill_launches
                same(g(first, args[1]), f(first, args[1]))
                args[1].add_(1)
            assert (tgb.stats(g).fill_launches - before == 1) == (at % 2 == 0)
    assert {type(x).__name__ for x in fill_calls.fillers(g)} == {"FusedFiller"}


@inside
def test_sizes_of_zero_and_one() -> None:
    f = fill_calls.model(10)
    with fill_calls.chosen(True, "cpu"), compiled(f, buckets=[1, 8]) as g:
        for n in (5, 1, 5, 1, 6):
            args = fill_calls.sources(10, n, DEVICE, n)
            for _ in range(3):
                same(g(*args), f(*args))

    def empty(x: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.new_ones(4, 4)) + nothing.sum(-1, keepdim=True)

    with fill_calls.chosen(True, "cpu"), compiled(empty, dynamic=True, buckets=[8]) as g:
        for n in (5, 3, 5, 0, 3):
            x, nothing = torch.randn(n, 4, device=DEVICE), torch.empty(n, 0, device=DEVICE)
            for _ in range(3):
                same([g(x, nothing)], [empty(x, nothing)])
        assert set(tgb.stats(g).eager) <= {"zero-size"}


@inside
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_of_inference_mode(mode: Any) -> None:
    """First frames made in one mode, later calls in the other."""
    f = fill_calls.model(10)
    with fill_calls.chosen(True, "cpu"), compiled(f, buckets=[8]) as g:
        for n in (5, 6, 5):
            for now in (mode, torch.no_grad, torch.inference_mode):
                with now():
                    args = fill_calls.sources(10, n, DEVICE, n)
                    for _ in range(3):
                        same(g(*args), f(*args))


@inside
def test_two_threads() -> None:
    """Each on a stream of its own, with sizes of its own, on the same slots."""
    f = fill_calls.model(10)
    wrong: list[str] = []
    with fill_calls.chosen(True, "cpu"), compiled(f, buckets=[8]) as g:
        for n in (5, 6, 5):
            g(*fill_calls.sources(10, n, DEVICE, n))

        def work(sizes: tuple[int, ...]) -> None:
            try:
                stream = torch.cuda.Stream(DEVICE) if CUDA else None
                with torch.no_grad(), torch.cuda.stream(stream):
                    for k in range(60 if CUDA else 6):
                        args = fill_calls.sources(10, sizes[k % len(sizes)], DEVICE, k)
                        for _ in range(3):
                            same(g(*args), f(*args))
            except BaseException as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(sizes,)) for sizes in ((5, 7, 3), (6, 2, 5))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong
    assert {type(x).__name__ for x in fill_calls.fillers(g)} == {"FusedFiller"}


@inside
@pytest.mark.usefixtures("no_grad")
def test_a_fill_by_itself() -> None:
    """The helpers of the tests below find a frame and give it its sources in the order of the slots."""
    f = fill_calls.model(10)
    with fill_calls.chosen(True, "cpu"), compiled(f, buckets=[8]) as g:
        for n in (5, 6, 5, 6):
            g(*fill_calls.sources(10, n, DEVICE, n))
        frame, args = frame_of(g, 5), fill_calls.sources(10, 5, DEVICE, 1)
        frame.slot_filler.fill(in_order(frame, args))
        for rows, source in zip(frame.slot_filler.real, in_order(frame, args), strict=True):
            assert torch.equal(rows, source)


def in_order(frame: Any, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of a call in the order of the slots. (Sizes are arguments of the graph too, between them.)"""
    ranks = sorted(frame.slot_args)
    assert len(ranks) == len(args)
    return [args[ranks.index(i)] for i in frame.slot_args]


def frame_of(g: Any, n: int) -> Any:
    """The frame of a real size: the first argument of ``fill_calls.model`` has one row for each."""
    frames = [x for e in fill_calls.entries(g) for x in e.frames.values()]
    return next(x for x in frames if x.slot_filler.real[x.slot_args.index(min(x.slot_args))].shape[0] == n)


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(list(got), list(want), rtol=1e-5, atol=1e-5)


# -- what only a GPU has -----------------------------------------------------------------------------------------------


@pytest.fixture
def one_key() -> Iterator[Any]:
    """Ten slots of one key, replayed several times through the kernel: the function, its compiled form, arguments."""
    f = fill_calls.model(10)
    with fill_calls.chosen(True), compiled(f, buckets=[8]) as g:
        sets = [fill_calls.sources(10, 5, DEVICE, k) for k in range(4)]
        for n in (5, 6):
            for args in (fill_calls.sources(10, n, DEVICE, 9), *sets):
                g(*args)
        yield f, g, sets


@pytest.mark.usefixtures("no_grad")
class TestOnAGpu:
    pytestmark = gpu

    def test_no_call_waits_for_the_device(self, one_key: Any) -> None:
        """Neither with addresses seen before nor with new ones, nor at a real size that is new."""
        f, g, sets = one_key
        fresh = [fill_calls.sources(10, n, DEVICE, 50 + k) for k, n in enumerate((5, 5, 5, 7, 4))]
        wanted = [f(*args) for args in (*sets, *fresh)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [g(*args) for args in (*sets, *fresh)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(got, wanted, strict=True):
            same(a, b)

    def test_a_fill_asks_for_no_memory(self, one_key: Any) -> None:
        """Addresses that were seen: none of the device, none that is pinned; further ones: none of the device."""
        _, g, sets = one_key
        frame = frame_of(g, 5)
        order = [in_order(frame, args) for args in sets]
        more = [in_order(frame, fill_calls.sources(10, 5, DEVICE, k)) for k in range(9)]
        for filled, sources in ((1, order), (40, more)):
            for args in sources:
                frame.slot_filler.fill(args)
            before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
            for k in range(filled):
                frame.slot_filler.fill(sources[k % len(sources)])
            assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
            assert frame.slot_filler.launches == 1

    def test_a_caller_that_captures(self, one_key: Any) -> None:
        """The call is eager then, and the fill itself, asked to, leaves nothing behind that the capture made."""
        f, g, sets = one_key
        static = [t.clone() for t in sets[0]]
        frame = frame_of(g, 5)
        filler = frame.slot_filler
        known, eager = dict(filler.known), tgb.stats(g).eager["already-capturing"]
        graph, fills = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = g(*static)
        assert tgb.stats(g).eager["already-capturing"] == eager + 1
        with torch.cuda.graph(fills):
            filler.fill(in_order(frame, static))
        assert filler.known == known
        for args in sets:
            for target, value in zip(static, args, strict=True):
                target.copy_(value)
            graph.replay()
            same(out, f(*args))
            fills.replay()
            for rows, source in zip(filler.real, in_order(frame, args), strict=True):
                assert torch.equal(rows, source)
            same(g(*args), f(*args))

    def test_streams_in_turn(self, one_key: Any) -> None:
        """Uploads on one stream, launches on another; the memory goes while kernels of the other may still run."""
        f, g, sets = one_key
        streams = [torch.cuda.Stream(DEVICE) for _ in range(3)]
        for k in range(60):
            args = sets[k % 4] if k % 3 else fill_calls.sources(10, 5, DEVICE, k)
            streams[k % 3].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[k % 3]):
                got = [t.clone() for t in g(*args)]
            torch.cuda.current_stream().wait_stream(streams[k % 3])
            same(got, f(*args))
            if k % 20 == 19:
                for entry in fill_calls.entries(g):
                    entry.forget()
                torch.full((1 << 20,), -1, device=DEVICE)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    @pytest.mark.parametrize("current", [0, 1])
    def test_two_devices(self, current: int) -> None:
        """Whatever device is current, at the first call, the recording, and every replay."""
        for at in (0, 1):
            for policies in ([P.REPEAT_ROW], list(P)):
                with torch.cuda.device(current):
                    assert fill_calls.compared(10, policies, torch.device("cuda", at)) == ""

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_the_kernel_runs_where_the_slots_are(self) -> None:
        f, device = fill_calls.model(10), torch.device("cuda", 1)
        args = fill_calls.sources(10, 5, device, 0)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.cuda.device(0), fill_calls.chosen(True), compiled(f, buckets=[8]) as g:
            for _ in range(4):
                g(*args)
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(3):
                    same(g(*args), f(*args))
                torch.cuda.synchronize(device)
            assert torch.cuda.current_device() == 0
        ran = [e.device_index for e in profile.events() if "fill_kernel" in e.name and e.device_type.name == "CUDA"]
        assert ran == [1] * 3

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_a_capture_on_the_other_device(self) -> None:
        """A stream of the slots' device captures while another device is current: the call is eager."""
        f, device = fill_calls.model(10), torch.device("cuda", 1)
        args = fill_calls.sources(10, 5, device, 0)
        with fill_calls.chosen(True), compiled(f, buckets=[8]) as g:
            for _ in range(4):
                g(*args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(1), torch.cuda.graph(graph), torch.cuda.device(0):
                out = g(*args)
            assert tgb.stats(g).eager["already-capturing"] == 1
            with torch.cuda.device(1):
                graph.replay()
                same(out, f(*args))
