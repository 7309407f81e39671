"""Structural keys of segments: equal segments (layer 2, layer 3, ...) have equal keys, so one compile serves them all.

Contract. Pure, and a key is hashable. Two segments of equal keys compute the same function of their inputs, in the
order in which the segments list those: same operations on the same positions, same scalar constants, same outputs,
same layouts of inputs, and the same inputs sharing memory. Names, source lines and module paths are no part of a key,
nor is where a weight comes from. What cannot be compared makes a key that equals no other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .symbols import expr_of

#: An address counts modulo this many bytes: what vectorised kernels assume.
ALIGNMENT = 16

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SCALARS = (int, float, complex, bool, str, type(None))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class InputFacts:
    """One input of a segment. ``shape`` and ``stride`` in elements (numbers, or texts where a compile serves several
    sizes); ``misaligned``: its address modulo 16 bytes; ``shares``: the first input with which it shares memory, its
    own position if that is none before it."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    misaligned: int
    shares: int


def segment_key(
    nodes: Sequence[Node],
    inputs: Mapping[str, InputFacts],
    outputs: Iterable[str],
    size: Callable[[Any], Hashable],
) -> Hashable:
    """The key of the segment that runs ``nodes`` (in order) on ``inputs`` (by node name, in order).

    ``size(expression)`` is what a size counts as: its value at a bucket, or a text.
    """
    numbers = {name: i for i, name in enumerate(inputs)}
    writer = _Writer(numbers, size)
    operations = []
    for node in nodes:
        call = (node.target, writer.value(node.args), writer.value(node.kwargs), writer.value(_regions(node)))
        numbers[node.name] = len(numbers)
        operations.append(call)
    return tuple(inputs.values()), tuple(operations), tuple(numbers[name] for name in outputs)


def _regions(node: Node) -> tuple[Any, ...]:
    """The autocast regions that a node runs in."""
    return tuple(node.meta.get("autocast", ()))


class _Writer:
    """Argument trees without names."""

    def __init__(self, numbers: Mapping[str, int], size: Callable[[Any], Hashable]) -> None:
        self.numbers, self.size = numbers, size

    def value(self, value: Any) -> Hashable:
        if isinstance(value, Node):
            number = self.numbers.get(value.name)
            # What no step makes is size arithmetic, which the generated code writes where it is used.
            return ("size", self.size(expr_of(value.meta["val"]))) if number is None else ("value", number)
        if isinstance(value, _SIZES):
            return "size", self.size(value.node.expr)
        if isinstance(value, (list, tuple)):
            return type(value).__name__, tuple(self.value(v) for v in value)
        if isinstance(value, Mapping):
            return "dict", tuple((k, self.value(v)) for k, v in value.items())
        if isinstance(value, slice):
            return "slice", self.value((value.start, value.stop, value.step))
        if type(value) in _SCALARS:
            return type(value).__name__, repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        if isinstance(value, _TORCH):
            return type(value).__name__, str(value)
        try:
            hash(value)
        except TypeError:
            return "object", _Unequal()
        return "object", value


class _Unequal:
    """Equal to nothing but itself."""
