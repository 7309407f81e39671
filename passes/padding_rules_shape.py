"""Padding rules of views and of everything else that only moves, repeats, joins or cuts dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy

from .layout import ONE, Axis, Layout, exact_quotient, front, mentions, product, same
from .padding_rules_base import (
    UNBOUNDED,
    Call,
    Operand,
    RefusedError,
    broadcast,
    content,
    drop,
    for_outputs,
    forbid,
    never_negative,
    rule,
)

Shape = tuple[sympy.Expr, ...]


def prefix(call: Call, size: sympy.Expr) -> Axis:
    """The axis of a dim whose entries count from the front."""
    axis = front(size, call.symbol)
    if axis is None:
        raise RefusedError(f"a dim of size {size}, which need not grow with the padded size", "derived-size")
    return axis


@lru_cache(maxsize=4096)
def reshaped(source: Shape, target: Shape, axes: tuple[tuple[int, Axis], ...], symbol: sympy.Symbol) -> Layout | None:
    """The axes after a reshape that keeps the order of elements; ``None`` if the padding does not land on one dim.

    In that order a padded factor has the same number of elements to its right before and after. So the factor lands
    in the dimension whose own right-hand product divides that number, and the quotient is its ``inner``.
    """
    carried = [d for d, size in enumerate(target) if mentions(size, symbol)]
    if len(carried) != len(axes):
        return None
    result = {}
    for (d, axis), k in zip(axes, carried, strict=True):
        right = axis.inner * product(source[d + 1 :])
        left = product(source[:d]) * axis.outer
        inner = exact_quotient(right, product(target[k + 1 :]))
        outer = exact_quotient(left, product(target[:k]))
        if inner is None or outer is None or mentions(inner, symbol) or mentions(outer, symbol):
            return None
        landed = replace(axis, outer=outer, inner=inner)
        if not same(landed.size(symbol), target[k]):
            return None
        result[k] = landed
    return Layout.of(result)


@rule(
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "view_as",
    "reshape_as",
    "flatten",
    "unflatten",
    "ravel",
    sizes=("size", "shape", "sizes", "stride"),
)
def view(call: Call) -> Layout:
    """Any reshape: sizes are read off the result, so ``-1`` is resolved already."""
    if call.op._overloadname == "dtype":
        return view_dtype(call)
    x = call.tensor("self")
    if x.layout.uniform:
        return x.layout.replace({d: prefix(call, size) for d, size in enumerate(call.out) if call.carried(size)})
    found = reshaped(x.shape, call.out, x.layout.axes, call.symbol)
    if found is None:
        raise RefusedError(f"the padding does not stay in one dim when {list(x.shape)} becomes {list(call.out)}")
    return x.layout.replace(dict(found.axes))


def view_dtype(call: Call) -> Layout:
    """Bits read as another dtype: the last dimension may change its size."""
    x = call.tensor("self")
    if call.dtypes[0] is None or call.dtypes[0].itemsize != x.dtype.itemsize:
        forbid(x, [x.ndim - 1], "reinterprets")
    return content(x.layout)


@rule("permute", loose=True)
def permute(call: Call) -> Layout:
    x = call.tensor("self")
    return x.layout.moved({int(d) % x.ndim: i for i, d in enumerate(call.args["dims"])})


@rule("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "mH", "adjoint", "matrix_H", loose=True)
def transpose(call: Call) -> Layout:
    """Two dimensions change places; ``numpy_T`` reverses all of them."""
    x = call.first("self", "a")
    names = [n for n in ("dim0", "axis0", "dim1", "axis1") if n in call.args]
    order = list(range(x.ndim))
    if call.op.overloadpacket.__name__ == "numpy_T" or x.ndim < 2:
        order.reverse()
    else:
        a, b = (call.dim(x.ndim, n) for n in names) if names else (x.ndim - 2, x.ndim - 1)
        order[a], order[b] = b, a
    return x.layout.moved(order)


@rule("movedim", "moveaxis")
def movedim(call: Call) -> Layout:
    x = call.tensor("self")
    lists = [call.args[n] if isinstance(call.args[n], tuple) else (call.args[n],) for n in ("source", "destination")]
    source, target = ([int(d) % x.ndim for d in dims] for dims in lists)
    rest = iter(d for d in range(x.ndim) if d not in source)
    order = [source[target.index(i)] if i in target else next(rest) for i in range(x.ndim)]
    return x.layout.moved({d: i for i, d in enumerate(order)})


@rule("squeeze", loose=True)
def squeeze(call: Call) -> Layout:
    """Dimensions of size 1 go; such a dimension never carries."""
    x = call.tensor("self")
    dims = [] if call.get("dim") == () else call.dims(x.ndim, "dim")
    return drop(x.layout, [d for d in dims if x.shape and x.shape[d] == 1])


@rule("unsqueeze", loose=True)
def unsqueeze(call: Call) -> Layout:
    x = call.tensor("self")
    new = call.dim(x.ndim + 1)
    return x.layout.moved({d: d + (d >= new) for d in x.layout.dims})


@rule("atleast_1d", "atleast_2d")
def at_least(call: Call) -> Layout:
    """Adds leading dimensions (only the tensor form)."""
    x = call.tensor("self")
    return x.layout.moved({d: d + len(call.out) - x.ndim for d in x.layout.dims})


def expanded(call: Call, x: Operand, shape: Shape) -> Layout:
    """``x`` broadcast to a shape. A repeated dimension is constant, so any axis fits: it gets the simplest one."""
    offset = len(shape) - x.ndim
    axes = {d + offset: axis for d, axis in x.layout.axes}
    for d, size in enumerate(shape):
        if d not in axes and call.carried(size):
            axes[d] = prefix(call, size)
    return x.layout.replace(axes, uniform=x.constant)


@rule("expand", "broadcast_to", "expand_as", sizes=("size",))
def expand(call: Call) -> Layout:
    return expanded(call, call.tensor("self"), call.out)


@rule("broadcast_tensors")
def broadcast_tensors(call: Call) -> Sequence[Layout]:
    return [expanded(call, x, shape or ()) for x, shape in zip(call.tensors(), call.outs, strict=True)]


@rule("meshgrid")
def meshgrid(call: Call) -> Sequence[Layout]:
    """Output dimension ``k`` is operand ``k``; indexing "xy" swaps the first two."""
    order = list(range(len(call.out)))
    if call.get("indexing") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    axes: dict[int, Axis] = {}
    for k, x in enumerate(call.tensors()):
        axes |= x.moved({0: order[k]})
    bounds = [x.layout.bound for x in call.tensors()]
    return [Layout.of(axes, bound=bound) for bound in bounds]


@rule("repeat", "tile", sizes=("repeats", "dims"))
def repeat(call: Call) -> Layout:
    """Copies one after the other: an outer factor of a padded dim. Repeating by the symbol makes a prefix."""
    x = call.tensor("self")
    times = list(call.args["repeats"] if "repeats" in call.args else call.args["dims"])
    times = [ONE] * (len(call.out) - len(times)) + [sympy.sympify(t) for t in times]
    offset = len(call.out) - x.ndim
    axes = {}
    for d, size in enumerate(call.out):
        axis = x.axis(d - offset) if d >= offset else None
        if axis is not None:
            axes[d] = replace(axis, outer=times[d] * axis.outer)
        elif call.carried(size):
            axes[d] = prefix(call, size)
    return x.layout.replace(axes)


@rule("repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Layout:
    """Every entry several times in a row: an inner factor of a padded dim."""
    x = call.tensor("self")
    if call.get("dim") is None:
        if x.carries and x.ndim != 1:
            raise RefusedError("flattens padded dims")
        dim = 0
    else:
        dim = call.dim(x.ndim)
    axes = dict(x.layout.axes)
    if dim in axes:
        axes[dim] = replace(axes[dim], inner=axes[dim].inner * call.args["repeats"])
    return x.layout.replace(axes)


@rule("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
def split(call: Call) -> Sequence[Layout]:
    x = call.tensor("self")
    forbid(x, [call.dim(x.ndim)], "splits")
    return for_outputs(call, x.layout)


@rule("unbind")
def unbind(call: Call) -> Sequence[Layout]:
    x = call.tensor("self")
    dim = call.dim(x.ndim)
    forbid(x, [dim], "splits")
    return for_outputs(call, drop(x.layout, [dim]))


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, sympy.Integer) else value


def _from_front(call: Call, start: Any) -> None:
    """A position must count from the front and must not depend on the padded size."""
    start = _integer(start)
    if start is None:
        return
    if isinstance(start, Operand):
        raise RefusedError("a position is a tensor")
    if isinstance(start, sympy.Expr):
        if call.carried(start) or not start.is_nonnegative:
            raise RefusedError("a position depends on the padded size")
    elif start < 0:
        raise RefusedError("a position counts from the end")


@rule("select")
def select(call: Call) -> Layout:
    """A fixed row: the same one at both sizes if nothing padded lies before it."""
    x = call.tensor("self")
    dim = call.dim(x.ndim)
    axis = x.axis(dim)
    if axis is not None:
        _from_front(call, call.args["index"])
        if axis.outer != 1:
            raise RefusedError(f"selects behind padding in dim {dim}")
    return x.layout.replace({d - (d > dim): a for d, a in x.layout.axes if d != dim})


@rule("slice", "narrow", sizes=("start", "end", "length"), loose=True)
def cut(call: Call) -> Layout:
    """From the front: entry ``j`` of the result is entry ``start + j * step`` whatever the size, so it is a prefix.

    ``table[:s]`` makes a padded dim: the table must have the bucket's rows.
    """
    x = call.tensor("self")
    dim = call.dim(x.ndim)
    size, axis, start = call.out[dim], x.axis(dim), call.get("start")
    step = _integer(call.get("step", 1))
    if axis is not None and not axis.loose and step == 1 and same(size, x.shape[dim]):
        return x.layout
    axes = {d: a for d, a in x.layout.axes if d != dim}
    if axis is None and not call.carried(size):
        if _size_used(call, "start", "length"):
            raise RefusedError("a position depends on the padded size")
        return x.layout.replace(axes)
    _from_front(call, start)
    first = sympy.sympify(start or 0)
    if axis is None:
        return _prefix(call, x, dim, first, step)
    if axis.outer != 1:
        raise RefusedError(f"cuts across the padding inside dim {dim}")
    if axis.loose and not never_negative(_held(call, axis) - (first + step * (size - 1) + 1)):
        raise RefusedError(f"keeps entries of dim {dim} that look past the end of the real rows")
    return x.layout.replace(axes | ({dim: prefix(call, size)} if call.carried(size) else {}))


def _held(call: Call, axis: Axis) -> sympy.Expr:
    """How many entries of a front axis the claim covers."""
    return axis.count(call.symbol) * axis.inner - axis.loose


def _size_used(call: Call, *names: str) -> bool:
    return any(call.carried(call.get(name)) for name in names)


def _prefix(call: Call, x: Operand, dim: int, start: sympy.Expr, step: int) -> Layout:
    """The first rows of a dimension that does not carry, as many as a multiple of the padded size."""
    size = call.out[dim]
    axis = prefix(call, size)
    call.oblige(sympy.Le(start + step * (size - 1) + 1, x.shape[dim]))
    bound = x.layout.bound
    if bound is None and not x.dtype.is_floating_point:
        bound = UNBOUNDED  # the table's rows beyond the real ones hold whatever they hold
    return Layout.of(dict(x.layout.axes) | {dim: axis}, x.layout.uniform, bound)


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Layout:
    """Other dims agree like operands do. In the joined dim only the last part may carry: nothing lies behind it."""
    dim = call.dim(len(call.out))
    parts = [x for x in call.tensors() if x.shape != (0,) and x.shape[dim] != 0]
    carriers = [x for x in parts if x.axis(dim) is not None]
    if not carriers or len(parts) == 1:
        return Layout.of(broadcast(call, parts, len(call.out)))
    last = carriers[0].axis(dim)
    assert last is not None
    if len(carriers) > 1 or parts[-1] is not carriers[0] or last.outer != 1:
        raise RefusedError(f"joins other rows with padded dim {dim} of size {carriers[0].shape[dim]}")
    others = [without_dim(x, dim) for x in parts]
    return Layout.of(broadcast(call, others, len(call.out)) | {dim: prefix(call, call.out[dim])})


def without_dim(x: Operand, dim: int) -> Operand:
    """The operand as the other dimensions see it."""
    return replace(x, layout=x.layout.moved({d: d for d in x.layout.dims if d != dim}))


@rule("stack")
def stack(call: Call) -> Layout:
    parts = call.tensors()
    axes = broadcast(call, parts, parts[0].ndim)
    dim = call.dim(len(call.out))
    return Layout.of({d + (d >= dim): axis for d, axis in axes.items()})


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def pad(call: Call) -> Layout:
    """A padded dim may get entries in front, and lose some on either side; new ones behind would follow the padding."""
    x = call.tensor("self")
    amounts = call.args["pad" if "pad" in call.args else "padding"]
    axes = dict(x.layout.axes)
    for i in range(0, len(amounts), 2):
        dim = x.ndim - 1 - i // 2
        before, after = (_integer(a) for a in amounts[i : i + 2])
        axis = x.axis(dim)
        if axis is None or (before == 0 and after == 0):
            continue
        if isinstance(before, sympy.Expr) or isinstance(after, sympy.Expr) or after > 0 or axis.outer != 1:
            raise RefusedError(f"adds entries behind padded dim {dim}")
        if call.get("mode") == "circular":
            raise RefusedError(f"wraps around padded dim {dim}")
        axes[dim] = prefix(call, call.out[dim])
    return Layout.of(axes)


@rule("tril", "triu")
def triangle(call: Call) -> Layout:
    """The mask counts positions from the front, which padding at the very end leaves alone."""
    x = call.tensor("self")
    for d in (x.ndim - 2, x.ndim - 1):
        axis = x.axis(d)
        if axis is not None and axis.outer != 1:
            raise RefusedError(f"masks across the padding inside dim {d}")
    return content(x.layout)


@rule("diagonal", "diag_embed", "unfold", "view_as_complex")
def of_dims(call: Call) -> Layout:
    """Only forms whose dimensions do not carry; the ones before them stay in place."""
    x = call.tensor("self")
    name = call.op.overloadpacket.__name__.removesuffix("_copy")
    if name == "view_as_complex":
        return content(x.layout)
    names = ("dimension",) if name == "unfold" else ("dim1", "dim2")
    if name == "diag_embed":
        forbid(x, range(x.ndim - 1, x.ndim), "takes the diagonal of")
        if tuple(call.dim(x.ndim + 1, n) for n in names) != (x.ndim - 1, x.ndim):
            raise RefusedError("the diagonal is not in the last dims")
        return content(x.layout)
    gone = [call.dim(x.ndim, n) for n in names]
    if name == "unfold":
        return Layout.of(dict(x.layout.axes) | windows(call, x, gone[0], call.out[gone[0]]))
    forbid(x, gone, "takes the diagonal of")
    return content(drop(x.layout, gone))


def windows(call: Call, x: Operand, dim: int, size: sympy.Expr, loose: int = 0) -> dict[int, Axis]:
    """The axis of a dimension that becomes windows: each looks ahead a fixed way, but none past the end of the rows.

    So a window of the real size is the same window at the bucket. ``loose`` is the number of last windows that do look
    past the end.
    """
    axis = x.axis(dim)
    if axis is None:
        return {}
    if axis.outer != 1:
        raise RefusedError(f"takes windows across the padding inside dim {dim}")
    return {dim: replace(Axis(rows=size) if loose else prefix(call, size), loose=loose)}
