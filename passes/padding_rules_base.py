"""What the padding rules share: the operands as a rule sees them, the registry, and the broadcast rule.

A rule reads arguments by schema name only. It returns the layout of every output for one symbol, or raises
``RefusedError``. A size argument that mentions the symbol is refused before the rule runs unless the rule declared it
in ``sizes``: then the rule (or the exactness check of every output) answers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from .layout import PLAIN, Axis, Fact, Layout, mentions, same
from .padding_tails import constant
from .padding_values import Span
from .torch_api import OpOverload

UNBOUNDED = sympy.oo
LEAVES = "indices count on in padded rows and could leave the table"
CLAMP = "clamp the indices to the rows of the table (which changes no valid one)"
PROMISE = "if they are valid indices, say so with declare_indices"


class RefusedError(Exception):
    """Why a node is not padding-safe: a reason code and a sentence without the op's name."""

    def __init__(self, text: str, code: str = "padding", fix: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.fix = fix


_UNKNOWN = Fact("")


def same_entry(a: float | int | bool, b: float | int | bool) -> bool:
    """Whether two fillers are one: NaN is NaN."""
    return a == b or (a != a and b != b)


@dataclass(frozen=True)
class Operand:
    """A tensor argument as one symbol sees it."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    layout: Layout
    span: Span | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def axis(self, dim: int) -> Axis | None:
        """The axis of ``dim`` (already non-negative)."""
        return self.layout.get(dim)

    def moved(self, where: Mapping[int, int]) -> dict[int, Axis]:
        """The axes of some dimensions, at their place in a result."""
        return {where[d]: axis for d, axis in self.layout.axes if d in where}

    @property
    def carries(self) -> bool:
        return bool(self.layout.axes)

    @property
    def fact(self) -> Fact:
        """What is known of the entries (of kind ``""`` if nothing is)."""
        return self.layout.fact or _UNKNOWN

    @property
    def rows_exist(self) -> bool:
        """Whether every entry, padded ones too, is a real row of a dimension of the symbol's size."""
        return self.fact.kind in ("inside", "rows") or self.fact == Fact("count", value=-1)

    def repeats(self, dim: int) -> bool:
        """Whether the padded entries along ``dim`` are copies of the last real one."""
        return self.fact.kind in ("repeats", "rows") and self.fact.dim == dim and self.axis(dim) == PLAIN

    def filled(self, dim: int, value: float | int | bool) -> bool:
        """Whether the padded entries along ``dim`` are ``value``."""
        known = self.fact.kind == "filled" and self.fact.dim == dim and self.axis(dim) == PLAIN
        return known and same_entry(self.fact.value, value)

    def goes_to_trash(self, target: Operand, dim: int) -> bool:
        """Whether all padded entries, as positions along ``dim`` of ``target``, are a row of it that nobody reads."""
        known = target.fact.kind == "trash" and dim == 0 and target.axis(0) is None and self.carries
        return known and all(self.filled(d, target.fact.value) for d in self.layout.dims)

    @property
    def constant(self) -> bool:
        """Whether all entries are one value: a constant fill, or a single element that does not carry."""
        return self.layout.uniform or (not self.carries and all(size == 1 for size in self.shape))


@dataclass
class Call:
    """One operation for one symbol. ``args`` holds ``Operand``, sympy expressions for sizes, or plain constants."""

    op: OpOverload
    symbol: sympy.Symbol
    args: dict[str, Any]
    outs: tuple[tuple[sympy.Expr, ...] | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    obligations: list[sympy.Basic] = field(default_factory=list)
    #: The user reserves the row that padded entries of its index name (``padding_rules_index``).
    reserved: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by schema name; ``default`` if the schema has none of that name."""
        return self.args.get(name, default)

    def tensor(self, name: str) -> Operand:
        """A tensor argument that must be given."""
        value = self.args.get(name)
        if not isinstance(value, Operand):
            raise RefusedError(f"argument {name!r} is not a tensor", "unknown-op")
        return value

    def first(self, *names: str) -> Operand:
        """The tensor argument under the first of the names that the schema has."""
        return self.tensor(next((name for name in names if name in self.args), names[0]))

    def tensors(self, *skip: str) -> list[Operand]:
        """Every tensor argument, those inside lists too, in schema order."""
        found: list[Operand] = []
        for name, value in self.args.items():
            if name not in skip:
                found += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Operand)]
        return found

    def dim(self, ndim: int, name: str = "dim") -> int:
        """A dimension argument as a non-negative int."""
        value = self.args[name]
        if isinstance(value, sympy.Integer):
            value = int(value)
        if not isinstance(value, int):
            raise RefusedError(f"{name} is not a constant")
        return value % max(ndim, 1)

    def dims(self, ndim: int, *names: str) -> list[int]:
        """A list-of-dimensions argument under the first name that the schema has; all dimensions if none or empty."""
        value = next((self.args[name] for name in names if name in self.args), None)
        if value is None or value == ():
            return list(range(ndim))
        return sorted({int(d) % max(ndim, 1) for d in (value if isinstance(value, tuple) else (value,))})

    @property
    def out(self) -> tuple[sympy.Expr, ...]:
        """The sizes of the first output."""
        if not self.outs or self.outs[0] is None:
            raise RefusedError("the result is not a tensor", "unknown-op")
        return self.outs[0]

    def carried(self, size: object) -> bool:
        return mentions(size, self.symbol)

    def oblige(self, condition: sympy.Basic, otherwise: str = LEAVES, fix: str = CLAMP) -> None:
        """Record a condition on sizes that must hold with every symbol at its bucket; a false one is refused."""
        if condition == sympy.false:
            raise RefusedError(otherwise, fix=fix)
        if condition != sympy.true:
            self.obligations.append(condition)

    def in_range(self, index: Operand, rows: sympy.Expr) -> None:
        """Padded entries of an index must stay inside ``rows`` rows."""
        bound = index.layout.bound
        if (value := constant(index)) is not None and not index.dtype.is_floating_point:
            return self.entry_in_range(value, rows)
        if bound == UNBOUNDED and index.span is not None and index.span.end is not None:
            bound = index.span.end  # what is known of every entry, at any size
        if bound is not None:
            self.oblige(sympy.false if bound == UNBOUNDED else sympy.Le(bound, rows))

    def entry_in_range(self, value: float | int | bool, rows: sympy.Expr) -> None:
        """Padded entries that are all ``value`` must stay inside ``rows`` rows, wherever real ones lie."""
        inside = sympy.sympify(value >= 0) & sympy.Lt(sympy.Integer(int(value)), rows)
        self.oblige(inside, f"padded entries are {value}, and there are {rows} rows", "choose a valid pad_value")

    def look_up(self, table: Operand, dim: int, index: Operand) -> None:
        """Entries of ``index`` read ``table`` along ``dim``: padded ones stay inside, real ones read real rows.

        A real entry of eager lies in the real rows, unless it is negative: then it counts from their end.
        """
        axis = table.axis(dim)
        if axis is not None and axis == PLAIN and index.rows_exist:
            return
        if axis is not None:
            if index.span is None:
                text = f"looks up rows of padded dim {dim} by values that may be negative or too large"
                raise RefusedError(text, fix=PROMISE)
            rows = axis.count(self.symbol) * axis.inner  # up to here, an entry is the same one at every size
            end = index.span.end if index.span.end is not None else rows * axis.outer
            if not never_negative(rows - end):
                raise RefusedError(f"looks up rows of padded dim {dim} by values that may exceed the real rows")
        self.in_range(index, table.shape[dim] if table.shape else sympy.Integer(1))


Rule = Callable[[Call], "Layout | Sequence[Layout]"]


@dataclass(frozen=True)
class Entry:
    """A rule, the schema names of the size arguments that it accounts for, and whether it knows loose axes."""

    rule: Rule
    sizes: frozenset[str]
    loose: bool = False


#: Rules by packet name (``aten.<name>``), or by ``name.overload`` where overloads differ in kind.
RULES: dict[str, Entry] = {}


def rule(*names: str, sizes: Iterable[str] = (), loose: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule under ATen names; an in-place operation uses the rule of its functional form.

    ``loose``: the rule may be given axes whose last entries do not hold (it moves them, or cuts them off).
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two padding rules for {name}")
            RULES[name] = Entry(function, frozenset(sizes), loose)
        return function

    return register


def broadcast(call: Call, operands: Iterable[Operand], ndim: int) -> dict[int, Axis]:
    """The axes of operands broadcast to ``ndim`` dimensions; operands that carry differently are refused.

    A constant fill fits any layout, so it only decides where no other operand carries the dimension.
    """
    hard: dict[int, Axis] = {}
    soft: dict[int, Axis] = {}
    for operand in operands:
        offset = ndim - operand.ndim
        for d, axis in operand.layout.axes:
            if operand.layout.uniform:
                soft.setdefault(d + offset, axis)
            elif hard.setdefault(d + offset, axis) != axis:
                raise RefusedError(f"operands hold the padding of {call.symbol} differently in dim {d + offset}")
    return {**soft, **hard}


def drop(layout: Layout, dims: Iterable[int], keep: bool = False) -> Layout:
    """The layout without some dimensions (which must not carry); ``keep`` leaves them as size 1."""
    gone = set(dims)
    if keep:
        return layout.moved({d: d for d in layout.dims if d not in gone})
    return layout.moved({d: d - sum(g < d for g in gone) for d in layout.dims if d not in gone})


def forbid(operand: Operand, dims: Iterable[int], what: str) -> None:
    """Refuse if one of the dimensions carries the symbol."""
    bad = [d for d in dims if operand.axis(d) is not None]
    if bad:
        raise RefusedError(f"{what} padded dim {', '.join(map(str, bad))}")


def never_negative(difference: sympy.Expr) -> bool:
    """Whether a difference of sizes is provably at least 0, whatever the sizes (each is at least 1)."""
    symbols = difference.free_symbols
    shifted = sympy.expand(difference.xreplace({s: s + 1 for s in symbols}))
    if not symbols:
        return bool(shifted.is_Integer and shifted >= 0)
    if not shifted.is_polynomial(*symbols):
        return False
    return all(c.is_Integer and c >= 0 for c in sympy.Poly(shifted, *symbols).coeffs())


def content(layout: Layout) -> Layout:
    """A layout whose content was computed anew: no claim about the values is kept."""
    return Layout(layout.axes)


def for_outputs(call: Call, layout: Layout) -> list[Layout]:
    """The same layout for every output."""
    return [layout] * len(call.outs)


def check_exact(call: Call, index: int, layout: Layout) -> None:
    """Every size of an output that mentions the symbol has an axis of exactly that size, and no other has one."""
    shape = call.outs[index]
    for d, size in enumerate(shape or ()):
        axis = layout.get(d)
        if axis is None:
            if call.carried(size):
                raise RefusedError(f"output dim {d} of size {size} is not accounted for")
        elif call.carried(axis.outer) or call.carried(axis.inner) or not same(size, axis.size(call.symbol)):
            raise RefusedError(f"output dim {d} of size {size} is not a multiple of the padded size", "derived-size")
    if any(d < 0 or d >= len(shape or ()) for d in layout.dims):
        raise RefusedError("the result has fewer dimensions than its layout")
