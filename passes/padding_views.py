"""Views through which padded rows could change memory that is no padding.

Contract. ``exposes(node, source, symbols)``: whether some padded entry of a view may lie on memory that has no padding
there, or on a real row. Reading through such a view is harmless (its padded entries are nobody's), writing is not:

* a view that carries a symbol in a dimension whose memory does not (``table[:s]``): its padded rows are the table's;
* a view that ends before the real rows do (``x[:-1]``, ``x[:n // 2]``, windows): its padded rows begin on real ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from .alias import arguments
from .layout import expr_of
from .padding_rules_base import never_negative
from .torch_api import OpOverload

#: Views that may leave out entries of a dimension, by the argument that names it.
_CUTS = {
    "slice": "dim", "narrow": "dim", "unfold": "dimension", "split": "dim", "split_with_sizes": "dim", "chunk": "dim",
    "tensor_split": "dim", "unsafe_split": "dim", "unsafe_split_with_sizes": "dim", "unsafe_chunk": "dim",
}  # fmt: skip
#: Views that may leave out entries of any dimension.
_CUT_ANYWHERE = frozenset({"diagonal", "as_strided", "hsplit", "vsplit", "dsplit", "select_backward"})


def exposes(node: Node, source: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]) -> bool:
    """``source``: the sizes of what the view ``node`` is made from."""
    value = node.meta.get("val")
    shapes = [value.shape] if isinstance(value, torch.Tensor) else [t.shape for t in value or () if hasattr(t, "shape")]
    return any(_carries_more(shape, source, symbols) for shape in shapes) or _ends_early(node, shapes, source, symbols)


def _carries_more(shape: Sequence[object], source: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]) -> bool:
    """The dimensions are counted: ``x[:T]`` of a ``(B, T)`` tensor carries T twice, its memory once."""

    def carried(sizes: Sequence[object], symbol: sympy.Symbol) -> int:
        return sum(symbol in expr_of(size).free_symbols for size in sizes)

    return any(carried(shape, s) > carried(source, s) for s in symbols)


def _ends_early(
    node: Node, shapes: Sequence[Sequence[object]], source: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]
) -> bool:
    """Whether a cut dimension that carries a symbol may end before the real rows do."""
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target.overloadpacket.__name__
    if name in _CUT_ANYWHERE:
        return any(s in size.free_symbols for size in source for s in symbols)
    if name not in _CUTS or not source:
        return False
    given = arguments(node)
    dim = given.get(_CUTS[name], 0) % len(source)
    whole = source[dim]
    if not any(s in whole.free_symbols for s in symbols):
        return False
    if name not in ("slice", "narrow"):
        return True
    (shape,) = shapes
    first = given.get("start")
    if isinstance(first, Node) and isinstance(first.meta["val"], torch.Tensor):
        return True  # a position that only the data knows
    size, start = expr_of(shape[dim]), _expression(first)
    # Entry ``size`` of the view, the first padded one, is entry ``start + step * size`` of the source.
    reach = start + _expression(given.get("step", 1)) * size
    return bool(start.is_negative) or not never_negative(sympy.sympify(reach - whole))


def _expression(value: object) -> sympy.Expr:
    if value is None:
        return sympy.Integer(0)
    return expr_of(value.meta["val"] if isinstance(value, Node) else value)
