"""What a break op promises: ``keeps_args=False`` is checked, and ``warmup`` alone runs when a key is recorded ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend.errors import BreakOpError, KeptArgument

pytestmark = pytest.mark.usefixtures("no_grad")

W = 8
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    KEPT.clear()


def fake(q: Tensor, layer: int = 0) -> Tensor:
    return torch.empty_like(q)


def keep_itself(q: Tensor) -> None:
    KEPT.append(q)


def keep_a_view(q: Tensor) -> None:
    KEPT.append(q[:1])


def keep_in_a_closure(q: Tensor) -> None:
    KEPT.append(lambda: q)


def keep_a_clone(q: Tensor) -> None:
    KEPT.append(q.clone())


def keep_its_shape(q: Tensor) -> None:
    KEPT.append((q.shape, q.data_ptr()))


def catch_an_exception(q: Tensor) -> None:
    """A cycle of frame and exception, which nobody holds."""
    try:
        raise ValueError
    except ValueError as error:
        cycle = [error]
        cycle.append(cycle)  # type: ignore[arg-type]


def net(op: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    up, down = nn.Linear(W, W), nn.Linear(W, W)
    return lambda x: down(torch.relu(op(torch.relu(up(x)))))


def rows(n: int, device: str) -> Tensor:
    x = torch.randn(n, W).to(device)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def on(device: str, f: Any) -> Any:
    for cell in f.__closure__:
        if isinstance(cell.cell_contents, nn.Module):
            cell.cell_contents.to(device)
    return f


@pytest.mark.parametrize("keep", [keep_itself, keep_a_view, keep_in_a_closure])
def test_an_argument_that_is_kept_is_found(device: str, keep: Callable[[Tensor], None]) -> None:
    @tgb.break_op("tgb_promises::keeper", keeps_args=False, fake=fake)
    def keeper(q: Tensor) -> Tensor:
        keep(q)
        return q * 2

    f = on(device, net(keeper))
    fast = torch.compile(f, backend="bcg", options={"buckets": [8]})
    with pytest.raises(KeptArgument, match=r"tgb_promises::keeper.*'q'.*test_break_promises.py") as caught:
        fast(rows(5, device))
    assert isinstance(caught.value, BreakOpError)
    assert caught.value.argument == "q"


@pytest.mark.parametrize("keep", [keep_a_clone, keep_its_shape, catch_an_exception])
def test_what_is_no_argument_may_be_kept(device: str, keep: Callable[[Tensor], None]) -> None:
    @tgb.break_op("tgb_promises::good", keeps_args=False, fake=fake)
    def good(q: Tensor) -> Tensor:
        keep(q)
        return q * 2

    f = on(device, net(good))
    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "audit": "every:1"})
    for n in (5, 7, 6):
        x = rows(n, device)
        torch.testing.assert_close(fast(x), f(x))
    assert tgb.stats(fast).audits == 3


def test_without_the_promise_it_may_keep(device: str) -> None:
    @tgb.break_op("tgb_promises::free", fake=fake)
    def free(q: Tensor) -> Tensor:
        keep_itself(q)
        return q * 2

    f = on(device, net(free))
    fast = torch.compile(f, backend="bcg", options={"buckets": [8]})
    for n in (5, 7, 6):
        fast(rows(n, device))
    before = [t.clone() for t in KEPT]
    fast(rows(7, device))
    for kept, value in zip(KEPT, before, strict=False):
        assert torch.equal(kept, value), "what it kept was a copy of its own"


@pytest.mark.parametrize(("option", "found"), [("off", False), ("every:1", True)])
def test_an_audit_looks_again(device: str, option: str, found: bool) -> None:
    """A function that begins to keep its argument after the first call."""

    @tgb.break_op("tgb_promises::later", keeps_args=False, fake=fake)
    def later(q: Tensor) -> Tensor:
        if KEPT:
            keep_a_view(q)
        return q * 2

    f = on(device, net(later))
    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "audit": option})
    fast(rows(5, device))
    fast(rows(7, device))
    KEPT.append("from now on")
    if not found:
        fast(rows(6, device))
        return
    with pytest.raises(KeptArgument):
        fast(rows(6, device))
    KEPT.clear()
    x = rows(6, device)
    torch.testing.assert_close(fast(x), f(x), msg="a failed call leaves the function usable")


# -- warmup ----------------------------------------------------------------------------------------------------------


def test_recording_ahead_calls_the_warmup_alone(device: str) -> None:
    """At the bucket's shapes, once a key however many layers; weights as they are, a changed cache in a copy."""
    calls: list[Any] = []
    warmed: list[Any] = []
    weight, cache = torch.randn(W).to(device), torch.zeros(W).to(device)

    def warm(q: Tensor, weight: Tensor, cache: Tensor, n: int, layer: int) -> None:
        warmed.append((tuple(q.shape), q.stride(), n, str(q.device.type), float(q.abs().sum()), weight.clone()))
        cache.add_(1)  # the zeros that it was given

    @tgb.break_op("tgb_promises::warm", mutates_args=("cache",), fake=lambda q, *_: torch.empty_like(q), warmup=warm)
    def attend(q: Tensor, weight: Tensor, cache: Tensor, n: int, layer: int) -> Tensor:
        calls.append(tuple(q.shape))
        cache.add_(q.sum(0))
        return q * weight

    up, down = nn.Linear(W, W).to(device), nn.Linear(W, W).to(device)

    def f(x: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
        for layer in range(3):
            x = attend(torch.relu(up(x)), weight, cache, x.shape[0], layer)
        return down(x)

    fast = torch.compile(f, backend="bcg", options={"buckets": [4, 8, 16]})
    theirs = cache.clone()
    x = rows(13, device)
    assert tgb.capture(fast, x, weight, cache, sizes=[13, 7, 3]) == 3
    assert calls == [(13, W)] * 3, "no break op ran for a recording"
    assert [w[:3] for w in warmed] == [((n, W), (W, 1), n) for n in (16, 8, 4)]
    assert all(w[3] == device and w[4] == 0 and torch.equal(w[5], weight) for w in warmed)
    f(x, weight, theirs)
    torch.testing.assert_close(cache, theirs)
    for n in (3, 7, 13):
        x = rows(n, device)
        torch.testing.assert_close(fast(x, weight, cache), f(x, weight, theirs), rtol=1e-4, atol=1e-5)
    assert len(warmed) == 3, "calls do not warm up"
    assert tgb.stats(fast).replays == 3


def test_recording_ahead_without_a_warmup_runs_no_break_op(device: str) -> None:
    calls: list[Any] = []

    @tgb.break_op("tgb_promises::cold", fake=fake)
    def cold(q: Tensor) -> Tensor:
        calls.append(tuple(q.shape))
        return q * 2

    f = on(device, net(cold))
    fast = torch.compile(f, backend="bcg", options={"buckets": [8, 16]})
    assert tgb.capture(fast, rows(13, device), sizes=[13, 7]) == 2
    assert calls == [(13, W)]


def test_the_warmup_of_a_method_gets_the_instance(device: str) -> None:
    warmed: list[Any] = []

    def warm(self: Any, q: Tensor) -> None:
        warmed.append((self.name, tuple(q.shape)))

    class Layer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.proj = name, nn.Linear(W, W)

        @tgb.break_op(fake=lambda self, q: torch.empty_like(q), warmup=warm)
        def attend(self, q: Tensor) -> Tensor:
            return q * 2

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.attend(torch.relu(self.proj(x))))

    model = nn.Sequential(Layer("a"), Layer("b")).to(device)
    fast = torch.compile(model, backend="bcg", options={"buckets": [8]})
    assert tgb.capture(fast, rows(5, device), sizes=[5]) == 1
    assert warmed == [("a", (8, W)), ("b", (8, W))]


def test_an_error_of_a_warmup_reaches_the_user(device: str) -> None:
    def warm(q: Tensor) -> None:
        raise RuntimeError("no such kernel")

    @tgb.break_op("tgb_promises::fails", fake=fake, warmup=warm)
    def op(q: Tensor) -> Tensor:
        return q * 2

    f = on(device, net(op))
    fast = torch.compile(f, backend="bcg", options={"buckets": [8]})
    with pytest.raises(RuntimeError, match="no such kernel"):
        tgb.capture(fast, rows(5, device), sizes=[5])
    x = rows(6, device)
    torch.testing.assert_close(fast(x), f(x))
