"""Where the values of one key lie, without running it: what Inductor has to know of a segment's inputs.

Contract. Nothing runs. Slots, bridges and arguments are real tensors; what a segment makes is known from its trace
(``Output``): its layout, and whether it is memory of its own or a view of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from torch_graph_backend.codegen import size_function
from torch_graph_backend.inductor_segment import Output, Unsuitable
from torch_graph_backend.passes.dedup import ALIGNMENT, InputFacts
from torch_graph_backend.plan import CapturedSegment, Ref, TensorSpec
from torch_graph_backend.plan_build import spec_of
from torch_graph_backend.slots import evaluate

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry

#: Stride expressions, and shape and stride as a function of all sizes.
General = tuple[tuple[Any, ...], Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]]


@dataclass(frozen=True, eq=False)
class Place:
    """A value that a segment reads: its layout, and where it lies: ``start`` bytes into the memory ``root``.
    ``readable``: the tensor, if it holds already what it will hold in the call. ``fill``: what an integer may be."""

    root: Hashable
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    spec: TensorSpec
    readable: torch.Tensor | None = None
    fill: int = 0

    @property
    def end(self) -> int:
        if 0 in self.shape:
            return self.start
        extent = 1 + sum((n - 1) * st for n, st in zip(self.shape, self.stride, strict=True))
        return self.start + extent * self.dtype.itemsize

    def overlaps(self, other: Place) -> bool:
        return self.root == other.root and self.start < other.end and other.start < self.end


class Places:
    """The values of one key: ``values`` are those that segments made, by name."""

    def __init__(self, entry: Entry, args: Sequence[Any]) -> None:
        self.entry, self.args = entry, args
        self.values: dict[str, Place] = {}

    def place(self, ref: Ref) -> Place:
        """Where a segment's input lies. Raises ``Unsuitable`` for what Inductor's code is not made for."""
        entry = self.entry
        if ref.kind == "static":
            if str(ref.key) not in self.values:
                raise Unsuitable(f"it reads {ref.key}, whose layout is not known")
            return self.values[str(ref.key)]
        if ref.kind == "count":
            count = entry.plan.counts[int(ref.key)]
            number = entry.bucket[count.symbol] if count.symbol is not None else self.args[count.arg].item()
            fill = 0 if count.dtype.is_floating_point else int(number)
            return _real(entry.counts[int(ref.key)], None, fill=fill)
        if ref.kind == "slot":
            slot, buffer = entry.plan.slots[int(ref.key)], entry.slots[int(ref.key)]
            return _real(buffer, slot.spec, fill=0 if buffer.is_floating_point() else int(slot.pad_value))
        if ref.kind == "bridge":
            return _real(entry.bridges[int(ref.key)], entry.plan.bridges[int(ref.key)].spec)
        tensor = self.args[int(ref.key)] if ref.kind == "arg" else entry.normal.constants[str(ref.key)]
        if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Unsuitable(f"{ref} is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise Unsuitable(f"{ref} is no plain strided tensor")
        if tensor.device != entry.state.device:
            raise Unsuitable(f"{ref} is on {tensor.device}")
        value = entry.normal.placeholders[int(ref.key)].meta["val"] if ref.kind == "arg" else tensor
        return _real(tensor, spec_of(value), readable=True)

    @staticmethod
    def facts(places: Sequence[Place]) -> list[InputFacts]:
        found = []
        for i, p in enumerate(places):
            misaligned = 0 if p.device.type == "cpu" else p.start % ALIGNMENT
            shares = next(k for k, q in enumerate(places[: i + 1]) if k == i or p.overlaps(q))
            found.append(InputFacts(p.shape, p.stride, p.dtype, p.device, misaligned, shares))
        return found

    def note(self, step: CapturedSegment, node: Node, out: Output, inputs: Sequence[Place]) -> None:
        """Note where an output of a segment lies."""
        spec = spec_of(node.meta["val"])
        if out.source == "input":
            base = inputs[out.index]
            root, start = base.root, base.start + (0 if out.whole else out.offset * out.dtype.itemsize)
        else:
            root, start = ("made", step.index, out.index), (0 if out.whole else out.offset * out.dtype.itemsize)
        device = self.entry.state.device
        self.values[node.name] = Place(root, start, out.shape, out.stride, out.dtype, device, spec)


def _real(tensor: torch.Tensor, spec: TensorSpec | None, readable: bool = False, fill: int = 0) -> Place:
    """A tensor that is there already, at its address."""
    layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device
    read = tensor.detach() if readable else None
    return Place("memory", tensor.data_ptr(), *layout, spec or spec_of(tensor), read, fill)


def general_layout(place: Place, entry: Entry) -> General | None:
    """The layout at any size; None if it is not as planned here (a buffer that is laid out densely)."""
    names = [s.name for s in entry.plan.symbols]
    spec = place.spec
    if tuple(evaluate(n, entry.bucket) for n in spec.shape) != place.shape:
        return None
    if tuple(evaluate(n, entry.bucket) for n in spec.stride) != place.stride:
        return None
    shape, stride = size_function(names, spec.shape), size_function(names, spec.stride)
    return spec.stride, lambda sizes: (list(shape(*sizes)), list(stride(*sizes)))
