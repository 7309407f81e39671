"""What the padding analysis knows of one tensor and of one operation, and questions about argument trees.

Contract. Plain frozen data: equal states give equal verdicts, so verdicts are shared among repeated layers by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
import torch

from .layout import Fact, Layout, mentions
from .padding_rules_base import Operand
from .padding_values import Span
from .reasons import Reason
from .torch_api import OpOverload

#: The layouts of one tensor: one per symbol; ``None`` where the tensor cannot be padded for that symbol.
PerSymbol = tuple["Layout | None", ...]


@dataclass(frozen=True, eq=False)
class TensorState:
    """One tensor value during the analysis. ``token`` is what a rule's verdict can depend on."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    layouts: PerSymbol
    span: Span | None = None
    token: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", (self.shape, self.dtype, self.layouts, self.span))

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorState) and self.token == other.token


Outputs = tuple["TensorState | None", ...]


@dataclass(frozen=True)
class Verdict:
    """The memoised outcome of one operation for all symbols."""

    reason: Reason | None
    layouts: tuple[PerSymbol, ...]
    spans: tuple[Span | None, ...]
    obligations: tuple[sympy.Basic, ...] = ()
    float_bound: bool = False


def named(op: OpOverload, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments by schema name, with defaults, lists as tuples."""
    bound: dict[str, object] = {}
    for position, arg in enumerate(op._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(arg.name, arg.default_value)
        bound[arg.name] = tuple(given) if isinstance(given, list) else given
    return bound


def involves(value: object, symbol: sympy.Symbol) -> bool:
    """Whether a size, a tensor's sizes, or anything inside a tuple mentions the symbol."""
    if isinstance(value, tuple):
        return any(involves(v, symbol) for v in value)
    if isinstance(value, TensorState):
        return any(symbol in size.free_symbols for size in value.shape)
    return mentions(value, symbol)


def knows(value: object, i: int) -> bool:
    """Whether something is known of a tensor's entries for the ``i``-th symbol."""
    if isinstance(value, tuple):
        return any(knows(v, i) for v in value)
    layout = value.layouts[i] if isinstance(value, TensorState) else None
    return layout is not None and layout.fact is not None and layout.fact.kind != "trash"


def with_trash(outputs: Outputs, row: int | None) -> Outputs:
    """A tensor of which nobody reads one row."""
    if row is None:
        return outputs
    fact = Fact("trash", 0, row)
    return tuple(
        t and replace(t, layouts=tuple(x and replace(x, fact=fact) for x in t.layouts), token=()) for t in outputs
    )


def size_mentions(value: object, symbol: sympy.Symbol) -> bool:
    """Whether a size argument (not a tensor) mentions the symbol."""
    if isinstance(value, tuple):
        return any(size_mentions(v, symbol) for v in value)
    return not isinstance(value, Operand) and mentions(value, symbol)


def has_tensor(value: object) -> bool:
    if isinstance(value, tuple):
        return any(has_tensor(v) for v in value)
    return isinstance(value, TensorState)
