"""Padding rules of operations that work element by element, and of those that only pass their input on."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from .layout import Layout
from .padding_rules_base import UNBOUNDED, Call, Operand, RefusedError, broadcast, content, for_outputs, rule
from .padding_tails import constant

#: Element-wise operations that torch does not tag as pointwise (mostly composites, whole before dispatch).
UNTAGGED = (
    "floor_divide", "hardswish", "log_sigmoid", "negative", "multiply", "divide",
    "subtract", "absolute", "fix", "arctan2", "float_power", "__and__", "__or__", "__rshift__", "__iand__",
    "__ior__", "__irshift__", "greater", "greater_equal", "less", "less_equal", "not_equal", "polar", "complex",
    "isclose", "isreal", "arccos", "arcsin", "arctan", "arcsinh", "arccosh", "arctanh", "special_expit",
    "special_exp2", "special_expm1", "special_erf", "special_erfc", "special_log1p", "special_xlogy",
    "special_digamma", "special_gammaln", "special_logit", "special_round", "special_sinc", "silu_backward",
    "softplus_backward", "hardswish_backward", "elu_backward", "hardtanh_backward", "max.other", "where.Scalar",
    "where.ScalarOther", "where.ScalarSelf", "where.self", "min.other", "masked_fill.Scalar", "masked_fill.Tensor",
    "celu", "elu", "hardsigmoid", "hardtanh", "leaky_relu", "selu",  # tagged from torch 2.13 on (not in 2.11)
    "rsub", "ldexp", "special_ndtr", "special_polygamma",
    "bitwise_not", "conj", "_conj", "resolve_conj", "resolve_neg", "conj_physical", "real", "imag",
)  # fmt: skip

#: Operations whose result has the values of ``self`` (perhaps in another dtype, place or memory format).
IDENTITY = (
    "to", "_to_copy", "type_as", "contiguous", "detach", "alias", "lift_fresh", "lift_fresh_copy", "clone",
    "pin_memory", "_autocast_to_full_precision", "_autocast_to_reduced_precision",
)  # fmt: skip


def _bound(call: Call, operands: list[Operand]) -> sympy.Expr | None:
    """The bound of a pointwise result (see ``Layout.bound``): moved by an added constant, else unknown."""
    bounds = [operand.layout.bound for operand in operands if operand.layout.bound is not None]
    if not bounds:
        return None
    if call.dtypes[0] is torch.bool:
        return sympy.Integer(2)
    name = call.op.overloadpacket.__name__.rstrip("_")
    other = call.get("other")
    if len(operands) > 1 or call.get("alpha", 1) != 1 or not isinstance(other, (int, sympy.Expr)):
        return UNBOUNDED
    if name in ("add", "sub"):
        return bounds[0] + other if name == "add" else bounds[0] - other
    return UNBOUNDED


_INTEGER_DIVISIONS = {"div", "divide", "floor_divide", "remainder", "fmod"}


def _no_new_zero(call: Call, operands: Sequence[Operand]) -> None:
    """Integer division raises on a zero, which a divisor that counts on in padded rows could reach there alone."""
    if call.op.overloadpacket.__name__.rstrip("_") not in _INTEGER_DIVISIONS:
        return
    divisor = call.get("other")
    if isinstance(divisor, (int, sympy.Integer)) and divisor > 0:  # minus one overflows for the smallest integer
        return
    divisors = [o for o in operands[-1:] if o.layout.bound is not None and not o.dtype.is_floating_point]
    if any(not constant(o) for o in divisors):  # a constant other than zero is fine
        raise RefusedError("a divisor that counts on in padded rows could be zero there")


@rule(*UNTAGGED, loose=True)
def pointwise(call: Call) -> Sequence[Layout]:
    """Operands broadcast. A size among them never gets here: no size argument is declared."""
    operands = call.tensors()
    _no_new_zero(call, operands)
    axes = broadcast(call, operands, len(call.out))
    uniform = all(o.constant for o in operands) and any(o.layout.uniform for o in operands)
    return for_outputs(call, Layout.of(axes, uniform, _bound(call, operands)))


@rule(*IDENTITY, loose=True)
def identity(call: Call) -> Layout:
    """The values of ``self``; a second tensor (``type_as``, ``to.other``) only lends its dtype."""
    return call.first("self", "input").layout


@rule("prelu", "_prelu_kernel")
def prelu(call: Call) -> Layout:
    """The weight belongs to dim 1 of the input and is not broadcast like an operand."""
    if call.tensor("weight").carries:
        raise RefusedError("the weight is padded")
    return content(call.tensor("self").layout)


@rule("bucketize.Tensor", "searchsorted.Tensor")
def lookup(call: Call) -> Layout:
    """Every element is compared with a whole second tensor, which must not carry (or be sorted with padding)."""
    names = {"bucketize": ("self", "boundaries")}
    one, all_of = names.get(call.op.overloadpacket.__name__, ("self", "sorted_sequence"))
    table = call.tensor(all_of)
    if table.carries or (all_of == "sorted_sequence" and table.ndim != 1):
        raise RefusedError(f"{all_of} is padded or batched")
    return content(call.tensor(one).layout)


@rule("fill", "zero")
def fill(call: Call) -> Layout:
    """A constant in every entry: the layout of the memory it goes to stays as it is."""
    return Layout(call.tensor("self").layout.axes, True)


@rule("copy")
def copy(call: Call) -> Layout:
    """The source broadcast to the target; where it has no axis it is constant along that dim and fits any."""
    target, source = call.tensor("self"), call.tensor("src")
    axes = broadcast(call, [source], target.ndim)
    if not source.constant and any(target.axis(d) != axis for d, axis in axes.items()):
        raise RefusedError("the copied rows are padded differently than the memory they go to")
    return Layout(target.layout.axes, source.constant, source.layout.bound)


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropout(call: Call) -> Layout:
    """Only as the identity: otherwise the random stream depends on the padded shape."""
    if call.get("train") and call.get("p") != 0:
        raise RefusedError("random values depend on the padded shape")
    return call.first("input", "self").layout


@rule("native_dropout")
def native_dropout(call: Call) -> Sequence[Layout]:
    """As ``dropout``, with the mask as second output."""
    if call.get("train") is not False and call.get("p") != 0:
        raise RefusedError("random values depend on the padded shape")
    return for_outputs(call, content(call.tensor("input").layout))


@rule("glu")
def glu(call: Call) -> Layout:
    """Halves one dimension, which must not carry."""
    x = call.tensor("self")
    dim = call.dim(x.ndim)
    if x.axis(dim) is not None:
        raise RefusedError(f"splits padded dim {dim}")
    return content(x.layout)


@rule("_assert_tensor_metadata", sizes=("size", "stride"))
def nothing(call: Call) -> Sequence[Layout]:
    """Checks metadata only and returns nothing."""
    return ()
