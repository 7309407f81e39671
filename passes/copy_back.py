"""Inputs that are changed and lie elsewhere at every call: worked on in a copy, which goes back at the end.

Contract. A segment that changes an argument is recorded with its address. An argument that keeps moving (a new cache
object for each generation) cannot be pinned, so what changes it would be eager, write after write. Where its bytes are
few, the graph works on a copy instead, and one ``copy_`` at the end, which is eager, gives the caller's tensor its new
contents. ``copy_back`` changes the graph only where nobody can tell the difference: the caller gets no view of the
argument from this graph, its copy has the same strides, and behind the first change nothing runs that could see the
argument (user code) or raise from the host (that, a singular matrix, a failed check): an exception leaves in the
argument what eager code leaves there.

An index out of range is no such exception. A GPU answers it with an error that ends the process's work on it; on a CPU
it raises, and the argument has the contents that it came with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import Node

from .alias import Aliasing, analyse_aliases, has_hidden_effects, is_random, may_raise
from .capturable import BreakPredicate
from .host_reads import host_read
from .normalize import NormalGraph
from .torch_api import OpOverload, size_hint

aten = torch.ops.aten


def copy_back(
    normal: NormalGraph, device: torch.device, moving: Collection[str], is_break: BreakPredicate, max_bytes: int
) -> NormalGraph:
    """The graph (changed in place), with the arguments named in ``moving`` that are changed copied in and back;
    ``max_bytes``: of all of them together, at the sizes of the first call."""
    aliasing = analyse_aliases(normal.graph, lambda n: has_hidden_effects(n) or is_break(n) is not None)
    raising = {n for n in normal.graph.nodes if _raises_from_host(n, device)}
    foreign = {n for n in normal.graph.nodes if _is_foreign(n, is_break)}
    found = [
        p for p in normal.placeholders if p.name in moving and _works_on_a_copy(normal, aliasing, p, raising, foreign)
    ]
    if found and sum(_nbytes(p) for p in found) <= max_bytes:
        output = next(n for n in normal.graph.nodes if n.op == "output")
        for p in found:
            _rewrite(normal, p, output, next(n for n in aliasing.writes if aliasing.set_of[p] in aliasing.writes[n]))
    return normal


def _works_on_a_copy(
    normal: NormalGraph, aliasing: Aliasing, p: Node, raising: Collection[Node], foreign: Collection[Node]
) -> bool:
    value, memory = p.meta.get("val"), aliasing.set_of.get(p)
    if memory is None or not aliasing.written(p) or not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    members = aliasing.members[memory]
    seen = [n for n in members if any(u.op == "output" for u in n.users)]
    if aliasing.bases(memory) != (p,) or seen or not _keeps_strides(normal, value):
        return False
    order = list(normal.graph.nodes)
    first = next(i for i, n in enumerate(order) if memory in aliasing.writes.get(n, ()))
    touching = {u for n in members for u in n.users} | {n for n in aliasing.writes if memory in aliasing.writes[n]}
    behind = order[first:]
    return not any(n in raising or n in foreign for n in behind) and not any(n in foreign for n in touching)


def _raises_from_host(node: Node, device: torch.device) -> bool:
    """An operation that raises because of data that the host reads. (Some random ones do: a wrong distribution.)"""
    if not isinstance(node.target, OpOverload) or not may_raise(node):
        return False
    return "assert" in node.target._schema.name or is_random(node) or host_read(node, device) is not None


def _is_foreign(node: Node, is_break: BreakPredicate) -> bool:
    """User code: it may raise, and look where no schema says."""
    if node.op != "call_function" or not has_hidden_effects(node):
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or is_break(node) is not None


def _keeps_strides(normal: NormalGraph, value: torch.Tensor) -> bool:
    """Views of the copy must lie as those of the argument do."""
    if normal.fake_mode is None:
        return False
    with normal.fake_mode:
        copy = value.clone()
    return all(a is b or size_hint(a) == size_hint(b) for a, b in zip(copy.stride(), value.stride(), strict=True))


def _nbytes(p: Node) -> int:
    count = size_hint(p.meta["val"].numel())
    return (count or 0) * int(p.meta["val"].element_size())


def _rewrite(normal: NormalGraph, p: Node, output: Node, first_write: Node) -> None:
    assert normal.fake_mode is not None
    with normal.graph.inserting_before(next(n for n in normal.graph.nodes if n.op not in ("placeholder", "get_attr"))):
        copy = normal.graph.call_function(aten.clone.default, (p,))
    # The views of the argument, which are views of the copy now, were traced with the memory of the argument's fake.
    copy.meta["val"] = p.meta["val"]
    with normal.fake_mode:
        p.meta["val"] = copy.meta["val"].clone()
    p.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    for node in normal.graph.nodes:  # what tracing saw of shared memory
        if p in node.meta.get("aliases", ()):
            node.meta["aliases"] = tuple(copy if a is p else a for a in node.meta["aliases"])
    with normal.graph.inserting_before(output):
        back = normal.graph.call_function(aten.copy_.default, (p, copy))
    back.meta["val"] = p.meta["val"]
    copy.meta["copies"] = p.name
    for node in (copy, back):
        node.meta |= {"where": first_write.meta.get("where", ""), "aliases": ()}


def copied_for_nothing(normal: NormalGraph, is_captured: Callable[[Node], bool]) -> set[str]:
    """Arguments whose copy is eager, for reasons of its own: they are changed as eagerly, without a copy."""
    copies = [n for n in normal.graph.nodes if "copies" in n.meta]
    return {n.meta["copies"] for n in copies if not is_captured(n)}
