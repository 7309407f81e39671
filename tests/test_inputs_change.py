"""Inputs that are not what the graph was compiled for, and calls that cannot run the plan.

Whatever changes between two calls is either a key or a graph of its own, or the call runs eagerly with a reason; it is
never silently wrong. Every test compares with eager and then asserts *how* the calls were answered.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from equality import check_calls, compare, poisoned
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_graph_backend as tgb
from torch_graph_backend import registry

H = 8
BUCKETS = {"options": {"buckets": [8, 16]}}


class MLP(nn.Module):
    """Two captured segments around a softmax over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 12), nn.Linear(12, H)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h + torch.softmax(h, -2))


class Cached(nn.Module):
    """Writes the caller's cache in place, at the caller's positions, from within a captured segment."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(H, H)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        h = self.proj(x)
        cache.mul_(0.5).add_(1.0)
        return torch.relu(h) @ cache


def rows(n: int, seed: int = 0, dim: int = 0, shape: tuple[int, ...] = (H,)) -> Tensor:
    """``n`` random rows whose first dimension is marked dynamic."""
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(100 * seed + n))
    return mark(x, dim)


def mark(x: Tensor, dim: int = 0) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def call(make: Callable[..., Tensor], *args: Any) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A call that makes its argument anew on each side: ``deepcopy`` would lose gaps and overlaps."""
    return lambda memory: (make(*args),)


# -- layout and strides ------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "plain": lambda n: rows(n),
    "transposed": lambda n: mark(torch.randn(H, n, generator=torch.Generator().manual_seed(n)).t()),
    "gaps": lambda n: mark(torch.randn(n, 2 * H, generator=torch.Generator().manual_seed(n))[:, ::2]),
    "row_gaps": lambda n: mark(torch.randn(2 * n, H, generator=torch.Generator().manual_seed(n))[::2]),
    "offset": lambda n: mark(torch.randn(n + 3, H, generator=torch.Generator().manual_seed(n))[3:]),
    "expanded_rows": lambda n: mark(torch.randn(1, H, generator=torch.Generator().manual_seed(n)).expand(n, H)),
    "expanded_columns": lambda n: mark(torch.randn(n, 1, generator=torch.Generator().manual_seed(n)).expand(n, H)),
    "overlapping": lambda n: mark(
        torch.randn(n + H, generator=torch.Generator().manual_seed(n)).as_strided((n, H), (1, 1))
    ),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_one_layout(layout: str) -> None:
    """A slot of these strides: filled right, padded right, and the outputs have eager's strides."""
    check_calls(
        MLP().eval(), [call(LAYOUTS[layout], n) for n in (5, 7, 5, 11, 7, 13)], compiled_kwargs=BUCKETS, floor=4
    )


@pytest.mark.parametrize("other", sorted(set(LAYOUTS) - {"plain"}))
def test_layout_changes_between_calls(other: str) -> None:
    """Would catch a key without strides: a plain call after (and before) one of another layout."""
    order = [("plain", 5), ("plain", 6), (other, 5), ("plain", 7), (other, 6), (other, 12), ("plain", 12), (other, 7)]
    model = MLP().eval()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    with torch.no_grad(), poisoned():
        for name, n in order:
            compare(compiled(LAYOUTS[name](n)), reference(LAYOUTS[name](n)), f"{name} {n}")
    stats = tgb.stats(model)
    assert set(stats.eager) <= {"input-strides"}, stats
    assert stats.replays >= 2, stats


def test_inner_dimension_is_padded() -> None:
    """``(B, T, H)`` padded in ``T`` alone: a cut is not contiguous, eager's tensor is; outputs too."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return torch.relu(h + h.mean(1, keepdim=True)) @ w, h.transpose(1, 2)

    w = torch.randn(H, H)
    sizes = (5, 3, 5, 7, 3, 12)
    check_calls(f, [(mark(rows(2, n, 1, (n, H)), 1), w) for n in sizes], compiled_kwargs=BUCKETS, floor=3)


# -- dtype and device --------------------------------------------------------------------------------------------------


def test_dtype_changes_between_calls() -> None:
    """Would catch a slot that casts: each dtype is a graph of its own (Dynamo guards it)."""

    def f(x: Tensor) -> Tensor:
        return torch.relu(x @ x.new_ones(H, H)) + x.softmax(0)

    dtypes = (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16)
    calls = [call(lambda d, n: mark(rows(n).to(d)), d, 5 + i % 3) for i, d in enumerate(dtypes)]
    report = check_calls(f, calls, compiled_kwargs=BUCKETS, floor=1, tolerance=1e-2)
    assert report.stats.graphs == 3


@pytest.mark.parametrize("lie", ["dtype", "device", "shape", "strides", "layout"])
def test_placeholder_that_lies(lie: str) -> None:
    """Placeholders can lie (a float64 tensor behind a float32 one has been seen), so the compiled graph is called
    directly with what it was not compiled for: the call must run eagerly, with the reason."""
    wrong: dict[str, Callable[[], Tensor]] = {
        "dtype": lambda: rows(6).double(),
        "device": lambda: torch.empty(6, H, device="meta"),
        "shape": lambda: torch.randn(6, H + 1)[:, :0].expand(6, 0),
        "strides": lambda: torch.randn(H, 6).t(),
        "layout": lambda: rows(6).to_sparse(),
    }

    def f(x: Tensor) -> Tensor:
        return torch.relu(x * 2) * 3 + x.cumsum(0)

    compiled = torch.compile(f, backend="bcg", **BUCKETS)
    with torch.no_grad():
        compiled(rows(5))
        compiled(rows(6))
        (graph,) = registry.graphs_of(f)
        x = wrong[lie]()
        args: list[Any] = [x if isinstance(p.meta["val"], Tensor) else 6 for p in graph.normal.placeholders]
        if lie == "layout":
            with pytest.raises((RuntimeError, NotImplementedError)):  # eager has no such kernel either
                f(x)
            with pytest.raises((RuntimeError, NotImplementedError)):
                graph(*args)
        elif lie == "device":
            assert graph(*args)[0].device == x.device
        else:
            compare(graph(*args)[0], f(x), lie)
        compare(compiled(rows(7)), f(rows(7)), "after the lie")
    assert dict(tgb.stats(f).eager) == {f"input-{lie}": 1}, tgb.stats(f)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two kinds of device")
def test_device_changes_between_calls() -> None:
    """Each device is a graph of its own."""

    def f(x: Tensor) -> Tensor:
        return torch.relu(x * 2) * 3

    compiled = torch.compile(f, backend="bcg", **BUCKETS)
    with torch.no_grad():
        for device in ("cpu", "cuda", "cpu", "cuda", "cpu", "cuda"):
            x = mark(rows(5).to(device))
            compare(compiled(x), f(x), device)


# -- weights -----------------------------------------------------------------------------------------------------------


def _swap_data(m: MLP) -> None:
    m.up.weight.data = torch.randn_like(m.up.weight)


def _replace(m: MLP) -> None:
    m.up.weight = nn.Parameter(torch.randn_like(m.up.weight))


def _assign(m: MLP) -> None:
    m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True)


def _copy(m: MLP) -> None:
    m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()})


def _in_place(m: MLP) -> None:
    with torch.no_grad():
        m.up.weight.mul_(2.0)


def _free_and_reuse(m: MLP) -> None:
    """The old memory is freed, and something else is put where it was."""
    shape = m.up.weight.shape
    m.up.weight = None  # type: ignore[assignment]
    junk = [torch.full(shape, float("nan")) for _ in range(8)]
    m.up.weight = nn.Parameter(torch.randn(shape))
    del junk


@pytest.mark.parametrize("change", [_swap_data, _replace, _assign, _copy, _in_place, _free_and_reuse])
def test_weights_change(change: Callable[[MLP], None]) -> None:
    """Would catch a recording that reads the memory of old weights."""
    model = MLP().eval()
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    with torch.no_grad(), poisoned():
        for round_ in range(3):
            for n in (5, 6, 12, 11, 7):
                compare(compiled(rows(n)), copy.deepcopy(model)(rows(n)), f"round {round_}, {n} rows")
            torch.manual_seed(round_)
            change(model)
    stats = tgb.stats()
    assert not stats.eager, stats
    assert stats.replays >= 6, stats
    if change in (_copy, _in_place):
        assert stats.recordings == 2, f"nothing moved, and yet it was recorded again\n{stats}"


def test_weights_are_not_kept_alive() -> None:
    """A recording must not hold the only reference to weights that the model has dropped, once they have moved."""
    import weakref

    model = MLP().eval()
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    with torch.no_grad():
        for n in (5, 6, 7, 12, 13):
            compiled(rows(n))
        old = weakref.ref(model.up.weight.untyped_storage())
        _swap_data(model)
        for n in (5, 6):
            compiled(rows(n))
    assert old() is None, "the old weights are still in memory"


# -- caches ------------------------------------------------------------------------------------------------------------


def test_cache_that_stays() -> None:
    """Would catch a lost or doubled write: the same cache, call after call, in a captured segment."""

    def make(memory: dict[str, Any], n: int) -> tuple[Any, ...]:
        return rows(n), memory.setdefault("cache", torch.ones(H, H))

    calls = [lambda memory, n=n: make(memory, n) for n in (5, 6, 5, 12, 7, 13, 5)]
    report = check_calls(Cached().eval(), calls, compiled_kwargs=BUCKETS, floor=4)
    assert report.plans[0].mutated, "the cache is not written by a captured segment"


def test_cache_that_moves_at_every_call() -> None:
    """After three moves the operations on it run eagerly and the rest replays; answers equal throughout."""
    model = Cached().eval()
    calls = [lambda memory, i=i: (rows(5 + i % 3), torch.full((H, H), float(i))) for i in range(14)]
    report = check_calls(model, calls, compiled_kwargs=BUCKETS, floor=1, moves=True)
    (plan,) = report.plans
    assert not plan.mutated, plan
    assert plan.reasons()["moving-input"] > 0, plan
    assert plan.captured_ops()["aten.linear"] == 1, plan
    assert report.stats.replays >= 4, report.stats


def test_caches_in_turn() -> None:
    """Two caches that take turns, both alive: each write lands in the cache that was passed."""

    def make(memory: dict[str, Any], i: int) -> tuple[Any, ...]:
        return rows(5 + i % 2), memory.setdefault(("cache", i % 2), torch.full((H, H), float(i)))

    calls = [lambda memory, i=i: make(memory, i) for i in range(10)]
    check_calls(Cached().eval(), calls, compiled_kwargs=BUCKETS, floor=1, moves=True)


def test_changed_input_overlaps_another() -> None:
    """Dynamo guards no overlap of storages: such a call runs eagerly, with eager's answer."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1.0)
        return torch.relu(x * 2) + y * 3

    def apart(memory: dict[str, Any]) -> tuple[Any, ...]:
        return rows(5, 1), rows(5, 2)

    def together(memory: dict[str, Any]) -> tuple[Any, ...]:
        base = torch.randn(9, H, generator=torch.Generator().manual_seed(3))
        return mark(base[:5]), mark(base[4:])

    calls = [apart, apart, together, apart, together]
    check_calls(f, calls, compiled_kwargs=BUCKETS, padded=False, moves=True, eager={"aliased-inputs": 2})


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_zero_one_and_beyond() -> None:
    """Sizes 0 and 1 are graphs of their own in Dynamo; beyond the largest bucket a call is eager with that reason."""
    sizes = (5, 6, 0, 1, 17, 7, 0, 1, 18, 16, 12, 6)
    eager = {"beyond-largest-bucket": 2}
    check_calls(MLP().eval(), [(rows(n),) for n in sizes], compiled_kwargs=BUCKETS, padded=False, floor=4, eager=eager)


def test_zero_on_a_graph_for_any_size() -> None:
    """A size of zero that reaches a graph compiled for any size is eager with reason ``zero-size``."""

    def f(x: Tensor) -> Tensor:
        return torch.relu(x * 2) * 3

    compiled = torch.compile(f, backend="bcg", **BUCKETS)
    with torch.no_grad():
        compiled(rows(5))
        (graph,) = registry.graphs_of(f)
        sized = [not isinstance(p.meta["val"], Tensor) for p in graph.normal.placeholders]
        args = [0 if s else torch.empty(0, H) for s in sized]
        assert tuple(graph(*args)[0].shape) == (0, H)
    assert dict(tgb.stats(f).eager) == {"zero-size": 1}


def test_no_symbols() -> None:
    """A static graph: one exact key, recorded on its second call, and bitwise equal."""
    calls = [(torch.randn(5, H),) for _ in range(5)]
    report = check_calls(MLP().eval(), calls, padded=False, floor=4, compiled_kwargs={"dynamic": False})
    assert (report.stats.first_calls, report.stats.replays, report.stats.recordings) == (1, 4, 1)
    assert report.exact == 5


# -- graphs ------------------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Dynamo makes two or three graphs of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = MLP(), MLP(), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.how == "print":
            torch._dynamo.graph_break()
        elif self.how == "item" and h.sum().item() > 1e9:
            return h
        elif self.how == "branch" and h.sum() > 0:
            return self.second(h) + 1
        return self.second(h)


@pytest.mark.parametrize("how", ["print", "item", "branch"])
def test_graph_breaks(how: str) -> None:
    """Several graphs a call: the output of one is the input of the next, and must not be overwritten in between."""
    report = check_calls(
        Breaks(how).eval(), [(rows(n),) for n in (5, 6, 5, 12, 7, 13)], compiled_kwargs=BUCKETS, floor=4
    )
    assert report.stats.graphs >= 2
    assert report.stats.calls == 12


def test_graph_without_work() -> None:
    """Nothing to compute, or views alone: Dynamo may skip it, and if it does not the call is eager with a reason."""

    def identity(x: Tensor) -> Tensor:
        return x

    def views(x: Tensor) -> tuple[Tensor, Tensor, int, None]:
        return x.t(), x[1:], x.shape[0] + 1, None

    for f in (identity, views):
        compiled = torch.compile(f, backend="bcg", **BUCKETS)
        for n in (5, 6, 7):
            x = rows(n)
            compare(compiled(x), f(x), f.__name__)
            for out in torch.utils._pytree.tree_leaves(compiled(x)):
                if isinstance(out, Tensor):
                    assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    stats = tgb.stats()
    assert set(stats.eager) <= {"nothing-to-capture"}, stats


def test_graph_without_a_capturable_node() -> None:
    """Every operation mixes rows: all eager, with a reason; the answer is eager's."""

    def f(x: Tensor) -> Tensor:
        return x.cumsum(0).flip(0).softmax(0)

    calls = [(rows(n),) for n in (5, 6, 5, 9)]
    check_calls(f, calls, compiled_kwargs=BUCKETS, padded=False, floor=0, eager={"nothing-to-capture": 4})


def test_nested_outputs() -> None:
    """Structure, Python values and memory shared between outputs, inputs and weights are as eager leaves them."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(H, H)

        def forward(self, x: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
            h = self.proj(x)
            g = torch.relu(h)
            return {
                "h": [h, (g, h[1:], {"deep": g.t(), "none": None})],
                "same": (h, h),
                "input": x,
                "view": x[:, 2:4],
                "extra": extra,
                "weight": self.proj.weight,
                "sizes": (x.shape[0], 2 * x.shape[0] + 1, x.shape, "text", 1.5, True),
                "empty": ((), [], {}),
            }

    calls = [(rows(n), {"a": torch.ones(2), "b": 3}) for n in (5, 6, 5, 12, 7)]
    check_calls(Nested().eval(), calls, compiled_kwargs=BUCKETS, floor=2)


# -- modes -------------------------------------------------------------------------------------------------------------


def test_gradients() -> None:
    """With gradients enabled: eager, one reason, right gradients; without them the same graph's twin replays."""
    model = MLP()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    for n in (5, 6):
        out, want = compiled(rows(n)), reference(rows(n))
        assert out.requires_grad
        out.sum().backward()
        want.sum().backward()
        compare(out, want, "with gradients")
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert dict(tgb.stats(model).eager) == {"grad": 2}
    with torch.no_grad():
        for n in (5, 6, 7):
            compare(compiled(rows(n)), reference(rows(n)), "without gradients")
    with torch.inference_mode():
        for n in (5, 6, 7):
            compare(compiled(rows(n)), reference(rows(n)), "in inference mode")
    stats = tgb.stats(model)
    assert dict(stats.eager) == {"grad": 2}, stats
    assert stats.replays >= 2, stats


def test_inference_mode_alternates() -> None:
    """Would catch memory made under inference mode that a later call outside it must change."""
    model = Cached().eval()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    cache, eager_cache = torch.ones(H, H), torch.ones(H, H)
    for i, mode in enumerate([torch.inference_mode, torch.no_grad] * 4):
        with mode():
            got, want = compiled(rows(5 + i % 3), cache), reference(rows(5 + i % 3), eager_cache)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(cache, eager_cache)
    stats = tgb.stats(model)
    assert not stats.eager, stats
    assert stats.replays >= 2, stats


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.linears = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linears += func in (torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_everything() -> None:
    """A FLOP counter around a recorded call must count what eager would."""
    model = MLP().eval()
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    with torch.no_grad():
        for n in (5, 6, 7):
            compiled(rows(n))
        with Counter() as counter:
            got = compiled(rows(6))
        compare(got, model(rows(6)), "under the mode")
    assert counter.linears in (0, 2), counter.linears
    stats = tgb.stats(model)
    assert counter.linears == 2 or stats.calls == 3, "the mode missed a replay"


# -- failures ----------------------------------------------------------------------------------------------------------


@contextmanager
def fragile_op() -> Iterator[dict[str, bool]]:
    """A custom operation (eager: its kernel is unknown) that raises when told to."""
    state = {"fail": False}
    with torch.library._scoped_library("tgb_inputs_test", "DEF") as lib:
        lib.define("fragile(Tensor x) -> Tensor")

        def kernel(x: Tensor) -> Tensor:
            if state["fail"]:
                raise ValueError("the kernel says no")
            return x * 2

        lib.impl("fragile", kernel, "CPU")
        lib.impl("fragile", torch.empty_like, "Meta")
        yield state


@pytest.mark.parametrize("when", [0, 1, 3])
def test_exception_then_retry(when: int) -> None:
    """On a first call, a recording call, a replay: the user's exception comes through, and later calls are right."""
    with fragile_op() as state:
        up, down = nn.Linear(H, H), nn.Linear(H, H)

        def f(x: Tensor) -> Tensor:
            return down(torch.ops.tgb_inputs_test.fragile(up(x))) + 1

        compiled = torch.compile(f, backend="bcg", **BUCKETS)
        with torch.no_grad(), poisoned():
            for i in range(6):
                if i == when:
                    state["fail"] = True
                    with pytest.raises(ValueError, match="the kernel says no"):
                        compiled(rows(5 + i % 2))
                    state["fail"] = False
                compare(compiled(rows(5 + i % 2)), f(rows(5 + i % 2)), f"call {i}")
    stats = tgb.stats()
    assert not stats.eager, stats
    assert stats.replays >= 4, stats


def test_threads() -> None:
    """Four threads call one model: every answer is its own, and nothing is lost in the counts."""
    model = MLP().eval()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="bcg", **BUCKETS)
    with torch.no_grad():
        for n in (5, 6, 12, 13):
            compiled(rows(n))
    before = tgb.stats(model)
    errors: list[BaseException] = []
    per_thread = 40

    def work(seed: int) -> None:
        try:
            with torch.no_grad():
                kept = []
                for i in range(per_thread):
                    n = (5, 6, 7, 11, 13)[(i + seed) % 5]
                    kept.append((compiled(rows(n, seed)), n))
                for out, n in kept:
                    compare(out, reference(rows(n, seed)), f"thread {seed}, {n} rows")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    after = tgb.stats(model)
    assert after.calls - before.calls == 4 * per_thread, f"{before}\n{after}"
    assert set(after.eager) <= {"busy"}, after
    assert after.replays - before.replays >= per_thread, f"{before}\n{after}"
