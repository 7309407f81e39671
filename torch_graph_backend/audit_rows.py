"""What an audit compares and spoils: the real rows of a captured value, and everything outside of them.

Contract. Pure tensor work at one bucket and one real size. A ``Bound`` says where the real rows of one tensor lie, and
whether the proof claims anything of the others (a filler that a repair put there): then they are not spoiled. A fill
respects what the proof may assume: integers and booleans are always those of some real row, the same row in every
tensor, so indices stay valid; so are floating-point values from which an index is computed. Random fills have a
generator of their own: an audit draws nothing from the user's.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_graph_backend.passes.alias import arguments
from torch_graph_backend.passes.capturable import tensors_of
from torch_graph_backend.passes.layout import Layout
from torch_graph_backend.passes.torch_api import OpOverload
from torch_graph_backend.plan import CapturedSegment, Padding, TensorSpec
from torch_graph_backend.plan_build import padding_of, spec_of
from torch_graph_backend.slots import CutView, Factor, Sizes, Window

#: Per node name and output: where the padding is, by symbol (``Classified.layouts``).
Layouts = Mapping[str, tuple[Mapping[sympy.Symbol, Layout], ...]]

#: In the order in which they are tried: what finds most leaks and disturbs least comes first.
FILLS = ("another row", "random", "huge", "NaN")
#: Which real row integers take under each fill, as a share of the real rows.
_ROW = {"another row": 1.0, "random": 0.5, "huge": 1.0, "NaN": 0.34}

#: Parts of the names of operations whose integer arguments are positions in another tensor.
_INDEXING = ("index", "gather", "scatter", "embedding", "take", "put", "one_hot", "bincount", "nll_loss")
#: Their integer results (of the latter: the second one) are in range whatever their input holds.
_POSITIONS, _WITH_POSITIONS = ("argmax", "argmin", "argsort"), ("topk", "sort", "max", "min")
#: Floating-point results that jump: a last digit decides.
_JUMPS = ("round", "floor", "ceil", "trunc", "sign", "frac", "fmod", "remainder", "floor_divide", "heaviside")


@dataclass(frozen=True)
class Bound:
    """One tensor at one bucket. ``spec``: its sizes and strides. ``free``: its padded rows may hold anything.
    ``exact``: its real rows are all eager's (else the last of them look past the end, and are not compared)."""

    spec: TensorSpec
    window: Window
    free: bool = True
    exact: bool = True

    def rows(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        return self.window.real_rows(tensor, sizes)

    def cut(self, tensor: torch.Tensor, sizes: Sizes) -> CutView:
        return CutView(tensor, self.spec, self.window, False, sizes)


class Bounds:
    """The bounds of the values of one graph at one bucket, by name; ``None`` where a layout is not known."""

    def __init__(self, nodes: Mapping[str, Node], layouts: Layouts, symbols: Sequence[Any], bucket: Sizes) -> None:
        self.nodes, self.layouts, self.symbols, self.bucket = nodes, layouts, symbols, bucket

    def of(self, name: str) -> list[Bound | None]:
        """One per tensor of the value."""
        node = self.nodes[name]
        values = tensors_of(node.meta.get("val"))
        found = self.layouts.get(name, ())
        known = [entry for entry in found if entry] if len(found) != len(values) else list(found)
        if len(known) != len(values):
            return [self.plain(v) for v in values]
        return [self.bound(v, entry) for v, entry in zip(values, known, strict=True)]

    def plain(self, value: torch.Tensor) -> Bound | None:
        """The bound of a tensor without any padded size."""
        spec = spec_of(value)
        padded = any(sympy.sympify(size).free_symbols & {*self.symbols} for size in spec.shape)
        return None if padded else Bound(spec, Window(()))

    def bound(self, value: torch.Tensor, layouts: Mapping[sympy.Symbol, Layout]) -> Bound | None:
        if len(layouts) < len(self.symbols):
            return self.plain(value)
        padding: Padding = padding_of(dict(layouts))
        free = not any(x.uniform or _claims(x) or x.bound is not None for x in layouts.values())
        exact = not any(axis.loose for x in layouts.values() for _, axis in x.axes)
        return Bound(spec_of(value, padding), Window.at(padding, self.bucket), free, exact)


def _claims(layout: Layout) -> bool:
    """Whether something is known of the padded entries."""
    return layout.fact is not None and layout.fact.kind != "trash"


# -- fills -----------------------------------------------------------------------------------------------------------


def spoil(tensor: torch.Tensor, window: Window, sizes: Sizes, how: str, guarded: bool) -> None:
    """Write ``how`` into the padded rows. ``guarded``: an index is computed from the tensor."""
    view, places = _split(tensor, window)
    rows_only = guarded or not (tensor.is_floating_point() or tensor.is_complex()) or how == "another row"
    for dim, factor in places:
        n = factor.real(sizes)
        if n >= factor.size or (view.stride(dim) == 0 and factor.size > 1):
            continue
        tail = view.narrow(dim, n, factor.size - n)
        if rows_only:
            row = min(int(_ROW[how] * n), n - 1)
            write(tail, view.narrow(dim, row, 1).expand_as(tail).clone())
        else:
            write(tail, _junk(tail, how))


def _split(tensor: torch.Tensor, window: Window) -> tuple[torch.Tensor, list[tuple[int, Factor]]]:
    """The tensor with every padded dimension split into its factors, and where the padded factors are."""
    places, offset = [], 0
    for dim, factors in window.dims:
        places += [(dim + offset + k, f) for k, f in enumerate(factors) if f.rows is not None]
        offset += len(factors) - 1
    for dim, factors in reversed(window.dims):
        tensor = tensor.unflatten(dim, [f.size for f in factors])
    return tensor, places


def _junk(like: torch.Tensor, how: str) -> torch.Tensor:
    shape, device = like.shape, like.device
    if how == "random":
        generator = torch.Generator(device).manual_seed(20_26)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * 1e3
    value = float("nan") if how == "NaN" else torch.finfo(like.dtype).max / 4
    return torch.full(shape, value, device=device, dtype=like.dtype)


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy, entries that share memory (stride 0) once."""
    for dim, (n, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and n > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


# -- what a segment does with values ---------------------------------------------------------------------------------


def guarded(step: CapturedSegment, nodes: Mapping[str, Node]) -> set[str]:
    """Inputs of a segment from which some index is computed: junk in them could point anywhere."""
    inside = {op.value for op in step.ops}
    todo = [a.name for op in step.ops for a in _indices(nodes[op.value])]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        if name in inside and not _in_range(nodes[name]):
            todo += [a.name for a in nodes[name].all_input_nodes]
    return found - inside


def jumps(step: CapturedSegment, nodes: Mapping[str, Node]) -> bool:
    """Whether a last digit may decide about a result: two shapes of one computation cannot be compared then."""
    return any(_jumps(nodes[op.value]) for op in step.ops)


def _indices(node: Node) -> list[Node]:
    """Integer tensors that an operation takes for positions."""
    if not _named(node, _INDEXING):
        return []
    found: list[Node] = []
    for value in arguments(node).values():
        items = value if isinstance(value, (list, tuple)) else (value,)
        found += [v for v in items if isinstance(v, Node) and _whole(v)]
    return found


def _in_range(node: Node) -> bool:
    """Whether a value is a position that the operation found in its input."""
    if node.target is operator.getitem and node.args[1] == 1:
        return isinstance(node.args[0], Node) and _named(node.args[0], _WITH_POSITIONS, whole=True)
    return _named(node, _POSITIONS, whole=True)


def _jumps(node: Node) -> bool:
    takes = any(not _whole(a) for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor))
    gives = any(not t.is_floating_point() and not t.is_complex() for t in tensors_of(node.meta.get("val")))
    return takes and (gives or _named(node, _JUMPS, whole=True))


def _whole(node: Node) -> bool:
    return any(not t.is_floating_point() and not t.is_complex() for t in tensors_of(node.meta.get("val")))


def _named(node: Node, parts: Sequence[str], whole: bool = False) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target.overloadpacket.__name__.rstrip("_")
    return name in parts if whole else any(part in name for part in parts)
