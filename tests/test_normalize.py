"""Normalisation: what the one IR keeps (composites, in-place ops, lines, regions), and equality with Dynamo's graph."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import Seen, assert_equal_run, assert_same, compiled, execute, take, take_one
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import torch_graph_backend as tgb
from torch_graph_backend.passes.normalize import NormaliseError
from torch_graph_backend.passes.torch_api import HigherOrderOperator, OpOverload

aten = torch.ops.aten
HERE = Path(__file__).name


def line_of(function: Callable[..., Any], text: str) -> str:
    """``"test_normalize.py:12 in f: y = x.sum()"`` for the line of ``function`` that reads ``text``."""
    lines, start = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if line.strip() == text)
    return f"{HERE}:{start + at} in {function.__name__}: {text}"


def assert_well_formed(seen: Seen) -> None:
    """What the module promises of every node: kinds of targets, and the metadata that later passes read."""
    nodes = list(seen.graph.nodes)
    assert seen.normal is not None
    for node in nodes:
        if node.op == "get_attr":
            assert node.target in seen.normal.constants
        if node.op != "call_function":
            assert node.op in ("placeholder", "get_attr", "output")
            continue
        size = isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        known = isinstance(node.target, (OpOverload, HigherOrderOperator)) or node.target is operator.getitem
        assert known or size or node.meta.get("opaque"), node.format_node()
        assert {"val", "where", "autocast", "aliases"} <= set(node.meta), node.format_node()
        assert all(a in node.all_input_nodes for a in node.meta["aliases"])
    assert [n for n in nodes if n.op == "placeholder"] == list(seen.normal.placeholders)
    seen.graph.lint()


def checked(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Seen:
    """The one graph of ``function``, well formed and equal to Dynamo's graph on real inputs."""
    seen = take_one(function, *args, dynamic=dynamic)
    assert_well_formed(seen)
    assert_equal_run(seen)
    return seen


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_composites_stay_whole() -> None:
    """Catches a trace below the composite level: linear as addmm, attention as matmuls, silu in parts."""

    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(F.linear(x, w, b), (8,))
        q = y.view(2, -1, 2, 4).transpose(1, 2)
        return F.silu(F.scaled_dot_product_attention(q, q, q, is_causal=True)) + F.softmax(q, -1)

    seen = checked(f, torch.randn(2, 5, 8), torch.randn(8, 8), torch.randn(8))
    for name in ("linear", "layer_norm", "scaled_dot_product_attention", "silu", "softmax.int"):
        assert len(seen.calls(f"aten.{name}")) == 1, seen.names()
    assert not {"aten.addmm", "aten.bmm", "aten.t", "aten.native_layer_norm"} & set(seen.names())


def test_in_place_operations_stay_in_place() -> None:
    """Catches functionalisation: the caller's tensor would no longer change."""

    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        cache[1] = x[0]
        cache.index_copy_(0, torch.tensor([2]), x[1:2])
        x += 1
        return F.relu(x, inplace=True) + cache.sum()

    seen = checked(f, torch.randn(3, 4), torch.zeros(3, 4))
    names = ("aten.mul_.Tensor", "aten.copy_", "aten.index_copy_", "aten.add_.Tensor", "aten.relu_")
    assert [n for n in seen.names() if n in names] == list(names)


def test_lines_point_at_the_users_code() -> None:
    """Catches a lost or a wrong stack frame, also inside PyTorch's own modules and in a helper."""

    def helper(t: torch.Tensor) -> torch.Tensor:
        return t.cos() * 2

    norm = nn.LayerNorm(4)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        z = helper(y)
        return norm(z)

    seen = checked(f, torch.randn(2, 4))
    assert seen.one("aten.sin").meta["where"] == line_of(f, "y = torch.sin(x)")
    assert seen.one("aten.cos").meta["where"] == line_of(helper, "return t.cos() * 2")
    assert seen.one("aten.mul.Tensor").meta["where"] == line_of(helper, "return t.cos() * 2")
    assert seen.one("aten.layer_norm").meta["where"] == line_of(f, "return norm(z)")


def test_a_reused_template_has_the_line_of_its_own_node() -> None:
    """Catches metadata of the first traced node leaking into the nodes instantiated from its template."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = x.cos().sin()
        return x

    seen = checked(f, torch.randn(3))
    assert [n.meta["where"] for n in seen.calls("aten.sin")] == [
        line_of(f, "x = x.sin()"),
        line_of(f, "x = x.cos().sin()"),
    ]
    assert seen.normal is not None
    assert seen.normal.reused == 1


def test_origin_is_what_the_user_called() -> None:
    """Break registrations by torch function rely on it."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1) + x.exp()

    seen = checked(f, torch.randn(2, 3))
    assert seen.one("aten.softmax.int").meta["origin"] is F.softmax
    assert seen.one("aten.exp").meta["origin"] == "exp"


def test_symbolic_sizes_and_size_arithmetic() -> None:
    """Catches frozen sizes: a graph traced at 5 rows must also answer at 9."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        n = x.shape[0]
        return torch.zeros(n, 2) + torch.arange(n)[:, None] + x.reshape(n * 2, -1).sum() / n, n // 2 + 1

    seen = checked(f, torch.randn(6, 4), dynamic=True)
    (x,) = [p for p in seen.graph.nodes if p.op == "placeholder" and isinstance(p.meta["val"], torch.Tensor)]
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)
    big = torch.randn(10, 4)
    got = execute(seen, [big.shape[0] if isinstance(a, int) else big for a in seen.args])
    rows, size = got
    assert_same(rows, f(big)[0])
    assert size == 6


def test_placeholders_know_source_and_weights() -> None:
    """The plan prints sources, and pins what is static."""
    model = nn.Linear(3, 4)
    seen = checked(lambda inputs: model(inputs["ids"]), {"ids": torch.randn(2, 3)})
    sources = {p.meta["source"]: p.meta["static"] for p in seen.graph.nodes if p.op == "placeholder"}
    assert any("ids" in s and not static for s, static in sources.items())
    assert sum(bool(static) for static in sources.values()) == 2


# --- regions ----------------------------------------------------------------------------------------------------------


def test_autocast_regions_are_annotated_and_executed() -> None:
    """Catches an autocast region that is lost, leaks out, or is baked into casts of the operations around it."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x @ w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = x @ w
            with torch.autocast("cpu", enabled=False):
                c = x @ w
            d = F.linear(b, w)
        return a, b, c, d, x @ w

    seen = checked(f, torch.randn(3, 4), torch.randn(4, 4))
    dtypes = [n.meta["val"].dtype for n in seen.calls() if n.target in (aten.matmul.default, aten.linear.default)]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    regions = [n.meta["autocast"] for n in seen.calls() if n.target in (aten.matmul.default, aten.linear.default)]
    assert [len(r) for r in regions] == [0, 1, 2, 1, 0]
    assert regions[1][0][:3] == ("cpu", torch.bfloat16, True)
    assert regions[2][1][2] is False
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_is_left_after_a_failure() -> None:
    """Catches an autocast state that outlives a graph that cannot be normalised."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x.clone()
            y.unsqueeze_(0)
            return y @ y.mT

    seen = take_one(f, torch.randn(3, 4))
    assert seen.error is not None
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("options", [{}, {"break_ops": ["aten::sin"]}])
def test_autocast_through_the_backend(options: dict[str, Any]) -> None:
    """The same, through the generated code, captured and eager."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = (x @ w).sin() @ w
        return b, x @ w

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with compiled(f, **options) as g:
        want = f(x, w)
        for _ in range(3):
            assert_same(g(x, w), want)


def test_grad_mode_regions_leave_no_nodes() -> None:
    """``no_grad`` proves nothing about the call if the code turns gradients on itself: the flag says so."""

    def off(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return y.cos()

    def on(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.sin()
        return y.cos()

    for function, flag in ((off, False), (on, True)):
        seen = checked(function, torch.randn(3))
        assert seen.normal is not None
        assert seen.normal.turns_grad_on is flag
        assert seen.names() == ["aten.sin", "aten.cos"]


# --- higher-order operations ------------------------------------------------------------------------------------------


def test_cond_stays_whole() -> None:
    """A branch on data runs whole; both ways must answer, so that neither branch was traced away."""

    def f(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.cond(p.any(), lambda t: t.sin() + 1, lambda t: t.cos() - 1, (x * 2,)) * 3

    seen = checked(f, torch.randn(3), torch.tensor([True]))
    assert seen.names().count("cond") == 1
    assert not {"aten.sin", "aten.cos"} & set(seen.names())
    seen.args = [torch.zeros_like(a) for a in seen.args]
    assert_equal_run(seen)


def test_while_loop_stays_whole() -> None:
    """Catches an unrolled or a dropped loop."""
    from torch._higher_order_ops.while_loop import while_loop

    def f(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda i, t: i > 0, lambda i, t: (i - 1, t * 2), (n, x))[1] + 1

    seen = checked(f, torch.tensor(3), torch.ones(2))
    assert seen.names().count("while_loop") == 1
    assert "aten.gt.Scalar" not in seen.names()


def test_flex_attention_stays_whole() -> None:
    """Its score function must stay a body and not become nodes of the graph."""

    def f(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)) * 2

    seen = checked(f, torch.randn(1, 2, 16, 16))
    assert seen.names().count("flex_attention") == 1
    assert "aten.sub.Tensor" not in seen.names()


def test_checkpoint_is_inlined() -> None:
    """Without gradients checkpointing is its body, which can be captured."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: torch.relu(t @ w).sin(), x, use_reentrant=False) + 1

    seen = checked(f, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4))
    assert seen.names() == ["aten.matmul", "aten.relu", "aten.sin", "aten.add.Tensor"]


def test_invoke_subgraph_is_inlined() -> None:
    """A nested compile region is its body, every time it is called."""

    @torch.compiler.nested_compile_region
    def block(t: torch.Tensor) -> torch.Tensor:
        return t.sin() * 2

    def f(x: torch.Tensor) -> torch.Tensor:
        return block(block(x)) + block(x)

    seen = checked(f, torch.randn(3))
    assert seen.names().count("aten.sin") == 3


def test_loops_of_known_length_are_written_out() -> None:
    """Each step of the body is operations of the graph; carry and results are eager's."""
    from torch._higher_order_ops.map import map as each
    from torch._higher_order_ops.scan import scan

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = carry * 0.5 + row @ w
            return carry, carry.tanh()

        last, all_of_them = scan(step, torch.zeros_like(x[:, 0]), x, dim=1)
        return last, all_of_them, each(lambda row, v: row.sin() @ v, x, w)

    seen = checked(f, torch.randn(2, 3, 4), torch.randn(4, 4))
    assert not {"scan", "map_impl"} & set(seen.names())
    assert seen.names().count("aten.tanh") == 3
    assert seen.names().count("aten.sin") == 2


@pytest.mark.parametrize("length", ["symbolic", "long"])
def test_other_loops_stay_whole(length: str) -> None:
    """A length that is known at run time alone, or so long that a plan would take longer than the loop."""
    from torch._higher_order_ops.scan import scan

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(lambda c, row: (c + row, c * row), torch.zeros_like(x[0]), x, dim=0)

    x = torch.randn(5 if length == "symbolic" else 600, 3)
    if length == "symbolic":
        torch._dynamo.mark_dynamic(x, 0)
    assert checked(f, x).names().count("scan") == 1


def test_a_loop_that_is_a_break_stays_whole() -> None:
    """A registration wins over writing the body out."""
    from torch._higher_order_ops.scan import scan

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(scan(lambda c, row: (c + row, c * row), torch.zeros_like(x[0]), x, dim=0)[1]) * 2

    x = torch.randn(4, 3)
    for breaks, count in (([], 0), ([torch.ops.higher_order.scan], 1)):
        torch._dynamo.reset()
        fast = torch.compile(f, backend="bcg", options={"break_ops": breaks})
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(fast(x), f(x))
        eager = [op.op for plan in tgb.plans(f) for region in plan.regions for op in region.ops]
        assert eager.count("scan") == count
        assert tgb.stats(f).replays == 2


def test_vmap_region_is_traced_as_one() -> None:
    """Node by node a vmap region would trace without its batch dimension."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.vmap(lambda row: (row @ w).sum())(y) + 1

    seen = checked(f, torch.randn(3, 4), torch.randn(4, 4))
    assert not any("nesting" in name or "batch_dim" in name for name in seen.names())
    assert seen.calls()[-1].meta["val"].shape == (3,)


# --- templates --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A small block with a residual, a norm, a matmul and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.up(self.norm(x)))
        a, b = h.view(*h.shape[:-1], 2, 8).unbind(-2)
        return x + self.down(torch.cat([a, b], -1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_repeated_layers_trace_nothing(dynamic: bool) -> None:
    """Compile time must not grow by traces with the number of layers: layers 2..n come from templates."""

    def model(n: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Layer() for _ in range(n)])

    x = torch.randn(3, 5, 8)
    one, four = (checked(model(n), x, dynamic=dynamic).normal for n in (1, 4))
    assert one is not None
    assert four is not None
    assert four.traced == one.traced
    per_layer = one.traced + one.reused
    assert four.traced + four.reused == 4 * per_layer


def test_templates_differ_by_shape_stride_and_dtype() -> None:
    """Catches a key that is too coarse: the second ``x + 1`` would get the metadata of the first."""

    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a + 1, b + 1, a.t() + 1, a.double() + 1, a[:2] + 1

    seen = checked(f, torch.randn(3, 3), torch.randn(2, 4))
    assert seen.normal is not None
    assert len(seen.calls("aten.add.Tensor")) == 5
    for node, want in zip(seen.calls("aten.add.Tensor"), seen.gm.forward(*seen.args), strict=True):
        got = node.meta["val"]
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize(
    "constants",
    [(1, 1.0, True), (True, 1, 1.0), (0.0, -0.0, 0), (2, 2.0, 2 + 0j), (float("nan"), float("inf"), -float("inf"))],
    ids=str,
)
def test_equal_constants_of_other_types_never_share_a_template(constants: tuple[Any, ...]) -> None:
    """``1 == 1.0 == True`` and ``0.0 == -0.0`` in Python; as operands they give other dtypes and other values."""

    def f(i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fulls = tuple(torch.full_like(i, c, dtype=torch.complex64) for c in constants)
        return tuple(torch.mul(i, c) for c in constants) + fulls

    seen = checked(f, torch.tensor([1, 2, 0]))
    want = [torch.mul(torch.tensor([1, 2, 0]), c).dtype for c in constants]
    assert [n.meta["val"].dtype for n in seen.calls("aten.mul.Tensor")] == want


def test_constants_inside_lists_and_slices_are_part_of_the_key() -> None:
    """Catches a key that drops nested constants: all four slices would be the first one."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[0:2], x[1:3], x[0:2:2], x[..., 0:2], x.permute(1, 0), x.permute(0, 1), x.sum([0]), x.sum([1])

    checked(f, torch.randn(4, 4))


def test_two_arguments_with_one_fake_are_told_apart() -> None:
    """``make_fx`` finds an argument by identity: two nodes with one fake tensor would become one of them."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.contiguous()  # the same fake object as x
        return torch.stack([a - y, x - a, y - a, a / x])

    checked(f, torch.randn(3), torch.randn(3))


def test_sizes_from_data_are_told_apart() -> None:
    """Two ``nonzero`` of one structure come from one template and have different numbers of rows at run time."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = torch.nonzero(x), torch.nonzero(y)
        n, m = a.shape[0], b.shape[0]
        return torch.cat([a, b]), x * n, y * m, torch.zeros(n + 2 * m), torch.full((n * m,), n - m)

    args = torch.tensor([1, 0, 2, 3]), torch.tensor([0, 0, 5, 0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        checked(f, *args)
        with compiled(f) as g:
            for _ in range(3):
                assert_same(g(*args), f(*args))


class Scaled(nn.Module):
    """A batch norm and numbers of its own: with ``dynamic=True`` all of them are arguments read by ``item``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, eps=0.5, momentum=0.25)
        self.a, self.b = 2.0, 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.a + self.b


def test_numbers_of_modules_are_told_apart() -> None:
    """Dynamo fixes eps and momentum, whose ``item`` then is dead; each has a value of its own all the same."""
    model = Scaled().eval()
    seen = checked(model, torch.randn(5, 4), dynamic=True)
    assert len(seen.calls("aten.item")) == 2  # those of the numbers that may change
    (norm,) = seen.calls("aten.batch_norm")
    assert norm.args[6:8] == (0.25, 0.5)
    x = torch.randn(6, 4)
    with compiled(model, dynamic=True) as fast:
        for _ in range(3):
            assert_same(fast(x), model(x))


def test_one_node_twice_in_an_operation() -> None:
    """``x - x`` and ``x - y`` have the same metadata and are different structures."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([x - y, x - x, y - x, y - y])

    checked(f, torch.randn(3), torch.randn(3))


# --- literals ---------------------------------------------------------------------------------------------------------


def test_a_literal_that_is_only_read_is_folded() -> None:
    """A copy at every call would be a host-to-device copy inside a segment."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0]) + torch.tensor(3)

    seen = checked(f, torch.randn(2))
    assert "aten.clone" not in seen.names()
    assert len([n for n in seen.graph.nodes if n.op == "get_attr"]) == 2


def test_a_mutated_literal_is_fresh_at_every_call() -> None:
    """Catches a folded constant that one call changes for the next."""

    def f(x: torch.Tensor) -> torch.Tensor:
        c = torch.tensor([1.0, 2.0])
        c.add_(1)
        return x + c

    assert checked(f, torch.randn(2)).names().count("aten.clone") == 1


def test_a_literal_mutated_through_a_view_is_fresh() -> None:
    """The same where only a view of the literal is written."""

    def f(x: torch.Tensor) -> torch.Tensor:
        c = torch.tensor([[1.0, 2.0]])
        c[0][1] = 7
        c.view(2)[:1].mul_(2)
        return x + c

    checked(f, torch.randn(2))


@pytest.mark.parametrize("view", [False, True])
def test_a_returned_literal_is_fresh_at_every_call(view: bool) -> None:
    """The caller may write into what it gets: the graph's own constant must not change."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = torch.tensor([1.0, 2.0])
        return x + c, c.view(2, 1) if view else c

    seen = checked(f, torch.randn(2))
    first = list(execute(seen, seen.args))[1]
    first.fill_(100)
    assert_same(list(execute(seen, seen.args))[1].flatten(), torch.tensor([1.0, 2.0]))


def test_literals_through_the_backend_stay_fresh() -> None:
    """End to end: three calls, the caller writes into each result."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c, d = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])
        d += 1
        return (x @ x) * c, c, d

    x = torch.randn(2, 2)
    with compiled(f) as g:
        for _ in range(3):
            got = g(x)
            assert_same(got, f(x))
            got[1].fill_(9)
            got[2].fill_(9)


def test_an_empty_literal_as_a_fresh_cache_uses_it() -> None:
    """Hugging Face's ``DynamicCache`` starts from ``torch.tensor([])``: a real tensor inside a fake graph."""

    def f(x: torch.Tensor) -> torch.Tensor:
        cache = torch.tensor([], dtype=x.dtype)
        return torch.cat([cache, x], dim=-2) * 2

    assert "aten.cat" in checked(f, torch.randn(1, 2, 3)).names()


def test_a_tensor_from_a_closure_is_an_argument_or_a_constant() -> None:
    """A global tensor changed between calls is read anew; it must not be copied into the graph."""
    table = torch.randn(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + table

    checked(f, torch.randn(3))


# --- what cannot be traced --------------------------------------------------------------------------------------------


def test_an_untraceable_node_stays_as_it_came() -> None:
    """One node that ``make_fx`` cannot take costs that node, not the graph; the reason is kept."""
    from torch._dynamo import allow_in_graph

    @allow_in_graph
    def odd(x: torch.Tensor) -> torch.Tensor:
        if _tracing():
            raise RuntimeError("cannot be traced here")
        return x * 3

    def f(x: torch.Tensor) -> torch.Tensor:
        return odd(x.sin()).cos()

    seen = take_one(f, torch.randn(3))
    opaque = [n for n in seen.calls() if n.meta.get("opaque")]
    assert len(opaque) == 1
    assert opaque[0].meta["opaque"] == "RuntimeError: cannot be traced here"
    assert {"aten.sin", "aten.cos"} <= set(seen.names())
    assert opaque[0].meta["where"] == line_of(f, "return odd(x.sin()).cos()")
    assert_well_formed(seen)
    assert_equal_run(seen)


def test_a_node_whose_result_the_trace_did_not_see_stays_as_it_came() -> None:
    """Would catch a tensor that Python made behind the dispatcher's back, taken for a constant of the graph."""
    from torch._dynamo import allow_in_graph

    @allow_in_graph
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return x.data

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        hidden(y).add_(1)
        return y.cos()

    seen = take_one(f, torch.randn(3))
    (opaque,) = [n for n in seen.calls() if n.meta.get("opaque")]
    assert opaque.meta["opaque"].startswith("UntracedError: ")
    assert_well_formed(seen)
    assert_equal_run(seen)


def _tracing() -> bool:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


@pytest.mark.parametrize(
    ("change", "op"),
    [
        (lambda y: y.unsqueeze_(0), "unsqueeze_"),
        (lambda y: y.t_(), "t_"),
        (lambda y: y.squeeze_(0), "squeeze_"),
        (lambda y: y.transpose_(0, 1), "transpose_"),
        (lambda y: y.as_strided_((2, 2), (1, 2)), "as_strided_"),
    ],
    ids=["unsqueeze_", "t_", "squeeze_", "transpose_", "as_strided_"],
)
def test_metadata_mutation_is_refused(change: Callable[[torch.Tensor], Any], op: str) -> None:
    """``meta["val"]`` of earlier readers would lie: the whole graph runs as it came, with the op in the reason."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        change(y)
        return y + 1

    graphs = take(f, torch.randn(3, 4))
    errors = [s.error for s in graphs if s.error is not None]
    assert errors, [s.names() for s in graphs]
    assert errors[0].reason.code == "metadata-mutation"
    assert op in errors[0].reason.text
    with pytest.raises(NormaliseError):
        _ = next(s for s in graphs if s.error is not None).graph
    x = torch.randn(3, 4)
    with compiled(f) as g:
        for _ in range(2):
            assert_same(g(x), f(x))


def test_resize_never_reaches_a_graph() -> None:
    """Dynamo breaks at ``resize_``; should that change, it must be refused. The answer is eager's either way."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.resize_(2, 6)
        return y + 1

    graphs = take(f, torch.randn(3, 4))
    assert all(s.error is not None or "aten.resize_" not in s.names() for s in graphs)
    x = torch.randn(3, 4)
    with compiled(f) as g:
        for _ in range(3):
            assert_same(g(x), f(x))


# --- odds and ends ----------------------------------------------------------------------------------------------------


def test_tuples_are_indexed_by_structure() -> None:
    """``split``, ``topk``, ``unbind`` and named results: items, negative indices and unused items."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.split(2, dim=1)
        top = x.topk(2)
        return a + c, top.values, top[1], x.unbind(0)[-1], x.max(dim=1).indices, b

    checked(f, torch.randn(3, 6))


def test_dead_code_goes_and_effects_stay() -> None:
    """Unused pure work is dropped; an unused draw moves the generator, and an in-place op has no users at all."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        torch.rand(3)
        x.add_(1)
        return torch.rand(2)

    seen = checked(f, torch.randn(2))
    assert seen.names() == ["aten.rand", "aten.add_.Tensor", "aten.rand"]


def test_the_same_tensor_returned_twice_and_arguments_returned() -> None:
    """Outputs that are arguments or each other keep their identity."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y, x, x.view(-1)

    seen = take_one(f, torch.randn(2, 2))
    got = list(execute(seen, seen.args))
    want = list(seen.gm.forward(*seen.args))
    assert_same(got, want)
    storages = [{t.untyped_storage().data_ptr() for t in outs} for outs in (got, want)]
    assert len(storages[0]) == len(storages[1])


def test_no_tensor_arguments() -> None:
    """A graph with nothing but factories has no fake mode on its placeholders."""
    checked(lambda: torch.ones(3) * torch.arange(3) + torch.tensor([1.0, 0.0, 2.0]))


def test_default_dtype_is_part_of_the_key() -> None:
    """A factory under another default dtype must not reuse a template."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 2, torch.ones(2) * 2

    torch.set_default_dtype(torch.float64)
    try:
        seen = checked(f, torch.tensor([1, 2]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(n.meta["val"].dtype == torch.float64 for n in seen.calls())


def test_normalising_does_not_change_dynamos_graph() -> None:
    """The Dynamo graph is the fallback for every call."""

    def f(x: torch.Tensor) -> torch.Tensor:
        c = torch.tensor([1.0, 2.0])
        c[0] = 3
        return x.add_(1) * c

    texts: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        from torch_graph_backend.passes.normalize import normalise

        before = str(gm.graph)
        normalise(gm)
        texts.extend([before, str(gm.graph)])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=backend)(torch.randn(2))
    assert texts[0] == texts[1]
