"""Size symbols: which exist, where each is read from, and its class with the reason for it.

Classes (design section 1): **bucketed** (rounding it up lets dense compute be captured), **pinned** (it is in the
shape of a tensor whose address we pin: its exact value is part of the key), **exact** (reaches only eager work).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .alias import Aliasing
from .padding import analyse
from .reasons import Reason
from .torch_api import OpOverload

aten = torch.ops.aten

#: Contractions with a weight: what a captured segment is for.
_DENSE = {"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution", "einsum"}

#: At most this many symbols are bucketed at once: keys multiply.
MAX_BUCKETED = 2


@dataclass(frozen=True)
class SymbolInfo:
    """One size symbol. ``arg`` is the flat argument it is read from, ``dim`` the dimension (``None``: the argument
    is the number itself); ``source`` is the user's name for it; ``kind`` is bucketed, pinned or exact."""

    symbol: sympy.Symbol
    source: str
    arg: int
    dim: int | None
    kind: str
    why: str

    @property
    def name(self) -> str:
        return str(self.symbol)


def expr_of(value: Any) -> sympy.Expr:
    """The expression of a size: an int or a SymInt."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.sympify(value)


def free(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols in a size, a tensor's sizes and strides, or a tree of them."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        dims: list[Any] = [*value.shape]
        if value.layout is torch.strided:
            dims += [*value.stride(), value.storage_offset()]
        return frozenset().union(*(free(d) for d in dims))
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(free(v) for v in value))
    if isinstance(value, dict):
        return free(list(value.values()))
    if isinstance(value, slice):
        return free([value.start, value.stop, value.step])
    if isinstance(value, Node):
        return free(value.meta.get("val"))
    return frozenset()


def size_symbols(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols in sizes and scalars; strides and offsets are left out, since static memory has its own."""
    if isinstance(value, torch.Tensor):
        return shape_symbols(value)
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(size_symbols(v) for v in value))
    return free(value)


def shape_symbols(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols in a tensor's sizes alone (or in those of a tuple of tensors)."""
    if isinstance(value, torch.Tensor):
        return frozenset().union(*(free(d) for d in value.shape))
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(shape_symbols(v) for v in value))
    return frozenset()


def is_dense(node: Node) -> bool:
    """A contraction with a weight: one operand has no symbolic size and at least two dimensions."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket.__name__ not in _DENSE:
        return False
    tensors = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    return any(t.dim() >= 2 and not shape_symbols(t) for t in tensors) or not any(shape_symbols(t) for t in tensors)


def find_symbols(placeholders: Sequence[Node]) -> dict[sympy.Symbol, tuple[int, int | None, str]]:
    """Where each symbol can be read: a SymInt argument first, else a dimension of a tensor argument."""
    places: dict[sympy.Symbol, tuple[int, int | None, str]] = {}
    for i, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            places.setdefault(value.node.expr, (i, None, node.meta.get("source") or node.name))
    for i, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                expr = expr_of(size)
                if isinstance(expr, sympy.Symbol):
                    places.setdefault(expr, (i, d, f"{node.meta.get('source') or node.name}.size()[{d}]"))
    return places


def unreadable(placeholders: Sequence[Node]) -> Reason | None:
    """A symbol in an argument's shape that no argument shows by itself: the graph runs as it came."""
    places = find_symbols(placeholders)
    missing = frozenset().union(*(free(p.meta.get("val")) for p in placeholders)) - set(places) if placeholders else ()
    if missing:
        return Reason(
            "symbol-unreadable", f"size {', '.join(sorted(map(str, missing)))} appears only inside expressions"
        )
    return None


def classify_symbols(
    graph: Graph, placeholders: Sequence[Node], aliasing: Aliasing, eager: dict[Node, Reason]
) -> tuple[SymbolInfo, ...]:
    """Every symbol with its class. ``eager`` holds the nodes that cannot be captured whatever their sizes."""
    places = find_symbols(placeholders)
    pinned = _pinned(placeholders, aliasing)
    rows = frozenset().union(*(shape_symbols(p.meta.get("val")) for p in placeholders)) if placeholders else frozenset()
    dense = [n for n in graph.nodes if n.op == "call_function" and n not in eager and is_dense(n)]
    mutated = frozenset(n for n in aliasing.set_of if aliasing.written(n))
    gains: dict[sympy.Symbol, int] = {}
    candidates = [s for s in places if s in rows and s not in pinned]
    for symbol in candidates:
        gains[symbol] = _gain(graph, symbol, dense or None, eager, mutated)
    best = [s for s in sorted(gains, key=lambda s: -gains[s]) if gains[s] > 0][:MAX_BUCKETED]
    return tuple(_info(s, places[s], s in best, pinned.get(s), gains.get(s), rows) for s in places)


def _pinned(placeholders: Iterable[Node], aliasing: Aliasing) -> dict[sympy.Symbol, str]:
    out: dict[sympy.Symbol, str] = {}
    for node in placeholders:
        if node.meta.get("static") or aliasing.written(node):
            what = "a parameter or buffer" if node.meta.get("static") else "changed in place"
            for symbol in shape_symbols(node.meta.get("val")):
                out.setdefault(symbol, f"in the shape of {node.meta.get('source') or node.name}, which is {what}")
    return out


def _gain(
    graph: Graph, symbol: sympy.Symbol, dense: list[Node] | None, eager: dict[Node, Reason], mutated: frozenset[Node]
) -> int:
    """How many nodes bucketing ``symbol`` lets us capture: dense ones, or any if the graph has no dense node."""
    if dense is not None:
        dense = [n for n in dense if symbol in shape_symbols(n.meta["val"])]
        if not dense:
            return 0
    refused = analyse(graph, [symbol], eager=eager, mutated=mutated).reasons
    if dense is not None:
        return sum(n not in refused for n in dense)
    touched = [n for n in graph.nodes if n.op == "call_function" and symbol in shape_symbols(n.meta.get("val"))]
    good = [n for n in touched if n not in refused and n not in eager]
    return len(good) if 2 * len(good) >= len(touched) else 0


def _info(
    symbol: sympy.Symbol,
    place: tuple[int, int | None, str],
    chosen: bool,
    pinned: str | None,
    gain: int | None,
    rows: frozenset[sympy.Symbol],
) -> SymbolInfo:
    arg, dim, source = place
    if chosen:
        kind, why = "bucketed", f"rounding it up lets {gain} operations be captured"
    elif pinned:
        kind, why = "pinned", pinned
    elif symbol not in rows:
        kind, why = "exact", "a number, not the size of an input"
    elif gain:
        kind, why = "exact", f"{MAX_BUCKETED} other sizes gain more"
    else:
        kind, why = "exact", "no dense operation could be captured by rounding it up"
    return SymbolInfo(symbol, source, arg, dim, kind, why)
