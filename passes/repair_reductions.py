"""Repairs of reductions: the same operation, with padded entries filled with what changes nothing.

Contract. As in ``repair_rules``. Padding inside of a reduced dimension (a flattened ``[B * T]``) gets a dimension of
its own first, in a view; operations that look along one dimension alone have no such form.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from .alias import arguments
from .layout import ONE, PLAIN, Layout, exact_quotient
from .padding_facts import Value, neutral
from .repair_edit import Editor, UnrepairableError, dimension, dimensions
from .repair_rules import MASKED, repairs, size_as_data
from .symbols import expr_of
from .torch_api import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Lines:
    """What a reduction looks along: ``dims`` of ``x``, in which padding lies at the end alone.

    ``given``: the dimensions that were asked for; ``split``: whether ``x`` is a view with more of them.
    """

    x: Node
    dims: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def split(self) -> bool:
        return self.dims != self.given

    def padded(self, e: Editor, x: Node | None = None) -> list[tuple[int, sympy.Symbol]]:
        """The dimensions that are padded, and by which symbol."""
        return [(d, s) for d in self.dims if (s := e.carried(x or self.x, d)) is not None]

    def masked(self, e: Editor, value: Value | None, x: Node | None = None) -> Node:
        """``x`` with a constant in its padded entries."""
        x = x or self.x
        padded = self.padded(e, x)
        if value is None or not padded:
            raise UnrepairableError("there is no entry that changes nothing")
        for d, symbol in padded:
            x = e.masked(x, d, symbol, value)
        return x

    def kept(self, e: Editor, result: Node, keepdim: bool) -> Node:
        """The result of a reduction that kept no dimension, with those that were asked for at size 1."""
        for d in sorted(self.given) if keepdim else ():
            result = e.add(aten.unsqueeze.default, result, d)
        return result


def lines(e: Editor, x: Node, dims: Sequence[int]) -> Lines:
    """The lines of a reduction over ``dims`` (all different), in a view if padding lies inside of one."""
    if len(set(dims)) != len(dims):
        raise UnrepairableError("a dimension is reduced twice")
    given = tuple(sorted(dims))
    parts = {d: _factors(e, x, d) for d in given}
    if all(len(found) <= 1 for found in parts.values()):
        return Lines(x, given, given)
    sizes: list[Any] = []
    where: list[int] = []
    moved: dict[int, int] = {}
    axes: dict[sympy.Symbol, dict[int, Any]] = {s: {} for s in e.symbols}
    for d, size in enumerate(x.meta["val"].shape):
        moved[d] = len(sizes)
        if len(parts.get(d, ())) <= 1:
            where += [len(sizes)] if d in parts else []
            sizes.append(size if isinstance(size, int) else e.add(aten.sym_size.int, x, d))
            continue
        for part in parts[d]:
            if part in axes:
                axes[part][len(sizes)] = PLAIN
            where.append(len(sizes))
            sizes.append(int(part) if part.is_Integer else e.size(part))
    view = e.add(aten.view.default, x, sizes)
    for s in e.symbols:
        axes[s] |= {moved[d]: axis for d, axis in e.layout(x, s).axes if len(parts.get(d, ())) <= 1}
    e.layouts[view.name] = ({s: Layout.of(found) for s, found in axes.items()},)
    return Lines(view, tuple(where), given)


def _factors(e: Editor, x: Node, dim: int) -> list[sympy.Expr]:
    """The sizes that a dimension is the product of, if padding lies inside of it: padded ones by themselves."""
    found = [(s, axis) for s in e.symbols if (axis := e.layout(x, s).get(dim)) is not None]
    if all(axis == PLAIN for _, axis in found) and len(found) <= 1:
        return []
    if any(axis.rows is not None or axis.loose for _, axis in found):
        raise UnrepairableError("the padding inside of the dimension has another size than a padded one")
    parts, done = [], ONE
    for symbol, axis in sorted(found, key=lambda f: len(f[1].outer.free_symbols)):
        before = exact_quotient(axis.outer, done)
        parts += [before, symbol]
        done = sympy.Mul(axis.outer, symbol)
    parts.append(exact_quotient(expr_of(x.meta["val"].shape[dim]), done))
    if any(p is None or not (p.is_Integer or p in e.symbols) for p in parts):
        raise UnrepairableError("the padding is inside of the dimension")
    return [p for p in parts if p != 1]


# -- reductions --------------------------------------------------------------------------------------------------------

#: The form of a reduction that takes several dimensions.
_SEVERAL = {
    "sum": aten.sum.dim_IntList, "nansum": aten.nansum.default, "any": aten.any.dims, "all": aten.all.dims,
    "amax": aten.amax.default, "amin": aten.amin.default, "count_nonzero": aten.count_nonzero.dim_IntList,
    "logsumexp": aten.logsumexp.default, "special_logsumexp": aten.special_logsumexp.default,
    "nanmean": aten.nanmean.default, "linalg_vector_norm": aten.linalg_vector_norm.default,
}  # fmt: skip


@repairs(
    "sum", "nansum", "nanmean", "prod", "any", "all", "amax", "amin", "count_nonzero", "argmax", "argmin", "max", "min",
    "logsumexp", "special_logsumexp", "linalg_vector_norm", "norm",
)  # fmt: skip
def reduction(e: Editor, node: Node) -> None:
    assert isinstance(node.target, OpOverload)
    named = arguments(node)
    if "other" in named:
        return size_as_data(e, node)
    x, name = named["self"], node.target.overloadpacket.__name__
    flat = named.get("dim") in (None, [], ())
    over = lines(e, x, dimensions(x, named.get("dim")))
    value = neutral(name, x.meta["val"].dtype, named.get("ord", named.get("p")))
    if flat and name in ("argmax", "argmin") and any(d > 0 for d, _ in over.padded(e)):
        return _flat_position(e, named, over, value)
    masked = over.masked(e, value)
    if over.split and (named.get("keepdim") or not flat):
        return _over_several(e, name, named, over, masked)
    e.put(MASKED, node.target, masked, *node.args[1:], **node.kwargs)


def _over_several(e: Editor, name: str, named: dict[str, Any], over: Lines, masked: Node) -> None:
    """The same over more dimensions than were asked for."""
    target = _SEVERAL.get(name)
    if target is None:
        raise UnrepairableError("the padding is inside of the dimension")
    rest = {k: v for k, v in named.items() if k not in ("self", "dim", "keepdim")}
    result = e.add(target, masked, dim=list(over.dims), **rest)
    e.become(MASKED, over.kept(e, result, bool(named.get("keepdim"))))


def _flat_position(e: Editor, named: dict[str, Any], over: Lines, value: Value | None) -> None:
    """The position in the flattened tensor, found dimension by dimension, each of them counted at its real size.

    The first of equal entries in the flattened tensor is in the first row that has one, and is the first of that row.
    """
    if value is None or named.get("keepdim") or 0 in over.x.meta["val"].shape:
        raise UnrepairableError("a position in the flattened tensor")
    best = aten.max.dim if e.node.target is aten.argmax.default else aten.min.dim
    values, place, stride = over.x, None, ONE
    for d in reversed(over.dims):
        symbol = dict(over.padded(e)).get(d)
        found = e.add(best, values if symbol is None else e.masked(values, d, symbol, value), d)
        first = here = e.add(operator.getitem, found, 1)
        if stride != 1:
            here = e.add(aten.mul.Tensor, first, e.number(stride) if stride.free_symbols else int(stride))
        if place is not None:
            at = e.add(aten.gather.default, place, d, e.add(aten.unsqueeze.default, first, d))
            here = e.add(aten.add.Tensor, e.add(aten.squeeze.dim, at, d), here)
        if d == 0:
            return e.become(MASKED, here)
        values, place = e.add(operator.getitem, found, 0), here
        stride = sympy.Mul(stride, expr_of(over.x.meta["val"].shape[d]))


@repairs("aminmax")
def both_ends(e: Editor, node: Node) -> None:
    """The smallest and the largest entry, each with its own filler."""
    named = arguments(node)
    x, keepdim = named["self"], bool(named.get("keepdim"))
    over = lines(e, x, dimensions(x, named.get("dim")))
    parts = {}
    for k in sorted(e.parts()):
        name, target = (("amin", aten.amin.default), ("amax", aten.amax.default))[k]
        found = e.add(target, over.masked(e, neutral(name, x.meta["val"].dtype)), list(over.dims))
        parts[k] = over.kept(e, found, keepdim)
    e.become_parts(MASKED, parts)


@repairs("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(e: Editor, node: Node) -> None:
    assert isinstance(node.target, OpOverload)
    named = arguments(node)
    x, name = named["self"], node.target.overloadpacket.__name__
    over = lines(e, x, [dimension(x, named["dim"])])
    if over.split:
        raise UnrepairableError("the padding is inside of the dimension")
    masked = over.masked(e, neutral(name, x.meta["val"].dtype))
    e.put(MASKED, node.target, masked, *node.args[1:], **node.kwargs)
