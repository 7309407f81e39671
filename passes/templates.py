"""Tracing one structure: a call with its arguments' metadata -> a small ATen graph that can be instantiated again.

Contract. Two calls with one key trace to the same graph. The key holds everything the trace can depend on: function,
sizes as expressions, strides, dtypes, devices, constants with their types, which arguments are one tensor, autocast
and default dtype. ``meta["aliases"]`` of a traced node lists the inputs whose storage its result shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .alias import arguments
from .reasons import Reason
from .symbols import free
from .torch_api import FakeTensor, FakeTensorMode, OpOverload, make_fx, map_aggregate

aten = torch.ops.aten

_CONVERSIONS = {"to", "contiguous", "type_as"}
_DROPOUTS = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}


class NormaliseError(Exception):
    """The graph cannot be normalised; ``reason`` says why. The Dynamo graph itself is still right."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class UntracedError(Exception):
    """Python code made a tensor of an argument behind the back of the trace, which then has it as a constant."""


@dataclass(frozen=True)
class Template:
    """One traced structure: a small ATen graph, and the tensors it lifted as attributes.

    ``makes_sizes``: it makes size symbols of its own (``nonzero``) or reads a number out of a tensor (``item``), so
    that no other node may share it. Where Dynamo fixed a number's value, it has no symbol and is part of the trace.
    """

    graph: Graph
    constants: dict[str, Any]
    makes_sizes: bool = False


class Method:
    """A callable for ``tensor.name(...)`` that prints as such."""

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name

    def __call__(self, this: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(this, self.name)(*args, **kwargs)


_METHODS: dict[str, Method] = {}


def callable_of(node: Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return _METHODS.setdefault(str(node.target), Method(str(node.target)))
    if getattr(node.target, "__name__", "") == "_get_data_attr":  # ``x.data``: a trace sees no operation in it
        return torch.Tensor.detach
    return node.target  # type: ignore[return-value]


def trace_template(
    function: Callable[..., Any], leaves: list[Node], args: Any, kwargs: Any, pre_dispatch: bool = True
) -> Template:
    """Trace ``function(*args, **kwargs)``, whose tensors and sizes are the nodes ``leaves``, on their fake values."""
    position = {n: i for i, n in enumerate(leaves)}

    def body(*values: Any) -> Any:
        a, k = map_aggregate((args, kwargs), lambda x: values[position[x]] if isinstance(x, Node) else x)
        return function(*a, **k)

    fakes = _distinct([n.meta["val"] for n in leaves])
    gm = make_fx(body, tracing_mode="real", pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True)(*fakes)
    _functional_views(gm.graph)
    constants = {str(n.target): getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"}
    if any(isinstance(value, FakeTensor) for value in constants.values()):
        raise UntracedError("a tensor in it comes from no operation that the trace has seen")
    _note_aliases(gm.graph)
    known = free(fakes)
    found = (free(n.meta.get("val")) for n in gm.graph.nodes)
    return Template(gm.graph, constants, any(symbols - known for symbols in found) or any(map(_reads, gm.graph.nodes)))


def is_fixed(value: Any) -> bool:
    """A symbolic number with no symbol in it."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and not free(value)


def _reads(node: Node) -> bool:
    """The operation reads tensor data on the host."""
    return isinstance(node.target, OpOverload) and torch.Tag.data_dependent_output in node.target.tags


def _distinct(values: list[Any]) -> list[Any]:
    """make_fx finds an argument by object identity, so two nodes must not share one fake tensor."""
    seen: set[int] = set()
    out = []
    for v in values:
        if isinstance(v, torch.Tensor) and id(v) in seen:
            v = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
        seen.add(id(v))
        out.append(v)
    return out


def leaves_of(tree: Any) -> tuple[list[Node], Any]:
    """Distinct nodes of an argument tree, and a hashable key of everything else."""
    position: dict[Node, int] = {}
    return_key = _tree_key(tree, position)
    return list(position), return_key


def _tree_key(tree: Any, position: dict[Node, int]) -> Any:
    if isinstance(tree, Node):
        return ("node", position.setdefault(tree, len(position)))
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *(_tree_key(t, position) for t in tree))
    if isinstance(tree, dict):
        return ("dict", *((k, _tree_key(v, position)) for k, v in tree.items()))
    if isinstance(tree, slice):
        return ("slice", *(_tree_key(t, position) for t in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, float):
        return ("float", repr(tree))  # -0.0 == 0.0, and nan != nan
    return (type(tree), tree)  # True == 1 == 1.0


def leaf_key(node: Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, FakeTensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        sizes = tuple(_expr(s) for s in value.shape)
        strides = tuple(_expr(s) for s in value.stride()) if value.layout is torch.strided else ()
        bits = (value.is_conj(), value.is_neg(), value.requires_grad, type(value).__name__)
        return (sizes, strides, value.dtype, value.device, value.layout, bits)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value).__name__, value.node.expr)
    if isinstance(value, torch.Tensor):
        return id(node)  # a subclass: never shared
    return (type(value), value)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def mode_key() -> Any:
    kinds = ("cpu", "cuda")
    states = tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
    return states, torch.get_default_dtype()


def _functional_views(graph: Graph) -> None:
    """``squeeze_`` and the like on a value made in this trace become plain views; on an argument they are refused."""
    for node in list(graph.nodes):
        target = node.target
        if (
            not isinstance(target, OpOverload)
            or torch.Tag.inplace_view not in target.tags
            or target is aten.detach_.default
        ):
            continue
        packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
        plain = getattr(packet, target._overloadname, None)
        if node.args[0].op != "call_function" or plain is None:
            text = f"{target} changes the shape or strides of a tensor in place"
            raise NormaliseError(Reason("metadata-mutation", text))
        node.target = plain
        later = set(_after(node))
        node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, later=later: user in later)


def _after(node: Node) -> Iterator[Node]:
    current = node.next
    while current.op != "root":
        yield current
        current = current.next


def _note_aliases(graph: Graph) -> None:
    """``meta["aliases"]``: the inputs whose storage a result shares, seen on the fake tensors of this trace.

    Schemas alone do not tell: ``aten::dropout`` at inference, ``type_as`` or ``atleast_1d`` return their input.
    """
    for node in graph.nodes:
        mine = _storages(node.meta.get("val"))
        node.meta["aliases"] = tuple(a for a in node.all_input_nodes if mine & _storages(a.meta.get("val")))


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return {value.untyped_storage()._cdata}
    if isinstance(value, (tuple, list)):
        return set().union(*(_storages(v) for v in value)) if value else set()
    return set()


def is_nested(node: Node) -> bool:
    """Whether it takes or makes a nested tensor: a second trace guards on ragged sizes, which Dynamo cannot write."""
    return any(getattr(n.meta.get("example_value"), "is_nested", False) for n in (node, *node.all_input_nodes))


def is_identity(node: Node) -> bool:
    """The operation returns its very argument: a conversion to what it is already, dropout that drops nothing.

    (The fake implementation of dropout shows a copy; eager returns the argument.)
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target.overloadpacket.__name__ in _DROPOUTS:
        named = arguments(node)
        return named.get("train") is False or named.get("p") == 0
    if target.overloadpacket.__name__ not in _CONVERSIONS or node.args[0] not in node.meta["aliases"]:
        return False
    mine, theirs = leaf_key(node), leaf_key(node.all_input_nodes[0])
    return isinstance(mine, tuple) and mine[:5] == theirs[:5]


@contextmanager
def allow_real_constants(mode: FakeTensorMode) -> Iterator[None]:
    """Real constants occur inside fake graphs (``torch.tensor([])`` in a fresh Hugging Face ``DynamicCache``)."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
