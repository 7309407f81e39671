"""Generated code: it compiles, reads as expected, and answers as Dynamo's graph for every kind of argument and name."""

from __future__ import annotations

import copy
import math
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from graph_harness import Seen, assert_golden, assert_same, compiled, take_one
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Min, Mod, ToFloat, TruncToInt

from torch_graph_backend.codegen import Program, generate, size_code, size_function
from torch_graph_backend.plan import CapturedSegment, Plan, Ref


class Plain:
    """The frame of a driver without padding, buffers and recordings: segments run as Python on the arguments."""

    def __init__(self, seen: Seen, plan: Plan, program: Program, args: Sequence[Any]) -> None:
        self.seen, self.plan, self.program, self.args = seen, plan, program, args
        self.sizes = program.sizes_of(args)
        self.slots: list[Any] = []
        self.bridges: dict[int, Any] = {}
        self.values: dict[str, Any] = {}
        self.owned: list[Any] = []

    def fill(self, args: Sequence[Any]) -> None:
        self.slots = [args[s.arg].clone() for s in self.plan.slots]

    def segment(self, index: int) -> list[Any]:
        step = self.plan.steps[index]
        assert isinstance(step, CapturedSegment)
        outputs = self.program.steps[index](*self.sizes, *(self.value(ref) for _, ref in step.inputs))
        self.values.update(zip(step.outputs, outputs, strict=True))
        return [self.values[c.value].clone() for c in self.plan.cuts if c.after == index]

    def value(self, ref: Ref) -> Any:
        assert self.seen.normal is not None
        kinds = {
            "arg": lambda k: self.args[k],
            "slot": lambda k: self.slots[k],
            "bridge": lambda k: self.bridges[k],
            "const": lambda k: self.seen.normal.constants[k],
            "static": lambda k: self.values[k],
        }
        return kinds[ref.kind](ref.key)

    def bridge(self, index: int, values: Sequence[Any]) -> None:
        which = [i for i, b in enumerate(self.plan.bridges) if b.after == index]
        self.bridges.update({i: v.clone() for i, v in zip(which, values, strict=True)})

    def own(self, value: Any) -> Any:
        self.owned.append(value)
        return value


def program_of(seen: Seen, *breaks: Any) -> tuple[Plan, Program]:
    plan = seen.plan(*breaks)
    assert seen.normal is not None
    return plan, generate(plan, seen.normal)


def checked(
    function: Callable[..., Any], *args: Any, breaks: Sequence[Any] = (), dynamic: bool | None = None
) -> Program:
    """The program of ``function``, whose answers and changes of arguments equal those of Dynamo's graph."""
    seen = take_one(function, *args, dynamic=dynamic)
    plan, program = program_of(seen, *breaks)
    compile(program.source, "generated", "exec")
    ours, theirs = copy.deepcopy(seen.args), copy.deepcopy(seen.args)
    with torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            got = program.run(ours, program.sizes_of(ours), Plain(seen, plan, program, ours))
            torch.manual_seed(0)
            want = seen.gm.forward(*theirs)
            assert_same(list(got), list(want))
            assert_same(ours, theirs)
    return program


# --- text -------------------------------------------------------------------------------------------------------------


def small(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A segment, a break, a segment with a size in it, and a literal."""
    y = F.linear(x, w).tanh()
    z = F.softmax(y, 0)
    return (z @ w).view(x.shape[0] * 2, -1) * torch.tensor([1.0, 2.0])


def test_golden_source() -> None:
    """The whole text, once: what a traceback shows and what a reader of a bug report sees."""
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    assert_golden("codegen_small", program_of(take_one(small, x, torch.randn(4, 4)))[1].source)


def test_the_source_does_not_depend_on_the_run() -> None:
    """Two compilations give one text: a diff of two dumps shows differences of plans alone."""
    x, w = torch.randn(6, 4), torch.randn(4, 4)
    assert program_of(take_one(small, x, w))[1].source == program_of(take_one(small, x, w))[1].source


def test_a_traceback_shows_the_generated_line() -> None:
    """A user's exception inside a break must be readable without our sources."""

    @torch.library.custom_op("tgb_codegen_test::fail", mutates_args=())
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("from the user")

    @fail.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def f(x: torch.Tensor) -> torch.Tensor:
        return fail(x.sin()).cos()

    with pytest.raises(RuntimeError, match="from the user") as raised, compiled(f, min_segment_kernels=1) as g:
        g(torch.randn(3))
    assert "fail = tgb_codegen_test_fail_default(" in "".join(traceback.format_exception(raised.value))


# --- arguments --------------------------------------------------------------------------------------------------------

X = torch.tensor([[1.0, -2.0, 3.0, 0.5], [0.0, 5.0, -6.0, 7.0], [2.0, 2.5, -1.0, 4.0]])

ARGUMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "inf": lambda x: x.masked_fill(x > 1, float("-inf")).clamp(max=float("inf")) + float("inf"),
    "nan": lambda x: torch.full_like(x, float("nan")).nan_to_num(nan=0.25) + x.nan_to_num(float("inf"), -1e308),
    "tiny floats": lambda x: x * 1e-45 + 1e-300 - -0.0 + 1e22,
    "large integers": lambda x: x.long() + (2**62) - 1,
    "complex": lambda x: torch.view_as_real(torch.full_like(x, 1 + 2j, dtype=torch.complex64)),
    "complex operand": lambda x: torch.view_as_real(x.to(torch.complex64) * 1j + complex(float("inf"), 0)),
    "bool": lambda x: torch.full_like(x, True, dtype=torch.bool),
    "slices": lambda x: (x[1:, ::2], x[..., None, -1], x[None, :2], x[:, 1:3][:-1], x[-2:], x[torch.tensor([2, 0])]),
    "dtypes": lambda x: (x.to(torch.bfloat16), x.double(), x.to(dtype=torch.int32), torch.zeros(2, dtype=torch.int8)),
    "devices": lambda x: (torch.zeros(2, device="cpu") + x[0, 0], x.to(torch.device("cpu")), x.to("cpu", torch.half)),
    "layouts": lambda x: (torch.empty_like(x, memory_format=torch.preserve_format).fill_(1), x.t().contiguous()),
    "kwargs": lambda x: (x.sum(dim=-1, keepdim=True), x.argmax(dim=0), torch.std(x, dim=1, correction=0)),
    "strings": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "quotes": lambda x: torch.einsum("ij,kj->ik", x, x) + F.interpolate(x[None], scale_factor=2.0)[0, 0, 0],
    "none": lambda x: torch.clamp(x, min=None, max=1.0) + torch.clamp(x, 0.5, None),
    "lists": lambda x: torch.cat([x, x.flip([0, 1])], 1).permute(1, 0).reshape([2, -1]),
    "empty list": lambda x: x.sum(()).reshape([]) + x[0, 0].reshape(()),
    "tuples": lambda x: (x.split([1, 3], 1)[1], *x.topk(2), x.unbind()[2], torch.broadcast_tensors(x, x[0])[1]),
    "out": lambda x: torch.neg(x, out=torch.empty_like(x)),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1.5)[1],
    "factories": lambda x: torch.arange(3)[:, None] + torch.linspace(0, 1, 4) + torch.eye(3, 4) + x,
    "tril": lambda x: torch.tril(torch.ones(4, 4, dtype=torch.bool), diagonal=-1).float() @ x.t(),
    "setitem": lambda x: _assigned(x),
    "draws": lambda x: (torch.rand(2), x.clone().uniform_(0.5, 1), torch.randint(0, 5, (2,)), x.clone().random_(2, 9)),
}  # fmt: skip


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 9
    y[:, 1] = y[:, 2]
    y[y > 4] = -1
    y[torch.tensor([0, 1]), torch.tensor([3, 3])] += 5
    return y


@pytest.mark.parametrize("breaks", [(), ("everything",)], ids=["captured", "eager"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, breaks: tuple[str, ...]) -> None:
    """Every kind of argument survives the way through text, in segments and in eager regions."""
    function = ARGUMENTS[name]
    seen = take_one(lambda x: function(x), X.clone())
    targets = {n.target for n in seen.calls() if hasattr(n.target, "_schema")} if breaks else ()
    plan, program = program_of(seen, *targets)
    assert not breaks or not plan.segments
    args = copy.deepcopy(seen.args)
    with torch.no_grad():
        torch.manual_seed(0)
        got = program.run(args, program.sizes_of(args), Plain(seen, plan, program, args))
        torch.manual_seed(0)
        assert_same(list(got), list(seen.gm.forward(*seen.args)))


def test_autocast_regions() -> None:
    """Nested, disabled, left and entered again, in one step."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x @ x.t()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = x @ x.t()
            with torch.autocast("cpu", enabled=False):
                c = x @ x.t()
            d = b @ b
        with torch.autocast("cpu", dtype=torch.float16):
            e = x @ x.t()
        return a, b, c, d, e, x @ x.t()

    source = checked(f, X).source
    assert source.count("with autocast('cpu'") == 5
    assert not torch.is_autocast_enabled("cpu")


# --- names ------------------------------------------------------------------------------------------------------------

WEIRD = [
    "class",
    "lambda",
    "None",
    "A",
    "S",
    "F",
    "run",
    "step_0",
    "cut_0",
    "torch",
    "math",
    "s0",
    "with space",
    "ö",
    "1",
]


def test_weird_argument_names() -> None:
    """Keywords, builtins and the driver's own names as keys of an argument."""

    def f(x: dict[str, torch.Tensor]) -> torch.Tensor:
        total = x["class"].sin()
        for value in x.values():
            total = total.softmax(0) + value
        return total

    checked(f, {name: torch.randn(3) for name in WEIRD})


@pytest.mark.parametrize(
    "name",
    [
        "A",
        "S",
        "F",
        "run",
        "step_0",
        "step_1",
        "math",
        "torch",
        "sizes_of",
        "autocast",
        "v_sin",
        "cut_0",
        "int",
        "self",
    ],
)
def test_weird_operation_names(name: str) -> None:
    """A library may call its operation anything; node names come from it. Sizes and autocast in the same step."""
    with torch.library._scoped_library("tgb_codegen_names", "FRAGMENT") as lib:
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")
        op = getattr(torch.ops.tgb_codegen_names, name)

        def f(x: torch.Tensor) -> torch.Tensor:
            n = x.shape[0]
            y = op(x.sin()).cos()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = op(op(y) @ x.t()[:, :3])
            return y.float() * math.floor(n / 2) + y.new_ones(max(n, 3), 3)

        checked(f, torch.randn(5, 4), dynamic=True)


@pytest.mark.parametrize("name", ["run", "step_0", "sizes_of", "A", "math", "torch", "<lambda>", "class"])
def test_weird_function_names(name: str) -> None:
    """A function that could not be traced is a global of the generated module: it must not collide with its parts."""

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    odd.__name__ = name

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().tanh().cos()

    seen = take_one(f, torch.randn(3))
    node = seen.one("aten.tanh")
    node.target, node.meta["opaque"] = odd, "RuntimeError: no"
    plan, program = program_of(seen)
    (got,) = program.run(seen.args, program.sizes_of(seen.args), Plain(seen, plan, program, seen.args))
    assert_same(got, (seen.args[0].sin() * 3).cos())


def test_user_variables_named_as_the_drivers() -> None:
    """Dynamo names nodes after the user's variables; higher-order ops keep that name."""

    def f(x: torch.Tensor) -> torch.Tensor:
        A = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        S = torch.cond(A.sum() > 0, torch.sin, torch.cos, (A,))
        F_ = torch.cond(S.sum() > 0, torch.sin, torch.cos, (S,))
        return A + S + F_

    checked(f, torch.randn(3))


# --- lifetime ---------------------------------------------------------------------------------------------------------


def test_a_value_dies_after_its_last_use() -> None:
    """An eager region must not hold more memory than eager code does."""
    alive: list[int] = []
    seen_values: list[weakref.ref[Any]] = []

    @torch.library.custom_op("tgb_codegen_test::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(r() is not None for r in seen_values))
        out = x + 1
        seen_values.append(weakref.ref(out.untyped_storage()))
        return out

    @count.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = count(x)
        return x

    seen = take_one(f, torch.randn(3))
    plan, program = program_of(seen)
    alive.clear()
    seen_values.clear()
    program.run(seen.args, (), Plain(seen, plan, program, seen.args))
    assert len(alive) == 5
    assert max(alive) <= 1


# --- sizes ------------------------------------------------------------------------------------------------------------

a, b = sympy.symbols("a b", integer=True, positive=True)
SIZES = [
    a + 2 * b - 1,
    a * b,
    FloorDiv(a, 2),
    FloorDiv(a + b - 1, b) * b,
    Mod(a, b),
    Max(a, b),
    Min(a, 3),
    Max(1, Min(a, b) - 1),
    a**2,
    sympy.Integer(7),
    TruncToInt(IntTrueDiv(a, 2)),
    CeilToInt(IntTrueDiv(a, b)),
    sympy.Piecewise((a, sympy.Gt(a, b)), (b, True)),
]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60))
def test_size_expressions(x: int, y: int) -> None:
    """Floor division, modulo, bounds and true division, as Python, against sympy."""
    got = size_function(["a", "b"], SIZES)(x, y)
    want = [e.subs({a: x, b: y}) for e in SIZES]
    assert [int(g) for g in got] == [int(w) for w in want]
    assert all(type(g) is int for g in got)


def test_size_code_of_conditions_and_floats() -> None:
    """Guards are booleans, scales are floats."""
    names = {"a": 9, "b": 2, "math": math, "torch": torch}
    cases = [(sympy.Gt(a, b), True), (sympy.Eq(Mod(a, 2), 1), True), (IntTrueDiv(a, b), 4.5), (ToFloat(a) * 0.5, 4.5)]
    for expr, want in cases:
        got = eval(size_code(expr), names)
        assert got == want
        assert type(got) is type(want)


def test_no_sizes() -> None:
    """``()`` and not a syntax error."""
    assert size_function([], [])() == ()
    assert size_function(["a"], [sympy.Integer(3)])(1) == (3,)


@pytest.mark.parametrize(
    "breaks", [(), ("aten::view", "aten::mul", "aten::sum", "aten::expand")], ids=["free", "broken"]
)
def test_sizes_at_call_time(breaks: tuple[str, ...]) -> None:
    """Sizes are read from the arguments of each call, in captured and in eager code, also as results."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        n = x.shape[0]
        y = (x @ w).view(n // 2, 2, -1) * (n * 0.5) * n**-0.5
        z = y.sum(1).expand(min(n, 3) * 0 + n // 2, 4)
        return z, max(n, 5), n % 4, math.ceil(n / 3), n / 4

    w = torch.randn(4, 4)
    with compiled(f, buckets=[8, 16], break_ops=list(breaks)) as g:
        for n in (6, 8, 10, 6, 8):
            x = torch.randn(n, 4)
            torch._dynamo.mark_dynamic(x, 0)
            got, want = g(x, w), f(x, w)
            torch.testing.assert_close(got[0], want[0])
            assert got[1:] == want[1:]
