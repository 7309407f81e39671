"""Which values decide something: an integer, a boolean, a step. They must be eager's to the last bit.

Contract. Pure; works on whole graphs and on traced segments. A float that differs from eager's in its last digit is
within what is promised, until it is compared, rounded to a whole number, sorted, or turned into an index: then another
row is taken. ``deciding(graph)`` has every value that such an operation depends on, through views, writes and any other
operation, so that code in front of it can keep to operations that are bit for bit eager's.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from .alias import view_args, written_args
from .torch_api import OpOverload

#: Of floats, to floats, with jumps.
_STEPS = {"ceil", "floor", "floor_divide", "fmod", "frac", "heaviside", "remainder", "round", "sgn", "sign", "trunc"}

#: Booleans and integers that no last digit changes, and questions about layout alone.
_SAFE = {
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "empty_like", "full_like", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "zeros_like", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset",
}  # fmt: skip


def deciding(graph: Graph, also: Iterable[Node] = ()) -> set[Node]:
    """All nodes on whose value a decision depends; ``also`` are values on which later graphs decide."""
    family, writers = _memory(graph)
    todo = [*also]
    for node in graph.nodes:
        if decides(node):
            todo += [a for a in node.all_input_nodes if _has(a, torch.Tensor.is_floating_point)]
    found: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        todo += node.all_input_nodes
        todo += writers[family(node)]
    return found


def decides(node: Node) -> bool:
    """Whether an operation makes something of floats that jumps where they change a little."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not any(_has(a, torch.Tensor.is_floating_point) for a in node.all_input_nodes):
        return False
    name = _name(node.target)
    if name in _SAFE:
        return False
    if name in _STEPS or _rounds(node):
        return True
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        read = {u.args[1] for u in node.users if u.target is operator.getitem and u.users}
        return any(_is_whole(v) for i, v in enumerate(value) if i in read)
    return value is not None and (not isinstance(value, torch.Tensor) or _is_whole(value))


def _rounds(node: Node) -> bool:
    return node.kwargs.get("rounding_mode") is not None


def _name(target: Any) -> str:
    if not isinstance(target, OpOverload):
        return ""
    return target._schema.name.split("::")[1].removesuffix("_")


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _has(node: Node, test: Any) -> bool:
    value = node.meta.get("val")
    return any(
        isinstance(v, torch.Tensor) and test(v) for v in (value if isinstance(value, (tuple, list)) else [value])
    )


def _memory(graph: Graph) -> tuple[Any, dict[Node, list[Node]]]:
    """Which values may share memory, as a function to one of them, and by that one the operations that write it."""
    parent: dict[Node, Node] = {}

    def family(node: Node) -> Node:
        while node in parent:
            node = parent[node]
        return node

    for node in graph.nodes:
        for source in (*view_args(node), *written_args(node)):
            a, b = family(node), family(source)
            if a is not b:
                parent[a] = b
    writers: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for source in written_args(node):
            writers[family(source)].append(node)
    return family, writers
