"""Padding rules of operations that read or write through index tensors.

Values of an index in padded rows come from row 0 of the inputs (a padded row is a copy of it), so they are in range
wherever row 0 is. ``Layout.bound`` marks the exceptions, and ``Call.in_range`` asks for the table to be long enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from .layout import Axis, Layout
from .padding_rules_base import Call, Operand, RefusedError, broadcast, forbid, rule
from .padding_tails import constant

WRITTEN = "padded rows are written through an index"


@rule("embedding")
def embedding(call: Call) -> Layout:
    """Rows of a table; the table's row dimension must not carry."""
    weight, indices = call.tensor("weight"), call.tensor("indices")
    call.look_up(weight, 0, indices)
    axes = dict(indices.layout.axes)
    axes |= weight.moved({1: indices.ndim})
    return Layout.of(axes)


@rule("index_select")
def index_select(call: Call) -> Layout:
    x, index = call.tensor("self"), call.tensor("index")
    dim = call.dim(x.ndim)
    call.look_up(x, dim, index)
    axes = {d: axis for d, axis in x.layout.axes if d != dim}
    axes |= index.moved({0: dim})
    return Layout.of(axes)


def _aligned(call: Call, x: Operand, index: Operand, dim: int) -> None:
    """``x`` and ``index`` carry alike in every dimension but ``dim``."""
    for d in set(x.layout.dims) | set(index.layout.dims):
        if d != dim and x.axis(d) != index.axis(d) and not index.layout.uniform:
            raise RefusedError(f"the index is padded differently than the tensor in dim {d}")
    if index.layout.uniform and {*index.layout.dims} - {dim} != {*x.layout.dims} - {dim}:
        raise RefusedError("the index is padded in other dims than the tensor")


@rule("gather", "take_along_dim")
def gather(call: Call) -> Layout:
    """One entry per entry of the index, from the same position in the other dimensions."""
    x, index = call.tensor("self"), call.first("index", "indices")
    dim = call.dim(x.ndim)
    _aligned(call, x, index, dim)
    call.look_up(x, dim, index)
    axes = {d: axis for d, axis in x.layout.axes if d != dim}
    return Layout.of(axes | index.moved({dim: dim}))


def _indexed(call: Call, x: Operand, trashed: bool = False) -> tuple[list[int], list[Operand], dict[int, Axis], int]:
    """Which dims are indexed, by what, and the axes and first dim of ``x[indices]``."""
    given = [(d, i) for d, i in enumerate(call.args["indices"]) if i is not None]
    dims, indices = [d for d, _ in given], [i for _, i in given]
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise RefusedError("a boolean mask makes the size depend on values")
    for d, index in given:
        if not (trashed and d == 0):
            call.look_up(x, d, index)
    together = max(i.ndim for i in indices)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if adjacent else 0
    axes = {first + d: axis for d, axis in broadcast(call, indices, together).items()}
    rest = [d for d in range(x.ndim) if d not in dims]
    for position, d in enumerate(rest):
        axes |= x.moved({d: position + (together if position >= first else 0)})
    return dims, indices, axes, first


@rule("index", "_unsafe_index")
def index(call: Call) -> Layout:
    """Advanced indexing by integer tensors; the result's dims follow NumPy's rule for adjacent indices."""
    return Layout.of(_indexed(call, call.tensor("self"))[2])


@rule("one_hot")
def one_hot(call: Call) -> Layout:
    """A new last dimension of a known number of classes (``-1`` would look for the largest value)."""
    x = call.tensor("self")
    classes = call.args["num_classes"]
    if classes == -1:
        raise RefusedError("the number of classes depends on padded values")
    call.in_range(x, sympy.sympify(classes))
    return Layout(x.layout.axes, bound=None if x.layout.bound is None else sympy.Integer(2))


def _again(call: Call, x: Operand, index: Operand, along: int, source: Operand | None, dim: int) -> bool:
    """Whether padded rows write what the last real row writes, to the same place, after it.

    Also if real rows write one place twice: the last one of them stays the last.
    """
    if call.get("reduce") is not None or x.axis(dim) is not None or not index.repeats(along):
        return False
    return source is None or source.axis(dim) is None or source.repeats(dim)


def _trashed(call: Call, x: Operand, index: Operand, dim: int) -> bool:
    """Whether padded rows write to a row that nobody reads, in whatever way. (``classify`` sees to it that the memory
    has that row.)"""
    return bool(call.op._schema.is_mutable) and index.goes_to_trash(x, dim)


def _reserved(call: Call, x: Operand, index: Operand, along: int, dim: int) -> bool:
    """Whether padded rows write one row alone, which the user reserves for them by the declared tail of the index."""
    value = constant(index)
    if not call.reserved or value is None or index.fact.dim != along or x.axis(dim) is not None:
        return False
    call.entry_in_range(value, x.shape[dim] if x.shape else sympy.Integer(1))
    return True


def _one_reserved(call: Call, x: Operand, given: Sequence[Operand], d: int, together: int) -> bool:
    """The same of several indices: each that is padded there names one row."""
    dims = [k for k, i in enumerate(call.args["indices"]) if i is not None]
    found = [
        _reserved(call, x, i, d - together + i.ndim, dim)
        for i, dim in zip(given, dims, strict=True)
        if i.axis(d - together + i.ndim) is not None
    ]
    return bool(found) and all(found)


def _row_local(call: Call, x: Operand, index: Operand, source: Operand | None, dim: int) -> Layout:
    """Writes that stay within each padded row: neither index nor source carries where ``x`` does not.

    Along ``dim`` both may carry if their padded entries repeat the last real one (never where entries accumulate), or
    if those of the index are a row that nobody reads.
    """
    again = call.op.overloadpacket.__name__.rstrip("_") == "scatter" and _again(call, x, index, dim, source, dim)
    trashed = _trashed(call, x, index, dim)
    again = again or trashed or _reserved(call, x, index, dim, dim)
    for d in set(index.layout.dims) | set(source.layout.dims if source is not None else ()):
        if not (again and d == dim) and (d == dim or x.axis(d) is None):
            raise RefusedError(WRITTEN)
    _aligned(call, x, index, dim)
    rest = tuple((d, axis) for d, axis in source.layout.axes if not (again and d == dim)) if source is not None else ()
    if source is not None and not source.layout.uniform and rest != x.layout.axes:
        raise RefusedError("the source is padded differently than the tensor")
    if not trashed:
        call.look_up(x, dim, index)
    return Layout(x.layout.axes)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Layout:
    """As ``gather``, written."""
    x, position = call.tensor("self"), call.tensor("index")
    source = call.get("src")
    return _row_local(call, x, position, source if isinstance(source, Operand) else None, call.dim(x.ndim))


@rule("index_copy", "index_add", "index_reduce", "index_fill")
def index_write(call: Call) -> Layout:
    """Whole slices at indexed positions: the index must not carry, the slices carry as the tensor does."""
    x, position = call.tensor("self"), call.tensor("index")
    dim = call.dim(x.ndim)
    source = next((call.args[n] for n in ("source", "value") if isinstance(call.get(n), Operand)), None)
    name = call.op.overloadpacket.__name__.rstrip("_")
    again = name in ("index_copy", "index_fill") and _again(call, x, position, 0, source, dim)
    again = again or _trashed(call, x, position, dim) or _reserved(call, x, position, 0, dim)
    if not again and (position.carries or (source is not None and source.axis(dim) is not None)):
        raise RefusedError(WRITTEN)
    forbid(x, [dim], "writes rows of")
    rest = tuple((d, axis) for d, axis in source.layout.axes if not (again and d == dim)) if source is not None else ()
    if source is not None and source.ndim and rest != x.layout.axes and not source.layout.uniform:
        raise RefusedError(WRITTEN if not x.carries else "the written rows are padded differently than the memory")
    return Layout(x.layout.axes)


@rule("index_put", "_unsafe_index_put")
def index_put(call: Call) -> Layout:
    """Advanced indexing, written: the index must not carry, the values carry as the indexed tensor does."""
    x, values = call.tensor("self"), call.tensor("values")
    given: Sequence[Operand] = [i for i in call.args["indices"] if i is not None]
    trashed = call.args["indices"][0] is not None and _trashed(call, x, given[0], 0)
    _, _, axes, first = _indexed(call, x, trashed)
    together = max(i.ndim for i in given)
    ndim = x.ndim - len(given) + together
    written = broadcast(call, [values], ndim)
    for d in {d + together - i.ndim for i in given for d in i.layout.dims}:
        alike = all(i.axis(d - together + i.ndim) is None or i.repeats(d - together + i.ndim) for i in given)
        at = first + d - ndim + values.ndim
        alike = alike and (at < 0 or values.axis(at) is None or values.repeats(at)) and not call.get("accumulate")
        if not trashed and not alike and not _one_reserved(call, x, given, d, together):
            raise RefusedError(WRITTEN)
        axes.pop(first + d)
        written.pop(first + d, None)
    if not values.layout.uniform and any(axes.get(d) != axis for d, axis in written.items()):
        raise RefusedError(WRITTEN)
    return Layout(x.layout.axes)
