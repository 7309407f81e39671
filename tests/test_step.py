"""``prepare``: host-side work once a call, before the first segment, the same answer without a compiled call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_harness import assert_same, compiled
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend.errors import BreakOpError

EVENTS: list[str] = []
SCALE = [2.0]


def prepare(step: tgb.Step) -> float:
    """Reads Python state, and notes when it ran."""
    EVENTS.append("prepare")
    return SCALE[0]


@tgb.break_op("tgb_step::scaled", fake=lambda q: torch.empty_like(q), prepare=prepare)
def scaled(q: Tensor) -> Tensor:
    EVENTS.append("break")
    return q * tgb.current_step().prepared(scaled)


def f(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = scaled(x @ w)
    return x @ w


@pytest.fixture(autouse=True)
def _clean() -> None:
    EVENTS.clear()
    SCALE[:] = [2.0]


def test_once_a_call_before_everything_and_anew_for_each() -> None:
    w = torch.randn(4, 4)
    with compiled(f) as g:
        for scale in (2.0, 3.0, 4.0, 5.0):
            x = torch.randn(3, 4)
            SCALE[:] = [scale]
            EVENTS.clear()
            got = g(x, w)
            assert EVENTS == ["prepare", "break", "break", "break"]
            assert_same(got, f(x, w))
        assert tgb.stats(g).replays == 3


def test_a_call_that_runs_eagerly_prepares_once_too() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    torch.compile(f, backend="bcg")(x, w)
    assert EVENTS == ["prepare", "break", "break", "break"]


def test_outside_compiled_code_it_is_made_when_it_is_asked_for() -> None:
    assert_same(scaled(torch.ones(2)), torch.full((2,), 2.0))
    assert EVENTS == ["break", "prepare"]
    assert tgb.current_step().arguments == {}


def test_the_step_has_the_arguments_by_name() -> None:
    found: list[dict[str, Any]] = []

    def look(step: tgb.Step) -> int:
        found.append(step.arguments)
        return 0

    @tgb.break_op(fake=lambda q: torch.empty_like(q), prepare=look)
    def op(q: Tensor) -> Tensor:
        return q + tgb.current_step().prepared(op)

    def use(tokens: Tensor, w: Tensor, n: int) -> Tensor:
        return op(tokens @ w) * n @ w

    w = torch.randn(4, 4)
    with compiled(use, dynamic=True) as g:
        for rows, n in ((3, 2), (5, 7)):
            tokens = torch.randn(rows, 4)
            assert_same(g(tokens, w, n), use(tokens, w, n))
            assert found[-2 if not found[-1] else -1] is not None
    compiled_calls = [a for a in found if a]
    assert [a["tokens"].shape[0] for a in compiled_calls] == [3, 5]
    assert [a["n"] for a in compiled_calls] == [2, 7]


def test_a_break_that_calls_another_compiled_function() -> None:
    """Each call has a step of its own, and the outer one is back afterwards, also after an exception."""
    w = torch.randn(4, 4)
    inner = torch.compile(f, backend="bcg")
    fail = [False]

    @tgb.break_op(fake=lambda q: torch.empty_like(q), prepare=lambda step: "outer")
    def nested(q: Tensor) -> Tensor:
        out = inner(q, w)
        assert tgb.current_step().prepared(nested) == "outer"
        assert tgb.current_step().names
        if fail[0]:
            raise KeyError("mine")
        return out

    def outer(x: Tensor) -> Tensor:
        return nested(x @ w) @ w

    x = torch.randn(3, 4)
    with compiled(outer) as g:
        for _ in range(3):
            assert_same(g(x), f(x @ w, w) @ w)
        fail[0] = True
        with pytest.raises(KeyError, match="mine"):
            g(x)
        assert tgb.current_step().names == ()


def test_an_op_without_prepare_is_named() -> None:
    @tgb.break_op(fake=lambda q: torch.empty_like(q))
    def op(q: Tensor) -> Tensor:
        return q

    with pytest.raises(BreakOpError, match=r"op.*has no prepare.*break_op\(prepare="):
        tgb.current_step().prepared(op)


def test_a_graph_without_prepare_is_called_directly() -> None:
    from torch_graph_backend.runner import CompiledGraph

    assert isinstance(tgb.bcg(torch.fx.symbolic_trace(torch.nn.Identity()), []), CompiledGraph)
