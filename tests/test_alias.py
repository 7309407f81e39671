"""Aliasing against real storages: sets, writers, versions, and an order under which every schedule answers as eager."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import assert_same, take_one
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from torch_graph_backend.passes.alias import Aliasing, analyse_aliases, is_random, written_args
from torch_graph_backend.passes.normalize import NormalGraph, normalise

aten = torch.ops.aten
Op = tuple[str, Callable[..., Any], tuple[Any, ...]]

#: Operations on one tensor. Views, maybe-views, copies, writers, draws; what eager refuses is left out of a program.
UNARY: list[tuple[Any, ...]] = [
    ("view", -1), ("reshape", -1), ("flatten",), ("transpose", 0, -1), ("unsqueeze", 0), ("squeeze",), ("contiguous",),
    ("expand", 2, -1, -1), ("narrow", 0, 0, 1), ("select", 0, 0), ("detach",), ("float",), ("double",), ("to", "cpu"),
    ("clone",), ("abs",), ("diagonal",), ("unfold", 0, 1, 1), ("as_strided", (2,), (1,)),
    ("add_", 1), ("mul_", 2), ("zero_",), ("relu_",), ("fill_", 3), ("clamp_", -1, 1), ("bernoulli_",), ("t",),
    (torch.rand_like,), (torch.atleast_2d,), (torch.positive,), (torch.conj,), (F.relu,), (F.dropout, 0.5, False),
    (operator.getitem, slice(0, 1)), (operator.getitem, (Ellipsis, 0)), (operator.getitem, None),
    (operator.setitem, 0, 5.0), (operator.iadd, 1), (torch.ravel,), (torch.real,), (F.relu, True), (torch.zeros_like,),
]  # fmt: skip
#: Operations on two tensors.
BINARY: list[tuple[Any, ...]] = [
    ("add",), ("add_",), ("copy_",), ("type_as",), ("view_as",), ("expand_as",), ("mul_",), (torch.maximum,),
    ("reshape_as",), (operator.isub,),
]  # fmt: skip
#: Operations with several results; the item that is used.
TUPLES: list[tuple[Any, ...]] = [("split", 1), ("chunk", 2), ("unbind",), (torch.atleast_1d,), ("max", 0)]


@dataclass
class Program:
    """A random program: its normalised graph, fresh arguments, and what the analysis says."""

    normal: NormalGraph
    args: list[torch.Tensor]
    aliasing: Aliasing


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Up to ten operations on two arguments; one of them may be a view of the other's memory in eager, never here."""
    args = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t() - 2]
    live = copy.deepcopy(args)
    graph = Graph()
    values: list[tuple[Node, torch.Tensor]] = []
    with FakeTensorMode() as mode:
        pass
    for i, arg in enumerate(args):
        node = graph.placeholder(f"a{i}")
        node.meta["example_value"] = mode.from_tensor(arg)
        values.append((node, live[i]))
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from([UNARY, UNARY, BINARY, TUPLES]))
        function, *rest = draw(st.sampled_from(kind))
        operands = [draw(st.sampled_from(values)) for _ in range(2 if kind is BINARY else 1)]
        add(graph, values, function, operands, rest)
    shown = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    graph.output(tuple(n for n, _ in shown))
    normal = normalise(GraphModule(torch.nn.Module(), graph))
    return Program(normal, args, analyse_aliases(normal.graph))


def add(graph: Graph, values: list[Any], function: Any, operands: list[Any], rest: Sequence[Any]) -> None:
    """Append one operation and its result, unless eager refuses it here."""
    real = [t for _, t in operands]
    before = [t.clone() for t in real]
    try:
        call = function if callable(function) else getattr(torch.Tensor, function)
        result = call(*real, *rest)
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        assert all(torch.equal(a, b) for a, b in zip(real, before, strict=True))
        return
    make = graph.call_function if callable(function) else graph.call_method
    node = make(function, (*(n for n, _ in operands), *rest))
    if isinstance(result, (tuple, list)):
        for i, item in enumerate(result):
            if item.is_floating_point():
                values.append((graph.call_function(operator.getitem, (node, i)), item))
    elif isinstance(result, torch.Tensor) and result.numel():
        values.append((node, result))


def evaluate(node: Node, env: dict[Node, Any], program: Program) -> Any:
    """One operation on real values."""
    if node.op == "get_attr":
        return program.normal.constants[str(node.target)]
    args, kwargs = torch.fx.node.map_aggregate(
        (node.args, dict(node.kwargs)), lambda a: env.get(a, a) if isinstance(a, Node) else a
    )
    return node.target(*args, **kwargs)


def run(program: Program, order: Sequence[Node]) -> tuple[dict[Node, Any], list[torch.Tensor]]:
    """All values and the arguments after running the graph in ``order``."""
    args = copy.deepcopy(program.args)
    env: dict[Node, Any] = dict(zip(program.normal.placeholders, args, strict=True))
    torch.manual_seed(0)
    for node in order:
        env[node] = evaluate(node, env, program)
    return env, args


def body(program: Program) -> list[Node]:
    return [n for n in program.normal.graph.nodes if n.op in ("call_function", "get_attr")]


def storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() or None if isinstance(value, torch.Tensor) else None


def check_storages(program: Program) -> None:
    """Values that share storage are in one set, and every change of bytes is in ``writes``."""
    args = copy.deepcopy(program.args)
    env: dict[Node, Any] = dict(zip(program.normal.placeholders, args, strict=True))
    for node in body(program):
        before = {n: v.clone() for n, v in env.items() if isinstance(v, torch.Tensor)}
        env[node] = evaluate(node, env, program)
        changed = {n for n, v in before.items() if not torch.equal(v.nan_to_num(), env[n].nan_to_num())}
        sets = {program.aliasing.set_of[n] for n in changed}
        assert sets <= program.aliasing.writes.get(node, frozenset()), f"{program.normal.graph}\n{node} {changed}"
        assert not sets or written_args(node)
        assert all(program.aliasing.written(n) for n in changed)
    by_storage: dict[int, set[int]] = {}
    for node, value in env.items():
        where = storage(value)
        if where is not None and "opaque" not in node.meta:  # these graphs do not say what an untraced node gives
            by_storage.setdefault(where, set()).add(program.aliasing.set_of[node])
    assert all(len(s) == 1 for s in by_storage.values()), f"{program.normal.graph}\n{by_storage}"


def check_versions(program: Program) -> None:
    """A reader's version is the number of writes to the set before it; a plan picks its bridge or cut by it."""
    aliasing = program.aliasing
    changed = {s for sets in aliasing.writes.values() for s in sets}
    count: dict[int, int] = {}
    for node in body(program):
        touched = {aliasing.set_of[a] for a in node.all_input_nodes if a in aliasing.set_of} & changed
        for s in touched | aliasing.writes.get(node, frozenset()):
            assert aliasing.version[node, s] == count.get(s, 0)
        for s in aliasing.writes.get(node, ()):
            count[s] = count.get(s, 0) + 1


def check_structure(program: Program) -> None:
    """Order looks back only; members come in program order; the first member is a base, made from no other member."""
    aliasing = program.aliasing
    position = {n: i for i, n in enumerate(program.normal.graph.nodes)}
    assert all(position[b] < position[n] for n, before in aliasing.order.items() for b in before)
    for set_id, members in aliasing.members.items():
        assert all(aliasing.set_of[m] == set_id for m in members)
        assert [position[m] for m in members] == sorted(position[m] for m in members)
        bases = aliasing.bases(set_id)
        assert members[0] in bases
        assert all(not set(b.all_input_nodes) & set(members) for b in bases)


@settings(max_examples=150, deadline=None)
@given(programs())
def test_sets_writers_and_versions_against_real_storages(program: Program) -> None:
    """Catches a missed view or writer: a write on one side would not be seen by a reader on the other."""
    check_storages(program)
    check_versions(program)
    check_structure(program)


@settings(max_examples=150, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_any_order_that_respects_inputs_and_memory_gives_the_same(program: Program, rng: random.Random) -> None:
    """The point of ``order``: the partition moves nodes, and the caller must not be able to tell."""
    nodes = body(program)
    shown = next(n for n in program.normal.graph.nodes if n.op == "output").all_input_nodes
    want, args = run(program, nodes)
    waiting, order = list(nodes), []
    done = set(program.normal.placeholders)
    while waiting:
        ready = [n for n in waiting if {*n.all_input_nodes, *program.aliasing.order.get(n, ())} <= done]
        node = rng.choice(ready)
        waiting.remove(node)
        done.add(node)
        order.append(node)
    got, moved = run(program, order)
    assert_same([got[n] for n in shown], [want[n] for n in shown])
    assert_same(moved, args)


# --- single cases -----------------------------------------------------------------------------------------------------


def analysed(function: Callable[..., Any], *args: Any) -> tuple[list[Node], Aliasing, Any]:
    seen = take_one(function, *args)
    aliasing = analyse_aliases(seen.graph)
    return [n for n in seen.graph.nodes if n.op == "call_function"], aliasing, seen


def test_users_of_an_in_place_result_use_the_tensor_itself() -> None:
    """``y = x.add_(1)`` is the same object: a second name would need a second buffer."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.add_(1)
        return y * x

    nodes, _, _ = analysed(f, torch.randn(3))
    assert [n.name for n in nodes[1].args] == ["l_x_", "l_x_"]
    assert not nodes[0].users


def test_unrelated_values_are_in_different_sets() -> None:
    """Over-approximation would pull everything to the eager side."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x + 1
        b = y.clone()
        b.add_(a)
        return a.view(-1) * b.view(-1)

    nodes, aliasing, seen = analysed(f, torch.randn(2, 2), torch.randn(2, 2))
    sets = {n.name: aliasing.set_of[n] for n in seen.graph.nodes if n in aliasing.set_of}
    assert len({sets["l_x_"], sets["l_y_"], sets["a"] if "a" in sets else sets["add"], sets["clone"]}) == 4
    assert [n for n in nodes if aliasing.writes.get(n)] == [n for n in nodes if n.target is aten.add_.Tensor]


def test_out_arguments_and_foreach_are_writes() -> None:
    """Catches a writer that is no method with a trailing underscore."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        torch.neg(x, out=y)
        torch._foreach_add_([x, z], 1.0)
        return x + y + z

    seen = take_one(f, torch.randn(2), torch.randn(2), torch.randn(2))
    aliasing = analyse_aliases(seen.graph)
    x, y, z = (p for p in seen.graph.nodes if p.op == "placeholder")
    by_name = {n.name: {a.name for a in written_args(n)} for n in seen.calls()}
    assert {frozenset(w) for w in by_name.values() if w} == {frozenset({y.name}), frozenset({x.name, z.name})}
    last = seen.calls()[-2]
    assert set(aliasing.order[last])
    assert all(aliasing.written(p) for p in (x, y, z))


def test_random_draws_keep_their_order() -> None:
    """Two draws that depend on nothing must not change places, or the same seed gives other numbers."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.rand(2)
        b = torch.randn(2)
        return x + a, x + b

    nodes, aliasing, _ = analysed(f, torch.randn(2))
    draws = [n for n in nodes if is_random(n)]
    assert len(draws) == 2
    assert draws[0] in aliasing.order[draws[1]]


def recurrent(x: torch.Tensor, dropout: float, train: bool) -> torch.Tensor:
    """Two recurrent layers, with dropout between them."""
    weights = [x.new_ones(9, 4), x.new_ones(9, 3), x.new_ones(9, 3), x.new_ones(9, 3)]
    return torch.gru(x[0], x.new_zeros(2, 4, 3), weights, False, 2, dropout, train, False, False)[0]


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda x: F.dropout(x, 0.5, False), False),
        (lambda x: F.dropout(x, 0.0, True), False),
        (lambda x: F.dropout(x, 0.5, True), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), True),
        (lambda x: torch.bernoulli(x.abs().clamp(max=1)), True),
        (lambda x: x * 2, False),
        (lambda x: recurrent(x, 0.5, False), False),
        (lambda x: recurrent(x, 0.0, True), False),
        (lambda x: recurrent(x, 0.5, True), True),
    ],
    ids=[
        *("dropout-off", "dropout-0", "dropout", "sdpa", "sdpa-dropout", "bernoulli", "mul"),
        *("gru-off", "gru-0", "gru-dropout"),
    ],
)
def test_what_draws(function: Callable[..., Any], draws: bool) -> None:
    """Dropout that is off must be capturable; dropout that is on must not be."""
    nodes, _, _ = analysed(lambda x: function(x) + 1, torch.randn(1, 2, 4, 4))
    assert any(is_random(n) for n in nodes) is draws


def test_custom_operations_keep_their_order_and_fence_the_callers_memory() -> None:
    """Two ops of a library may share hidden state; a write to the caller's memory must not overtake one."""

    def fill_kernel(x: torch.Tensor, y: torch.Tensor) -> None:
        x.copy_(y)

    with torch.library._scoped_library("tgb_alias_test", "FRAGMENT") as lib:
        lib.define("touch(Tensor x) -> Tensor")
        lib.impl("touch", lambda x: x + 1, "CompositeExplicitAutograd")
        lib.define("fill(Tensor(a!) x, Tensor y) -> ()")
        lib.impl("fill", fill_kernel, "CPU")
        lib.impl("fill", lambda x, y: None, "Meta")

        def f(x: torch.Tensor, cache: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a = torch.ops.tgb_alias_test.touch(x)
            cache.add_(1)
            b = torch.ops.tgb_alias_test.touch(x * 2)
            torch.ops.tgb_alias_test.fill(other, x)
            return a + b, other * 2

        nodes, aliasing, seen = analysed(f, torch.randn(2), torch.randn(2), torch.randn(2))
    first, second = seen.calls("tgb_alias_test.touch")
    (write,), (fill,) = seen.calls("aten.add_.Tensor"), seen.calls("tgb_alias_test.fill")
    assert first in aliasing.order[second]
    assert first in aliasing.order[write]
    assert write in aliasing.order[second]
    assert second in aliasing.order[fill]
    assert [a.name for a in written_args(fill)] == ["l_other_"]
    assert fill in aliasing.order[nodes[-1]]


def test_an_effect_can_be_declared() -> None:
    """A break op is an effect: the caller's memory is written on the same side of it as in eager code."""

    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        cache.add_(1)
        return y

    seen = take_one(f, torch.randn(2), torch.randn(2))
    sin, write = seen.calls()
    assert sin not in analyse_aliases(seen.graph).order[write]
    assert sin in analyse_aliases(seen.graph, lambda n: n is sin).order[write]


@pytest.mark.parametrize("writes", [False, True])
def test_a_branch_may_write_what_it_was_given(writes: bool) -> None:
    """A higher-order op with an in-place body changes its arguments; with a pure body it must not count as a writer."""

    def f(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = torch.cond(p, lambda t: t.clone().add_(1) if writes else t + 1, lambda t: t - 1, (y,))
        return z + y

    nodes, aliasing, seen = analysed(f, torch.randn(2), torch.tensor(True))
    (cond,) = seen.calls("cond")
    assert bool(aliasing.writes.get(cond)) is writes
    assert (cond in aliasing.order[nodes[-1]]) is writes


@pytest.mark.parametrize(
    "maybe_view",
    [
        lambda x: torch.atleast_1d(x.type_as(x).contiguous()),
        lambda x: F.dropout(x, 0.5, False),
        lambda x: x.reshape(2),
        lambda x: torch.broadcast_tensors(x, x)[0],
    ],
    ids=["type_as", "dropout", "reshape", "broadcast"],
)
def test_views_through_maybe_views(maybe_view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """No schema says that ``type_as``, ``atleast_1d`` or dropout at inference may return their input."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = maybe_view(x)
        y.add_(1)
        return x * 2

    nodes, aliasing, seen = analysed(f, torch.randn(2))
    (x,) = (p for p in seen.graph.nodes if p.op == "placeholder")
    assert aliasing.written(x)
    assert aliasing.order[nodes[-1]] == tuple(seen.calls("aten.add_.Tensor"))
