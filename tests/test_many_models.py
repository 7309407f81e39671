"""Several compiled things in one process: models in turn, nested, copied, pickled, reset, wrapped, in threads.

All bit for bit (whole numbers, see ``modes_harness``).
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import compare
from modes_harness import OPTIONS, SIZES, Both, H, Net, compiled, linear, on_devices, whole
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import registry

pytestmark = on_devices


def test_models_in_turn(device: str) -> None:
    """Calls of five models interleave; they share a recorder, its memory pool, and some of them their code."""
    models = [Net(seed).to(device) for seed in (1, 4)]
    models += [nn.Sequential(linear(H, 5 + i), nn.ReLU(), linear(5 + i, H)).to(device) for i in range(3)]
    boths = [Both(m) for m in models]
    for i, n in enumerate(SIZES * 2):
        for j, both in enumerate(boths):
            both(whole(n if j % 2 else SIZES[-1 - i % len(SIZES)], H, device=device, seed=i + j))
    for both in boths:
        both.finish(0)
    assert tgb.stats().replays >= 85, tgb.stats()
    del both, models, boths[1]
    for i, n in enumerate(SIZES):  # what was freed with one model is not used by the others
        junk = [torch.full((64, 64), float("nan"), device=device) for _ in range(8)]
        for both in boths:
            both(whole(n, H, device=device, seed=i))
        del junk
    for both in boths:
        both.finish(0)
    assert tgb.stats().replays >= 120, tgb.stats()


@contextmanager
def calling_op(function: Callable[[Tensor], Tensor], device: str) -> Iterator[Any]:
    """An operation, eager between segments, whose kernel calls ``function``."""
    with torch.library._scoped_library("tgb_modes_test", "DEF") as lib:
        lib.define("call(Tensor x) -> Tensor")
        lib.impl("call", lambda x: function(x).clone(), device.upper())
        lib.impl("call", torch.empty_like, "Meta")
        yield torch.ops.tgb_modes_test.call


def test_a_compiled_function_inside_anothers_break(device: str) -> None:
    """The inner one records and replays while the outer one is in the middle of its own segments, and by itself."""
    inner = Both(Net(7).to(device))

    def in_break(x: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return inner.fast(x) if running["fast"] else inner.plain(x)

    up, down = linear().to(device), linear(H, H, 2).to(device)
    running = {"fast": False}
    with calling_op(in_break, device) as op, torch.no_grad():

        def outer(x: Tensor) -> Tensor:
            return down(torch.relu(op(torch.relu(up(x)) * 2)))

        fast = compiled(outer)
        kept = []
        for i, n in enumerate(SIZES * 2):
            x = whole(n, H, device=device, seed=i)
            running["fast"] = False
            want = outer(x)
            running["fast"] = True
            got = fast(x)
            assert torch.equal(got, want), f"call {i}, {n} rows"
            kept.append((got, want))
            inner.sizes(n, device=device)
        assert all(torch.equal(a, b) for a, b in kept)
        assert torch.equal(inner.model.count, inner.plain.count), "the inner model ran more or less than once a call"
    assert tgb.stats(outer).replays >= 12, tgb.stats(outer)
    inner.finish(30)
    assert not tgb.stats().eager, tgb.stats()


def test_a_compiled_module_inside_a_compiled_function(device: str) -> None:
    """Nested ``torch.compile``: the inner one is inlined, or called with another backend; answers stay eager's."""
    net = Net().to(device)
    plain = copy.deepcopy(net)
    for backend in ("bcg", "eager"):
        torch._dynamo.reset()
        inner = torch.compile(net, backend=backend)

        def f(x: Tensor, m: Any) -> Tensor:
            return torch.relu(m(x * 2)) + 1

        fast = compiled(lambda x, inner=inner, f=f: f(x, inner))
        with torch.no_grad():
            for i, n in enumerate(SIZES):
                x = whole(n, H, device=device, seed=i)
                assert torch.equal(fast(x), f(x, plain)), f"{backend}, call {i}"
        assert tgb.stats().replays >= 6, tgb.stats()
        assert torch.equal(net.count, plain.count)


def test_a_disabled_region(device: str) -> None:
    """``torch.compiler.disable`` inside: two graphs around code that runs eagerly."""
    up, down = linear().to(device), linear(H, H, 2).to(device)

    @torch.compiler.disable
    def middle(h: Tensor) -> Tensor:
        return h[torch.argsort(h.sum(1), stable=True)]

    def f(x: Tensor) -> Tensor:
        h = torch.relu(up(x)) * 2
        return torch.relu(down(middle(h))) + h

    both = Both(f)
    both.sizes(*SIZES, device=device)
    assert all(torch.equal(a, b) for a, b in both.kept)
    assert tgb.stats().replays >= 12, tgb.stats()


@pytest.mark.parametrize("how", ["wrapped", "method"])
@pytest.mark.parametrize("via", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(device: str, how: str, via: Callable[[Any], Any]) -> None:
    """A copy made after compiling has its own weights and state, and neither disturbs the other."""
    model = Net().to(device)
    if how == "wrapped":
        fast = compiled(model)
    else:
        fast = model
        model.compile(backend="bcg", options=OPTIONS)
    first = Both(model, lambda m: fast)
    first.sizes(5, 6, 11, 7, 12, device=device)
    made = via(fast if how == "wrapped" and via is copy.deepcopy else model)
    inner = getattr(made, "_orig_mod", made)
    with torch.no_grad():
        inner.up.weight.add_(1.0)
    plain = Net().to(device)
    plain.load_state_dict(inner.state_dict())
    if how == "method" or made is inner:
        made = compiled(inner)
    for i, n in enumerate(SIZES):
        x = whole(n, H, device=device, seed=i)
        with torch.no_grad():
            compare(made(x), plain(x), f"copy, call {i}", exact=True)
        first.sizes(n, device=device)
    first.finish(0)
    assert tgb.stats().replays >= 18, tgb.stats()


def test_reset_of_dynamo_in_the_middle(device: str) -> None:
    """Earlier outputs stay, later calls record anew; also at a second reset, of which Dynamo tells us only if asked."""
    both = Both(Net().to(device))
    for _ in range(3):
        both.sizes(5, 6, 11, 7, 12, device=device)
        assert both.stats.replays == 3, both.stats
        torch._dynamo.reset()
        assert not tgb.stats().graphs
    both.sizes(5, 6, 11, 7, 12, device=device)
    both.finish(3)


def test_reset_in_the_middle(device: str) -> None:
    """Earlier outputs stay; what is compiled already runs eagerly from then on, and says so."""
    both = Both(Net().to(device))
    both.sizes(5, 6, 11, 7, 12, device=device)
    tgb.reset()
    both.sizes(5, 6, 11, 7, 12, device=device)
    both.finish(3, eager=("disabled",))
    assert (both.stats.replays, both.stats.eager["disabled"]) == (3, 5), both.stats


def test_calls_beyond_the_recompile_limit(device: str) -> None:
    """They run without any backend; those that have graphs go on replaying."""
    both = Both(Net().to(device), lambda m: compiled(m, dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in (5, 6, 7, 5, 6, 8, 5, 6, 5, 6):
            both(whole(n, H, device=device, dynamic=False))
    both.finish(4)
    assert both.stats.graphs == 2
    assert both.stats.limits


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_dynamic_sizes_on_and_off(device: str, dynamic: bool | None) -> None:
    both = Both(Net().to(device), lambda m: compiled(m, dynamic=dynamic))
    for n in SIZES * 2:
        both(whole(n, H, device=device, dynamic=False))
    both.finish(8)


STANCES: list[dict[str, Any]] = [
    {"stance": "force_eager"},
    {"stance": "eager_on_recompile"},
    {"stance": "default", "skip_guard_eval_unsafe": True},
    {"stance": "eager_then_compile"},
    {"stance": "default"},
]


def test_stances(device: str) -> None:
    """Under each: eager's answer; replays go on where Dynamo enters its graphs."""
    both = Both(Net().to(device))
    both.sizes(*SIZES, device=device)
    for stance in STANCES:
        with torch.compiler.set_stance(**stance):
            both.sizes(5, 6, 11, 7, device=device)
        both.sizes(5, 12, device=device)
    both.finish(16)


@pytest.fixture
def process_group(device: str, tmp_path: Any) -> Iterator[None]:
    if not dist.is_available():
        pytest.skip("needs a torch build with torch.distributed")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["compile the wrapped", "wrap the compiled"])
def test_ddp(device: str, process_group: None, order: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = Plain(1).to(device)  # DDP around a class of torch itself, such as Sequential, is not traced at all
    plain = copy.deepcopy(model)
    if order == "compile the wrapped":
        fast = compiled(DistributedDataParallel(model))
    else:
        fast = DistributedDataParallel(compiled(model))
    kept = []
    with torch.no_grad():
        for n in SIZES:
            x = whole(n, H, device=device)
            kept.append((fast(x), plain(x)))
    assert all(torch.equal(a, b) for a, b in kept)
    assert tgb.stats().replays >= 6, tgb.stats()
    fast(whole(5, H, device=device)).sum().backward()
    plain(whole(5, H, device=device)).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# -- threads and failures ----------------------------------------------------------------------------------------------


def in_threads(works: list[Callable[[], None]]) -> None:
    """All at once, with Python switching between them as often as it can."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("how", ["one model", "a model each", "copies of a model"])
def test_threads(device: str, how: str) -> None:
    """First calls, recordings and replays of four threads meet each other; copies share a graph, but not weights."""
    if how == "one model":
        models = [Plain(1).to(device)] * 4
    else:
        models = [Plain(k, 6 + k if how == "a model each" else 6).to(device) for k in range(4)]
    fast = {id(m): compiled(m) for m in models}
    # Made beforehand: random CUDA calls of other threads raise while one records, on torch 2.11.
    data = [[whole(n, H, device=device, seed=17 * k + i) for i, n in enumerate(SIZES * 4)] for k in range(4)]
    wanted = [[m(x).detach() for x in xs] for m, xs in zip(models, data, strict=True)]
    compile_first = {id(m): m for m in models}
    with torch.no_grad():
        for m in compile_first.values():
            fast[id(m)](whole(5, H, device=device))
    together = threading.Barrier(4)

    def work(k: int) -> None:
        together.wait()
        kept = [fast[id(models[k])](x) for x in data[k]]
        for i, (got, want) in enumerate(zip(kept, wanted[k], strict=True)):
            assert torch.equal(got, want), f"thread {k}, call {i}"

    in_threads([lambda k=k: work(k) for k in range(4)])
    stats = tgb.stats()
    assert stats.replays >= 140, stats
    assert not stats.eager, stats


class Plain(nn.Module):
    def __init__(self, seed: int, inside: int = 6) -> None:
        super().__init__()
        self.up, self.down = linear(H, inside, seed), linear(inside, H, seed + 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h + h.cumsum(0))


def test_another_thread_allocates_while_one_records(device: str) -> None:
    """Many recordings, while another thread takes and gives back memory of all sizes, and writes to all of it: it is
    never disturbed, and never writes to what a recording works on."""
    model = Plain(1).to(device)
    fast, sizes = compiled(model), list(range(2, 17))
    # Made beforehand: random CUDA calls of other threads raise while one records, on torch 2.11.
    data = {n: [whole(n, H, device=device, seed=n + i) for i in range(3)] for n in sizes}
    wanted = {n: [model(x).detach() for x in xs] for n, xs in data.items()}
    with torch.no_grad():
        fast(data[5][0])
    done = threading.Event()

    def churn() -> None:
        kept: list[Tensor] = []
        for k in range(10**9):
            if done.is_set():
                return
            number = float(k % 1000)
            block = torch.full((1 << (k % 14),), number, device=device)
            kept = [*kept[-20:], block]
            assert float(block.sum()) == number * block.numel()

    def record() -> None:
        try:
            for _ in range(4):
                for n in sizes:
                    for x, want in zip(data[n], wanted[n], strict=True):
                        assert torch.equal(fast(x), want)
                for graph in registry.graphs_of(model):
                    for entry in graph.entries.values():
                        entry.forget()
        finally:
            done.set()

    in_threads([churn, record])
    assert tgb.stats(model).recordings >= 8


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_exceptions_in_a_break_with_state(device: str, when: int) -> None:
    """In the middle of a call that has already changed a buffer, as in eager; a retry gives what eager's gives."""
    failing = {"now": False}

    def kernel(x: Tensor) -> Tensor:
        if failing["now"]:
            raise ValueError("the kernel says no")
        return x * 2

    with calling_op(kernel, device) as op:

        class Fragile(nn.Module):
            count: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = linear(), linear(H, H, 2)
                self.register_buffer("count", torch.zeros(1))

            def forward(self, x: Tensor) -> Tensor:
                self.count.add_(1.0)
                h = op(torch.relu(self.up(x)) + self.count)
                self.count.mul_(2.0)
                return self.down(h) + self.count

        both = Both(Fragile().to(device))
        for i, n in enumerate((5, 6, 7, 5, 6, 11, 12, 13)):
            if i == when:
                failing["now"] = True
                for model in (both.plain, both.fast):
                    with torch.no_grad(), pytest.raises(ValueError, match="the kernel says no"):
                        model(whole(n, H, device=device))
                failing["now"] = False
            both(whole(n, H, device=device))
        both.finish(5)


@pytest.mark.slow
def test_beside_a_model_of_reduce_overhead(device: str) -> None:
    """PyTorch's own graph trees record and replay in between, in a pool of their own; both stay right."""
    mine, theirs = Both(Net().to(device)), Plain(3).to(device)
    peer = torch.compile(theirs, mode="reduce-overhead", dynamic=True)
    for i, n in enumerate(SIZES * 2):
        x = whole(n, H, device=device, seed=i)
        with torch.no_grad():
            assert torch.equal(peer(x).clone(), theirs(x)), f"the other model, call {i}"
        mine.sizes(n, device=device)
        with torch.no_grad():
            assert torch.equal(peer(x).clone(), theirs(x)), f"the other model, call {i}, again"
    mine.finish(16)
