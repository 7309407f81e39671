"""``@break_op``: what users write, what Dynamo sees, and that the answer is the eager one at every call."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_harness import assert_same, compiled, take_one
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend.break_define import defined
from torch_graph_backend.errors import BreakOpError

break_ops_module = sys.modules["torch_graph_backend.break_ops"]
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def like(q: Tensor, *_: Any, **__: Any) -> Tensor:
    """A fake for ops whose one result looks like the first argument."""
    return torch.empty_like(q)


@tgb.break_op
def bare(q: Tensor, layer: int, name: str = "a") -> Tensor:
    SEEN.append((tuple(q.shape), q.stride(), layer, name))
    return q * layer


bare.register_fake(like)


@tgb.break_op(
    "tgb_test::every", mutates_args=("caches", "out"), fake=lambda q, *a, **k: (like(q), q.new_empty(q.shape[0]))
)
def every(
    q: Tensor,
    caches: list[Tensor],
    out: Tensor | None = None,
    sizes: list[int] | None = None,
    causal: bool = True,
    *,
    scale: float = 1.0,
    label: str = "x",
) -> tuple[Tensor, Tensor]:
    SEEN.append((type(sizes), causal, scale, label, out is None))
    caches[0][: q.shape[0]] += q
    if out is not None:
        out.copy_(q + 1)
    return q * scale * (sum(sizes) if sizes else 1), q.sum(-1)


class Net(nn.Module):
    """Breaks first, back to back, in a loop over layers, and last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = bare(x, 1)
        for i, layer in enumerate(self.layers):
            h = layer(x)
            out = torch.zeros_like(h)
            h, total = every(h, [self.cache], out if i else None, [i, x.shape[0]], scale=0.5, label=f"layer.{i}")
            x = bare(h, x.shape[0], name="second") + out + total[:, None]
        return bare(x, 2), x


def same(got: Any, want: Any, device: str) -> None:
    """Bit for bit; on a GPU a padded product may take another kernel than eager's."""
    if device == "cpu":
        assert_same(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_answer_is_the_eager_one_at_every_size(device: str) -> None:
    """All kinds of arguments, mutation of a list and of an optional, results as a tuple, real sizes as ints."""
    ours, eager = Net().to(device), Net().to(device)
    eager.load_state_dict(ours.state_dict())
    with compiled(ours) as g:
        for n in (5, 6, 7, 5, 1, 7, 12):
            x = torch.randn(n, 4).to(device)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            SEEN.clear()
            want = eager(x)
            theirs = list(SEEN)
            SEEN.clear()
            got = g(x)
            assert theirs == SEEN
            same(got, want, device)
            same(ours.cache, eager.cache, device)
        stats = tgb.stats(g)
        assert stats.replays >= 2
        assert not stats.eager
        (plan,) = tgb.plans(g)[-1:]
        assert dict(plan.eager_ops())["tgb_test.every"] == 3


def test_back_to_back_breaks_share_one_step(device: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return bare(bare(bare(x @ w, 1), 2), 3) @ w

    w = torch.randn(4, 4).to(device)
    with compiled(f) as g:
        for _ in range(3):
            x = torch.randn(3, 4).to(device)
            same(g(x, w), f(x, w), device)
        (plan,) = tgb.plans(g)
        assert [s.kernels for s in plan.steps] == [1, 3, 1]


def test_dynamo_sees_one_operation_and_the_function_is_left_alone() -> None:
    """Neither the body nor a wrapper is traced; the function that the user calls is the function he wrote."""
    seen = take_one(lambda x: bare(q=x, layer=2).sin(), torch.randn(3))
    assert seen.names() == ["tgb.test_break_op_bare", "aten.sin"]
    assert len(SEEN) == 1  # the call itself; tracing ran nothing
    assert type(bare) is type(like)
    assert bare.__code__.co_name == "bare"
    bare(torch.randn(3), 2)
    assert len(SEEN) == 2
    assert bare.op is torch.ops.tgb.test_break_op_bare.default
    assert defined(bare.op) is bare.break_op is defined("tgb::test_break_op_bare")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_run_it_as_an_operation(backend: str) -> None:
    ours, eager = Net(), Net()
    eager.load_state_dict(ours.state_dict())
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert_same(torch.compile(ours, backend=backend)(x), eager(x))
    assert_same(ours.cache, eager.cache)


CONTEXT: contextvars.ContextVar[Tensor] = contextvars.ContextVar("context")


@tgb.break_op("tgb_test::from_context", fake=like, keeps_args=False)
def from_context(q: Tensor) -> Tensor:
    return q + CONTEXT.get()[: q.shape[0]]


def test_python_state_is_read_when_it_runs(device: str) -> None:
    """A forward context of the step: no value of an earlier call may be frozen."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return from_context(x @ w) @ w

    w = torch.randn(4, 4).to(device)
    with compiled(f) as g:
        for n in (3, 4, 3, 4, 3):
            CONTEXT.set(torch.randn(8, 1).to(device))
            x = torch.randn(n, 4).to(device)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(g(x, w), f(x, w))
        assert tgb.stats(g).replays >= 2


@pytest.mark.parametrize("keeps", [True, False])
def test_keeps_args_decides_who_gets_copies(keeps: bool) -> None:
    """By default an op may hold on to what it is given; one that promises not to is given views."""
    kept: list[Tensor] = []

    @tgb.break_op(fake=like, keeps_args=keeps)
    def hold(q: Tensor) -> Tensor:
        kept.append(q if keeps or kept else q.clone())  # a promise that is broken at the first call is found
        return q * 2

    def f(x: Tensor, w: Tensor) -> Tensor:
        return hold(x @ w) @ w

    w = torch.randn(4, 4)
    with compiled(f) as g:
        xs = [torch.randn(3, 4) for _ in range(4)]
        for x in xs:
            assert_same(g(x, w), (x @ w * 2) @ w)
        (plan,) = tgb.plans(g)
        assert [c.private for c in plan.cuts if c.after == 0] == [keeps]
    assert all(torch.equal(k, x @ w) for k, x in zip(kept[1:], xs[1:], strict=True)) is keeps


def test_a_break_inside_a_cond_branch(device: str) -> None:
    """The whole higher-order op runs eagerly."""

    def f(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
        h = x @ w
        h = torch.cond(p, lambda h: bare(h, 3), lambda h: h.sin(), (h,))
        return h @ w

    w = torch.randn(4, 4).to(device)
    with compiled(f) as g:
        for flag in (True, False, True, True):
            x, p = torch.randn(3, 4).to(device), torch.tensor(flag, device=device)
            same(g(x, w, p), f(x, w, p), device)
        assert "cond" in dict(tgb.plans(g)[0].eager_ops())
        assert tgb.stats(g).replays == 3


# --- methods ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A method that reads and changes the state of its module."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.scale = scale
        self.register_buffer("calls", torch.zeros(4))

    @tgb.break_op(fake=lambda self, q, n=1: torch.empty_like(q))
    def mix(self, q: Tensor, n: int = 1) -> Tensor:
        self.calls += n
        return self.lin(q) * self.scale

    @staticmethod
    @tgb.break_op(fake=like)
    def plain(q: Tensor) -> Tensor:
        return q + 1

    def forward(self, x: Tensor) -> Tensor:
        before = self.calls * 2
        h = self.mix(self.lin(x), n=2)
        return self.plain(h) + self.calls + before


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(2.0), Scaled(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) @ self.a.lin.weight)


def test_a_method_keeps_to_its_instance() -> None:
    """Two instances in one graph, a second model of the class, state that is changed and read on both sides."""
    models = [(Two(), Two()) for _ in range(2)]
    for ours, eager in models:
        eager.load_state_dict(ours.state_dict())
        with compiled(ours) as g:
            for i in range(4):
                x = torch.randn(3, 4)
                assert_same(g(x), eager(x))
                assert_same(ours.a.calls, eager.a.calls)
                if i == 2:
                    ours.a.scale = eager.a.scale = 7.0
            assert tgb.stats(g).replays >= 1


class Table(nn.Module):
    """Products with a buffer on both sides of a method that changes it, which nothing else puts in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("table", torch.eye(4))

    @tgb.break_op(fake=lambda self, q: torch.empty_like(q))
    def learn(self, q: Tensor) -> Tensor:
        self.table += q.mean()
        return q * 2

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.learn(self.lin(x))
        after = x @ self.table
        again = self.learn(self.lin(h))
        return h, after, self.lin(again), x @ self.table


def test_what_reads_a_buffer_stays_on_its_side_of_a_method() -> None:
    ours, eager = Table(), Table()
    eager.load_state_dict(ours.state_dict())
    with compiled(ours) as g:
        for _ in range(4):
            x = torch.randn(3, 4)
            assert_same(g(x), eager(x))
            assert_same(ours.table, eager.table)
        assert tgb.stats(g).replays == 3


def test_a_method_of_a_copy_is_the_copys() -> None:
    import copy

    first = Scaled(2.0)
    g = torch.compile(lambda m, x: m(x), backend="bcg")
    with torch.no_grad():
        x = torch.randn(3, 4)
        g(first, x)
        second = copy.deepcopy(first)
        second.scale = 5.0
        want = copy.deepcopy(second)(x)
        assert_same(g(second, x), want)


def test_a_method_of_an_object_that_is_no_module() -> None:
    class Holder:
        def __init__(self) -> None:
            self.k = 3.0

        @tgb.break_op(fake=lambda self, q: torch.empty_like(q))
        def times(self, q: Tensor) -> Tensor:
            return q * self.k

    holder = Holder()
    with compiled(lambda x, w: holder.times(x @ w) @ w) as g:
        x, w = torch.randn(3, 4), torch.randn(4, 4)
        for k in (3.0, 4.0, 5.0):
            holder.k = k
            assert_same(g(x, w), ((x @ w) * k) @ w)
        fresh = torch.compile(lambda x: Holder().times(x), backend="bcg")
        with pytest.raises(Exception, match=r"made inside the compiled code|compiled for is gone"):
            fresh(x)


class Stateless:
    @tgb.break_op(fake=lambda self, q: torch.empty_like(q))
    def double(self, q: Tensor) -> Tensor:
        return q * 2


def test_a_method_of_an_object_without_attributes() -> None:
    this, w = Stateless(), torch.randn(4, 4)
    with compiled(lambda x: this.double(x @ w) @ w) as g:
        for _ in range(3):
            x = torch.randn(3, 4)
            assert_same(g(x), (x @ w * 2) @ w)


def test_an_object_without_weak_references_is_refused() -> None:
    from torch_graph_backend.break_self import handle_of, instance

    class Slotted:
        __slots__ = ("__dict__",)

    this = Slotted()
    this.k = 1
    with pytest.raises(BreakOpError, match="__weakref__"):
        handle_of(this, "ns::op")
    owner = Scaled(1.0)
    number = handle_of(owner, "ns::op")
    assert handle_of(owner, "ns::op") == number
    assert instance(number, "ns::op") is owner
    del owner
    with pytest.raises(BreakOpError, match="gone"):
        instance(number, "ns::op")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_a_fake_the_error_has_the_lines_to_add() -> None:
    @tgb.break_op
    def nofake(q: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return q, q

    lines = r"BCG302.*@nofake\.register_fake\s+def _\(q, n\):\s+return torch\.empty_like\(q\), torch\.empty_like\(q\)"
    with torch.no_grad(), pytest.raises(Exception, match=f"(?s){lines}"):
        torch.compile(lambda x: nofake(x, 2), backend="bcg")(torch.randn(3))


@pytest.mark.parametrize(
    ("define", "text"),
    [
        (lambda: tgb.break_op(lambda q: q), "Parameter q must have a type annotation"),
        (lambda: tgb.break_op(torch.sin), "is a builtin"),
        (lambda: tgb.break_op(nn.Linear), "not a Python function"),
        (lambda: tgb.break_op(bare), "is a break op already"),
        (lambda: tgb.break_op(torch.ops.aten.sin), "register_break_op"),
        (lambda: tgb.break_op("aten::mine")(like), "library of your own"),
        (lambda: tgb.break_op("no name")(like), "library of your own"),
        (lambda: tgb.break_op("tgb_test::every", mutates_args="q")(like), r"write \('q',\)"),
        (lambda: tgb.break_op(fake=3)(like), "not callable"),
        (lambda: tgb.break_op(schema="Tensor x -> Tensor")(lambda x: x), "does not start"),
        (lambda: tgb.break_op(schema="(Tensr x) -> Tensor")(lambda x: x), "not accepted"),
        (lambda: tgb.break_op(mutates_args=("z",))(one), "z.*not found"),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_cannot_work_is_refused_when_it_is_defined(define: Any, text: str) -> None:
    with pytest.raises(BreakOpError, match=f"BCG301.*{text}"):
        define()


def one(q: Tensor) -> Tensor:
    return q + 1


def test_a_schema_for_a_function_without_annotations() -> None:
    op = tgb.break_op(schema="(Tensor x, int n=2) -> Tensor", fake=like)(lambda x, n=2: x * n)
    with compiled(lambda x, w: op(x @ w, n=3) @ w) as g:
        x, w = torch.randn(3, 4), torch.randn(4, 4)
        for _ in range(3):
            assert_same(g(x, w), ((x @ w) * 3) @ w)


def test_a_schema_says_what_is_changed() -> None:
    w = torch.randn(4, 4)

    @tgb.break_op("tgb_test::bump", schema="(Tensor(a!) x, float by=1.0) -> ()")
    def bump(x: Any, by: Any = 1.0) -> None:
        x.add_(by)

    def f(x: Tensor) -> Tensor:
        h = x @ w
        bump(h, by=2.0)
        return h @ w

    with compiled(f) as g:
        for n in (5, 6, 7, 5, 6):
            x = torch.randn(n, 4)
            assert_same(g(x), f(x))
        assert tgb.stats(g).replays >= 2
    with pytest.raises(BreakOpError, match=r"mutates_args is \('x',\), but its schema changes \(\)"):
        tgb.break_op("tgb_test::bumps", schema="(Tensor x) -> ()", mutates_args=("x",))(lambda x: None)


def test_a_list_among_the_results() -> None:
    """Results inside results have no padding of their own to prove; they come from the op as its fake says."""
    w = torch.randn(4, 4)

    @tgb.break_op(
        "tgb_test::listed",
        schema="(Tensor x, SymInt n) -> (Tensor, Tensor[])",
        fake=lambda x, n: (torch.empty_like(x), [x.new_empty(n), torch.empty_like(x)]),
    )
    def listed(x: Any, n: Any) -> Any:
        return x * 2, [x.new_ones(n), x + n]

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        a, (b, c) = listed(x @ w, x.shape[0])
        return a @ w + b[:, None], c @ w

    with compiled(f) as g:
        for n in (5, 6, 7, 5, 6):
            x = torch.randn(n, 4)
            assert_same(g(x), f(x))
        assert tgb.stats(g).replays >= 2


def test_defined_again_under_its_name() -> None:
    """A notebook cell that runs twice; functions made twice without a name are two ops."""

    def make(k: int) -> Any:
        return tgb.break_op("tgb_test::again", fake=like)(_times(k))

    x = torch.randn(3)
    for k in (2, 3):
        op = make(k)
        with compiled(lambda x, op=op: op(x.sin()).cos()) as g:
            assert_same(g(x), (x.sin() * k).cos())
    pair = [tgb.break_op(fake=like)(_times(k)) for k in (5, 7)]
    with compiled(lambda x: pair[0](x) + pair[1](x)) as g:
        assert_same(g(x), x * 5 + x * 7)


def _times(k: int) -> Any:
    def times(q: Tensor) -> Tensor:
        return q * k

    return times


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_without_a_formula_name_register_autograd() -> None:
    """Forward is eager's; asking for the gradient is an error, not a zero."""
    op = tgb.break_op(fake=like)(_times(3))
    x = torch.randn(3, requires_grad=True)
    y = torch.compile(lambda x: op(x).sin(), backend="bcg")(x)
    assert y.requires_grad
    assert_same(y.detach(), (x * 3).sin().detach())
    with pytest.raises(BreakOpError, match=r"times\.register_autograd"):
        y.sum().backward()


def test_gradients_with_a_formula() -> None:
    op = tgb.break_op(fake=like)(_times(3))
    op.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0].ne(0),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: op(x).sin().sum(), backend="bcg")(x).backward()
    assert_same(x.grad, (3 * (x * 3).cos()).detach())


def test_gradients_through_changed_arguments_are_refused() -> None:
    """Values as in eager code; the gradient would be lost in silence."""

    @tgb.break_op("tgb_test::into", mutates_args=("out",))
    def into(q: Tensor, out: Tensor) -> None:
        out.copy_(q * 2)

    def f(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        into(x, out)
        return out.sin()

    x = torch.randn(3, requires_grad=True)
    y = torch.compile(f, backend="bcg")(x)
    assert_same(y.detach(), (x * 2).sin().detach())
    with pytest.raises(BreakOpError, match="register_autograd"):
        y.sum().backward()
    with pytest.raises(BreakOpError, match="no gradient formula"):
        into.register_autograd(lambda ctx, grad: grad)


def test_a_keyword_only_tensor() -> None:
    """Torch takes no gradient formula for one: it is an operation all the same, and the gradient an error."""

    @tgb.break_op("tgb_test::keyword", fake=lambda q, *, k, scale=1.0: torch.empty_like(q))
    def keyword(q: Tensor, *, k: Tensor, scale: float = 1.0) -> Tensor:
        return q * scale + k.sum(0)

    w = torch.randn(4, 4)

    def f(x: Tensor) -> Tensor:
        h = x @ w
        return keyword(h, k=x, scale=2.0) @ w + keyword(x, k=h) @ w

    with compiled(f) as g:
        for n in (5, 6, 7, 5, 6):
            x = torch.randn(n, 4)
            assert_same(g(x), f(x))
        assert tgb.stats(g).replays >= 2
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.compile(f, backend="bcg")(x)
    torch.testing.assert_close(y, f(x))
    with pytest.raises(BreakOpError, match="keyword-only tensor argument"):
        y.sum().backward()
    with pytest.raises(BreakOpError, match="no gradient formula"):
        keyword.register_autograd(lambda ctx, grad: grad)
