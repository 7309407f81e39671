"""Where a padded size sits inside a tensor: the abstract values of the padding proof.

For one size symbol ``s`` a tensor's ``Layout`` says, per dimension, that it reads as ``[outer][rows][inner]``, where
``rows`` is ``s`` itself or something that grows with it (``s + 2`` after two rows were put in front). The claim behind
it: the tensor computed at the bucket's size, with that factor cut to as many entries as it has at ``n``, equals the
tensor computed at ``n``. A layout without axes claims that the tensor does not depend on ``s`` at all. Every axis is
exact (``size == outer * rows * inner``, with ``outer`` and ``inner`` free of ``s``), so a layout is also the recipe for
cutting real rows out and for padding them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch

from .torch_api import FloorDiv

ONE = sympy.Integer(1)


@dataclass(frozen=True)
class Axis:
    """One dimension that reads as ``[outer][rows][inner]``, all counted in elements of that dimension.

    ``rows``: the entries of the padded factor (``None``: the symbol itself). It never falls while the symbol grows.
    ``loose``: how many of the last entries the claim leaves out, since they look past the end of the real rows (a
    convolution that pads on the right). Such a value may only be cut down to the entries that hold.
    """

    outer: sympy.Expr = ONE
    inner: sympy.Expr = ONE
    rows: sympy.Expr | None = None
    loose: int = 0

    def count(self, symbol: sympy.Symbol) -> sympy.Expr:
        """The entries of the padded factor."""
        return symbol if self.rows is None else self.rows

    def size(self, symbol: sympy.Symbol) -> sympy.Expr:
        """The size of the dimension that this axis describes."""
        return self.outer * self.count(symbol) * self.inner


PLAIN = Axis()


@dataclass(frozen=True)
class Fact:
    """What is known of a tensor's entries relative to ``n``, the real size of the symbol, which is at least 1.

    ``count``: the one entry is ``n + value``, at any size. ``below``: every entry is less than ``n``.
    Along padded dimension ``dim``, whose axis is ``PLAIN``: ``positions``: entry ``i`` is ``i``. ``real``: entry ``i``
    is whether ``i < n``. ``rows``: entry ``i`` is ``min(i, n - 1)``. ``repeats``: padded entries are copies of the last
    real one. ``filled``: padded entries are ``value``. ``whole`` (of ``repeats``): the same holds along every other
    padded dimension, so each padded entry is a copy of a real one. ``trash``: nobody reads row ``value`` of an argument
    (of dimension 0; the user's word).
    """

    kind: str
    dim: int = 0
    value: float | int | bool = 0
    whole: bool = False


@dataclass(frozen=True)
class Layout:
    """How one tensor carries one symbol: ``axes`` (dim -> Axis, sorted by dim) and what is known of its content.

    ``uniform``: the content is one constant that does not depend on the symbol, so it fits any layout.
    ``bound`` is about values that are used as indices. ``None``: a padded entry holds what row 0 could hold, so it
    is in range wherever row 0 is. Else padded entries count on past the real ones (``arange``), and ``bound`` is an
    exclusive upper limit of the values at the bucket's size; ``oo`` if no limit is known, 0 for rows of a table
    (valid wherever the table has these rows).
    ``fact``: what a repair makes true of the entries. A rule that builds a new layout drops it.
    """

    axes: tuple[tuple[int, Axis], ...] = ()
    uniform: bool = False
    bound: sympy.Expr | None = None
    fact: Fact | None = None

    @staticmethod
    def of(axes: Mapping[int, Axis], uniform: bool = False, bound: sympy.Expr | None = None) -> Layout:
        """A layout from a mapping of dimensions."""
        return Layout(tuple(sorted(axes.items(), key=lambda item: item[0])), uniform, bound)

    def get(self, dim: int) -> Axis | None:
        """The axis of ``dim``, or ``None`` if that dimension does not carry the symbol."""
        return next((axis for d, axis in self.axes if d == dim), None)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that carry the symbol, ascending."""
        return tuple(d for d, _ in self.axes)

    def replace(self, axes: Mapping[int, Axis], uniform: bool | None = None) -> Layout:
        """The same content rearranged: new axes, the claims about content kept unless given."""
        return Layout.of(axes, self.uniform if uniform is None else uniform, self.bound)

    def moved(self, where: Mapping[int, int] | Iterable[int]) -> Layout:
        """The layout after dimension ``d`` moved to ``where[d]``; dimensions that are not in a mapping are dropped."""
        table = where if isinstance(where, Mapping) else dict(enumerate(where))
        return self.replace({table[d]: axis for d, axis in self.axes if d in table})


INDEPENDENT = Layout()


@lru_cache(maxsize=4096)
def _integer(value: int) -> sympy.Integer:
    return sympy.Integer(value)


def expr_of(size: object) -> sympy.Expr:
    """The sympy expression of an int or a SymInt (or SymFloat, SymBool)."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size.node.expr
    return _integer(size) if isinstance(size, int) else sympy.sympify(size)


def shape_of(val: torch.Tensor) -> tuple[sympy.Expr, ...]:
    """The sizes of a (fake) tensor as expressions."""
    return tuple(expr_of(size) for size in val.shape)


def mentions(expr: object, symbol: sympy.Symbol) -> bool:
    """Whether an expression contains the symbol."""
    return symbol in getattr(expr, "free_symbols", ())


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether two sizes are equal for every value of their symbols (``False`` if that is not provable)."""
    return a == b or sympy.expand(a - b) == 0


def product(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    """The product of sizes (1 for none)."""
    return sympy.Mul(*sizes)


@lru_cache(maxsize=16384)
def exact_quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """``a / b`` if it is a polynomial with integer coefficients, so whole for every value of the symbols."""
    if b == 0:
        return None
    ratio = a / b
    if not ratio.is_Integer:
        ratio = sympy.cancel(ratio)
    if sympy.denom(ratio) != 1:
        return None
    terms = sympy.Add.make_args(sympy.expand(ratio))
    return ratio if all(term.as_coeff_Mul()[0].is_Integer for term in terms) else None


def canonical(size: sympy.Expr, symbol: sympy.Symbol) -> Axis | None:
    """The axis ``[1][symbol][inner]`` of a size that is a multiple of the symbol, else ``None``."""
    inner = exact_quotient(size, symbol)
    return None if inner is None or mentions(inner, symbol) else Axis(ONE, inner)


def rising(size: sympy.Expr, symbol: sympy.Symbol) -> bool:
    """Whether a size provably never falls while the symbol, its only one, grows."""
    if size.free_symbols - {symbol}:
        return False
    if size == symbol or size.is_Integer:
        return True
    if isinstance(size, (sympy.Add, sympy.Min, sympy.Max)):
        return all(rising(part, symbol) for part in size.args)
    if isinstance(size, sympy.Mul):
        number, rest = size.as_coeff_Mul()
        return bool(number.is_Integer and number > 0 and rest != size and rising(rest, symbol))
    if isinstance(size, FloorDiv):
        base, divisor = size.args
        return bool(divisor.is_Integer and divisor > 0 and rising(base, symbol))
    return False


def front(size: sympy.Expr, symbol: sympy.Symbol) -> Axis | None:
    """The axis of a dimension whose entries count from the front: the simplest that has this size.

    ``None`` if it is not known that a larger symbol only adds entries at the end.
    """
    return canonical(size, symbol) or (Axis(rows=size) if rising(size, symbol) else None)


def natural(val: object, symbol: sympy.Symbol) -> Layout | None:
    """The layout of a tensor that was padded from outside: every dimension of size ``symbol`` is padded at its end.

    ``None`` if a size mentions the symbol in any other form: such a tensor is never padded, so a captured consumer
    cannot have it. What is not a tensor does not carry anything.
    """
    if not isinstance(val, torch.Tensor):
        return INDEPENDENT
    return natural_of(shape_of(val), symbol)


@lru_cache(maxsize=16384)
def natural_of(shape: tuple[sympy.Expr, ...], symbol: sympy.Symbol) -> Layout | None:
    """``natural`` on size expressions."""
    carried = [d for d, size in enumerate(shape) if mentions(size, symbol)]
    if any(shape[d] != symbol for d in carried):
        return None
    return Layout(tuple((d, PLAIN) for d in carried))
