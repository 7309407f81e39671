"""Hoisting: what is computed from Python values alone is computed once, when the plan is made, and kept with it.

Contract. A node is hoisted if it is a deterministic ATen operation whose every input is a literal or was hoisted
before it, whose result has no symbolic size, lies on the graph's device, is at most ``MAX_BYTES`` large, and whose
memory nobody changes, sees or keeps. So ``torch.tensor([a, b], device="cuda")``, which copies from pageable host memory
and cannot be recorded, and what is computed from it, becomes a constant of the plan; the values are those that the same
operations give eagerly. ``hoist`` runs nothing of the user's: no break, no operator outside ATen, no random number.
"""

from __future__ import annotations

import operator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .alias import Aliasing, analyse_aliases, has_hidden_effects, is_random, may_raise
from .capturable import BreakPredicate, tensors_of
from .cleanup import drop_dead
from .normalize import NormalGraph
from .symbols import free
from .torch_api import OpOverload, map_aggregate, unset_fake_temporarily

aten = torch.ops.aten

#: Larger results are not worth their memory for as long as the plan lives.
MAX_BYTES = 1 << 20

#: Of undefined content, or not what eager code would make again (a copy that only the plan keeps is fine).
_NEVER = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


def hoist(normal: NormalGraph, device: torch.device, is_break: BreakPredicate) -> NormalGraph:
    """The graph (changed in place) with what depends on Python values alone replaced by constants.

    A constant that cannot be computed (the operation raises) stays an operation.
    """
    aliasing = analyse_aliases(normal.graph, lambda n: has_hidden_effects(n) or is_break(n) is not None)
    known: dict[Node, Any] = {n: normal.constants[str(n.target)] for n in normal.graph.nodes if _is_literal(n)}
    closed = _closed(normal, aliasing)
    made: dict[Node, Any] = {}
    for node in normal.graph.nodes:
        if node.target is operator.getitem and node.args[0] in made:
            known[node] = made[node] = made[node.args[0]][node.args[1]]
        elif _may_hoist(node, known, aliasing, closed, is_break):
            value = _computed(node, known)
            if value is not None:
                known[node] = made[node] = value
    for node, value in made.items():
        wanted = any(u not in made for u in node.users)
        if wanted and isinstance(value, torch.Tensor) and value.device == device:
            node.replace_all_uses_with(_constant(normal, node, value))
    drop_dead(normal.graph)
    left = set(normal.graph.nodes)
    return replace(normal, hoisted=sum(n not in left for n in made))


def _is_literal(node: Node) -> bool:
    """A tensor that tracing made of Python values (what a module holds is an argument of the graph)."""
    value = node.meta.get("val")
    return node.op == "get_attr" and "_tensor_constant" in str(node.target) and isinstance(value, torch.Tensor)


def _closed(normal: NormalGraph, aliasing: Aliasing) -> set[int]:
    """Memory that is changed, or that the caller, a break or other user code gets to see."""
    closed = {s for sets in aliasing.writes.values() for s in sets}
    for node in normal.graph.nodes:
        if node.op == "output" or has_hidden_effects(node):
            closed |= {aliasing.set_of[a] for a in node.all_input_nodes if a in aliasing.set_of}
    return closed


def _may_hoist(
    node: Node, known: dict[Node, Any], aliasing: Aliasing, closed: set[int], is_break: BreakPredicate
) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if target.overloadpacket.__name__ in _NEVER or is_random(node) or may_raise(node) or is_break(node) is not None:
        return False
    tensors = tensors_of(node.meta.get("val"))
    if not tensors or node.meta.get("autocast") or free((node.args, node.kwargs)) or free(node.meta["val"]):
        return False
    if any(a not in known for a in node.all_input_nodes) or aliasing.set_of.get(node) in closed:
        return False
    return sum(t.numel() * t.element_size() for t in tensors) <= MAX_BYTES


def _computed(node: Node, known: dict[Node, Any]) -> Any:
    assert isinstance(node.target, OpOverload)
    args = map_aggregate(node.args, lambda a: known[a] if isinstance(a, Node) else a)
    kwargs = map_aggregate(node.kwargs, lambda a: known[a] if isinstance(a, Node) else a)
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        try:
            return node.target(*args, **kwargs)
        except Exception:  # eager code will say so, at the call
            return None


def _constant(normal: NormalGraph, node: Node, value: torch.Tensor) -> Node:
    name = f"const_{len(normal.constants)}_{node.name}"
    normal.constants[name] = value
    with normal.graph.inserting_before(node):
        new = normal.graph.create_node("get_attr", name, (), {}, name=name)
    new.meta.update(val=value, where=node.meta.get("where", ""))
    return new
