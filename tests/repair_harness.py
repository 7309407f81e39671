"""A repaired program on its own: traced, rewritten, and run node by node at a bucket with whatever in its padded rows.

No recorder and no compiled frame: one trace serves many sizes, fills and values. The answer is compared with eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from equality import tensors
from torch import Tensor

from torch_graph_backend.passes.classify import Classified, classify
from torch_graph_backend.passes.normalize import NormalGraph, normalise
from torch_graph_backend.passes.repair import repair

NAN, INF = float("nan"), float("inf")

#: What padded rows hold, by kind of dtype. Not what a real row could hold, and not what fillers are.
FILLS = {"float": (NAN, INF, -INF, "huge", 3), "int": ("huge", "low", 3), "bool": (True, False)}


def fills_of(dtype: torch.dtype) -> list[Any]:
    kind = "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "int"
    ends = torch.finfo(dtype) if kind == "float" else torch.iinfo(dtype) if kind == "int" else None
    return [getattr(ends, {"huge": "max", "low": "min"}[f]) if isinstance(f, str) else f for f in FILLS[kind]]


@dataclass(frozen=True)
class Program:
    """``function`` of one tensor, rewritten for padding in some of its dimensions."""

    function: Callable[[Tensor], Any]
    normal: NormalGraph
    graph: NormalGraph
    seen: Classified
    dims: tuple[int, ...]

    @property
    def repaired(self) -> bool:
        return any(n.meta.get("repaired") for n in self.graph.graph.nodes)

    @property
    def captured(self) -> bool:
        """Whether nothing is left to run eagerly."""
        return all(v.kind != "eager" for v in self.seen.verdicts.values())

    def want(self, x: Tensor) -> list[Tensor]:
        return tensors([self.function(x)])

    def got(self, x: Tensor, room: Mapping[int, int], fill: Any) -> list[Tensor]:
        """The rewritten graph at sizes ``room`` (by dimension), cut back to the real ones."""
        shape = [room.get(d, n) for d, n in enumerate(x.shape)]
        whole = torch.full(shape, fill, dtype=x.dtype)
        whole[tuple(slice(n) for n in x.shape)] = x
        return evaluate(self.graph, self.seen, whole, x)


def before(x: Tensor) -> Tensor:
    """A captured operation, so that a masked one behind it joins something."""
    return x.logical_not() if x.dtype is torch.bool else x.neg()


def program(op: Callable[[Tensor], Any], example: Tensor, dims: Sequence[int]) -> Program:
    """``op`` behind a captured operation, padded in ``dims`` of its argument."""
    found: list[Any] = []

    def function(x: Tensor) -> Any:
        return op(before(x))

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    example = example.clone()
    for d in dims:
        torch._dynamo.mark_dynamic(example, d)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(example)
    (gm,) = found
    normal = normalise(gm)
    graph, seen = repair(normal, lambda g: classify(g, torch.device("cpu"), lambda n: None), min_kernels=0)
    return Program(function, normal, graph, seen, tuple(dims))


def evaluate(normal: NormalGraph, seen: Classified, whole: Tensor, real: Tensor) -> list[Tensor]:
    """The tensors that a graph returns for a padded argument, with sizes of ``whole`` and counts of ``real``."""
    values: dict[Any, Any] = {}
    (fake,) = (p.meta["val"] for p in normal.placeholders if isinstance(p.meta["val"], Tensor))
    sizes: dict[sympy.Symbol, tuple[int, int]] = {
        s.node.expr: (a, b)
        for s, a, b in zip(fake.shape, whole.shape, real.shape, strict=True)
        if isinstance(s, torch.SymInt)
    }
    for node in normal.graph.nodes:
        val = node.meta.get("val")
        if "real_size" in node.meta:
            values[node] = torch.tensor(sizes[node.meta["real_size"]][1])
        elif node.op == "placeholder":
            values[node] = whole if isinstance(val, Tensor) else sizes[val.node.expr][0]
        elif node.op == "get_attr":
            values[node] = normal.constants[str(node.target)]
        elif node.op == "output":
            outputs = [a for a in node.all_input_nodes if isinstance(values[a], Tensor)]
            return [_cut(values[a], seen.layouts[a][0], sizes) for a in outputs]
        else:
            args, kwargs = torch.fx.node.map_aggregate(
                (node.args, dict(node.kwargs)), lambda a: values[a] if isinstance(a, torch.fx.Node) else a
            )
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")


def _cut(value: Tensor, layouts: Mapping[sympy.Symbol, Any], sizes: Mapping[sympy.Symbol, tuple[int, int]]) -> Tensor:
    """The real rows of an output."""
    keep: dict[int, Tensor] = {}
    at = [{s: sympy.Integer(pair[k]) for s, pair in sizes.items()} for k in (0, 1)]
    for symbol, layout in layouts.items():
        for dim, axis in layout.axes:
            whole, real = (int(axis.count(symbol).xreplace(a)) for a in at)
            place = torch.arange(value.shape[dim]) // int(axis.inner.xreplace(at[0])) % whole
            keep[dim] = keep.get(dim, True) & (place < real)
    for dim, rows in keep.items():
        value = value if rows.all() else value.index_select(dim, rows.nonzero().flatten())
    return value
