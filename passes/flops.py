"""Floating-point operations of one node, at the sizes of the example that was traced.

Contract. Pure: nothing runs, fake values are read. The formulas are those of ``torch.utils.flop_counter`` (a multiply
and an add are two operations; pointwise work counts nothing), so a formula that a user registers there for an operator
of his own (``register_flop_formula``) counts here too. ``None`` means unknown: an operator without a formula outside
ATen, or a size that depends on data. An unknown count must never be shown as zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .torch_api import HigherOrderOperator, OpOverload, is_composite, map_aggregate, size_hint

aten = torch.ops.aten

#: Libraries whose operators are known: without a formula they contract nothing, unless they are made of others.
_LIBRARIES = {"aten", "prims"}

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class FlopCounter:
    """Counts nodes; equal ones (the layers of a model) are counted once."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int | None] = {}

    def count(self, node: Node) -> int | None:
        """Operations of ``node``, or ``None`` if that is unknown."""
        target = node.target
        if _is_free(target) or isinstance(node.meta.get("val"), _NUMBERS):
            return 0
        if not isinstance(target, (OpOverload, HigherOrderOperator)):
            return None
        try:
            args, kwargs = map_aggregate((node.args, dict(node.kwargs)), _concrete)
            value = _concrete(node.meta.get("val"))
            key = (target, repr(_shapes((args, kwargs, value))))
            if key not in self.known:
                self.known[key] = _count(target, args, kwargs, value)
            return self.known[key]
        except Exception:  # a formula that does not fit its operands, a size that depends on data
            return None


def _is_free(target: Any) -> bool:
    """Size arithmetic, and what ATen's own operators do beside contractions: no formula, at any size."""
    if not isinstance(target, OpOverload):
        return getattr(operator, getattr(target, "__name__", ""), None) is target
    return _formula(target) is None and target.namespace in _LIBRARIES and not is_composite(target)


def _formula(target: Any) -> Any:
    return flop_registry.get(getattr(target, "overloadpacket", target))


def _concrete(value: Any) -> Any:
    """Nodes as values; tensors as meta tensors and sizes as ints at the example's sizes."""
    if isinstance(value, Node):
        return map_aggregate(value.meta.get("val"), _concrete)
    if isinstance(value, torch.Tensor):
        shape = [size_hint(n) for n in value.shape]
        known = [n for n in shape if n is not None]
        if len(known) < len(shape):
            raise ValueError("a size depends on data")
        return torch.empty(known, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_concrete(v) for v in value]) if type(value) in (tuple, list) else tuple(value)
    return value


def _shapes(value: Any) -> Any:
    return map_aggregate(value, lambda v: ("tensor", tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v)


def _count(target: Any, args: Any, kwargs: Any, value: Any) -> int | None:
    formula = _formula(target)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=value))
    if isinstance(target, HigherOrderOperator) or target.namespace not in _LIBRARIES:
        return None
    if target.overloadpacket is aten.scaled_dot_product_attention:
        return _attention(*args[:3])
    if kwargs.get("device") is not None:  # a copy or a factory, and the device may not exist here
        return 0
    with torch.no_grad(), FlopCounterMode(display=False) as mode:
        target(*args, **kwargs)
    return int(mode.get_total_flops())


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Both products, whatever a mask or causality would leave out; heads are those of the queries."""
    *outer, rows, width = q.shape
    pairs = rows * k.shape[-2]
    for n in outer:
        pairs *= n
    return int(2 * pairs * (width + v.shape[-1]))


def rows_of(node: Node, size: Callable[[Any], int]) -> int:
    """Rows that a contraction computes at other sizes: the product of all dimensions of its result but the last, and of
    batched products the second last alone. 0 for what is no contraction. ``size``: the value of a size expression."""
    value = node.meta.get("val")
    target = getattr(node.target, "overloadpacket", None)
    if not isinstance(value, torch.Tensor) or (target not in _CONTRACTIONS and _formula(node.target) is None):
        return 0
    shape = [size(n) for n in value.shape]
    if target in (aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d) and len(shape) > 1:
        shape = [n for d, n in enumerate(shape) if d != 1] + [shape[1]]
    if target in (aten.bmm, aten.baddbmm) or (target is aten.matmul and _both_batched(node)):
        shape = shape[-2:]
    return math.prod(shape[:-1])


#: Made of others (``mm``, ``convolution``), or with a formula.
_CONTRACTIONS = frozenset([aten.linear, aten.matmul, aten.einsum, aten.conv1d, aten.conv2d, aten.conv3d])


def _both_batched(node: Node) -> bool:
    operands = [a.meta.get("val") for a in node.args[:2] if isinstance(a, Node)]
    return all(isinstance(v, torch.Tensor) and v.dim() > 2 for v in operands)
