"""Partition: every dependence is respected, segments and steps are as few as any schedule allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from torch_graph_backend.passes.partition import Phase, partition


@dataclass(frozen=True)
class Dag:
    """``kinds[i]``: whether node i is captured; ``needs[i]``: earlier nodes that must have run."""

    kinds: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]


@st.composite
def dags(draw: st.DrawFn, most: int = 12) -> Dag:
    """A random program: node i depends on some earlier nodes."""
    n = draw(st.integers(0, most))
    kinds = tuple(draw(st.booleans()) for _ in range(n))
    most_needs = draw(st.integers(1, 3))  # sparse programs have several chains that a schedule can interleave
    needs = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=most_needs)))) if i else () for i in range(n)
    )
    return Dag(kinds, needs)


def run(dag: Dag, outside: int = 0) -> tuple[list[Node], tuple[Phase, ...]]:
    """Partition a DAG; every node also needs ``outside`` nodes that are not scheduled (arguments)."""
    graph = Graph()
    arguments = [graph.placeholder(f"a{i}") for i in range(outside)]
    nodes = [graph.call_function(len, name=f"n{i}") for i in range(len(dag.kinds))]
    needs = {n: [*arguments, *(nodes[d] for d in ds)] for n, ds in zip(nodes, dag.needs, strict=True)}
    captured = {n for n, kind in zip(nodes, dag.kinds, strict=True) if kind}
    return nodes, partition(nodes, captured, needs.__getitem__)


def fewest(dag: Dag) -> tuple[int, int]:
    """Brute force over all schedules: the fewest captured segments, and the fewest steps among those schedules."""
    n = len(dag.kinds)
    everything = (1 << n) - 1

    @cache
    def best(done: int, kind: bool) -> tuple[int, int]:
        """The rest after ``done``, if the step that runs now is of ``kind`` and was counted already."""
        if done == everything:
            return 0, 0
        options = []
        for i in range(n):
            if not done >> i & 1 and all(done >> d & 1 for d in dag.needs[i]):
                segments, steps = best(done | 1 << i, dag.kinds[i])
                new = dag.kinds[i] != kind
                options.append((segments + (new and dag.kinds[i]), steps + new))
        return min(options)

    if not n:
        return 0, 0
    starts = []
    for kind in (True, False):
        segments, steps = best(0, kind)
        starts.append((segments + kind, steps + 1))
    return min(starts)


@settings(max_examples=200, deadline=None)
@given(dags(), st.integers(0, 2))
def test_every_node_once_after_what_it_needs(dag: Dag, outside: int) -> None:
    """Catches a lost or doubled node, a dependence against the order, and a step of mixed or repeated kind."""
    nodes, phases = run(dag, outside)
    order = [n for p in phases for n in p.nodes]
    assert len(order) == len(set(order)) == len(nodes)
    at = {n: i for i, n in enumerate(order)}
    for node, deps in zip(nodes, dag.needs, strict=True):
        assert all(at[nodes[d]] < at[node] for d in deps)
    for phase in phases:
        assert phase.nodes
        assert {dag.kinds[nodes.index(n)] for n in phase.nodes} == {phase.captured}
        places = [nodes.index(n) for n in phase.nodes]
        assert places == sorted(places)


@settings(max_examples=200, deadline=None)
@given(dags())
def test_phases_alternate(dag: Dag) -> None:
    """Two captured segments in a row would be one launch too many."""
    _, phases = run(dag)
    assert all(a.captured != b.captured for a, b in pairwise(phases))


@settings(max_examples=300, deadline=None)
@given(dags(most=8))
def test_segments_and_steps_are_minimal(dag: Dag) -> None:
    """No schedule at all has fewer captured segments, and none with as few has fewer steps."""
    _, phases = run(dag)
    assert (sum(p.captured for p in phases), len(phases)) == fewest(dag)


@settings(max_examples=100, deadline=None)
@given(dags())
def test_same_answer_every_time(dag: Dag) -> None:
    """A plan must not depend on the order of a set."""
    names = [[(p.captured, [n.name for n in p.nodes]) for p in run(dag)[1]] for _ in range(2)]
    assert names[0] == names[1]


def test_either_kind_may_come_first() -> None:
    """Eager first saves a segment where an eager node feeds everything, captured first where it feeds nothing."""
    assert [p.captured for p in run(Dag((False, True, True), ((), (0,), (1,))))[1]] == [False, True]
    assert [p.captured for p in run(Dag((True, False), ((), (0,))))[1]] == [True, False]
    assert [p.captured for p in run(Dag((True, False, True), ((), (), (1,))))[1]] == [False, True]


def test_two_chains_interleave() -> None:
    """Captured, eager, captured beside eager, captured: two segments serve both chains, started at either end."""
    _, phases = run(Dag((True, False, True, False, True), ((), (0,), (1,), (), (3,))))
    assert [p.captured for p in phases] == [True, False, True]
    assert [len(p.nodes) for p in phases] == [1, 2, 2]


def test_independent_nodes_move_past_a_break() -> None:
    """A captured node that the break does not need may run before or after it, so there is one segment and not two."""
    _, phases = run(Dag((True, False, True, True), ((), (), (0,), (1, 2))))
    assert [p.captured for p in phases] == [False, True]


def test_nothing_to_schedule() -> None:
    """A graph of size arithmetic alone."""
    assert run(Dag((), ()))[1] == ()
