"""Declared tails against the padding proof: which declarations a graph may have, and what is captured thanks to them.

Contract. Pure. A declaration is refused if the proof captures less with it than without: an index whose padded entries
are no copy of row 0 may be out of range. One more is refused whatever the proof says, since a mistake there destroys
memory: a tail that keeps old entries, on an index that a captured write uses. What is captured with the accepted ones
and would not be without is listed as *declared*: an audit looks there first.

*Reserved rows.* A write of padded rows that no repair covers (accumulating ones) is accepted if every padded entry of
its index is one valid constant: that row of the memory is the user's reserved one, and its content is no longer
eager's. Where a repair exists it is preferred, and the memory is eager's to the last byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from .alias import arguments
from .capturable import name_of
from .classify import Classified
from .normalize import NormalGraph
from .padding_rules_declared import TRASH
from .padding_tails import Tail
from .reasons import Reason
from .repair import repair
from .repair_edit import copied
from .source_lines import where
from .torch_api import OpOverload

Judge = Callable[[NormalGraph], Classified]
#: What the graph as it is says against a declaration, by the placeholder's name.
Vet = Callable[[Classified], Mapping[str, Reason]]

#: Operations that write rows through an index, in place or not.
WRITES = frozenset({
    "index_put", "_unsafe_index_put", "_index_put_impl", "index_copy", "index_add", "index_fill", "index_reduce",
    "scatter", "scatter_add", "scatter_reduce", "masked_scatter",
})  # fmt: skip
#: Reasons of policy: a node that is eager for one of these is none that a declaration harmed.
_COST = frozenset({"small-segment", "returned-copy"})


@dataclass(frozen=True)
class Proved:
    """``refused``: declarations that are not applied, by placeholder; ``declared``: captured nodes that would not be
    captured as they are without a declaration, by name, and why."""

    normal: NormalGraph
    classified: Classified
    refused: dict[str, Reason]
    declared: dict[str, str]


def prove(
    normal: NormalGraph,
    judge: Judge,
    min_kernels: int,
    tails: Mapping[str, Tail],
    names: Mapping[str, str],
    vet: Vet,
) -> Proved:
    """Repair and classify under the declared ``tails`` of placeholders; ``names``: what the user calls these."""
    graph, plain = repair(normal, judge, min_kernels)
    objections = vet(plain)
    if not names:
        return Proved(graph, plain, {}, {})
    refused = {n: r for n, r in objections.items() if n in names}
    refused |= {n: r for n, r in _written(graph, plain, tails, names).items() if n not in refused}
    wanted = {n: t for n, t in tails.items() if n not in refused}
    if not wanted:
        return Proved(graph, plain, refused, {})
    accepted = dict(wanted)
    graph, found = _under(normal, judge, min_kernels, accepted)
    if _lost(plain, found) is not None:
        accepted = {}
        graph, found = repair(normal, judge, min_kernels)
        for name, tail in wanted.items():
            tried, seen = _under(normal, judge, min_kernels, accepted | {name: tail})
            lost = _lost(found, seen)
            if lost is None:
                accepted[name] = tail
                graph, found = tried, seen
            else:
                refused[name] = _refusal(names[name], tail, lost)
    graph, found = _reserve(graph, found, judge, min_kernels, normal, accepted)
    return Proved(graph, found, refused, _declared(plain, found, accepted, names))


def _under(
    normal: NormalGraph, judge: Judge, min_kernels: int, tails: Mapping[str, Tail], reserved: Iterable[str] = ()
) -> tuple[NormalGraph, Classified]:
    """The graph under these tails, with writes of these names to rows that are reserved."""
    marked = copied(normal)
    chosen = set(reserved)
    for node in marked.graph.nodes:
        if node.op == "placeholder" and node.name in tails:
            node.meta["tail"] = tails[node.name]
        if node.name in chosen:
            node.meta["reserved"] = True
    return repair(marked, judge, min_kernels)


def _captured(found: Classified) -> dict[str, Node]:
    return {n.name: n for n, v in found.verdicts.items() if v.kind == "capture" and not _helper(n)}


def _helper(node: Node) -> bool:
    return bool(node.meta.get("repair_of") or node.meta.get("shared"))


def _lost(before: Classified, after: Classified) -> Reason | None:
    """Why the first node that was captured before is eager now, or captured in a repaired form alone, which costs more
    than the tail saves; ``None`` if none is."""
    kept = _captured(before)
    for node, verdict in after.verdicts.items():
        reason = verdict.reason
        if node.name in kept and reason is not None and reason.code not in _COST:
            return reason
        if node.name in kept and verdict.repaired and not kept[node.name].meta.get("repaired"):
            text = f"{name_of(kept[node.name])} would have to be rewritten: {verdict.repaired}"
            return Reason("padding", text).at(where(node))
    return None


def _refusal(name: str, tail: Tail, lost: Reason) -> Reason:
    what = "keeps old entries in its tail" if tail.value is None else f"has {tail.value} in its tail"
    text = f"slot {name!r} {what}, with which {lost.text}"
    return Reason("slot-refused", text, lost.where, "declare another padding, or none: a copy of row 0 is safe here")


def _written(
    normal: NormalGraph, plain: Classified, tails: Mapping[str, Tail], names: Mapping[str, str]
) -> dict[str, Reason]:
    """Stale tails on what a captured write takes for its index; and tails of arguments that the graph changes."""
    found: dict[str, Reason] = {}
    for p in normal.placeholders:
        if p.name in names and plain.aliasing.written(p):
            text = f"slot {names[p.name]!r}: the graph changes this argument"
            found[p.name] = Reason("slot-refused", text, fix="leave an argument that is changed undeclared")
    stale = {p for p in normal.placeholders if p.name in tails and tails[p.name].value is None}
    for node in _captured(plain).values():
        packet = getattr(node.target, "overloadpacket", None)
        if packet is None or packet.__name__.rstrip("_") not in WRITES:
            continue
        for p in stale & ancestors(_indices(node)):
            text = f"slot {names[p.name]!r} keeps old entries in its tail, and {name_of(node)} writes where it says"
            fix = "declare ZERO, FILL_SENTINEL or REPEAT_ROW"
            found.setdefault(p.name, Reason("slot-refused", text, where(node), fix))
    return found


def _indices(node: Node) -> list[Node]:
    """What a write takes for its index."""
    given = arguments(node)
    found = [given.get("index"), *(given.get("indices") or ())]
    return [i for i in found if isinstance(i, Node)]


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and everything that they are computed from."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _reserve(
    graph: NormalGraph,
    found: Classified,
    judge: Judge,
    min_kernels: int,
    normal: NormalGraph,
    tails: Mapping[str, Tail],
) -> tuple[NormalGraph, Classified]:
    """Writes that padding still forbids, to rows that a constant tail reserves."""
    if all(t.value is None for t in tails.values()):
        return graph, found
    _to_trash(found)
    wanted: set[str] = set()
    for node, verdict in found.verdicts.items():
        packet = getattr(node.target, "overloadpacket", None)
        refused = verdict.reason is not None and verdict.reason.code == "padding"
        if refused and packet is not None and packet.__name__.rstrip("_") in WRITES:
            wanted.add(node.name)
    while wanted:
        tried, seen = _under(normal, judge, min_kernels, tails, wanted)
        if _lost(found, seen) is not None:
            break
        unknown = {n.name for n in _captured(seen).values() if n.name in wanted and _reserved_row(n, seen) is None}
        if not unknown:
            for node in _captured(seen).values():
                if node.name in wanted:  # from here on as any other row that nobody reads, by the user's word
                    memory = node.args[0]
                    assert isinstance(memory, Node)
                    node.meta[TRASH] = memory.meta[TRASH] = _reserved_row(node, seen)
            return tried, seen
        wanted -= unknown
    return graph, found


def _to_trash(found: Classified) -> None:
    """Note the row of captured writes whose padded rows go to one that nobody reads, by a tail and not by a repair."""
    for node in _captured(found).values():
        packet = getattr(node.target, "overloadpacket", None)
        if packet is None or packet.__name__.rstrip("_") not in WRITES or not isinstance(node.args[0], Node):
            continue
        if node.args[0].meta.get(TRASH) is not None and (row := _reserved_row(node, found)) is not None:
            node.meta[TRASH] = row


def _reserved_row(node: Node, found: Classified) -> int | None:
    """The row that padded rows write: of dimension 0 of an argument, in place; ``None`` if it is not as simple."""
    given = arguments(node)
    memory, index = given.get("self"), given.get("index", next(iter(given.get("indices") or ()), None))
    in_place = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    if not in_place or not isinstance(memory, Node) or memory.op != "placeholder" or not isinstance(index, Node):
        return None
    if given.get("dim", 0) % max(memory.meta["val"].dim(), 1):
        return None
    facts = [x.fact for x in found.layouts[index][0].values() if x.axes]
    rows = {fact.value for fact in facts if fact is not None and fact.kind == "filled"}
    row = next(iter(rows)) if len(rows) == 1 == len(facts) else None
    return int(row) if row is not None and memory.meta.get(TRASH) in (None, row) and row >= 0 else None


def _declared(
    plain: Classified, found: Classified, tails: Mapping[str, Tail], names: Mapping[str, str]
) -> dict[str, str]:
    """Captured nodes that the plain proof left eager for their padding, or captured in a repaired form alone."""
    before = {n.name: v for n, v in plain.verdicts.items()}
    declared = {}
    for node in _captured(found).values():
        was = before.get(node.name)
        if was is None:
            continue
        gained = was.reason is not None and was.reason.code == "padding"
        unrepaired = bool(was.repaired) and not node.meta.get("repaired")
        if not gained and not unrepaired:
            continue
        roots = _indices(node) if node.meta.get("reserved") else [node]
        behind = [p for p in ancestors(roots) if p.name in tails and tails[p.name].value is not None]
        what = ", ".join(sorted(f"{names[p.name]} = {tails[p.name].value}" for p in behind))
        if not what:
            continue
        kind = "padded rows write the reserved row of" if node.meta.get("reserved") else "relies on the tail of"
        declared[node.name] = f"{kind} {what}"
    return declared
