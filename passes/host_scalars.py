"""Numbers that arrive in CPU tensors: read on the device from memory of ours, so that a recording does not freeze them.

With ``dynamic=True`` Dynamo passes the floats of a module (``self.scale``) as CPU tensors of one entry, and reads them
with ``item``. Callers pass CPU scalars beside CUDA tensors as well. Neither can be recorded: a number is frozen, and a
CPU tensor is read by the host.

Contract. ``host_scalars`` gives an operation that takes such a number the same number as a tensor without dimensions on
its own device (``meta["host_copy"]``: which argument holds it), which is written at every call. It does so only where
the tensor gives what the number gives: the arithmetic in the same precision (half precision is computed in single, as
kernels do with a number) and a result of the same dtype. On a GPU a division by it is a true division, where eager
multiplies by the inverse. All else stays as it is: ``item`` then runs eagerly, with what depends on it.
"""

from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import Node

from .alias import analyse_aliases, arguments, has_hidden_effects
from .capturable import BreakPredicate
from .cleanup import drop_dead
from .normalize import NormalGraph
from .symbols import expr_of
from .torch_api import FakeTensor, OpOverload, enable_python_dispatcher

aten = torch.ops.aten

_WHOLE = (torch.int64, torch.int32)
_SINGLE = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)

_ARITHMETIC = frozenset(
    getattr(aten, name + mark).Tensor for name in ("add", "sub", "mul", "div") for mark in ("", "_")
)
_COMPARED = {getattr(aten, n).Scalar: getattr(aten, n).Tensor for n in ("eq", "ne", "lt", "le", "gt", "ge")}
#: Arithmetic on the host that is the same on the device, in double precision.
_ON_HOST = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
}


def host_scalars(normal: NormalGraph, device: torch.device, is_break: BreakPredicate) -> NormalGraph:
    """The graph (changed in place) in which operations on ``device`` read host numbers from there."""
    if normal.fake_mode is None:
        return normal
    aliasing = analyse_aliases(normal.graph, lambda n: has_hidden_effects(n) or is_break(n) is not None)
    sources = {p: i for i, p in enumerate(normal.placeholders) if _is_scalar(p) and not aliasing.written(p)}
    if sources:
        editor = _Editor(normal, device, sources)
        for node in list(normal.graph.nodes):
            free = node.op == "call_function" and not node.meta.get("opaque") and is_break(node) is None
            if free and isinstance(node.target, OpOverload):
                editor.visit(node)
        editor.tidy()
    return normal


def _is_scalar(node: Node) -> bool:
    """An argument that is a CPU tensor without dimensions, and no part of the module's state."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.meta.get("static"):
        return False
    return value.device.type == "cpu" and value.dim() == 0 and value.dtype in (*_WHOLE, *_SINGLE)


class _Editor:
    def __init__(self, normal: NormalGraph, device: torch.device, sources: dict[Node, int]) -> None:
        self.normal, self.graph, self.device, self.sources = normal, normal.graph, device, sources
        self.made: dict[tuple[Node, torch.dtype], Node] = {}
        self.last = normal.placeholders[-1]

    def visit(self, node: Node) -> None:
        """Rewrite one operation, if it takes a host number and the tensor would do."""
        self.node, self.added = node, list[Node]()
        before = node.target, node.args, node.kwargs
        changed = self.number(node) if self.mine(node) else False
        if not changed and self.device.type != "cpu":
            changed = self.moved(node)
        if not changed or not self.alike(node):
            node.target, node.args, node.kwargs = before
            for new in reversed(self.added):
                self.graph.erase_node(new)

    def tidy(self) -> None:
        """Drop what nobody reads any more: the copies, and ``item``."""
        for node in reversed(self.made.values()):
            if not node.users:
                self.graph.erase_node(node)
        drop_dead(self.graph)
        for node in [n for n in reversed(self.graph.nodes) if n.target in _ON_HOST and not n.users]:
            self.graph.erase_node(node)
        drop_dead(self.graph)

    # -- what it reads -------------------------------------------------------------------------------------------

    def copy(self, source: Node, dtype: torch.dtype) -> Node:
        """The argument ``source`` on the device, in a dtype: a placeholder that the plan fills."""
        key = (source, dtype)
        if key not in self.made:
            with self.graph.inserting_after(self.last):
                name = f"{source.name}_{str(dtype).removeprefix('torch.')}"
                new = self.last = self.graph.placeholder(f"number_{name}")
            value = self.value(torch.empty, ((),), {"dtype": dtype, "device": self.device})
            new.meta = {"val": value, "host_copy": self.sources[source], "where": "", "static": None}
            new.meta |= {"source": source.meta.get("source", ""), "aliases": ()}
            self.made[key] = new
        return self.made[key]

    def on_device(self, value: Any, dtype: torch.dtype) -> Node | None:
        """A host number as a tensor of ``dtype``; ``None`` if it is none of ours."""
        source = self.read(value)
        if source is not None:
            return self.copy(source, dtype)
        double = self.computed(value)
        return double if double is None or dtype is torch.float64 else self.add(aten.to.dtype, double, dtype)

    def read(self, value: Any) -> Node | None:
        """The argument whose only entry ``value`` is."""
        if not isinstance(value, Node) or value.target not in (aten.item.default, aten._local_scalar_dense.default):
            return None
        source = value.args[0]
        return source if isinstance(source, Node) and source in self.sources else None

    def computed(self, value: Any) -> Node | None:
        """Floats that are computed from such arguments on the host, computed on the device."""
        if not isinstance(value, Node) or value.target not in _ON_HOST:
            return None
        if not isinstance(value.meta.get("val"), (float, torch.SymFloat)):
            return None
        args: list[Any] = []
        for a in value.args:
            source = self.read(a)
            args.append(self.copy(source, torch.float64) if source is not None else self.computed(a) or a)
        if not isinstance(args[0], Node):
            if value.target not in (operator.add, operator.mul):
                return None
            args.reverse()
        good = isinstance(args[0], Node) and isinstance(args[0].meta["val"], torch.Tensor)
        if not good or any(isinstance(a, Node) and not isinstance(a.meta["val"], torch.Tensor) for a in args):
            return None
        return self.add(_ON_HOST[value.target], *args)

    # -- rewriting -----------------------------------------------------------------------------------------------

    def mine(self, node: Node) -> bool:
        """Whether the operation works on the graph's device."""
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.device == self.device

    def number(self, node: Node) -> bool:
        """An operation on a tensor and a number."""
        named = arguments(node)
        x, other, dtype = named.get("self"), named.get("other"), node.meta["val"].dtype
        if not isinstance(x, Node) or not isinstance(other, Node) or isinstance(other.meta.get("val"), torch.Tensor):
            return False
        if named.get("alpha", 1) != 1:
            return False
        if node.target in _COMPARED:
            return self.compared(node, x, other)
        if dtype in _HALF:
            return self.in_single(node, x, other)
        if dtype not in (*_SINGLE, torch.int64):
            return False
        if dtype is torch.int64 and not isinstance(other.meta["val"], (int, torch.SymInt)):
            return False
        number = self.on_device(other, dtype)
        if number is None:
            return False
        if node.target in _ARITHMETIC:
            return self.put(node.target, x, number)
        if node.target is aten.rsub.Scalar:
            return self.put(aten.sub.Tensor, number, x)
        return False

    def compared(self, node: Node, x: Node, other: Node) -> bool:
        dtype = x.meta["val"].dtype
        whole = dtype is torch.int64 and isinstance(other.meta["val"], (int, torch.SymInt))
        number = self.on_device(other, dtype) if dtype in _SINGLE or whole else None
        return number is not None and self.put(_COMPARED[node.target], x, number)

    def in_single(self, node: Node, x: Node, other: Node) -> bool:
        """Half precision and a number: computed in single precision, rounded once."""
        assert isinstance(node.target, OpOverload)
        if node.target not in _ARITHMETIC or node.target._schema.is_mutable or node.meta.get("autocast"):
            return False
        number = self.on_device(other, torch.float32)
        if number is None:
            return False
        wide = self.add(node.target, self.add(aten.to.dtype, x, torch.float32), number)
        return self.put(aten.to.dtype, wide, node.meta["val"].dtype)

    def moved(self, node: Node) -> bool:
        """A CPU scalar among tensors of the device, which kernels take as a number."""
        assert isinstance(node.target, OpOverload)
        here = [a for a in node.all_input_nodes if a in self.sources]
        if not here or not self.mine(node) or torch.Tag.pointwise not in node.target.tags:
            return False
        dtype = node.meta["val"].dtype
        if any(dtype not in (*_SINGLE, *_WHOLE, torch.bool) and a.meta["val"].dtype is not dtype for a in here):
            return False
        for a in here:
            node.replace_input_with(a, self.copy(a, a.meta["val"].dtype))
        return True

    def put(self, target: Any, *args: Any) -> bool:
        self.node.target, self.node.args, self.node.kwargs = target, args, {}
        return True

    def add(self, target: Any, *args: Any) -> Node:
        """A new node before the current one."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args)
        keep = {k: self.node.meta[k] for k in ("where", "stack_trace", "autocast", "origin") if k in self.node.meta}
        new.meta = keep | {"val": self.run(target, args, {}), "aliases": ()}
        self.added.append(new)
        return new

    def alike(self, node: Node) -> bool:
        """Whether the rewritten operation has the shape and dtype that the original has."""
        old = node.meta["val"]
        try:
            new = self.run(node.target, node.args, node.kwargs)
        except Exception:  # the tensor form refuses what the form with a number takes
            return False
        return new.dtype is old.dtype and [expr_of(n) for n in new.shape] == [expr_of(n) for n in old.shape]

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns, on fake tensors; in-place operations work on copies."""
        copies = target._schema.is_mutable

        def fake(a: Any) -> Any:
            found = a.meta["val"] if isinstance(a, Node) else a
            if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor):  # a constant
                found = self.normal.fake_mode.from_tensor(found, static_shapes=True)  # type: ignore[union-attr]
            return found.clone() if copies and isinstance(found, torch.Tensor) else found

        return self.value(target, [fake(a) for a in args], {k: fake(a) for k, a in kwargs.items()})

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        with ExitStack() as stack:
            assert self.normal.fake_mode is not None
            stack.enter_context(self.normal.fake_mode)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            return target(*args, **kwargs)
