"""Padding rules of operations that make tensors out of sizes and constants."""

from __future__ import annotations

import sympy

from .layout import Layout, front
from .padding_rules_base import Call, Operand, RefusedError, rule


def fresh(call: Call, uniform: bool) -> Layout:
    """The layout of a new tensor: any axis fits a constant fill, so each size gets the simplest one."""
    axes = {}
    for d, size in enumerate(call.out):
        if call.carried(size):
            axis = front(size, call.symbol)
            if axis is None:
                raise RefusedError(f"new dim {d} of size {size} need not grow with the padded size", "derived-size")
            axes[d] = axis
    return Layout.of(axes, uniform)


@rule("zeros", "ones", "new_zeros", "new_ones", sizes=("size",))
def constant(call: Call) -> Layout:
    return fresh(call, True)


@rule("full", "new_full", sizes=("size",))
def full(call: Call) -> Layout:
    """The fill value is not a declared size: a padded size as the value is refused before."""
    return fresh(call, not isinstance(call.get("fill_value"), Operand))


@rule("empty", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", sizes=("size", "stride"))
def empty(call: Call) -> Layout:
    """Undefined content equals nothing, so it is not a constant fill; what is written later decides."""
    return fresh(call, False)


@rule("zeros_like", "ones_like", "full_like")
def constant_like(call: Call) -> Layout:
    return Layout(call.tensor("self").layout.axes, True)


@rule("empty_like")
def empty_like(call: Call) -> Layout:
    return Layout(call.tensor("self").layout.axes)


@rule("scalar_tensor", "eye", "linspace")
def without_size(call: Call) -> Layout:
    """Made of constants alone; any size that mentions the symbol is refused before."""
    return Layout()


@rule("arange", sizes=("end",))
def arange(call: Call) -> Layout:
    """Counting from a start that is free of the symbol is a prefix of counting further."""
    step = call.get("step", 1)
    step = int(step) if isinstance(step, sympy.Integer) else step
    if isinstance(step, sympy.Expr):
        raise RefusedError("counts by a size")
    start = call.get("start", 0)
    size = call.out[0]
    axis = front(size, call.symbol)
    if not call.carried(size):
        raise RefusedError("the size itself is used as data")
    if axis is None:
        raise RefusedError(f"counts {size} steps, which need not grow with the padded size", "derived-size")
    end = call.get("end")
    negative = not (start.is_nonnegative if isinstance(start, sympy.Expr) else start >= 0)
    bound = sympy.oo if negative or step < 0 or isinstance(end, float) else sympy.sympify(end)
    return Layout.of({0: axis}, bound=bound)
