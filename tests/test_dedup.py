"""Structural keys: what is equal shares a compile, what computes something else does not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import take_one

from torch_graph_backend.passes.dedup import InputFacts, segment_key

CPU = torch.device("cpu")


def facts(value: torch.Tensor, position: int) -> InputFacts:
    return InputFacts(tuple(value.shape), tuple(value.stride()), value.dtype, CPU, 0, position)


def key(function: Callable[..., Any], *args: Any, change: dict[int, Any] | None = None) -> Hashable:
    """The key of a whole function as one segment; ``change`` replaces facts of inputs."""
    seen = take_one(function, *args)
    placeholders = [n for n in seen.graph.nodes if n.op in ("placeholder", "get_attr")]
    tensors = [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    inputs = {n.name: facts(n.meta["val"], i) for i, n in enumerate(tensors)}
    for i, changes in (change or {}).items():
        inputs[tensors[i].name] = replace(inputs[tensors[i].name], **changes)
    (output,) = (n for n in seen.graph.nodes if n.op == "output")
    outputs = [n.name for n in output.all_input_nodes]
    return segment_key(seen.calls(), inputs, outputs, int)


X, W = torch.ones(4, 8), torch.ones(8, 8)


class Layer(torch.nn.Module):
    def __init__(self, name: str, index: int, scale: float = 2.0) -> None:
        super().__init__()
        self.name, self.layer_idx, self.scale = name, index, scale
        self.weight = torch.nn.Parameter(torch.full((8, 8), float(index)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.weight, approximate="tanh") * self.scale


def test_names_strings_and_layer_indices_do_not_count() -> None:
    """Two layers with other names, other indices, other weights and other source lines."""

    def first(hidden: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        query = hidden @ w
        return torch.relu(query) + 1

    def second(states: torch.Tensor, proj: torch.Tensor) -> torch.Tensor:
        out = states @ proj

        return torch.relu(out) + 1

    assert key(first, X, W) == key(second, X, W)
    assert key(Layer("attention", 3), X) == key(Layer("mlp", 7), X)


def test_keys_are_hashable() -> None:
    assert len({key(Layer("a", 0), X), key(Layer("b", 1), X)}) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: torch.relu(x @ w) + 2,
        lambda x, w: torch.relu(x @ w) + 1.0,
        lambda x, w: torch.sigmoid(x @ w) + 1,
        lambda x, w: torch.relu(w @ x.T) + 1,
        lambda x, w: torch.relu(x @ w) + True,
        lambda x, w: torch.relu(x.reshape(2, 2, 8) @ w) + 1,
    ],
    ids=["constant", "type of constant", "operation", "operands", "bool", "shape"],
)
def test_what_computes_something_else_has_another_key(other: Callable[..., Any]) -> None:
    assert key(lambda x, w: torch.relu(x @ w) + 1, X, W) != key(other, X, W)


def test_minus_zero_and_nan_are_constants_like_others() -> None:
    keys = [key(lambda x, c=c: x + c, X) for c in (0.0, -0.0, float("nan"))]
    assert len(set(keys)) == 3
    assert key(lambda x: x + float("nan"), X) == keys[2]


def test_op_strings_that_change_the_result_count() -> None:
    assert key(lambda x: F.gelu(x), X) != key(lambda x: F.gelu(x, approximate="tanh"), X)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (4, 9)},
        {"stride": (1, 4)},
        {"dtype": torch.float64},
        {"device": torch.device("meta")},
        {"misaligned": 4},
    ],
    ids=lambda c: next(iter(c)),
)
def test_the_layout_of_an_input_counts(change: dict[str, Any]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    assert key(f, X, W) != key(f, X, W, change={0: change})


def test_inputs_that_share_memory_count() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x + w

    square = torch.ones(8, 8)
    assert key(f, square, W) != key(f, square, W, change={1: {"shares": 0}})


def test_the_order_of_outputs_counts() -> None:
    assert key(lambda x: (x + 1, x * 2), X) != key(lambda x: (x * 2, x + 1), X)
    swapped = key(lambda x: tuple(reversed((x + 1, x * 2))), X)
    assert swapped != key(lambda x: (x + 1, x * 2), X)


def test_autocast_regions_count() -> None:
    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    def cast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ w

    assert key(plain, X, W) != key(cast, X, W)


def test_sizes_count_by_value() -> None:
    """The same code at another size of a dynamic dimension has another key; at the same size the same."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * 2, -1) + 1

    torch._dynamo.mark_dynamic(x := torch.ones(4, 8), 0)
    seen = take_one(f, x)
    tensors = [n for n in seen.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)]

    def at(rows: int) -> Hashable:
        def size(expr: Any) -> int:
            return int(expr.subs(dict.fromkeys(expr.free_symbols, rows)))

        inputs = {n.name: InputFacts((rows, 8), (8, 1), torch.float32, CPU, 0, i) for i, n in enumerate(tensors)}
        return segment_key(seen.calls(), inputs, [seen.calls()[-1].name], size)

    assert at(4) == at(4)
    assert at(4) != at(6)
