"""Verdicts: one example for every reason an operation can have, with its line; and the classes of sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import CPU, Seen, reason_of, take_one

from torch_graph_backend.passes.capturable import capture_reason, name_of
from torch_graph_backend.passes.classify import Classified
from torch_graph_backend.passes.reasons import CODES, Reason
from torch_graph_backend.passes.symbols import MAX_BUCKETED, SymbolInfo, unreadable

HERE = Path(__file__).name
Case = tuple[str, str, Seen, Classified]

#: Node codes that no CPU graph gives by itself, with who tests them.
ELSEWHERE = {
    "audit-failed",
    "collective",
    "other-device",
    "device-copy",
    "capture-failed",
    "derived-size",
    "not-normalised",
}
NODE_CODES = set(list(CODES)[: list(CODES).index("inductor-failed")])


def eager(seen: Seen, classified: Classified, name: str) -> Reason:
    """The reason of the only operation called ``name``; its line must be the one marked ``# here`` in the source."""
    return reason_of(classified, seen.one(name))


def marked(function: Callable[..., Any]) -> str:
    """``"test_classify.py:12 in f: code"`` of the line of ``function`` that ends in ``# here``."""
    lines, start = inspect.getsourcelines(function)
    (at,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{HERE}:{start + at} in {function.__name__}: {lines[at].strip()}"


def rows(n: int, *rest: int) -> torch.Tensor:
    """A tensor whose first dimension is dynamic."""
    x = torch.randn(n, *rest)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Operations of another library: one plain, one that returns a Python number."""
    with torch.library._scoped_library("tgb_classify_test", "FRAGMENT") as lib:
        lib.define("mystery(Tensor x) -> Tensor")
        lib.impl("mystery", lambda x: x + 1, "CompositeExplicitAutograd")
        yield torch.ops.tgb_classify_test


# --- one example per code ---------------------------------------------------------------------------------------------


def break_op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.tanh(y)  # here
    return z @ w


def unknown_op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.ops.tgb_classify_test.mystery(y)  # here
    return z @ w


def data_dependent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    n = torch.nonzero(y[:, 0])  # here
    return y @ w + n.sum()


def masked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = y[y[:, 0] > 0]  # here
    return z.sum() + y


def random_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = F.dropout(y, 0.5, True)  # here
    return z @ w


def higher_order(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # here
    return z @ w


def not_strided(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.conj(y)  # here
    return torch.real(z) + 1


def python_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    n = torch.nonzero(y).shape[0]  # here
    return y * n


def item(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    n = x[0, 0].item()  # here
    return y * n


def exact_symbol(x: torch.Tensor, w: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = y + keys.shape[0]  # here
    return z @ w


def padding(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = y.softmax(0) - y.mean(0)  # here
    return z @ w


def derived(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.cat([y, y[1:]])  # here
    return z @ w


def mutation(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    v = y.view(-1)  # here
    v.bernoulli_()
    return y @ w


def output_alias(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    z = y.view(-1)  # here
    return y, z


def returned_copy(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    z = torch.cat([y, x], -1)  # here
    return y @ w, z


def small_segment(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x @ w, 0)
    y = y.sin()  # here
    return y.softmax(0) @ w


def moving_input(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    y = x @ w
    cache.add_(1)  # here
    return y @ w


W = torch.randn(4, 4)
EXAMPLES: list[tuple[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    ("break-op", "aten.tanh", break_op, (4,), {"breaks": ["aten::tanh"]}),
    ("unknown-op", "tgb_classify_test.mystery", unknown_op, (4,), {}),
    ("data-dependent", "aten.nonzero", data_dependent, (4,), {}),
    ("data-dependent", "aten.index.Tensor", masked, (4,), {}),
    ("random", "aten.dropout", random_numbers, (4,), {}),
    ("higher-order-op", "cond", higher_order, (4,), {}),
    ("python-value", "aten.sym_size.int", python_value, (4,), {}),
    ("data-dependent", "aten.item", item, (4,), {}),
    ("exact-symbol", "aten.add.Tensor", exact_symbol, (4,), {"extra": rows(9, 2)}),
    ("padding", "aten.softmax.int", padding, (4,), {}),
    ("padding", "aten.mean.dim", padding, (4,), {}),
    ("mutation", "aten.view", mutation, (4,), {}),
    ("output-alias", "aten.view", output_alias, (4,), {}),
    ("returned-copy", "aten.cat", returned_copy, (4,), {}),
    ("small-segment", "aten.sin", small_segment, (4,), {"min_kernels": 2}),
    ("moving-input", "aten.add_.Tensor", moving_input, (4,), {"moving": frozenset({"l_cache_"}), "extra": W.clone()}),
]


@pytest.mark.parametrize(
    ("code", "name", "function", "shape", "how"),
    EXAMPLES,
    ids=[f"{e[0]}-{e[1]}".replace("aten.", "") for e in EXAMPLES],
)
def test_reason_and_line(
    library: Any, code: str, name: str, function: Callable[..., Any], shape: tuple[int, ...], how: dict[str, Any]
) -> None:
    """Catches a verdict without a reason, a reason of another kind, and one that points at another line."""
    extra = (how["extra"],) if "extra" in how else ()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        seen = take_one(function, rows(6, *shape), W, *extra)
    classified = seen.classify(
        *how.get("breaks", ()), min_kernels=how.get("min_kernels", 1), moving=how.get("moving", frozenset())
    )
    reason = eager(seen, classified, name)
    assert reason.code == code, reason
    assert reason.where == marked(function)
    assert name.removeprefix("aten.").split(".")[0] in reason.text
    matmul = seen.calls("aten.matmul")[0]
    assert classified.verdicts[matmul].kind == "capture", classified.verdicts[matmul].reason
    assert classified.verdicts[matmul].reason is None


def test_not_strided() -> None:
    """Conjugate views carry a bit that a buffer would lose."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        z = torch.conj(y)  # here
        return z @ w

    seen = take_one(f, torch.randn(3, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64))
    reason = eager(seen, seen.classify(), "aten._conj")
    assert reason.code == "not-strided"
    assert reason.where == marked(f)


def test_not_normalised() -> None:
    """A node that could not be traced is eager, with the tracer's words."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        z = torch.tanh(y)  # here
        return z @ w

    seen = take_one(f, torch.randn(3, 4), W)
    seen.one("aten.tanh").meta["opaque"] = "RuntimeError: no"
    reason = eager(seen, seen.classify(), "aten.tanh")
    assert reason.code == "not-normalised"
    assert "RuntimeError: no" in reason.text
    assert reason.where == marked(f)


def test_devices() -> None:
    """A node on another device, and one that moves data between two; metadata alone decides."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    seen = take_one(f, torch.randn(3, 4))
    sin, cos = seen.calls()
    assert capture_reason(sin, CPU, lambda n: None) is None
    other = capture_reason(sin, torch.device("meta"), lambda n: None)
    assert other is not None
    assert other.code == "other-device"
    with torch._subclasses.fake_tensor.FakeTensorMode():
        cos.meta["val"] = torch.empty(3, 4, device="meta")
    moved = capture_reason(cos, CPU, lambda n: None)
    assert moved is not None
    assert moved.code == "device-copy"


@pytest.mark.parametrize("name", ["masked_fill", "masked_fill_", "index_fill", "index_fill_"])
def test_values_that_cuda_kernels_read_on_the_host(name: str) -> None:
    """With the value in a tensor; a number is part of the launch."""

    def f(x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y = x * 2
        where = (mask,) if "masked" in name else (0, index)
        return getattr(y, name)(*where, value) + getattr(x * 3, name)(*where, 1.0)

    args = (torch.randn(4), torch.rand(4) > 0.5, torch.tensor([1, 2]), torch.tensor(7.0))
    seen = take_one(f, *args)
    found = [n for n in seen.calls() if name_of(n).split(".")[1] == name]
    reasons = [capture_reason(n, torch.device("cuda"), lambda n: None) for n in found]
    assert [r.code if r else None for r in reasons] == ["data-dependent", "other-device"]
    assert [capture_reason(n, CPU, lambda n: None) for n in found] == [None, None]


def test_derived_size() -> None:
    """``2 * s - 1`` rows cannot be cut out of any bucket."""
    seen = take_one(derived, rows(6, 4), W)
    classified = seen.classify()
    codes = {v.reason.code for v in classified.verdicts.values() if v.reason is not None}
    assert codes & {"derived-size", "padding"}
    assert classified.verdicts[seen.calls("aten.matmul")[1]].kind == "eager"


def test_every_node_code_has_an_example() -> None:
    """A new code needs an example here, or a line in ELSEWHERE."""
    assert {e[0] for e in EXAMPLES} | ELSEWHERE | {"not-strided"} == NODE_CODES


def test_a_reason_must_have_a_known_code() -> None:
    """Users filter on codes: a typo must not make a new one."""
    with pytest.raises(ValueError, match="paddign"):
        Reason("paddign")


# --- what is captured or computed on the host -------------------------------------------------------------------------


def test_size_arithmetic_is_host_work() -> None:
    """Sizes are Python ints at call time: no kernel, no segment, no reason."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] * 2
        return (x @ w).view(n, -1) @ w[:2, :2]

    seen = take_one(f, rows(6, 4), W)
    classified = seen.classify()
    kinds = {n.name: v.kind for n, v in classified.verdicts.items()}
    assert set(kinds.values()) <= {"host", "capture"}
    assert all(v.kind == "host" for n, v in classified.verdicts.items() if isinstance(n.meta["val"], torch.SymInt))


def test_items_of_a_tuple_follow_it() -> None:
    """A result and its items must be on one side."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = (x @ w).split(2, -1)
        values, _ = x.sort(0)
        return a * b + values[:, :2]

    seen = take_one(f, rows(6, 4), W)
    classified = seen.classify()
    for item in seen.calls("getitem"):
        assert classified.verdicts[item].kind == classified.verdicts[item.args[0]].kind
    kinds = {classified.verdicts[n].kind for n in seen.calls("getitem")}
    assert kinds == {"capture", "eager"}


def test_only_the_refused_node_is_eager() -> None:
    """One refusal must not poison what follows it: rows are padded again after the break."""
    seen = take_one(break_op, rows(6, 4), W)
    classified = seen.classify("aten::tanh")
    assert [classified.verdicts[n].kind for n in seen.calls()] == ["capture", "eager", "capture"]
    assert [p.captured for p in classified.phases] == [True, False, True]


def test_private_values() -> None:
    """What the caller keeps and what eager code changes must be copies; what eager code reads need not be."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, c = x @ w, x @ w.t(), x * 2
        b.bernoulli_()
        return a, b.sum(-1) + c.softmax(0).sum(-1)

    seen = take_one(f, rows(6, 4), W)
    classified = seen.classify()
    a, b = seen.calls("aten.matmul")
    (c,) = seen.calls("aten.mul.Tensor")
    assert {n: classified.verdicts[n].kind for n in (a, b, c)} == dict.fromkeys((a, b, c), "capture")
    assert a in classified.private
    assert b in classified.private
    assert c not in classified.private


# --- classes of sizes -------------------------------------------------------------------------------------------------


def classes(seen: Seen) -> dict[str, SymbolInfo]:
    return {s.source: s for s in seen.classify().symbols}


def test_rows_that_feed_a_matmul_are_bucketed() -> None:
    """Both sizes of a (batch, sequence) model; the reason says how much it gains."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(x, W)).softmax(-1)

    x = rows(3, 5, 4)
    torch._dynamo.mark_dynamic(x, 1)
    found = classes(take_one(f, x))
    kinds = {s.kind for source, s in found.items() if "'x'" in source}
    assert kinds == {"bucketed"}
    assert len(found) == 2
    assert all(s.why == "rounding it up lets 1 operations be captured" for s in found.values())


def test_at_most_two_sizes_are_bucketed() -> None:
    """Keys multiply: three sizes of a ladder of 50 would be 125000 recordings."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        a = F.linear(F.linear(x, W), W).sum(-1)
        b = F.linear(F.linear(y, W), W).sum(-1)
        return a.unsqueeze(-1).unsqueeze(-1) + b.unsqueeze(-1) + F.linear(z, W).sum(-1)

    found = classes(take_one(f, rows(5, 4), rows(6, 4), rows(7, 4)))
    kinds = {source.split("'")[1]: s.kind for source, s in found.items()}
    assert kinds == {"x": "bucketed", "y": "bucketed", "z": "exact"}
    (z,) = [s for source, s in found.items() if "'z'" in source]
    assert z.why == f"{MAX_BUCKETED} other sizes gain more"


def test_the_batch_of_a_static_cache_is_pinned() -> None:
    """Its memory is read in place: another batch size is another cache, never a padded one."""

    def f(x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, at, F.linear(x, W))
        return F.linear(x, W) + cache.sum(1, keepdim=True)

    x, cache = torch.randn(3, 1, 4), torch.zeros(3, 8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(cache, 0)
    seen = take_one(f, x, cache, torch.tensor([2]))
    (batch,) = classes(seen).values()
    assert batch.kind == "pinned"
    assert batch.why == "in the shape of L['cache'], which is changed in place"


def test_a_size_of_a_buffer_is_pinned() -> None:
    """Module buffers are static: their sizes are exact in the key."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, W) @ self.table.t()

    model = Model()
    torch._dynamo.mark_dynamic(model.table, 0)
    with torch._dynamo.config.patch(force_parameter_static_shapes=False, force_nn_module_property_static_shapes=False):
        seen = take_one(model, rows(5, 4))
    found = classes(seen)
    (table,) = [s for source, s in found.items() if "table" in source]
    assert table.kind == "pinned"
    assert table.why.endswith(", which is a parameter or buffer")
    assert {s.kind for source, s in found.items() if "'x'" in source} == {"bucketed"}


def test_a_key_length_is_exact() -> None:
    """The length of a growing cache reaches attention and ``cat`` alone: nobody gains from rounding it up."""

    def f(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = F.linear(x, W).view(1, 1, -1, 4)
        k = torch.cat([k, q], -2)
        v = torch.cat([v, q], -2)
        y = F.scaled_dot_product_attention(q, k, v)
        return F.linear(y.view(1, -1, 4), W), k, v

    k = torch.randn(1, 1, 9, 4)
    x = torch.randn(1, 6, 4)
    torch._dynamo.mark_dynamic(k, 2)
    torch._dynamo.mark_dynamic(x, 1)
    seen = take_one(f, x, k, k.clone())
    found = classes(seen)
    lengths = [s for source, s in found.items() if "'k'" in source]
    assert [s.kind for s in lengths] == ["exact"]
    assert lengths[0].why == "no dense operation could be captured by rounding it up"
    assert [s.kind for source, s in found.items() if "'x'" in source] == ["bucketed"]
    classified = seen.classify()
    reason = reason_of(classified, seen.one("aten.scaled_dot_product_attention"))
    assert reason.code == "exact-symbol"
    assert "L['k']" in reason.text


def test_a_number_is_exact() -> None:
    """A position is data, not a size."""

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return F.linear(x, W) + n

    seen = take_one(f, rows(6, 4), 17, dynamic=True)
    (n,) = [s for source, s in classes(seen).items() if source == "L['n']"]
    assert (n.kind, n.why) == ("exact", "a number, not the size of an input")
    assert n.dim is None


def test_a_frozen_position_is_refused() -> None:
    """``arange(1) + kv_len`` has no symbol in its shape, and would freeze a position at capture."""

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        position = torch.arange(1) + n  # here
        return F.linear(x, W) * position

    seen = take_one(f, rows(6, 4), 17, dynamic=True)
    reason = reason_of(seen.classify(), seen.one("aten.add.Tensor"))
    assert (reason.code, reason.where) == ("exact-symbol", marked(f))


def test_without_dense_work_any_gain_counts() -> None:
    """A graph of pointwise operations alone is still worth a recording."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos() + 1

    (n,) = classes(take_one(f, rows(6, 4))).values()
    assert n.kind == "bucketed"


def test_symbols_say_where_they_are_read() -> None:
    """A size is read from its own argument if there is one, else from a tensor's dimension."""
    seen = take_one(break_op, rows(6, 4), W)
    (n,) = seen.classify().symbols
    assert n.source == "L['x'].size()[0]"
    value = seen.args[n.arg]
    assert (value if n.dim is None else value.shape[n.dim]) == 6


def test_a_size_inside_an_expression_alone_is_unreadable() -> None:
    """``x`` of shape ``[2 * s]`` alone does not show ``s``: such a graph runs as it came."""
    seen = take_one(break_op, rows(6, 4), W)
    (x,) = [p for p in seen.graph.nodes if p.op == "placeholder" and getattr(p.meta["val"], "shape", None) is not None
            and isinstance(p.meta["val"].shape[0], torch.SymInt)]  # fmt: skip
    assert unreadable([x]) is None
    x.meta["val"] = torch.cat([x.meta["val"], x.meta["val"]])
    reason = unreadable([x])
    assert reason is not None
    assert reason.code == "symbol-unreadable"
