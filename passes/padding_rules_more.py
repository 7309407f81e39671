"""Padding rules of rarer operations: losses, distances, stacks of tensors, scattered slices, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .layout import INDEPENDENT, Layout
from .padding_rules_base import Call, Operand, RefusedError, broadcast, content, forbid, rule
from .padding_rules_contraction import SUM
from .padding_rules_shape import cat, windows, without_dim

NONE = 0  # the ``reduction`` of a loss that is not reduced


def _whole(call: Call, layout: Layout, what: str = "reduces over") -> Layout:
    """A loss: entry by entry, or one number of all of them."""
    if call.get("reduction", NONE) == NONE:
        return layout
    if layout.axes:
        raise RefusedError(f"{what} padded dim {', '.join(map(str, layout.dims))}")
    return INDEPENDENT


@rule(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "margin_ranking_loss", "hinge_embedding_loss",
)  # fmt: skip
def loss(call: Call) -> Layout:
    """Entry by entry; reduced, over all entries."""
    operands = call.tensors()
    return _whole(call, Layout.of(broadcast(call, operands, max(x.ndim for x in operands))))


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def class_loss(call: Call) -> Layout:
    """Row by row over classes, which must not carry; ``target`` holds classes or probabilities."""
    x, target = call.tensor("self"), call.tensor("target")
    if x.ndim < 2:
        raise RefusedError("is the loss of one sample", "unknown-op")
    forbid(x, [1], "compares the classes of")
    rows = x.layout.moved({d: d - (d > 1) for d in x.layout.dims})
    dims = (
        target.layout
        if target.ndim == x.ndim - 1
        else target.layout.moved({d: d - (d > 1) for d in target.layout.dims})
    )
    if dims.axes != rows.axes:
        raise RefusedError("the target is padded differently than the input")
    call.in_range(target, x.shape[1])
    return content(_whole(call, rows))


@rule("diff")
def differences(call: Call) -> Layout:
    """Neighbours subtracted, ``n`` times: windows along ``dim``, after what is put in front of it."""
    x, front, behind = call.tensor("self"), call.get("prepend"), call.get("append")
    dim = call.dim(x.ndim)
    if x.axis(dim) is not None and (
        isinstance(behind, Operand) or (isinstance(front, Operand) and front.axis(dim) is not None)
    ):
        raise RefusedError(f"joins other rows with padded dim {dim}")
    parts = [without_dim(part, dim) for part in (x, front, behind) if isinstance(part, Operand)]
    return Layout.of(broadcast(call, parts, x.ndim) | windows(call, x, dim, call.out[dim]))


@rule("addr")
def add_outer(call: Call) -> Layout:
    """An outer product plus ``self`` broadcast to it."""
    axes = {i: axis for i, name in enumerate(("vec1", "vec2")) if (axis := call.tensor(name).axis(0)) is not None}
    whole = Operand(call.out, call.tensor("self").dtype, Layout.of(axes))
    return Layout.of(broadcast(call, [whole, call.tensor("self")], 2))


@rule("cdist", "_cdist_forward")
def distances(call: Call) -> Layout:
    """Every row of one against every row of the other; features are contracted."""
    a, b = call.tensor("x1"), call.tensor("x2")
    forbid(a, [a.ndim - 1], SUM)  # the dimension of ``x2`` has the same size
    batch = [replace(x, shape=x.shape[:-2], layout=x.layout.moved({d: d for d in range(x.ndim - 2)})) for x in (a, b)]
    last = len(call.out) - 1
    axes = broadcast(call, batch, last - 1)
    rows = {last - 1: a.axis(a.ndim - 2), last: b.axis(b.ndim - 2)}
    return Layout.of(axes | {d: axis for d, axis in rows.items() if axis is not None})


@rule("cross", "linalg_cross")
def cross(call: Call) -> Layout:
    """Mixes the three entries along ``dim``, whose size is always 3."""
    axes = Layout.of(broadcast(call, call.tensors(), len(call.out)))
    if call.get("dim") is None:
        raise RefusedError("looks for the dimension by its size", "unknown-op")
    return axes


@rule("linalg_vecdot")
def vector_product(call: Call) -> Layout:
    """A product of two operands, summed over ``dim``."""
    ndim = max(x.ndim for x in call.tensors())
    axes = Layout.of(broadcast(call, call.tensors(), ndim))
    dim = call.dim(ndim)
    if axes.get(dim) is not None:
        raise RefusedError(f"{SUM} padded dim {dim}")
    return axes.moved({d: d - (d > dim) for d in axes.dims})


@rule("hstack", "vstack", "dstack", "column_stack")
def stacks(call: Call) -> Layout | Sequence[Layout]:
    """``cat`` of tensors that have the dimension to join along already."""
    name = call.op.overloadpacket.__name__
    parts = call.tensors()
    dim = {"hstack": 0 if len(call.out) == 1 else 1, "vstack": 0, "dstack": 2, "column_stack": 1}[name]
    if any(x.ndim != len(call.out) for x in parts):
        raise RefusedError("joins tensors that get another dimension first", "unknown-op")
    return cat(replace(call, args={"tensors": tuple(parts), "dim": dim}))


@rule("select_scatter", "slice_scatter")
def scattered_slice(call: Call) -> Layout:
    """``self`` with one row, or a slice, replaced along a dimension that must not carry."""
    x, source = call.tensor("self"), call.tensor("src")
    dim = call.dim(x.ndim)
    forbid(x, [dim], "writes rows of")
    gone = call.op.overloadpacket.__name__ == "select_scatter"
    placed = source.layout.moved({d: d + (gone and d >= dim) for d in source.layout.dims})
    if placed.axes != x.layout.axes and not source.layout.uniform:
        raise RefusedError("the written rows are padded differently than the rest")
    return Layout(x.layout.axes)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def sampling(call: Call) -> Layout:
    """Each sample on its own; the sampled points may carry as well."""
    x, grid = call.tensor("input"), call.tensor("grid")
    forbid(x, range(1, x.ndim), "samples along")
    points = grid.layout.moved({d: d + (d > 0) for d in grid.layout.dims})
    return Layout.of(broadcast(call, [x, replace(grid, layout=points, shape=call.out)], len(call.out)))


@rule("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def membership(call: Call) -> Sequence[Layout]:
    """Every element against a whole second tensor, which must not carry."""
    others = call.get("test_elements")
    if isinstance(others, Operand) and others.carries:
        raise RefusedError("looks for padded entries")
    return [content(call.tensor("elements").layout)]


@rule("view_as_real")
def view_as_real(call: Call) -> Layout:
    """Adds a last dimension of size 2."""
    return content(call.tensor("self").layout)
