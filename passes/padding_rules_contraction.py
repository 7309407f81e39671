"""Padding rules of matrix products, einsum, convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layout import Axis, Layout
from .padding_rules_base import Call, Operand, RefusedError, broadcast, content, for_outputs, forbid, rule
from .padding_rules_shape import windows

SUM = "contracts over"


def _slice(operand: Operand, dims: Sequence[int]) -> Operand:
    """The operand seen through some of its dimensions, in order."""
    table = {d: i for i, d in enumerate(dims)}
    return Operand(tuple(operand.shape[d] for d in dims), operand.dtype, operand.layout.moved(table))


def multiply(call: Call, a: Operand, b: Operand) -> dict[int, Axis]:
    """``a @ b`` with the rules of ``matmul``: 1-D operands, batch broadcast, the inner dimension contracted."""
    met = max(b.ndim - 2, 0)  # has the same size; padded entries add nothing if both are zero (0 * NaN is NaN)
    if not (a.filled(a.ndim - 1, 0) and b.filled(met, 0)):
        forbid(a, [a.ndim - 1], SUM)
    batch = [_slice(x, range(x.ndim - 2)) for x in (a, b) if x.ndim > 2]
    lead = max((x.ndim for x in batch), default=0)
    axes = broadcast(call, batch, lead)
    rows = [a.axis(a.ndim - 2)] if a.ndim > 1 else []
    rows += [b.axis(b.ndim - 1)] if b.ndim > 1 else []
    return axes | {lead + i: axis for i, axis in enumerate(rows) if axis is not None}


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def product(call: Call) -> Layout:
    first, second = call.tensors()[:2]
    return Layout.of(multiply(call, first, second))


@rule("addmm", "baddbmm", "addmv")
def add_product(call: Call) -> Layout:
    """A product plus ``self`` broadcast to it."""
    bias, first, second = call.tensors()[:3]
    axes = Layout.of(multiply(call, first, second))
    whole = Operand(call.out, first.dtype, axes)
    return Layout.of(broadcast(call, [whole, bias], len(call.out)))


@rule("linear")
def linear(call: Call) -> Layout:
    """``x @ weight.T + bias``; a padded out-feature dimension of the weight carries into the last dimension."""
    x, weight = call.tensor("input"), call.tensor("weight")
    last = len(call.out) - 1
    forbid(x, [x.ndim - 1], SUM)
    axes = dict(x.layout.axes)
    if weight.ndim == 2:
        axes |= weight.moved({0: last})
    operands = [Operand(call.out, x.dtype, Layout.of(axes))]
    if isinstance(call.get("bias"), Operand):
        operands.append(call.tensor("bias"))
    return Layout.of(broadcast(call, operands, last + 1))


@rule("outer", "ger")
def outer(call: Call) -> Layout:
    axes = {i: x.axis(0) for i, x in enumerate(call.tensors()[:2])}
    return Layout.of({d: axis for d, axis in axes.items() if axis is not None})


@rule("inner")
def inner(call: Call) -> Layout:
    """Contracts the last dimensions and keeps the others, first those of ``self``."""
    a, b = call.tensor("self"), call.tensor("other")
    forbid(a, [a.ndim - 1], SUM)
    if not (a.ndim and b.ndim):
        return Layout.of(broadcast(call, [a, b], len(call.out)))
    return Layout.of(dict(a.layout.axes) | {d + a.ndim - 1: axis for d, axis in b.layout.axes})


@rule("tensordot")
def tensordot(call: Call) -> Layout:
    """Contracts the named dimensions; the others follow one after the other."""
    axes: dict[int, Axis] = {}
    position = 0
    for name in ("self", "other"):
        x = call.tensor(name)
        gone = [int(d) % max(x.ndim, 1) for d in call.args[f"dims_{name}"]]
        forbid(x, gone, SUM)
        axes |= {d + position: axis for d, axis in drop_dims(x, gone).axes}
        position += x.ndim - len(gone)
    return Layout.of(axes)


def drop_dims(x: Operand, gone: Sequence[int]) -> Layout:
    """The layout of an operand without the contracted dimensions."""
    return _slice(x, [d for d in range(x.ndim) if d not in gone]).layout


def _labels(equation: str, operands: Sequence[Operand]) -> tuple[list[list[str]], list[str]]:
    """The labels of every operand and of the result; ellipsis dimensions get negative numbers, counted from the end."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    inputs = []
    for term, operand in zip(terms, operands, strict=True):
        before, dots, after = term.partition("...")
        hidden = operand.ndim - len(before) - len(after) if dots else 0
        inputs.append([*before, *(f"-{i}" for i in range(hidden, 0, -1)), *after])
    if not arrow:
        letters = [c for c in left if c.isalpha()]
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    before, dots, after = right.partition("...")
    hidden = max((sum(label[0] == "-" for label in labels) for labels in inputs), default=0) if dots else 0
    return inputs, [*before, *(f"-{i}" for i in range(hidden, 0, -1)), *after]


@rule("einsum")
def einsum(call: Call) -> Layout:
    """A label that carries must be in the result, be unique in its operand, and carry alike in every operand."""
    operands = [x for x in call.args["tensors"] if isinstance(x, Operand)]
    inputs, output = _labels(str(call.args["equation"]), operands)
    dims = []
    for labels, operand in zip(inputs, operands, strict=True):
        for d in operand.layout.dims:
            if labels[d] not in output:
                raise RefusedError(f"contracts over padded dim {d} ({labels[d]!r})")
            if labels.count(labels[d]) > 1:
                raise RefusedError(f"takes a diagonal of padded dim {d} ({labels[d]!r})")
        table = {d: output.index(label) for d, label in enumerate(labels) if label in output}
        dims.append(Operand(call.out, operand.dtype, operand.layout.moved(table)))
    return Layout.of(broadcast(call, dims, len(output)))


@rule("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
def convolution(call: Call) -> Layout:
    """The batch may carry, channels not (nor the weight, which has the same). In one dimension padding stays behind.

    In two dimensions libraries transform whole tiles (Winograd, FFT), where a padded entry can reach its neighbours. In
    half precision oneDNN multiplies entries behind the last window by zero, which NaN and infinity survive.
    """
    x, weight = call.tensor("input"), call.tensor("weight")
    _plain_filter(call, weight)
    space = weight.ndim - 2
    first = x.ndim - space
    if space != 1 or call.get("transposed"):
        forbid(x, range(first, x.ndim), "mixes entries along")
        return content(x.layout)
    axes = {d: axis for d, axis in x.layout.axes if d != first}
    if x.axis(first) is not None:
        if x.dtype not in (torch.float32, torch.float64):
            raise RefusedError(f"in {str(x.dtype).removeprefix('torch.')} reads past the rows of padded dim {first}")
        axes |= windows(call, x, first, call.out[first], _looking_ahead(call, weight))
    return Layout.of(axes)


def _plain_filter(call: Call, weight: Operand) -> None:
    if any(isinstance(w, Operand) and w.carries for w in (weight, call.get("bias"))):
        raise RefusedError("the weight is padded")


def _looking_ahead(call: Call, weight: Operand) -> int:
    """How many windows of a 1-D convolution look past the end: at most as many as it pads there."""
    padding, dilation = (_only(call.get(name)) for name in ("padding", "dilation"))
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = dilation * (int(weight.shape[-1]) - 1)
        padding = total - total // 2
    return int(padding)


def _only(value: object) -> Any:
    """The one entry of a list argument of a 1-D operation."""
    return value[0] if isinstance(value, tuple) else value


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call) -> Layout:
    """Only the batch may carry."""
    x, weight = call.tensor("input"), call.tensor("weight")
    _plain_filter(call, weight)
    forbid(x, range(1 if x.ndim == weight.ndim else 0, x.ndim), "mixes entries along")
    return content(x.layout)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Layout:
    """Rows of the query are independent given keys, values and mask; keys and values must not carry in length."""
    query, key, value, mask = call.tensor("query"), call.tensor("key"), call.tensor("value"), call.get("attn_mask")
    rows = query.ndim - 2
    if call.get("dropout_p") != 0:
        raise RefusedError("random values depend on the padded shape")
    for x in (key, value):
        forbid(x, [x.ndim - 2, x.ndim - 1], "attends to")
    if call.get("enable_gqa"):
        for x in (query, key, value):
            forbid(x, [x.ndim - 3], "groups heads along")
    if query.axis(rows) is not None and call.get("is_causal"):
        raise RefusedError(f"the causal mask depends on the length of padded dim {rows}")
    operands = [query, key, value]
    if isinstance(mask, Operand):
        operands.append(mask)
    return Layout.of(broadcast(call, operands, query.ndim))


@rule("channel_shuffle")
def batch_only(call: Call) -> Sequence[Layout]:
    """Each sample on its own."""
    x = call.tensor("self")
    forbid(x, range(1, x.ndim), "mixes entries along")
    return for_outputs(call, content(x.layout))
