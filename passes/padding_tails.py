"""What a declared policy makes true of the padded rows of an input.

Contract. The runtime writes a ``Tail`` at every call (or leaves it alone, if it is ``STALE``), so a constant tail is a
fact and no promise. Padded entries that are no copy of row 0 need not be valid indices: their layout says so
(``UNBOUNDED``), and what is known of a constant one is the fact ``filled``, which element-wise operations carry on by
computing it. ``n >= 1`` is assumed, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch

from .layout import PLAIN, Fact, Layout
from .torch_api import unset_fake_temporarily

if TYPE_CHECKING:
    from .padding_rules_base import Call, Operand


@dataclass(frozen=True)
class Tail:
    """Padded entries: ``value`` in all of them, or, for ``None``, whatever an earlier call left there."""

    value: float | int | bool | None


STALE = Tail(None)


def with_tail(layout: Layout | None, tail: Tail | None) -> Layout | None:
    """The layout of an input for one symbol, under its declared tail."""
    if layout is None or tail is None or not layout.axes:
        return layout
    fact = None if tail.value is None else Fact("filled", layout.dims[0], tail.value)
    return replace(layout, bound=sympy.oo, fact=fact)


def constant(operand: Operand) -> float | int | bool | None:
    """The value of *every* padded entry, if it is one: the operand carries the symbol in one dimension alone."""
    fact = operand.fact
    known = fact.kind == "filled" and operand.layout.axes == ((fact.dim, PLAIN),)
    return fact.value if known else None


def same_padding(call: Call, layout: Layout) -> Fact | None:
    """The fact of an operation that only moves entries: its dimension at its new place, the only one that carries.

    Real entries come first in either, and there are as many of them along that dimension: so padded ones stay padded.
    """
    x = call.args.get("self", call.args.get("input"))
    if x is None or not hasattr(x, "fact") or constant(x) is None or len(layout.axes) != 1:
        return None
    return replace(x.fact, dim=layout.dims[0])


def computed(call: Call, layout: Layout) -> Fact | None:
    """The fact of an element-wise operation: the padded entries of its operands, put through it.

    Operands that are not padded must be numbers: another tensor's rows may differ.
    """
    tensors = call.tensors()  # broadcast: all of them carry the one dimension of the result
    values = [constant(t) for t in tensors]
    if not tensors or any(v is None for v in values) or len(layout.axes) != 1:
        return None
    whole = call.dtypes[0] is not None and not (call.dtypes[0].is_floating_point or call.dtypes[0].is_complex)
    if not (_whole(values) if whole else call.op.overloadpacket.__name__ in EXACT):
        return None
    return _evaluate(call, layout.dims[0])


def _evaluate(call: Call, dim: int) -> Fact | None:
    """Run the operation on one padded entry of each operand."""

    def entry(value: Any) -> Any:
        known = constant(value) if hasattr(value, "fact") else None
        if known is not None:
            return torch.full((1,) * max(value.ndim, 1), known, dtype=value.dtype)
        if isinstance(value, sympy.Expr):
            if not value.is_number:
                raise TypeError("a size")
            return int(value) if value.is_Integer else float(value)
        return value

    with unset_fake_temporarily(), torch.device("cpu"):
        try:
            result = call.op(**{name: entry(v) for name, v in call.args.items() if not _placed(name)})
        except (RuntimeError, TypeError, ValueError, OverflowError):
            return None
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or result.dtype is not call.dtypes[0]:
        return None
    value = result.item()
    return None if isinstance(value, complex) else Fact("filled", dim, value)


def _whole(values: Sequence[float | int | bool | None]) -> bool:
    """Whether none is infinite, no number at all, or beyond what every integer dtype conversion agrees on."""
    return all(v is not None and math.isfinite(v) and abs(v) < 2**31 for v in values)


def _placed(name: str) -> bool:
    """Arguments about where a result lies, not what it holds."""
    return name in ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")


#: Operations that only move entries, or bring others along unchanged.
MOVES = (
    "unsqueeze", "clone", "contiguous", "alias", "detach", "transpose", "permute", "t", "movedim", "expand",
    "broadcast_to", "expand_as", "lift_fresh_copy", "slice", "select", "narrow", "squeeze", "view", "reshape",
    "flatten",
)  # fmt: skip
#: Element-wise ones that are not tagged so.
COMPUTED = ("to", "_to_copy", "floor_divide")
#: Whose floating-point results are the same number on every device: nothing is approximated.
EXACT = ("to", "_to_copy", "add", "sub", "mul", "neg", "abs", "relu", "clamp", "maximum", "minimum")
#: What a shift by too many bits gives, the device decides.
_SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")


def rule_for(call: Call) -> Callable[[Call, Layout], Fact | None] | None:
    """How the fact ``filled`` gets through an operation; ``None`` if it does not."""
    if call.op._schema.is_mutable:
        return None
    name = call.op.overloadpacket.__name__
    if name in MOVES:
        return same_padding
    if name in COMPUTED or (torch.Tag.pointwise in call.op.tags and name not in _SHIFTS):
        return computed
    return None
