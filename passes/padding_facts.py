"""What a repair makes true of a tensor's entries: derived operation by operation, used by the rules that allow more.

Contract. A ``Fact`` (``layout``) holds whatever the padded rows of the inputs hold. It starts at a *count*, a tensor
of one element that holds the real size ``n`` at any bucket, and at ``arange`` along a padded dimension. ``derive``
knows the few operations that a repair is made of; every other operation drops the fact. So a rewritten graph is proved,
not trusted: what makes the padded rows harmless is found again in the graph itself. ``n >= 1`` is assumed: a call with
a padded size of zero is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import sympy
import torch

from .layout import PLAIN, Fact, Layout
from .padding_rules_base import Call, Operand, same_entry
from .padding_tails import rule_for

Value = float | int | bool


def derive(call: Call, layout: Layout) -> Fact | None:
    """The fact about the first result of an operation whose layout is known."""
    rule = _DERIVED.get(call.op.overloadpacket.__name__)
    fact = rule(call, layout) if rule is not None else None
    if fact is None and (carried := rule_for(call)) is not None:
        fact = carried(call, layout)
    if fact is None or fact.kind in _ANYWHERE:
        return fact
    return fact if layout.get(fact.dim) == PLAIN else None


#: Facts that are not about one dimension.
_ANYWHERE = frozenset({"count", "below", "inside"})


def in_range(fact: Fact | None) -> bool:
    """Whether padded entries, taken as indices, are in range wherever real ones are."""
    return fact is not None and (fact.kind in ("rows", "inside") or (fact.kind == "repeats" and fact.whole))


def _fact(operand: object) -> Fact:
    return operand.fact if isinstance(operand, Operand) else Fact("")


def _number(value: object) -> int | None:
    if isinstance(value, (int, sympy.Integer)) and not isinstance(value, bool):
        return int(value)
    return None


def _arange(call: Call, layout: Layout) -> Fact | None:
    start, step = call.get("start", 0), call.get("step", 1)
    counts = call.dtypes[0] is torch.int64 and start == 0 and step == 1
    return Fact("positions") if counts and layout.axes == ((0, PLAIN),) else None


def _unsqueeze(call: Call, layout: Layout) -> Fact | None:
    x = call.tensor("self")
    fact, new = x.layout.fact, call.dim(x.ndim + 1)
    return fact and replace(fact, dim=fact.dim + (fact.dim >= new))


def _view(call: Call, layout: Layout) -> Fact | None:
    fact = call.tensor("self").layout.fact
    return fact if fact is not None and fact.kind == "count" and call.dtypes[0] is torch.int64 else None


def _moved(fact: Fact, by: int) -> Fact | None:
    """The fact after a constant was added to every entry."""
    if fact.kind == "count":
        return replace(fact, value=int(fact.value) + by)
    if fact.kind == "rows":
        return Fact("repeats", fact.dim, whole=True)
    return fact if fact.kind == "repeats" else None


def _add(call: Call, layout: Layout) -> Fact | None:
    x, other = call.get("self"), call.get("other")
    if call.dtypes[0] is not torch.int64 or call.get("alpha", 1) != 1:
        return None
    number = _number(other)
    if number is not None:
        return _moved(_fact(x), number)
    if _fact(x).kind == "count":
        x, other = other, x
    count, entries = _fact(other), x.span if isinstance(x, Operand) else None
    if count.kind != "count" or entries is None or entries.end is None:
        return None
    last = _number(sympy.sympify(entries.end) + count.value)  # one more than the largest entry, less n
    return Fact("below") if last is not None and last <= 0 else None


def _sub(call: Call, layout: Layout) -> Fact | None:
    x, other = _fact(call.get("self")), call.get("other")
    if call.dtypes[0] is not torch.int64 or call.get("alpha", 1) != 1:
        return None
    number = _number(other)
    if number is not None:
        return _moved(x, -number)
    counts_down = x.kind == "count" and x.value <= -1 and _fact(other).kind == "positions"
    return Fact("below") if counts_down else None


def _clamp(call: Call, layout: Layout) -> Fact | None:
    """Entries below ``n`` and not below 0 are rows that exist."""
    below = _fact(call.get("self")).kind == "below" and _number(call.get("min")) == 0 and call.get("max") is None
    return Fact("inside") if below else None


def _compared(call: Call, wanted: str) -> Fact | None:
    x, other = _fact(call.get("self")), _fact(call.get("other"))
    both = x.kind == "positions" and other == Fact("count", value=0)
    return Fact(wanted, x.dim) if both else None


def _minimum(call: Call, layout: Layout) -> Fact | None:
    x, other = _fact(call.get("self")), _fact(call.get("other"))
    return Fact("rows", x.dim) if x.kind == "positions" and other == Fact("count", value=-1) else None


def _masked_fill(call: Call, layout: Layout) -> Fact | None:
    """Padded entries become a constant. The mask is broadcast: its dimensions count from the last."""
    x, mask, value = call.tensor("self"), call.tensor("mask"), call.get("value")
    if isinstance(value, sympy.Expr) and value.is_number:
        value = int(value) if value.is_Integer else float(value)
    if not isinstance(value, (bool, int, float)) or x.ndim != len(call.out):
        return None
    if x.fact.kind == "filled" and same_entry(x.fact.value, value):
        return x.fact  # whatever the mask
    known = _fact(mask)
    if known.kind != "padded":
        return None
    return Fact("filled", known.dim + len(call.out) - mask.ndim, value)


def _index_select(call: Call, layout: Layout) -> Fact | None:
    x, index, dim = call.tensor("self"), _fact(call.tensor("index")), call.dim(call.tensor("self").ndim)
    if index.kind != "rows":
        return None
    others = [d for d in x.layout.dims if d != dim]
    known = x.fact.kind == "repeats" and x.repeats(x.fact.dim)
    return Fact("repeats", dim, whole=all(known and d == x.fact.dim for d in others))


_DERIVED: dict[str, Callable[[Call, Layout], Fact | None]] = {
    "arange": _arange,
    "unsqueeze": _unsqueeze,
    "view": _view,
    "add": _add,
    "sub": _sub,
    "clamp": _clamp,
    "ge": lambda call, layout: _compared(call, "padded"),
    "minimum": _minimum,
    "masked_fill": _masked_fill,
    "index_select": _index_select,
}


# -- what the rules ask ------------------------------------------------------------------------------------------------


def neutral(name: str, dtype: torch.dtype, order: object = None) -> Value | None:
    """The entry that changes no result of a reduction (``amax``) or of ``softmax``; ``None`` if there is none.

    ``order``: of a norm.
    """
    if name in _NEUTRAL:
        return _NEUTRAL[name]
    if name in _LARGEST:
        return _end(dtype, -1)
    if name in _SMALLEST:
        return _end(dtype, 1)
    if not dtype.is_floating_point:
        return None
    if name in _NORMS:
        return _negligible(order)
    return {**dict.fromkeys(_EXPONENTIAL, -math.inf), "nanmean": math.nan}.get(name)


def _negligible(order: object) -> Value | None:
    """What adds nothing to a norm: zero, or for a negative order (a power of it, or the smallest) infinity."""
    try:
        number = 2.0 if order is None else float(order)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if math.isnan(number):
        return None
    return 0 if number >= 0 else math.inf


_NEUTRAL: dict[str, Value] = {"sum": 0, "nansum": 0, "count_nonzero": 0, "prod": 1, "any": 0, "all": 1}
_LARGEST = frozenset({"amax", "max", "argmax"})
_SMALLEST = frozenset({"amin", "min", "argmin"})
_NORMS = frozenset({"linalg_vector_norm", "norm"})
_EXPONENTIAL = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "special_logsumexp"})


def _end(dtype: torch.dtype, sign: int) -> Value | None:
    """The smallest (-1) or largest (1) value of a dtype."""
    if dtype.is_complex:
        return None
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype is torch.bool:
        return sign > 0
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min
