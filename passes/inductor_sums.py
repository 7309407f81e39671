"""Sums, means and variances of floats in a segment compiled for a CPU: added in float64, rounded once.

Contract. ``exact_sums`` changes a functional graph below all decompositions in place: softmax and normalisations are
``sum`` and ``var_mean`` by then. Inductor's C++ adds one number after the other in float32; eager code adds blocks, and
its error grows with the logarithm of their number. In float64 the error is that of the last rounding.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

SUMS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.var.correction,
    aten.var_mean.correction,
}


#: (In the half dtypes both add in float32.)
NARROW = (torch.float32, torch.float16, torch.bfloat16)


#: Which Inductor (2.13) computes by a loop that takes no float64 where halves are loaded in the same kernel.
SPREADS = {aten.var.correction, aten.var_mean.correction}


def exact_sums(graph: Graph, halves: bool = False) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in SUMS or (halves and node.target in SPREADS):
            continue
        source = node.args[0]
        if isinstance(source, Node) and _is_narrow(source.meta.get("val")):
            _widen(graph, node, source)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in NARROW and value.device.type == "cpu"


def _widen(graph: Graph, node: Node, source: Node) -> None:
    """``f(x)`` as ``f(x.double())`` rounded to the dtype it had."""
    with graph.inserting_before(node):
        wide = graph.call_function(convert, (source, torch.float64))
    wide.meta["val"] = source.meta["val"].to(torch.float64)
    node.args = (wide, *node.args[1:])
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        node.meta["val"] = _round(graph, node, value)
        return
    node.meta["val"] = tuple(v.to(torch.float64) for v in value)
    for part in [n for n in node.users if n.target is operator.getitem]:
        part.meta["val"] = _round(graph, part, part.meta["val"])


def _round(graph: Graph, node: Node, value: torch.Tensor) -> torch.Tensor:
    """Have users of ``node`` use it rounded to the dtype of ``value``; the value that it has now."""
    with graph.inserting_after(node):
        rounded = graph.call_function(convert, (node, value.dtype))
    rounded.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    return value.to(torch.float64)
