"""A break's results are compared with its fake at every call; what an operator must not do is found at the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_harness import assert_same, compiled
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend.errors import BreakOpError, BridgeMismatch

ANSWER: list[Callable[[Tensor], Any]] = []


def like(q: Tensor) -> Tensor:
    return torch.empty_like(q)


@tgb.break_op("tgb_calls::one", fake=like)
def one(q: Tensor) -> Tensor:
    return ANSWER[0](q)


@tgb.break_op("tgb_calls::two", fake=lambda q: (torch.empty_like(q), q.new_empty(q.shape[0])))
def two(q: Tensor) -> tuple[Tensor, Tensor]:
    return ANSWER[0](q)


@tgb.break_op("tgb_calls::many", fake=lambda q: [torch.empty_like(q), torch.empty_like(q)])
def many(q: Tensor) -> list[Tensor]:
    return ANSWER[0](q)


def read(x: Tensor, w: Tensor) -> Tensor:
    """A segment reads the result."""
    return one(x @ w) @ w


def hand_out(x: Tensor, w: Tensor) -> Tensor:
    """Nobody but the caller reads the result."""
    return one(x @ w)


def eager_reader(x: Tensor, w: Tensor) -> Tensor:
    """Another eager operation reads the result, and would broadcast it."""
    h = x @ w
    return torch.sort(one(h) + h.sort().values).values @ w


WRONG = {
    "shape": (lambda q: q.sum(0), r"float32\[4\] on cpu"),
    "broadcasts": (lambda q: q[:1].clone(), r"float32\[1, 4\] on cpu"),
    "dtype": (lambda q: q.double(), r"float64\[3, 4\] on cpu"),
    "device": (lambda q: q.to("meta"), r"float32\[3, 4\] on meta"),
    "none": (lambda q: None, "None"),
    "tuple": (lambda q: (q * 2,), r"tuple of 1: float32\[3, 4\]"),
    "number": (lambda q: 3, "a int"),
}


@pytest.mark.parametrize("late", [False, True], ids=["first", "replay"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("f", [read, hand_out, eager_reader])
def test_one_result_that_differs(f: Any, kind: str, late: bool) -> None:
    """At a first call and at a replay, whoever reads the result; the next good call works."""
    wrong, got = WRONG[kind]
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    ANSWER[:] = [lambda q: q * 2]
    want = f(x, w)
    with compiled(f) as g:
        for _ in range(3 if late else 0):
            assert_same(g(x, w), want)
        ANSWER[:] = [wrong]
        expected = rf"BCG403.*tgb_calls\.one returned {got}.*promised float32\[3, 4\] on cpu; at test_break_calls\.py"
        with pytest.raises(BridgeMismatch, match=expected):
            g(x, w)
        ANSWER[:] = [lambda q: q * 2]
        for _ in range(3):
            assert_same(g(x, w), want)


@pytest.mark.parametrize(
    ("op", "good", "wrong"),
    [
        (two, lambda q: (q * 2, q.sum(-1)), lambda q: (q * 2, q.sum(0))),
        (two, lambda q: (q * 2, q.sum(-1)), lambda q: (q * 2,)),
        (two, lambda q: (q * 2, q.sum(-1)), lambda q: q * 2),
        (many, lambda q: [q * 2, q + 1], lambda q: [q * 2]),
        (many, lambda q: [q * 2, q + 1], lambda q: [q * 2, q.double()]),
    ],
    ids=["shape", "short", "not-a-tuple", "short-list", "dtype-in-list"],
)
def test_several_results(op: Any, good: Any, wrong: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return op(x @ w)[0] @ w

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    ANSWER[:] = [good]
    with compiled(f) as g:
        for _ in range(3):
            assert_same(g(x, w), f(x, w))
        ANSWER[:] = [wrong]
        with pytest.raises(BridgeMismatch, match="of 2: float32"):
            g(x, w)


def test_results_of_another_type_that_is_a_tensor_pass() -> None:
    """A quick check that fails is no error in itself: a parameter is a tensor, a list of results is a tuple of them."""
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    ANSWER[:] = [lambda q: torch.nn.Parameter(q * 2, requires_grad=False)]
    with compiled(read) as g:
        for _ in range(3):
            torch.testing.assert_close(g(x, w), (x @ w * 2) @ w)
    ANSWER[:] = [lambda q: [q * 2, q.sum(-1)]]
    with compiled(lambda x, w: two(x @ w)[0] @ w) as g:
        for _ in range(3):
            torch.testing.assert_close(g(x, w), (x @ w * 2) @ w)


def test_a_size_that_only_the_data_knows_is_not_compared() -> None:
    def fake(q: Tensor) -> Tensor:
        return q.new_empty(torch.library.get_ctx().new_dynamic_size(), 4)

    @tgb.break_op("tgb_calls::some", fake=fake)
    def some(q: Tensor) -> Tensor:
        return ANSWER[0](q)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return some(x @ w) @ w

    x, w = torch.randn(5, 4), torch.randn(4, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), compiled(f) as g:
        for n in (2, 3, 2):
            ANSWER[:] = [lambda q, n=n: q[:n].clone()]
            assert_same(g(x, w), f(x, w))
        ANSWER[:] = [lambda q: q[:2, :3].clone()]
        with pytest.raises(BridgeMismatch, match=r"returned float32\[2, 3\].*promised float32\[any, 4\]"):
            g(x, w)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda q: q, r"returns its argument 'q', or a view.*clone"),
        (lambda q: q.view(-1).view(3, 4), "returns its argument 'q', or a view"),
        (lambda q: q.add_(1) * 2, r"changes its argument 'q' in place.*mutates_args=\('q',\)"),
    ],
    ids=["itself", "view", "changed"],
)
def test_what_an_operator_must_not_do_is_found_at_the_first_call(answer: Any, text: str) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    ANSWER[:] = [answer]
    with compiled(read) as g:
        with pytest.raises(BreakOpError, match=rf"BCG301.*tgb_calls::one.*{text}"):
            g(x, w)
        ANSWER[:] = [lambda q: q * 2]
        assert_same(g(x, w), read(x, w))


@tgb.break_op("tgb_calls::append", mutates_args=("keys",), fake=lambda keys, values, q: torch.empty_like(q))
def append(keys: Tensor, values: Tensor, q: Tensor) -> Tensor:
    keys[: len(q)] += q
    return q + values[: len(q)]


@pytest.mark.parametrize("other", [0, 1], ids=["the same", "another part"])
def test_an_argument_that_shares_memory_with_a_declared_one_may_change_with_it(other: int) -> None:
    """Both are views of one buffer, whose version counts the changes of either."""
    ours, eager, w = torch.zeros(2, 8, 4), torch.zeros(2, 8, 4), torch.randn(4, 4)

    def f(x: Tensor, cache: Tensor) -> Tensor:
        return append(cache[0], cache[other], x @ w) @ w

    with compiled(f) as g:
        for _ in range(4):
            x = torch.randn(3, 4)
            assert_same(g(x, ours), f(x, eager))
            assert_same(ours, eager)
        assert tgb.stats(g).replays >= 2


def test_replays_call_the_bare_function() -> None:
    """No wrapper and no dispatcher between the generated code and the user's function."""
    from torch_graph_backend import registry

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    ANSWER[:] = [lambda q: q * 2]
    with compiled(read) as g:
        g(x, w)
        (graph,) = registry.all_graphs()
        names = [k for k, v in graph.program.steps[1].__globals__.items() if v is one]
        assert len(names) == 1
        assert f"= {names[0]}(" in graph.program.source
