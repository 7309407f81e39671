"""Padding rules of operations that look along dimensions: reductions, scans, sorts, softmax, norms and pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .layout import INDEPENDENT, Layout, product
from .padding_facts import neutral
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
    rule,
)
from .padding_rules_shape import windows

#: Which output of an operation counts positions along its dimension. Such a value is in range by construction.
POSITIONS = {
    "argmax": 0, "argmin": 0, "argsort": 0, "max": 1, "min": 1, "sort": 1, "topk": 1, "mode": 1, "median": 1,
    "nanmedian": 1, "kthvalue": 1,
}  # fmt: skip


def _with_positions(call: Call, layout: Layout, x: Operand, dims: Sequence[int]) -> Sequence[Layout]:
    """The same layout for every output; what counts positions along ``dims`` keeps the bound that it has anyway."""
    layouts = list(for_outputs(call, layout))
    position = POSITIONS.get(call.op.overloadpacket.__name__)
    if x.layout.bound is not None and position is not None and position < len(layouts):
        layouts[position] = replace(layout, bound=product(x.shape[d] for d in dims))
    return layouts


def _unmasked(call: Call, x: Operand, dims: Sequence[int]) -> list[int]:
    """The dimensions of ``dims`` whose padded entries could change the result: not filled with what changes nothing."""
    name = call.op.overloadpacket.__name__
    value = neutral(name, x.dtype, call.get("ord", call.get("p")))
    if value is None:
        return list(dims)
    flat = call.get("dim") is None and POSITIONS.get(name, len(call.outs)) < len(call.outs)
    counts = dims[1:] if flat else ()  # a position in the flattened tensor counts the padded entries in front of it
    return [d for d in dims if d in counts or not x.filled(d, value)]


@rule("median", "nanmedian", "mode", "kthvalue", "max.dim", "min.dim", "max", "min", "special_logsumexp", "nanmean")
def reduction(call: Call) -> Sequence[Layout]:
    """The reduced dimensions must not carry; all of them are reduced if the schema or the call names none."""
    x = call.first("self", "input")
    dims = call.dims(x.ndim, "dim", "dims")
    forbid(x, _unmasked(call, x, dims), "reduces over")
    return _with_positions(call, content(drop(x.layout, dims, bool(call.get("keepdim", False)))), x, dims)


@rule(
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "special_softmax",
    "special_log_softmax",
    "_safe_softmax",
    "sort",
    "argsort",
    "topk",
    "msort",
)
def along(call: Call) -> Sequence[Layout]:
    """Every entry depends on the whole line along ``dim`` (any line if there is no such argument)."""
    x = call.first("self", "input")
    dims = call.dims(x.ndim, "dim")
    forbid(x, _unmasked(call, x, dims), "mixes entries along")
    return _with_positions(call, content(x.layout), x, dims)


@rule("flip", "roll", "fliplr", "flipud", "rot90")
def moved_rows(call: Call) -> Layout:
    """Moves entries along ``dims`` (all of them if there is no such argument; ``roll`` without any flattens)."""
    x = call.tensor("self")
    forbid(x, call.dims(x.ndim, "dims"), "moves rows along")
    return x.layout


@rule("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
def scan(call: Call) -> Sequence[Layout]:
    """An entry depends on the ones before it: padding at the very end of a line is behind every real entry."""
    x = call.tensor("self")
    dim = call.dim(x.ndim)
    axis = x.axis(dim)
    if axis is None:
        return for_outputs(call, content(x.layout))
    if axis.outer != 1:
        raise RefusedError(f"scans across the padding inside dim {dim}")
    return for_outputs(call, Layout(x.layout.axes, bound=UNBOUNDED))


@rule("cosine_similarity", "pairwise_distance")
def distance(call: Call) -> Layout:
    """Broadcasts two operands and reduces one dimension, the last one if there is no ``dim``."""
    operands = call.tensors()
    ndim = max(operand.ndim for operand in operands)
    layout = Layout.of(broadcast(call, operands, ndim))
    dim = call.dim(ndim) if "dim" in call.args else ndim - 1
    if layout.get(dim) is not None:
        raise RefusedError(f"reduces over padded dim {dim}")
    return drop(layout, [dim], bool(call.get("keepdim", False)))


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", sizes=("normalized_shape",))
def layer_norm(call: Call) -> Sequence[Layout]:
    """The trailing dimensions of ``normalized_shape`` must not carry (the weights have no others)."""
    x = call.tensor("input")
    normalised = call.args["normalized_shape"]
    forbid(x, range(x.ndim - len(normalised), x.ndim), "normalises over")
    return for_outputs(call, content(x.layout))


@rule("group_norm", "native_group_norm")
def group_norm(call: Call) -> Sequence[Layout]:
    """Each sample is normalised on its own: only dim 0 may carry. (``native_group_norm`` needs its sizes as data.)"""
    x = call.tensor("input")
    forbid(x, range(1, x.ndim), "normalises over")
    return for_outputs(call, content(x.layout))


@rule("instance_norm")
def instance_norm(call: Call) -> Layout:
    """Each sample on its own unless running statistics are read or updated."""
    x = call.tensor("input")
    forbid(x, range(1, x.ndim), "normalises over")
    if call.get("running_mean") is not None or call.get("running_var") is not None:
        raise RefusedError("running statistics average over padded rows")
    return content(x.layout)


@rule("batch_norm", "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> Sequence[Layout]:
    """Row by row only with given statistics; batch statistics average over padded rows."""
    x = call.tensor("input")
    if call.get("training", False) is not False:
        raise RefusedError("batch statistics average over padded rows")
    forbid(x, [1], "has one weight per entry of")
    return [content(x.layout)] + [INDEPENDENT] * (len(call.outs) - 1)


#: Operations that mix within their last ``k`` dimensions and treat everything before them independently.
LOCAL = {
    "max_pool1d_with_indices": 1, "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "adaptive_max_pool1d": 1,
    "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3,
    "fractional_max_pool2d": 2, "im2col": 3, "col2im": 2, "upsample_nearest1d": 1, "upsample_nearest2d": 2,
    "upsample_nearest3d": 3, "_upsample_nearest_exact1d": 1, "_upsample_nearest_exact2d": 2, "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3, "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2, "pixel_shuffle": 3, "pixel_unshuffle": 3,
}  # fmt: skip


@rule(*LOCAL)
def local(call: Call) -> Sequence[Layout]:
    """The mixed dimensions must not carry."""
    x = call.first("self", "input")
    forbid(x, range(x.ndim - LOCAL[call.op.overloadpacket.__name__.rstrip("_")], x.ndim), "mixes entries along")
    return for_outputs(call, content(x.layout))


@rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def pool(call: Call) -> Layout:
    """Windows along the last dimensions. One that carries must not be padded, nor cut a last window short."""
    x = call.tensor("self")
    space = int(call.op.overloadpacket.__name__[-2])
    axes = dict(x.layout.axes)
    for i, dim in enumerate(range(x.ndim - space, x.ndim)):
        if x.axis(dim) is None:
            continue
        padding = call.args["padding"]
        if call.get("ceil_mode") or padding[i % len(padding)] != 0:
            raise RefusedError(f"windows look past the end of padded dim {dim}")
        axes |= windows(call, x, dim, call.out[dim])
    return Layout.of(axes)


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
def transform(call: Call) -> Layout:
    """A transform along ``dim``, which must not carry."""
    x = call.tensor("self")
    forbid(x, [call.dim(x.ndim)], "mixes entries along")
    return content(x.layout)
