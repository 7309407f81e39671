"""Arguments that are changed and lie elsewhere at every call: the graph works on a copy, which goes back at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_graph_backend as tgb
from torch_graph_backend import backend
from torch_graph_backend.instances import MAX_MOVES
from torch_graph_backend.plan import Plan

pytestmark = pytest.mark.usefixtures("no_grad")
W, LENGTH, LAYERS = 16, 24, 3
CALLS = 2 * MAX_MOVES + 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(W, W)

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        key = self.up(x)
        cache.index_copy_(0, at, key)
        return x + F.scaled_dot_product_attention(key[None, None], cache[None, None], cache[None, None])[0, 0]


class Decoder(nn.Module):
    """One token, a key cache of all layers in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        for layer, part in zip(self.layers, cache, strict=True):
            x = layer(x, part, at)
        return x


def given(device: str, i: int, strides: tuple[int, ...] = (LENGTH * W, W, 1)) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(i)
    x, memory = torch.randn(1, W, generator=generator), torch.randn(LAYERS * LENGTH * W, generator=generator)
    cache = memory.as_strided((LAYERS, LENGTH, W), strides)
    return x.to(device), cache.to(device), torch.tensor([i % LENGTH], device=device)


def check(f: Callable[..., Any], calls: list[tuple[Tensor, ...]], model: Any = None, **options: Any) -> Plan:
    """Answers and arguments are eager's, and stay so when later calls are over; the plan at the end."""
    fast = torch.compile(f, backend="bcg", options={"inductor": "off", **options})
    done = []
    for args in calls:
        twins = [a.clone() for a in args]  # keeps dense strides
        wanted, got = f(*twins), fast(*args)
        done.append((got, wanted, args, twins))
    for got, wanted, args, twins in done:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        for a, b in zip(args, twins, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return tgb.plans(f)[-1]


def eager_ops(plan: Plan) -> set[str]:
    return {str(o.op).removeprefix("aten.").split(".")[0] for s in plan.steps if s not in plan.segments for o in s.ops}


@pytest.mark.parametrize("strides", [(LENGTH * W, W, 1), (W, LAYERS * W, 1), (1, W * LAYERS, LAYERS)])
def test_a_new_cache_at_every_call(device: str, strides: tuple[int, ...]) -> None:
    """Would catch: writes that stay in the copy, or land in the cache of an earlier call."""
    torch.manual_seed(0)
    net = Decoder().to(device)
    plan = check(net, [given(device, i, strides) for i in range(CALLS)])
    assert plan.captured_ops()["aten.index_copy_"] == LAYERS, plan
    assert "index_copy_" not in eager_ops(plan)
    assert "copy_" in eager_ops(plan)
    stats = tgb.stats(net)
    assert stats.eager == {}
    assert stats.replays >= CALLS - MAX_MOVES - 4, stats


def test_state_beside_padded_rows(device: str) -> None:
    def f(x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.5).add_(x.sum(0))
        return torch.relu(x * 2) + state

    calls = []
    for i in range(CALLS):
        x = torch.randn(3 + i % 4, W).to(device)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        calls.append((x, torch.full((W,), float(i), device=device)))
    plan = check(f, calls, buckets=[8])
    assert "copy_" in eager_ops(plan), plan
    assert not {"mul_", "add_", "clone"} & eager_ops(plan), plan
    assert tgb.stats(f).replays >= 3


def test_a_cache_that_is_too_large(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Decoder().to(device)
    monkeypatch.setattr(backend, "MAX_COPIED", LAYERS * LENGTH * W * 4 - 1)
    plan = check(net, [given(device, i) for i in range(CALLS)])
    assert "index_copy_" in eager_ops(plan)
    assert "clone" not in eager_ops(plan) | set(plan.captured_ops())


def test_writes_that_are_eager_for_another_reason(device: str) -> None:
    """Rows that may be padded are written through an index: there a copy would only cost."""

    def f(x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x * 2)
        return torch.relu(x) + cache.sum()

    calls = []
    for i in range(CALLS):
        x, at = torch.randn(3 + i % 4, W).to(device), torch.arange(3 + i % 4, device=device) + i
        for t in (x, at):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        calls.append((x, torch.zeros(LENGTH, W, device=device), at))
    plan = check(f, calls, buckets=[8])
    if "index_copy_" in eager_ops(plan):
        assert "clone" not in eager_ops(plan) | {k.removeprefix("aten.") for k in plan.captured_ops()}, plan


VISIBLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the argument": lambda x, cache: (x * 2 + cache.add_(1.0), cache),
    "a view of it": lambda x, cache: (x * 2 + cache.add_(1.0), cache[1:]),
    "a view before the change": lambda x, cache: (cache[1:], x * 2 + cache.add_(1.0)),
}


@pytest.mark.parametrize("name", VISIBLE)
def test_results_that_are_the_argument(device: str, name: str) -> None:
    """They must stay so: a later change of one shows in the other."""
    f = VISIBLE[name]
    fast = torch.compile(f, backend="bcg", options={"inductor": "off"})
    for i in range(CALLS):
        x, cache = torch.randn(3, W, device=device), torch.full((3, W), float(i), device=device)
        want = f(x, cache.clone())
        got = fast(x, cache)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        inside = [t for t in got if t.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()]
        assert len(inside) == 1
        cache.zero_()
        assert not inside[0].any()


def test_a_break_that_raises_leaves_what_eager_code_leaves(device: str) -> None:
    """Between the first change and the last runs user code: there the caller's tensor itself is changed."""
    fails: list[bool] = []

    @tgb.break_op
    def checked(x: Tensor) -> Tensor:
        if fails:
            raise ValueError("injected")
        return x + 1

    @checked.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1.0)
        y = checked(x * 2 + cache)
        cache.mul_(2.0)
        return y * cache + 1

    fast = torch.compile(f, backend="bcg", options={"inductor": "off"})
    for i in range(CALLS):
        x, cache = torch.randn(3, W, device=device), torch.full((3, W), float(i), device=device)
        torch.testing.assert_close(fast(x, cache.clone()), f(x, cache.clone()))
    fails.append(True)
    x, cache = torch.randn(3, W, device=device), torch.full((3, W), 5.0, device=device)
    with pytest.raises(ValueError, match="injected"):
        fast(x, cache)
    assert cache.eq(6.0).all()


RAISING: dict[str, Callable[[Tensor], Any]] = {
    "singular": torch.linalg.inv,
    "not positive": torch.linalg.cholesky,
    "assert": lambda t: torch._assert_async(t[0, 0] != 0),
    "no distribution": lambda t: torch.multinomial(t, 1),
}


@pytest.mark.parametrize("name", RAISING)
def test_an_operation_that_raises_leaves_what_eager_code_leaves(device: str, name: str) -> None:
    """It raises on the host, between the first change and the last: the first one is in the caller's tensor."""
    if name in ("assert", "no distribution") and device != "cpu":
        pytest.skip("needs a CPU: a failed assertion on a GPU ends all work on it")

    def f(x: Tensor, cache: Tensor, t: Tensor) -> Tensor:
        cache.add_(1.0)
        y = torch.relu(x * 2) + cache
        RAISING[name](t)
        cache.mul_(2.0)
        return y * cache + 1

    fast = torch.compile(f, backend="bcg", options={"inductor": "off"})
    good, bad = torch.eye(2, device=device), torch.zeros(2, 2, device=device)
    for i in range(CALLS):
        x, cache = torch.randn(3, W, device=device), torch.full((3, W), float(i), device=device)
        twin = cache.clone()
        torch.testing.assert_close(fast(x, cache, good), f(x, twin, good))
        assert torch.equal(cache, twin)
    cache = torch.full((3, W), 5.0, device=device)
    with pytest.raises(RuntimeError):
        fast(x, cache, bad)
    assert cache.eq(6.0).all()
    torch.testing.assert_close(fast(x, twin.clone(), good), f(x, twin.clone(), good))


def test_an_operation_that_raises_before_the_first_change(device: str) -> None:
    """There a copy changes nothing, and is made."""

    def f(x: Tensor, cache: Tensor, t: Tensor) -> Tensor:
        y = torch.relu(x * 2) + torch.linalg.inv(t).sum()
        cache.add_(1.0).mul_(2.0)
        return y * cache + 1

    good, bad = torch.eye(2, device=device), torch.zeros(2, 2, device=device)
    calls = [(torch.randn(3, W).to(device), torch.full((3, W), float(i), device=device), good) for i in range(CALLS)]
    fast = torch.compile(f, backend="bcg", options={"inductor": "off"})
    plan = check(f, calls)
    assert "copy_" in eager_ops(plan), plan
    cache = torch.full((3, W), 5.0, device=device)
    with pytest.raises(RuntimeError):
        fast(calls[0][0], cache, bad)
    assert cache.eq(5.0).all()


def test_two_arguments_that_overlap(device: str) -> None:
    """Only at some calls: those run eagerly."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1.0)
        y.mul_(2.0)
        return torch.relu(x) + y

    fast = torch.compile(f, backend="bcg", options={"inductor": "off"})
    for i in range(2 * CALLS):
        base = torch.arange(6 * W, dtype=torch.float32).reshape(6, W) + i
        twin = base.clone()
        mine = base.to(device)
        theirs = twin.to(device)
        cut = (slice(0, 3), slice(1, 4)) if i % 5 == 4 else (slice(0, 3), slice(3, 6))
        torch.testing.assert_close(fast(mine[cut[0]], mine[cut[1]]), f(theirs[cut[0]], theirs[cut[1]]))
        torch.testing.assert_close(mine, theirs)


def test_statistics_that_the_caller_replaces(device: str) -> None:
    """Running statistics, which a schema does not call changed."""

    def f(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.relu(F.batch_norm(x * 2, mean, var, training=True)) + 1

    calls = [
        (torch.randn(8, W).to(device), torch.zeros(W, device=device), torch.ones(W, device=device))
        for _ in range(CALLS)
    ]
    check(f, calls)
