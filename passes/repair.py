"""Repair: operations that padding would make wrong are rewritten so that padded rows do nothing, and stay captured.

Contract. ``repair(normal, classify)`` returns a graph and its classification. A repair replaces the target and the
arguments of one node, whose name and value stay, and puts a few nodes before it; these read *counts*, one tensor of one
element a bucketed size, which holds the real size and is filled with the slots (``meta["real_size"]``). At the real
size the rewritten node computes what the original did; at the bucket the padding proof has to find it safe by itself:
the new graph is classified like any other. A repaired node that is eager after all gets its original form back.

Cost. A repair that only adds arithmetic or redirects a write always pays. One that makes a masked copy of its input
costs about as much as running the operation eagerly between two segments; it pays where it joins them, so it is kept
only with captured work before it and enough of it behind (``_unpaid``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch.fx import Node

from .classify import Classified, is_view
from .normalize import NormalGraph
from .repair_edit import Editor, UnrepairableError, copied
from .repair_rules import MASKED
from .repair_table import find_rule
from .symbols import is_dense, shape_symbols

Classify = Callable[[NormalGraph], Classified]

#: More rounds than this mean that repairs and refusals chase each other: then nothing is repaired.
MAX_ROUNDS = 8


def repair(normal: NormalGraph, classify: Classify, min_kernels: int = 2) -> tuple[NormalGraph, Classified]:
    """The graph with every repair that the padding proof accepts and that pays, and its classification."""
    first = classify(normal)
    if normal.fake_mode is None:
        return normal, first
    chosen: set[str] = set()
    refused: set[str] = set()
    graph, current = normal, first
    for _ in range(MAX_ROUNDS):
        lost, new = _lost(chosen, current), _repairable(current) - chosen - refused
        unpaid = set() if lost or new else _unpaid(current, min_kernels)
        if not (lost or new or unpaid):
            return graph, current
        refused |= lost | unpaid
        wanted = (chosen | new) - refused
        made, failed = rewrite(normal, wanted, current)
        refused |= failed
        if wanted - failed == chosen:
            continue
        chosen = wanted - failed
        graph, current = (made, classify(made)) if chosen else (normal, first)
    return normal, first


def rewrite(normal: NormalGraph, names: Collection[str], seen: Classified) -> tuple[NormalGraph, set[str]]:
    """A copy of the graph with these nodes repaired, and the names of those for which no repair is known.

    ``seen``: the last classification; its layouts say where padding is.
    """
    graph = copied(normal)
    editor = Editor(graph, seen)
    failed = set()
    for node in [n for n in graph.graph.nodes if n.name in names]:
        rule = find_rule(node.target)
        editor.at(node)
        try:
            if rule is None:
                raise UnrepairableError("no repair is known")
            rule(editor, node)
        except UnrepairableError:
            editor.undo()
            failed.add(node.name)
    editor.finish()
    return graph, failed


def _repairable(seen: Classified) -> set[str]:
    """Eager nodes that a repair may help: padding is in their way, or a number (not a shape) that is in no key."""
    exact = {s.symbol for s in seen.symbols if s.kind == "exact"}
    found = set()
    for node, verdict in seen.verdicts.items():
        code = verdict.reason.code if verdict.reason is not None else ""
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        if code == "padding" or (code == "exact-symbol" and not any(shape_symbols(v) & exact for v in values)):
            found.add(node.name)
    return found


def _lost(chosen: Collection[str], seen: Classified) -> set[str]:
    """Repaired nodes that are eager all the same, or whose helpers are."""
    eager = {n for n, v in seen.verdicts.items() if v.kind == "eager"}
    return {n.name for n in eager if n.name in chosen} | {n.meta["repair_of"] for n in eager if n.meta.get("repair_of")}


def _unpaid(seen: Classified, min_kernels: int) -> set[str]:
    """Masked operations without captured work before them, or enough of it behind, in the segment that they are in. Of
    one that gave several results, one of them is enough."""
    found: dict[str, bool] = {}
    for phase in seen.phases:
        for node in phase.nodes if phase.captured else ():
            if node.meta.get("repaired") != MASKED:
                continue
            before = _spread(phase.nodes[::-1], node, lambda n: list(n.users))
            after = _spread(phase.nodes, node, lambda n: n.all_input_nodes)
            pays = bool(before) and (len(after) >= min_kernels or any(is_dense(n) for n in after))
            name = node.meta.get("repair_of", node.name)
            found[name] = pays or found.get(name, False)
    return {name for name, pays in found.items() if not pays}


def _spread(nodes: Sequence[Node], start: Node, adjacent: Callable[[Node], Collection[Node]]) -> list[Node]:
    """The kernels of the user's that are connected with ``start``; ``nodes`` are ordered away from it."""
    reached = {start}
    for node in nodes:
        if any(n in reached for n in adjacent(node)):
            reached.add(node)
    helpers = ("repair_of", "shared")
    return [
        n for n in nodes if n in reached and n is not start and not is_view(n) and not any(map(n.meta.get, helpers))
    ]
