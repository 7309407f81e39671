"""Which values share memory, who writes it, and in which order reads and writes must stay.

Contract. ``analyse_aliases(graph)`` first replaces every use of an in-place op's result by the tensor it changed
(``y = x.add_(1)``: users of ``y`` use ``x``), then puts tensor values into *sets*: two values are in one set if one
may be a view of the other. It is conservative: schema annotations, what the fake tensors showed at tracing, and for
opaque nodes every argument. Reads and writes of one set must keep their program order; nothing else is ordered but
data, random state and operations that may have hidden effects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .torch_api import HigherOrderOperator, OpOverload

#: Pseudo memory: everything that draws random numbers, and everything that may have effects we cannot see.
RANDOM, EFFECTS = -1, -2

_INPLACE_OPERATORS = {
    operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imod, operator.ilshift,
    operator.irshift, operator.imatmul,
}  # fmt: skip


@dataclass(frozen=True)
class Aliasing:
    """``set_of`` maps a tensor value to its set; ``members`` lists a set in program order; ``writes`` maps a node to
    the sets it changes. ``order`` maps a node to the nodes that must run before it because of memory."""

    set_of: dict[Node, int]
    members: dict[int, tuple[Node, ...]]
    writes: dict[Node, frozenset[int]]
    order: dict[Node, tuple[Node, ...]]
    version: dict[tuple[Node, int], int]

    def written(self, node: Node) -> bool:
        """Whether some operation changes the memory behind this value."""
        return self.set_of.get(node, 0) in self._written_sets

    @property
    def _written_sets(self) -> set[int]:
        cached = self.__dict__.get("_cache")
        if cached is None:
            cached = {s for sets in self.writes.values() for s in sets}
            object.__setattr__(self, "_cache", cached)
        return cached

    def bases(self, set_id: int) -> tuple[Node, ...]:
        """The values of a set that are not made from another value of it."""
        inside = set(self.members.get(set_id, ()))
        return tuple(n for n in self.members.get(set_id, ()) if not any(a in inside for a in n.all_input_nodes))


def is_tensor_value(value: Any) -> bool:
    """A tensor, or a tuple or list that holds one."""
    if isinstance(value, (tuple, list)):
        return any(is_tensor_value(v) for v in value)
    return isinstance(value, torch.Tensor)


def written_args(node: Node) -> tuple[Node, ...]:
    """The tensor arguments that ``node`` changes (all of them, if it cannot be known)."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return ()
    if isinstance(target, OpOverload):
        schema = target._schema
        if not schema.is_mutable:
            return hidden_writes(node)
        out: list[Node] = []
        for i, arg in enumerate(schema.arguments):
            if arg.alias_info is not None and arg.alias_info.is_write:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
                out += [value] if isinstance(value, Node) else [v for v in _flat(value) if isinstance(v, Node)]
        return tuple(out)
    if isinstance(target, HigherOrderOperator) and not _may_write(node):
        return ()
    if node.meta.get("opaque") or isinstance(target, HigherOrderOperator):
        return tuple(a for a in node.all_input_nodes if is_tensor_value(a.meta.get("val")))
    return ()


def hidden_writes(node: Node) -> tuple[Node, ...]:
    """Running statistics that a normalisation in training mode updates, which its schema does not say."""
    named = arguments(node)
    if "running_mean" not in named or not any(named.get(k) for k in ("training", "train", "use_input_stats")):
        return ()
    return tuple(a for a in (named["running_mean"], named.get("running_var")) if isinstance(a, Node))


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an ATen call by schema name (those that were given)."""
    assert isinstance(node.target, OpOverload)
    names = (a.name for a in node.target._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _flat(v)
    elif value is not None:
        yield value


def _may_write(node: Node) -> bool:
    """Whether a higher-order op can change its arguments: some body has an in-place operation (or has no body)."""
    bodies = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), GraphModule)]
    return not bodies or any(_body_writes(b) for b in bodies)


def _body_writes(body: GraphModule) -> bool:
    for n in body.graph.nodes:
        name = str(n.target)
        if n.op == "call_method" and name.endswith("_") and not name.endswith("__"):
            return True
        if n.op == "call_function":
            func = getattr(n.target, "__name__", "")
            mutable = isinstance(n.target, OpOverload) and n.target._schema.is_mutable
            inplace = func.endswith("_") and not func.endswith("__")
            inplace = inplace or bool(n.kwargs.get("inplace")) or "norm" in func  # which may update statistics
            if mutable or inplace or n.target in _INPLACE_OPERATORS or "out" in n.kwargs or "triton" in func:
                return True
        if n.op == "get_attr":
            inner = getattr(body, name, None) if "." not in name else None
            if isinstance(inner, GraphModule) and _body_writes(inner):
                return True
    return False


def view_args(node: Node) -> Iterable[Node]:
    """The arguments whose memory the result of ``node`` may share."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        if isinstance(source, Node) and (not isinstance(source.target, OpOverload) or any(view_args(source))):
            yield source  # the results of other operations, such as topk, are memory of their own
        return
    yield from node.meta.get("aliases", ())
    if isinstance(target, OpOverload):
        schema = target._schema
        shared = {s for r in schema.returns if r.alias_info is not None for s in r.alias_info.before_set}
        for i, arg in enumerate(schema.arguments):
            if arg.alias_info is not None and shared & set(arg.alias_info.before_set):
                value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
                yield from (v for v in _flat(value) if isinstance(v, Node))
    elif node.meta.get("opaque"):
        yield from (a for a in node.all_input_nodes if is_tensor_value(a.meta.get("val")))


def resolve_inplace_results(graph: Graph) -> None:
    """Let users of an in-place op's result use the changed tensor itself: it is the same object."""
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        written, returns = written_args(node), node.target._schema.returns
        if (
            len(returns) == 1
            and len(written) == 1
            and returns[0].alias_info is not None
            and returns[0].alias_info.is_write
        ):
            node.replace_all_uses_with(written[0])


#: Libraries of operations in which all ranks of a process group take part.
_COLLECTIVES = frozenset({
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem",
})  # fmt: skip


def is_collective(target: Any) -> bool:
    """Whether ranks must call an operation together, in one order."""
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def is_wait(node: Node) -> bool:
    """The second half of an asynchronous collective. It depends on the first alone: kept in the order of effects, an
    operation between the two could pull them into two regions, and what runs between regions may use memory again
    that the collective still reads."""
    return is_collective(node.target) and node.target.overloadpacket.__name__ == "wait_tensor"  # type: ignore[union-attr]


def has_hidden_effects(node: Node) -> bool:
    """Operations outside ATen may read or change state that no schema shows: they keep their order."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem or is_wait(node):
        return False
    if isinstance(target, OpOverload):
        return target.namespace not in ("aten", "prims") or not target._schema.returns
    return bool(node.meta.get("opaque")) or isinstance(target, HigherOrderOperator)


#: Parts of the names of operations that can raise because of the data they see.
_RAISES = (
    "index", "gather", "scatter", "embedding", "take", "put", "one_hot", "linalg", "cholesky", "inverse", "solve",
    "nll_loss", "cross_entropy", "bincount", "multinomial", "bernoulli", "normal", "poisson", "item", "local_scalar",
    "assert", "repeat_interleave", "histc", "bucketize", "searchsorted", "masked_scatter", "unique",
)  # fmt: skip


#: They raise for a tensor of more or fewer than one entry, and for nothing else.
_ONE_ENTRY = frozenset({"item", "_local_scalar_dense"})


def _has_one_entry(value: Any) -> bool:
    """Whether an argument is a tensor that has one entry at any size."""
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and all(isinstance(n, int) and n == 1 for n in tensor.shape)


def may_raise(node: Node) -> bool:
    """Whether the operation can raise at run time (an index out of range, a singular matrix, user code)."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.op == "call_function" and (bool(node.meta.get("opaque")) or isinstance(target, HigherOrderOperator))
    if target.overloadpacket.__name__ in _ONE_ENTRY and _has_one_entry(node.args[0]):
        return False
    return target.namespace not in ("aten", "prims") or any(part in target._schema.name for part in _RAISES)


#: Random for the sake of dropout alone: nothing is drawn at inference, or with probability 0.
_DROPS_OUT = ("dropout", "aten::gru", "aten::lstm", "aten::rnn_tanh", "aten::rnn_relu")


def is_random(node: Node) -> bool:
    """Whether the node draws from a random generator (dropout, and recurrent layers for theirs, not at inference)."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    named = arguments(node)
    off = named.get("train") is False or named.get("training") is False
    probabilities = [named[k] for k in ("p", "dropout_p", "dropout") if k in named]
    if target._schema.name.endswith(_DROPS_OUT) and (off or probabilities == [0.0]):
        return False
    if "scaled_dot_product" in target._schema.name:
        return bool(probabilities and probabilities[0] != 0.0)
    return True


def analyse_aliases(
    graph: Graph,
    is_effect: Callable[[Node], bool] = has_hidden_effects,
    touches_state: Callable[[Node], bool] = lambda _: False,
) -> Aliasing:
    """Sets, writers and memory order of a normalised graph (changes the graph: see the module docstring).

    ``is_effect(node)``: operations that keep their order among each other, and that writes to the caller's memory must
    not overtake either way: if one raises, the caller sees what eager code would have left.
    ``touches_state(node)``: operations that may change weights and buffers without being given them (the method of a
    module): what reads those stays on its side of the operation.
    """
    resolve_inplace_results(graph)
    parent: dict[Node, Node] = {}

    def find(n: Node) -> Node:
        while parent[n] is not n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for node in graph.nodes:
        if node.op != "output" and is_tensor_value(node.meta.get("val")):
            parent[node] = node
            for arg in view_args(node):
                if arg in parent:
                    parent[find(node)] = find(arg)
    ids: dict[Node, int] = {}
    set_of = {n: ids.setdefault(find(n), len(ids) + 1) for n in parent}
    members: dict[int, list[Node]] = {}
    for n, s in set_of.items():
        members.setdefault(s, []).append(n)
    writes = {n: frozenset(set_of[a] for a in written_args(n) if a in set_of) for n in graph.nodes}
    writes = {n: w for n, w in writes.items() if w}
    caller = {s for n, s in set_of.items() if n.op in ("placeholder", "get_attr")}
    order, version = _memory_order(graph, set_of, writes, caller, is_effect)
    _keep_sides(graph, set_of, order, touches_state)
    return Aliasing(set_of, {s: tuple(m) for s, m in members.items()}, writes, order, version)


def _keep_sides(
    graph: Graph,
    set_of: dict[Node, int],
    order: dict[Node, tuple[Node, ...]],
    touches_state: Callable[[Node], bool],
) -> None:
    """Add to ``order``: nothing that touches weights, buffers or constants passes an operation that may change them."""
    state = {s for n, s in set_of.items() if n.op == "get_attr" or (n.op == "placeholder" and n.meta.get("static"))}
    last: Node | None = None
    since: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if touches_state(node):
            order[node] = tuple(dict.fromkeys((*order.get(node, ()), *since)))
            last, since = node, []
        elif any(set_of.get(a) in state for a in node.all_input_nodes):
            since.append(node)
            if last is not None:
                order[node] = tuple(dict.fromkeys((*order.get(node, ()), last)))


def _memory_order(
    graph: Graph,
    set_of: dict[Node, int],
    writes: dict[Node, frozenset[int]],
    caller: set[int],
    is_effect: Callable[[Node], bool],
) -> tuple[dict[Node, tuple[Node, ...]], dict[tuple[Node, int], int]]:
    last_write: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    count: dict[int, int] = {}
    order: dict[Node, tuple[Node, ...]] = {}
    version: dict[tuple[Node, int], int] = {}
    caller_writes: list[Node] = []
    raisers: list[Node] = []
    changed = {s for w in writes.values() for s in w}
    for node in graph.nodes:
        if node.op == "placeholder" or node.op == "get_attr":
            continue
        touched = {set_of[a] for a in node.all_input_nodes if a in set_of}
        wrote = set(writes.get(node, ()))
        if is_random(node):
            wrote.add(RANDOM)
        writes_caller = bool(wrote & caller)
        before: dict[Node, None] = {}
        effect = is_effect(node) and not is_wait(node)
        if effect:
            wrote |= {EFFECTS, RANDOM}
        if effect or (may_raise(node) and not is_wait(node)):
            before.update(dict.fromkeys(caller_writes))
            raisers.append(node)
        if writes_caller:
            before.update(dict.fromkeys(r for r in raisers if r is not node))
            caller_writes.append(node)
        for s in (touched & changed) | wrote:
            version[node, s] = count.get(s, 0)
            if s in last_write:
                before[last_write[s]] = None
            if s in wrote:
                before.update(dict.fromkeys(readers.pop(s, ())))
                last_write[s] = node
                count[s] = count.get(s, 0) + 1
            else:
                readers.setdefault(s, []).append(node)
        order[node] = tuple(before)
    return order, version
