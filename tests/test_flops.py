"""FLOPs by node: the sum over a graph is what torch's own counter counts when the model runs; unknown is never zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import take_one
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from torch_graph_backend.passes.capturable import name_of
from torch_graph_backend.passes.flops import FlopCounter, rows_of

W = torch.randn(4, 6)


def rows(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def counted(function: Callable[..., Any], *args: Any) -> dict[str, int | None]:
    """FLOPs by operator name, summed; ``None`` if any is unknown."""
    counter, found = FlopCounter(), {}
    for node in take_one(function, *args).calls():
        n, name = counter.count(node), name_of(node)
        before = found.get(name, 0)
        found[name] = None if n is None or before is None else before + n
    return found


CONV = nn.Conv1d(4, 6, 3, padding=1)
MODELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "linear": (nn.Linear(4, 6), (rows(5, 4),)),
    "linear of three dimensions": (nn.Linear(4, 6, bias=False), (rows(5, 3, 4),)),
    "matmul and pointwise": (lambda x: (x @ W).relu().softmax(0) @ W.t(), (rows(5, 4),)),
    "batched": (lambda a, b: torch.bmm(a, b), (rows(5, 3, 4), rows(5, 4, 2))),
    "broadcast matmul": (lambda a, b: torch.matmul(a, b), (rows(5, 2, 3, 4), torch.randn(4, 2))),
    "einsum": (lambda x: torch.einsum("bi,ij->bj", x, W), (rows(5, 4),)),
    "convolution": (CONV, (rows(5, 4, 7),)),
    "only views": (lambda x: x.transpose(0, 1).reshape(-1, 2), (rows(4, 4),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_that_of_torch(name: str) -> None:
    """Would catch a formula that is not found, a size taken from the wrong place, an operator counted twice."""
    function, args = MODELS[name]
    with torch.no_grad(), FlopCounterMode(display=False) as mode:
        function(*args)
    found = counted(function, *args)
    assert None not in found.values()
    assert sum(n or 0 for n in found.values()) == mode.get_total_flops()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_attention_counts_both_products(heads: int, kv_heads: int) -> None:
    """Whatever implementation eager would choose: 2 * (rows * keys * width) for each of the two products."""
    q, k, v = rows(2, heads, 5, 8), rows(2, kv_heads, 7, 8), rows(2, kv_heads, 7, 3)
    found = counted(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads < heads), q, k, v)
    assert found["aten.scaled_dot_product_attention"] == 2 * (2 * heads * 5 * 7) * (8 + 3)


def test_sizes_are_those_of_the_example() -> None:
    """Symbols have the values with which the graph was traced."""
    for n in (5, 9):
        assert counted(nn.Linear(4, 6), rows(n, 4))["aten.linear"] == 2 * n * 4 * 6


def test_an_operator_of_the_user_is_unknown_until_it_has_a_formula() -> None:
    """Zero would say that it costs nothing."""

    @torch.library.custom_op("tgb_flops_test::mix", mutates_args=())
    def mix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    mix.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    assert counted(lambda x: mix(x, W), rows(5, 4)) == {"tgb_flops_test.mix": None}
    packet = torch.ops.tgb_flops_test.mix
    register_flop_formula(packet)(lambda x, w, *_, out_shape=None: 2 * x[0] * x[1] * w[1])
    try:
        assert counted(lambda x: mix(x, W), rows(5, 4)) == {"tgb_flops_test.mix": 2 * 5 * 4 * 6}
    finally:
        del flop_registry[packet]


def test_a_size_that_depends_on_data_is_unknown() -> None:
    """The dense operation behind ``nonzero`` has no size before it runs; pointwise work costs nothing at any."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x[torch.nonzero(x[:, 0] > 0).squeeze(1)].relu() @ W

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = counted(f, rows(5, 4))
    assert found["aten.matmul"] is None
    assert found["aten.relu"] == found["aten.nonzero"] == found["aten.index.Tensor"] == 0


def test_a_higher_order_operation_is_unknown() -> None:
    found = counted(lambda x: torch.cond(x.sum() > 0, lambda t: t @ W, lambda t: (t + 1) @ W, (x,)), rows(5, 4))
    assert found["cond"] is None


def test_equal_nodes_are_counted_once() -> None:
    """A hundred layers must not cost a hundred runs of the counter."""
    counter = FlopCounter()
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)])
    nodes = take_one(layers, rows(5, 4)).calls("aten.linear")
    assert [counter.count(n) for n in nodes] == [160] * 10
    assert len(counter.known) == 1


def contraction_rows(function: Callable[..., Any], *args: Any) -> list[int]:
    """Rows of every operation that is a contraction."""
    found = [rows_of(node, lambda n: int(n)) for node in take_one(function, *args).calls()]
    return [n for n in found if n]


@pytest.mark.parametrize(
    ("function", "args", "wanted"),
    [
        (lambda x: F.linear(x, W.T), (torch.randn(5, 3, 4),), [15]),
        (lambda x: x @ W, (torch.randn(5, 4),), [5]),
        (lambda x: torch.bmm(x, x.mT), (torch.randn(7, 5, 4),), [5]),
        (lambda x: x @ x.mT, (torch.randn(2, 7, 5, 4),), [5]),
        (lambda x: x.relu() + 1, (torch.randn(5, 4),), []),
        (lambda x: F.conv2d(x, torch.ones(8, 3, 2, 2)), (torch.randn(2, 3, 5, 6),), [2 * 4 * 5]),
    ],
    ids=["linear", "matmul with a weight", "bmm", "batched matmul", "no contraction", "convolution"],
)
def test_rows_of_a_contraction(function: Callable[..., Any], args: tuple[Any, ...], wanted: list[int]) -> None:
    """Batched products (attention) count the rows of one matrix."""
    assert contraction_rows(function, *args) == wanted
