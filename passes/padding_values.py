"""What is known of the values of an integer tensor: the range that every entry lies in, at any size.

Contract. A ``Span`` is a fact about eager's values, whatever the sizes, so it holds for real rows at the real size and
at the bucket. It decides whether an index may read a padded dimension: eager would wrap a negative entry around the
*real* size, and refuse one beyond it. What is not known here has no span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from .layout import product
from .torch_api import OpOverload


@dataclass(frozen=True)
class Span:
    """Every entry is at least 0 and below ``end``; without ``end`` the user promised a valid index for any use."""

    end: sympy.Expr | None


_WHOLE = (torch.int64, torch.int32)

#: Operations whose entries are entries of ``self``.
_MOVES = frozenset({
    "to", "_to_copy", "type_as", "contiguous", "detach", "alias", "clone", "view", "reshape", "flatten", "unflatten",
    "_unsafe_view", "ravel", "permute", "transpose", "t", "movedim", "squeeze", "unsqueeze", "expand", "expand_as",
    "broadcast_to", "view_as", "reshape_as", "slice", "narrow", "select", "chunk", "split", "split_with_sizes",
    "unbind", "repeat", "tile", "repeat_interleave", "flip", "roll", "index_select", "gather", "index",
    "take_along_dim", "lift_fresh_copy", "sort", "topk", "msort",
})  # fmt: skip
#: Which output counts positions along ``dim`` (along everything, if there is none).
_POSITIONS = {
    "argmax": 0,
    "argmin": 0,
    "argsort": 0,
    "sort": 1,
    "topk": 1,
    "max": 1,
    "min": 1,
    "cummax": 1,
    "cummin": 1,
}


def _number(value: Any) -> sympy.Expr | None:
    """An int or a size expression, as an expression."""
    if isinstance(value, bool) or not isinstance(value, (int, sympy.Expr)):
        return None
    found = sympy.sympify(value)
    return found if found.is_integer else None


def _not_negative(value: sympy.Expr | None) -> bool:
    return value is not None and bool(value.is_nonnegative)


def spans(op: object, args: Mapping[str, Any], dtypes: Sequence[torch.dtype | None]) -> tuple[Span | None, ...]:
    """The span of every output. ``args``: by schema name; tensors have ``shape``, ``dtype`` and ``span``."""
    none = (None,) * len(dtypes)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return none
    name = op.overloadpacket.__name__
    found: list[Span | None] = list(none)
    tensor = args.get("self", args.get("input"))
    if name in _POSITIONS and hasattr(tensor, "shape") and _POSITIONS[name] < len(found) and "other" not in args:
        dim = args.get("dim", -1)  # ``argsort`` and ``topk`` without one take the last
        sizes = tensor.shape if dim is None or not tensor.shape else (tensor.shape[int(dim)],)
        found[_POSITIONS[name]] = Span(product(sizes))
    if name in _MOVES and op._overloadname != "dtype":  # which reads the bits anew
        known = getattr(tensor, "span", None)
        if known is not None and tensor.dtype in _WHOLE:
            found = [known if f is None else f for f in found] if name not in ("sort", "topk") else [known, *found[1:]]
    elif len(found) == 1 and found[0] is None:
        found[0] = _made(name, args, tensor)
    return tuple(f if dtype in _WHOLE else None for f, dtype in zip(found, dtypes, strict=True))


def _made(name: str, args: Mapping[str, Any], tensor: Any) -> Span | None:
    """The span of a new or computed tensor."""
    if name == "arange":
        end, start, step = (_number(args.get(k, d)) for k, d in (("end", None), ("start", 0), ("step", 1)))
        return Span(end) if end is not None and _not_negative(start) and step is not None and step > 0 else None
    if name in ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"):
        return Span(sympy.Integer(2 if "ones" in name else 1))
    if name in ("full", "full_like", "new_full"):
        value = _number(args.get("fill_value"))
        return Span(value + 1) if value is not None and _not_negative(value) else None
    known = getattr(tensor, "span", None)
    if name == "clamp":
        low, high = _number(args.get("min")), _number(args.get("max"))
        if known is None and not _not_negative(low):
            return None
        return Span(high + 1) if _not_negative(high) and high is not None else None
    other = _number(args.get("other"))
    if other is None or args.get("alpha", 1) != 1:
        return None
    if name == "remainder":
        return Span(other) if other.is_positive else None
    if known is None or known.end is None or not _not_negative(other):
        return None
    if name == "add":
        return Span(known.end + other)
    if name == "mul":
        return Span((known.end - 1) * other + 1)
    return None
