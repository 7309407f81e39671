"""One verdict a node: CAPTURE, HOST (size arithmetic) or EAGER with a reason. The heart of the plan.

Contract. A node is captured only if it is no break op, capture-safe (``capturable``), depends on bucketed and pinned
sizes alone in its shapes *and scalar arguments*, padding-safe (``padding``), and if no memory it shares is changed on
the other side. The passes are repeated until nothing changes; each round only adds eager nodes, so it ends.

Memory on two sides. A captured value lives in static memory, an eager region sees its real rows, possibly as a copy.
So a view and an in-place op must run on the same side as what they alias:

* a set of aliases with an eager write is eager as a whole, except for a captured base that computes something: eager
  code gets a private copy of it;
* views that the caller gets together with their base, another view of it, or as a view of an argument are made
  eagerly, from the private copy or from the caller's own tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import sympy
import torch
from torch.fx import Node

from .alias import Aliasing, analyse_aliases, has_hidden_effects, is_tensor_value
from .capturable import BreakPredicate, capture_reason, is_size, name_of
from .layout import Layout
from .normalize import NormalGraph
from .padding import analyse, natural
from .padding_rules_declared import TRASH
from .partition import Phase, partition
from .reasons import Reason
from .source_lines import where
from .symbols import SymbolInfo, classify_symbols, expr_of, free, is_dense, size_symbols
from .torch_api import OpOverload

aten = torch.ops.aten

#: Results of these only move data: when the caller gets the result, a captured copy would be copied once more.
_COPIES = {"cat", "stack", "clone", "contiguous", "repeat"}
_FACTORIES = {"zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "zeros_like"}
_FACTORIES |= {"empty_like", "ones_like", "full_like", "empty_strided", "new_empty_strided", "clone"}


@dataclass(frozen=True)
class Verdict:
    """``kind`` is ``capture``, ``host`` or ``eager``; an eager verdict has a ``reason`` with the user's line.

    ``repaired``: how a captured node was rewritten, if it was (``repair``).
    """

    kind: str
    reason: Reason | None = None
    repaired: str = ""


@dataclass(frozen=True)
class Classified:
    """What the plan is built from. ``private`` lists captured values that eager code or the caller must get as a
    copy of their own; ``layouts`` gives, per captured node and output, where the padding is; ``conditions`` on sizes
    must hold at the bucket, else a captured node would read out of bounds."""

    verdicts: dict[Node, Verdict]
    phases: tuple[Phase, ...]
    symbols: tuple[SymbolInfo, ...]
    layouts: dict[Node, tuple[dict[sympy.Symbol, Layout], ...]]
    aliasing: Aliasing
    private: frozenset[Node]
    conditions: tuple[sympy.Basic, ...]


@dataclass
class _Work:
    normal: NormalGraph
    aliasing: Aliasing
    calls: list[Node]
    outputs: list[Node]
    moving: frozenset[str]
    min_kernels: int
    borrows: Callable[[Node], bool]
    eager: dict[Node, Reason] = field(default_factory=dict)
    host: set[Node] = field(default_factory=set)
    bucketed: list[sympy.Symbol] = field(default_factory=list)

    def refuse(self, nodes: Iterable[Node], code: str, text: str) -> bool:
        """Make nodes eager; whether that changed anything."""
        changed = False
        for n in nodes:
            if n.op == "call_function" and n not in self.eager and n not in self.host:
                self.eager[n] = Reason(code, f"{name_of(n)} {text}").at(where(n))
                changed = True
        return changed


def classify(
    normal: NormalGraph,
    device: torch.device,
    is_break: BreakPredicate,
    *,
    moving: frozenset[str] = frozenset(),
    min_kernels: int = 2,
    view_outputs: bool = False,
    borrows: Callable[[Node], bool] = lambda _: False,
    touches_state: Callable[[Node], bool] = lambda _: False,
    refused: Mapping[str, Reason] = MappingProxyType({}),
) -> Classified:
    """Verdicts, phases and layouts of a normalised graph. ``moving`` names inputs that must not be pinned;
    ``view_outputs``: the caller gets outputs in the memory of the recording, without a copy. ``borrows(node)``: an
    operation with effects that keeps none of its arguments. ``touches_state(node)``: one that may read or change
    weights and buffers that it is not given. ``refused``: nodes, by name, that were found to be unsafe at run time."""
    aliasing = analyse_aliases(normal.graph, lambda n: has_hidden_effects(n) or is_break(n) is not None, touches_state)
    calls = [n for n in normal.graph.nodes if n.op == "call_function"]
    output = next(n for n in normal.graph.nodes if n.op == "output")
    work = _Work(normal, aliasing, calls, list(output.all_input_nodes), moving, min_kernels, borrows)
    work.eager.update({n: refused[n.name] for n in calls if n.name in refused})
    _host_and_unsafe(work, device, is_break)
    symbols = classify_symbols(normal.graph, normal.placeholders, aliasing, work.eager)
    _exact_sizes(work, symbols)
    bucketed = work.bucketed = [s.symbol for s in symbols if s.kind == "bucketed"]
    mutated = frozenset(n for n in aliasing.set_of if aliasing.written(n))
    while True:
        padding = analyse(normal.graph, bucketed, eager=work.eager, mutated=mutated)
        for node, reason in padding.reasons.items():
            if node.op == "call_function" and node not in work.host:
                work.eager.setdefault(node, reason.at(where(node)))
        _follow_tuples(work)
        if _memory_rules(work) or _returned_copies(work):
            continue
        phases = _phases(work)
        if not _small_segments(work, phases):
            break
    verdicts = {n: _verdict(work, n) for n in calls}
    must_hold = [c for n, found in padding.obligations.items() if verdicts[n].kind == "capture" for c in found]
    must_hold += [_has_row(n) for n in calls if verdicts[n].kind == "capture" and TRASH in n.meta]
    conditions = tuple(c for c in dict.fromkeys(must_hold) if c != sympy.true)
    return Classified(verdicts, phases, symbols, padding.layouts, aliasing, _private(work, view_outputs), conditions)


def _has_row(node: Node) -> sympy.Basic:
    """That the memory which ``node`` writes to has the row for padded rows."""
    (memory, *_), row = node.args, node.meta[TRASH]
    assert isinstance(memory, Node)
    return sympy.Gt(expr_of(memory.meta["val"].shape[0]), row)


def _verdict(work: _Work, node: Node) -> Verdict:
    if node in work.host:
        return Verdict("host")
    reason = work.eager.get(node)
    return Verdict("eager", reason) if reason else Verdict("capture", repaired=node.meta.get("repaired", ""))


def _host_and_unsafe(work: _Work, device: torch.device, is_break: BreakPredicate) -> None:
    readable = {s for p in work.normal.placeholders for s in free(p.meta.get("val"))}
    for node in work.calls:
        value = node.meta.get("val")
        if is_size(value) and free(value) <= readable and not _reads_data(node):
            work.host.add(node)
            continue
        if node.target is operator.getitem and not is_tensor_value(value):
            work.eager[node] = Reason("python-value", f"{name_of(node)} returns a Python value").at(where(node))
            continue
        reason = capture_reason(node, device, is_break)
        if reason is not None and node not in work.eager:
            work.eager[node] = reason.at(where(node))
    _follow_tuples(work)


def _reads_data(node: Node) -> bool:
    """``tensor.item()`` and the like: a number, but one that only the device knows."""
    target = node.target
    if not isinstance(target, OpOverload) or target.overloadpacket.__name__.startswith("sym_"):
        return bool(node.meta.get("opaque"))
    return any(is_tensor_value(a.meta.get("val")) for a in node.all_input_nodes)


def _follow_tuples(work: _Work) -> None:
    for node in work.calls:
        if node.target is operator.getitem and node not in work.host:
            source = node.args[0]
            if source in work.eager:
                work.eager.setdefault(node, work.eager[source])  # type: ignore[index]
            elif node in work.eager and not isinstance(node.meta.get("val"), (int, float)):
                work.eager[source] = work.eager[node]  # type: ignore[index]
                return _follow_tuples(work)


def _exact_sizes(work: _Work, symbols: tuple[SymbolInfo, ...]) -> None:
    """Condition 3: shapes and scalar arguments may depend on bucketed and pinned sizes only."""
    allowed = {s.symbol for s in symbols if s.kind != "exact"}
    names = {s.symbol: s.source for s in symbols}
    for node in work.calls:
        if node in work.eager or node in work.host:
            continue
        used = size_symbols(node.meta.get("val")).union(
            *(size_symbols(a.meta.get("val")) for a in node.all_input_nodes)
        )
        if used - allowed:
            size = ", ".join(sorted(names.get(s, str(s)) for s in used - allowed))
            work.eager[node] = Reason("exact-symbol", f"{name_of(node)} depends on {size}, which is not bucketed").at(
                where(node)
            )
    _follow_tuples(work)


# -- memory ------------------------------------------------------------------------------------------------------


def _memory_rules(work: _Work) -> bool:
    changed = False
    writers: dict[int, list[Node]] = {}
    for node, sets in work.aliasing.writes.items():
        for s in sets:
            writers.setdefault(s, []).append(node)
    for set_id, members in work.aliasing.members.items():
        if set_id in writers:
            changed |= _written_set(work, set_id, members, writers[set_id])
        changed |= _visible_set(work, set_id, members)
    if changed:
        _follow_tuples(work)
    return changed


def _written_set(work: _Work, set_id: int, members: tuple[Node, ...], writers: list[Node]) -> bool:
    bases = work.aliasing.bases(set_id)
    views = [n for n in members if n not in bases and n not in writers]
    caller = len(bases) == 1 and bases[0].op == "placeholder" and bases[0].name not in work.moving
    inside = len(bases) == 1 and bases[0].op == "call_function"
    eager = any(w in work.eager for w in writers) or not (caller or inside)
    # A captured write, or a captured view, of a view that is made eagerly would work on a copy.
    inner = set(members)
    eager = eager or any(a in work.eager for n in (*writers, *views) for a in n.all_input_nodes if a in inner)
    eager = eager or (inside and (bases[0] in work.eager or any(v in work.eager for v in views)))
    if not eager:
        return False
    copied = [b for b in bases if isinstance(b.target, OpOverload) and b.target.overloadpacket.__name__ in _FACTORIES]
    # Later readers get the changed value through a bridge, which can only be padded in its natural layout.
    copied += [b for b in bases if any(natural(b.meta.get("val"), s) is None for s in work.bucketed)]
    code, text = "mutation", "shares memory that is changed by an operation that runs eagerly"
    if any(b.name in work.moving for b in bases):
        code, text = "moving-input", "changes an input whose address keeps changing, or is a view of it"
    return work.refuse([*writers, *views, *copied], code, text)


def _visible_set(work: _Work, set_id: int, members: tuple[Node, ...]) -> bool:
    visible = [n for n in members if n in work.outputs]
    bases = work.aliasing.bases(set_id)
    from_caller = any(b.op != "call_function" for b in bases)
    if not visible or (len(visible) == 1 and not from_caller):
        return False
    inside, todo, wanted = set(members), list(visible), set()
    while todo:
        n = todo.pop()
        if n not in wanted:
            wanted.add(n)
            todo += [a for a in n.all_input_nodes if a in inside]
    text = "makes a view that the caller gets together with what it is a view of"
    copied = [b for b in bases if isinstance(b.target, OpOverload) and b.target.overloadpacket.__name__ in _FACTORIES]
    return work.refuse([n for n in members if n in wanted and n not in bases] + copied, "output-alias", text)


def _private(work: _Work, view_outputs: bool) -> frozenset[Node]:
    """Captured values of which eager code or the caller must get a copy of their own."""
    eager_written = {s for n, sets in work.aliasing.writes.items() if n in work.eager for s in sets}
    shown = {work.aliasing.set_of[o] for o in work.outputs if o in work.aliasing.set_of}
    # User code may hold on to what it is given, unless it promises not to.
    keepers = [n for n in work.eager if has_hidden_effects(n) and not work.borrows(n)]
    kept = {work.aliasing.set_of[a] for n in keepers for a in n.all_input_nodes if a in work.aliasing.set_of}
    copied = eager_written | kept | (set() if view_outputs else shown)
    return frozenset(n for n, s in work.aliasing.set_of.items() if s in copied)


# -- cost --------------------------------------------------------------------------------------------------------


def _returned_copies(work: _Work) -> bool:
    """A cache that a graph makes and returns belongs on the eager side: captured, it would be copied twice."""
    found = []
    for node in work.outputs:
        if node.op != "call_function" or node in work.eager or not isinstance(node.target, OpOverload):
            continue
        others = [u for u in node.users if u.op != "output" and u not in work.eager]
        if node.target.overloadpacket.__name__ in _COPIES and not others:
            found.append(node)
    return work.refuse(found, "returned-copy", "only moves data into a result that goes straight to the caller")


def is_view(node: Node) -> bool:
    """Makes a view (or is ``getitem``): no kernel runs."""
    if node.target is operator.getitem:
        return True
    mutable = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return bool(node.meta.get("aliases")) and not mutable


def _phases(work: _Work) -> tuple[Phase, ...]:
    scheduled = [n for n in work.calls if n not in work.host]
    captured = {n for n in scheduled if n not in work.eager}

    def needs(node: Node) -> list[Node]:
        return [*node.all_input_nodes, *work.aliasing.order.get(node, ())]

    return partition(scheduled, captured, needs)


def _small_segments(work: _Work, phases: tuple[Phase, ...]) -> bool:
    """Segments without kernels, and small islands between two eager regions, join the eager side."""
    changed = False
    last = len(phases) - 1
    for i, phase in enumerate(phases):
        if not phase.captured:
            continue
        kernels = sum(not is_view(n) for n in phase.nodes)
        island = 0 < i < last and kernels < work.min_kernels and not any(is_dense(n) for n in phase.nodes)
        if kernels == 0 or island:
            changed |= work.refuse(
                phase.nodes,
                "small-segment",
                f"is in a segment with {kernels} kernel{'s' * (kernels != 1)}, too small to pay",
            )
    if changed:
        _follow_tuples(work)
    return changed
