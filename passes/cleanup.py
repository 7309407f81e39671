"""Tidying a normalised graph: constants that need no copy, and results that nobody uses."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from .alias import may_raise
from .torch_api import HigherOrderOperator, OpOverload

aten = torch.ops.aten


def fold_constant_copies(graph: Graph) -> None:
    """A literal (``torch.tensor([])``) is made afresh at every call; where nobody changes or keeps it, once will do."""
    for node in graph.nodes:
        if (
            node.target is aten.clone.default
            and node.args[0].op == "get_attr"
            and all(_only_reads(u) for u in node.users)
        ):
            node.replace_all_uses_with(node.args[0])


def _only_reads(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and not target._schema.is_mutable and not node.meta["aliases"]


def drop_dead(graph: Graph) -> None:
    """Remove unused nodes without effects (fx keeps what it cannot judge; ops with random state stay too)."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or node.meta.get("opaque"):
            continue
        target = node.target
        if node.op == "get_attr" or target is operator.getitem or not isinstance(target, OpOverload):
            pure = node.op == "get_attr" or not isinstance(target, HigherOrderOperator)
        else:
            pure = not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
            pure = pure and bool(target._schema.returns) and not may_raise(node)
        if pure:
            graph.erase_node(node)
