"""Whose memory a recording uses, and for how long: the arena, boundary values, the caller's caches, outputs, leaks.

Every test runs on the CPU, and on a CUDA device where there is one.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.arena import Arena
from torch_graph_backend.errors import MemoryFault
from torch_graph_backend.plan import CapturedSegment
from torch_graph_backend.runner import MAX_MOVES, WORTH_RECORDING, CompiledGraph

W = 32


pytestmark = pytest.mark.usefixtures("no_grad")


class Block(nn.Module):
    """Two segments around attention over the tokens, which is eager when the tokens are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (W,))).chunk(3, -1)
        a = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)
        return x + self.out(a[0, 0]).relu()


class Cached(nn.Module):
    """Changes the caller's cache in a captured segment."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(W, W)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.mul_(0.5).add_(1.0)
        return torch.relu(self.proj(x)) @ cache


def blocks(device: str, n: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(n))).to(device).eval()


def tokens(device: str, n: int) -> Tensor:
    x = torch.randn(n, W).to(device)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def only_graph(model: Any) -> CompiledGraph:
    (graph,) = registry.graphs_of(model)
    return graph


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


SIZES = [70, 9, 33, 10, 71, 9, 34, 70, 200, 9, 33, 72, 199, 10, 200, 33]

# -- the arena ---------------------------------------------------------------------------------------------------------


def test_keys_lie_on_top_of_each_other_in_the_arena(device: str) -> None:
    """The arena is as large as the largest key needs, in whatever order the keys come."""
    for order in ([9, 33, 70, 200], [200, 70, 33, 9], [33, 200, 9, 70]):
        torch._dynamo.reset()
        net = blocks(device)
        fast = torch.compile(net, backend="bcg")
        for n in order:
            fast(tokens(device, n))
        graph = only_graph(net)
        assert len(graph.entries) == 4
        largest = max(
            sum(b.untyped_storage().nbytes() > 0 and b.nbytes for b in e.lease.buffers) for e in graph.entries.values()
        )
        assert largest <= graph.state.arena.nbytes <= 1.5 * largest + 4096


def test_arena_chunks_live_as_long_as_a_lease() -> None:
    arena = Arena(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    layouts = [((8, 4), (4, 1), torch.float32), ((3,), (1,), torch.int64), ((0, 5), (5, 1), torch.bool)]
    first = arena.take(layouts)
    assert [tuple(b.shape) for b in first.buffers] == [(8, 4), (3,), (0, 5)]
    assert first.nbytes == arena.nbytes == 3 * 512
    again = arena.take(layouts)
    assert again.nbytes == 0
    assert again.buffers[0].data_ptr() == first.buffers[0].data_ptr()
    larger = arena.take([*layouts, ((1000,), (1,), torch.float64)])
    assert larger.nbytes == 8192
    spans = sorted((b.data_ptr(), b.data_ptr() + b.nbytes) for b in larger.buffers if b.numel())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    del larger
    assert arena.nbytes == 3 * 512
    del first, again
    assert arena.nbytes == 0


# -- boundary values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_replays_in_any_order_of_buckets_equal_eager(device: str, verify: bool) -> None:
    """Boundary values are dropped once their last reader is recorded: would catch one that is dropped too early."""
    net = blocks(device)
    fast = torch.compile(net, backend="bcg", options={"verify_memory": verify})
    for n in SIZES:
        x = tokens(device, n)
        close(fast(x), net(x))
    stats = tgb.stats(net)
    assert stats.replays == stats.calls - stats.first_calls >= len(SIZES) // 2
    recorder = only_graph(net).recorder
    if device == "cpu":
        assert recorder.leased_bytes == 0, "boundary values are held after the recording"  # type: ignore[attr-defined]


def test_verify_memory_finds_a_value_that_is_dropped_early(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lifetimes are made wrong on purpose: every boundary value ends with the segment that makes it."""
    from torch_graph_backend import plan_build
    from torch_graph_backend.device_state import state_of
    from torch_graph_backend.entry import Entry
    from torch_graph_backend.frames import FirstFrame

    real = plan_build._Builder.step

    def wrong(self: Any, index: int, inputs: Any) -> Any:
        step = real(self, index, inputs)
        if isinstance(step, CapturedSegment):
            return replace(step, last_reads=tuple(step.index for _ in step.outputs))
        return step

    def let_go(self: Entry, values: dict[str, Any], index: int) -> None:
        values.update((name, self.recorder.alias(v)) for name, v in values.items())

    monkeypatch.setattr(plan_build._Builder, "step", wrong)
    monkeypatch.setattr(Entry, "_let_go", let_go)
    monkeypatch.setattr(FirstFrame, "_let_go", lambda self, index: None)
    state = state_of(torch.device(device, 0) if device == "cuda" else torch.device(device))
    if device == "cpu":  # its own poison would be the same in both replays
        state.recorder._pool.poison = False  # type: ignore[union-attr]

    def f(x: Tensor) -> Tensor:
        h = (x * 2).relu() + 1
        return (h * 3 + torch.sort(h, 0).values).relu() * 2

    fast = torch.compile(f, backend="bcg", options={"verify_memory": True})
    x = tokens(device, 12)
    fast(x)
    with pytest.raises(MemoryFault, match="segment 2"):
        fast(x)


def test_memory_of_many_keys_is_about_that_of_the_largest(device: str) -> None:
    """42 keys do not hold 42 times their boundary values."""
    net = blocks(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": list(range(8, 260, 6))})
    assert tgb.capture(fast, tokens(device, 200)) >= 30
    graph = only_graph(net)
    many = graph.state.nbytes
    torch._dynamo.reset()
    fast = torch.compile(net, backend="bcg", options={"buckets": [254]})
    tgb.capture(fast, tokens(device, 200))
    one = only_graph(net).state.nbytes
    assert many <= 3 * one + 2**21


# -- the caller's memory -----------------------------------------------------------------------------------------------


def test_recordings_do_not_keep_a_cache_or_weights_alive(device: str) -> None:
    net = Cached().to(device)
    fast = torch.compile(net, backend="bcg")
    cache = torch.ones(W, W, device=device)
    for n in (8, 8, 8):
        fast(tokens(device, n), cache)
    assert tgb.stats(net).replays == 2
    memory = registry_ref(cache)
    (entry,) = only_graph(net).entries.values()
    assert not entry.dead()
    del cache
    gc.collect()
    assert memory.expired(), "a recording holds the caller's cache"
    assert entry.dead()
    weights = registry_ref(net.proj.weight)
    graph = only_graph(net)
    del net, fast
    torch._dynamo.reset_code_caches()
    gc.collect()
    assert graph.entries
    assert weights.expired(), "a recording holds the weights"


def registry_ref(tensor: Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def test_a_recording_dies_with_the_cache_it_works_on(device: str) -> None:
    net = Cached().to(device)
    fast = torch.compile(net, backend="bcg")
    cache = torch.ones(W, W, device=device)
    for _ in range(2):
        fast(tokens(device, 8), cache)
    (entry,) = only_graph(net).entries.values()
    assert entry.recorded
    cache = torch.ones(W, W, device=device)
    fast(tokens(device, 100), cache)
    assert not entry.recorded, "the old cache is gone, and another key was added since"


def test_a_new_cache_at_the_old_address_with_other_strides(device: str) -> None:
    """Only the address is compared in C++; the layout must not be forgotten."""
    net = Cached().to(device)
    fast = torch.compile(net, backend="bcg", dynamic=False)
    memory = torch.arange(W * W, device=device, dtype=torch.float32) / 100
    x = torch.randn(8, W).to(device)
    for strides in ((W, 1), (W, 1), (1, W), (1, W), (W, 1), (1, W)):
        twin = memory.clone().as_strided((W, W), strides)
        got = fast(x, memory.as_strided((W, W), strides))
        close(got, net(x, twin))
        close(memory.as_strided((W, W), strides), twin)


@pytest.mark.parametrize("calls", [2, WORTH_RECORDING + 2])
def test_caches_that_move_often_are_unpinned_and_others_recorded_again(device: str, calls: int) -> None:
    net = Cached().to(device)
    fast = torch.compile(net, backend="bcg")
    keep = []
    for _ in range(MAX_MOVES + 2):
        cache, twin = torch.ones(W, W, device=device), torch.ones(W, W, device=device)
        keep.append(cache)  # so that the next one lies elsewhere
        for _ in range(calls):
            x = tokens(device, 8)
            close(fast(x, cache), net(x, twin))
            close(cache, twin)
    plan = tgb.plans(net)[0]
    assert ("moving-input" in plan.reasons()) == (calls == 2)
    assert tgb.stats(net).replays > 0


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_outputs_as_views_are_the_documented_exception(device: str) -> None:
    """``outputs="view"``: no copy, the next call of the key overwrites it, calls of other keys do not."""
    net = blocks(device, 2)
    safe, fast = (torch.compile(net, backend="bcg", options={"outputs": kind}) for kind in ("safe", "view"))
    inputs = [tokens(device, n) for n in (16, 16, 16, 16, 40, 40, 40)]
    for x in inputs[:3]:
        close(fast(x), net(x))
    first = fast(inputs[3])
    want = net(inputs[3])
    for x in inputs[4:]:
        close(fast(x), net(x))
    close(first, want)
    second = fast(inputs[0])
    assert second.data_ptr() == first.data_ptr()
    close(second, net(inputs[0]))
    torch._dynamo.reset()
    kept = [(safe(x), net(x)) for x in inputs]
    for got, expected in kept:
        close(got, expected)


def test_view_outputs_fed_back_and_derived(device: str) -> None:
    """A view output that is the next input, and outputs that are views of each other."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = (x * 0.5 + 1).relu()
        return y, y.t(), torch.sort(y, 0).values

    fast = torch.compile(f, backend="bcg", options={"outputs": "view"})
    x = tokens(device, 12)
    a, b = x, x.clone()
    for _ in range(6):
        got, want = fast(a), f(b)
        for g, w in zip(got, want, strict=True):
            close(g, w)
        assert got[0].data_ptr() == got[1].data_ptr()
        a, b = got[0], want[0].clone()
        torch._dynamo.maybe_mark_dynamic(a, 0)


def test_outputs_of_first_calls_survive_replays_of_other_keys(device: str) -> None:
    """On CUDA a first run allocates from the pool, whose free blocks recordings write to."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = (x * 2).relu() + 1
        mixed = torch.sort(h, 0).values
        return (h * 3 + mixed).relu(), mixed.t(), h[0]

    for kind in ("safe", "view"):
        torch._dynamo.reset()
        fast = torch.compile(f, backend="bcg", options={"outputs": kind})
        for _ in range(3):
            fast(tokens(device, 64))
        kept = []
        for n in (8, 16, 24, 32, 40, 48):
            x = tokens(device, n)
            kept.append((fast(x), f(x)))
            for _ in range(2):
                fast(tokens(device, 64))
        for got, want in kept:
            for g, w in zip(got, want, strict=True):
                close(g, w)


def live_bytes(device: str) -> int:
    """Bytes of tensors that are in use: the allocator's on a GPU, else those that Python knows, each storage once."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())
    found = {}
    for t in gc.get_objects():
        if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu":
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_memory_of_outputs_is_that_of_those_that_are_kept(device: str) -> None:
    """What the caller drops is free again; what it keeps costs its own size, whatever the bucket, and not the memory
    that it was computed in."""
    net = blocks(device, 2)
    fast = torch.compile(net, backend="bcg", options={"buckets": [512]})
    xs = [tokens(device, n) for n in (300, 257, 511)]
    for _ in range(2):
        for x in xs:
            fast(x)
    before = live_bytes(device)
    for _ in range(30):
        for x in xs:
            fast(x)
    assert live_bytes(device) <= before
    kept = [fast(xs[1]) for _ in range(20)]
    assert tgb.stats(net).replays >= 100
    each = -(-kept[0].nbytes // 512) * 512
    assert live_bytes(device) - before <= 20 * each
    assert len({t.untyped_storage().data_ptr() for t in kept}) == 20
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in kept)
    del kept
    assert live_bytes(device) <= before


# -- leaks -------------------------------------------------------------------------------------------------------------


def test_nothing_is_left_after_del_and_reset(device: str) -> None:
    net = blocks(device, 2)
    fast = torch.compile(net, backend="bcg")
    xs = [tokens(device, n) for n in (16, 16, 16, 70, 70)]
    outputs = [fast(x) for x in xs]
    graph = weakref.ref(only_graph(net))
    recorder = only_graph(net).recorder
    held = [registry_ref(t) for t in (*net.parameters(), *xs, *outputs)]
    del net, fast, xs, outputs
    torch._dynamo.reset()
    gc.collect()
    assert all(ref.expired() for ref in held)
    assert graph() is None
    assert recorder.nbytes == 0


def test_a_thousand_re_records_are_flat(device: str) -> None:
    """Recordings come and go, memory does not grow."""
    net = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W)).to(device).eval()
    fast = torch.compile(net, backend="bcg")
    x = tokens(device, 8)
    sizes = []
    for i in range(1000):
        fast(x)
        fast(x)
        graph = only_graph(net)
        if i in (20, 999):
            gc.collect()
            made = getattr(graph.recorder, "_logs" if device == "cpu" else "_graphs")
            sizes.append((graph.state.nbytes, len(made)))
        for entry in graph.entries.values():
            entry.forget()
    assert sizes[0] == sizes[1]
    assert tgb.stats(net).recordings == 1000


def test_close_frees_one_model_and_leaves_the_others(device: str) -> None:
    nets = [blocks(device, 1), blocks(device, 2)]
    fasts = [torch.compile(net, backend="bcg") for net in nets]
    x = tokens(device, 16)
    for _ in range(3):
        for fast, net in zip(fasts, nets, strict=True):
            close(fast(x), net(x))
    graph = only_graph(nets[0])
    tgb.close(nets[0])
    assert not graph.entries
    for fast, net in zip(fasts, nets, strict=True):
        close(fast(x), net(x))
    assert tgb.stats(nets[0]).eager == {"disabled": 1}
    assert tgb.stats(nets[1]).replays == 3
