"""The edits that repairs are made of: a copy of the graph, counts and row numbers on the device, new nodes with values.

Contract. ``copied`` never changes the graph it copies. An ``Editor`` works on one node at a time: what it adds goes
before that node, except for what many repairs share (counts, masks, row numbers), which goes to the top. Every new node
gets its value by running the operation on fake tensors. ``undo`` takes back what was done for the current node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .classify import Classified
from .layout import PLAIN, Layout
from .normalize import NormalGraph
from .symbols import expr_of, free
from .torch_api import FakeTensor, FloorDiv, OpOverload, enable_python_dispatcher, map_aggregate

aten = torch.ops.aten


class UnrepairableError(Exception):
    """This node cannot be repaired; it stays as it is."""


def copied(normal: NormalGraph) -> NormalGraph:
    """The same graph, in nodes of its own with the same names."""
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in normal.graph.nodes:
        if node.op == "output":
            graph.output(map_aggregate(node.args[0], lambda a: new[a] if isinstance(a, Node) else a))
        else:
            new[node] = graph.node_copy(node, lambda a: new[a])
    for node in new.values():
        if node.meta.get("aliases"):
            node.meta["aliases"] = tuple(new[a] for a in node.meta["aliases"] if a in new)
    return replace(normal, graph=graph, placeholders=tuple(new[p] for p in normal.placeholders))


class Editor:
    """Rewrites nodes of ``normal`` (a copy). ``seen``: the classification that says where padding is."""

    def __init__(self, normal: NormalGraph, seen: Classified) -> None:
        self.normal, self.graph = normal, normal.graph
        self.symbols = [s.symbol for s in seen.symbols if s.kind == "bucketed"]
        self.numbers = [s.symbol for s in seen.symbols if s.kind != "pinned"]
        self.layouts = {n.name: found for n, found in seen.layouts.items()}
        self.sets = {n.name: s for n, s in seen.aliasing.set_of.items()}
        self.seen = seen
        self.outputs = {n.name for n in next(n for n in self.graph.nodes if n.op == "output").all_input_nodes}
        self.device = next(
            (v.device for n in self.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)),
            torch.device("cpu"),
        )
        self.shared: dict[Any, Node] = {}
        self.node: Node
        self.added: list[Node] = []
        self.before: tuple[Any, Any, Any, dict[str, Any]]

    # -- one node ------------------------------------------------------------------------------------------------

    def at(self, node: Node) -> None:
        """Start with ``node``."""
        self.node, self.added = node, []
        self.before = (node.target, node.args, dict(node.kwargs), dict(node.meta))

    def undo(self) -> None:
        """Take back what was done for the current node (what is shared stays, for others)."""
        self.node.target, self.node.args, self.node.kwargs, self.node.meta = self.before
        for node in reversed(self.added):
            self.graph.erase_node(node)
        self.added = []

    def finish(self) -> None:
        """Drop shared nodes that nobody uses."""
        for node in reversed(list(self.shared.values())):
            if not node.users:
                self.graph.erase_node(node)

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node before the current one."""
        value = self.value(target, args, kwargs)
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        keep = {k: self.node.meta[k] for k in ("where", "stack_trace", "autocast", "origin") if k in self.node.meta}
        new.meta = keep | {"val": value, "aliases": (), "repair_of": self.node.name}
        if target in _VIEWS:
            new.meta["aliases"] = tuple(a for a in args[:1] if isinstance(a, Node))
        self.layouts.pop(new.name, None)  # of another node, in the graph that was classified
        self.sets.pop(new.name, None)
        self.added.append(new)
        return new

    def put(self, what: str, target: Any, *args: Any, **kwargs: Any) -> None:
        """Make the current node this operation; ``what`` names the kind of repair. Shape and dtype must stay."""
        value, old = self.value(target, args, kwargs), self.node.meta["val"]
        if not _alike(value, old) and not target._schema.is_mutable:
            raise UnrepairableError("the result would have another shape or dtype")
        self.node.target, self.node.args, self.node.kwargs = target, args, kwargs
        self.node.meta["repaired"] = what

    def become(self, what: str, new: Node) -> None:
        """Make the current node what ``new`` is, the node that was added last."""
        target, args, kwargs = self._taken(new)
        self.put(what, target, *args, **kwargs)
        self.node.meta["aliases"] = args[:1] if target in _VIEWS else ()

    def become_parts(self, what: str, parts: Mapping[int, Node]) -> None:
        """Make each part of the result of the current node, which is a tuple, what a node that was added is."""
        users: dict[Node, Any] = {user: user.args[1] for user in self.node.users}
        if set(users.values()) != set(parts) or len(users) != len(parts):
            raise UnrepairableError("the result is used in another way than part by part")
        if not all(_alike(parts[k].meta["val"], user.meta["val"]) for user, k in users.items()):
            raise UnrepairableError("a result would have another shape or dtype")
        for user, k in users.items():
            user.target, user.args, user.kwargs = self._taken(parts[k])
            user.meta |= {"aliases": user.args[:1] if user.target in _VIEWS else (), "repair_of": self.node.name}
        next(iter(users)).meta["repaired"] = what
        self.graph.erase_node(self.node)

    def _taken(self, new: Node) -> tuple[Any, Any, dict[str, Any]]:
        """What an added node without users computes; the node is gone."""
        self.added.remove(new)
        found = (new.target, new.args, dict(new.kwargs))
        self.graph.erase_node(new)
        return found

    def parts(self) -> set[int]:
        """Which parts of the result of the current node, a tuple, are used."""
        return {user.args[1] for user in self.node.users if user.target is operator.getitem}  # type: ignore[misc]

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns, on fake tensors; in-place operations work on copies."""
        copies = isinstance(target, OpOverload) and target._schema.is_mutable

        def fake(a: Any) -> Any:
            found = a.meta["val"] if isinstance(a, Node) else a
            if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor):  # a constant
                found = self.normal.fake_mode.from_tensor(found, static_shapes=True)  # type: ignore[union-attr]
            return found.clone() if copies and isinstance(found, torch.Tensor) else found

        with ExitStack() as stack:
            assert self.normal.fake_mode is not None
            stack.enter_context(self.normal.fake_mode)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            for device, dtype, enabled, cache in self.autocast():
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            try:
                return target(*map_aggregate(args, fake), **map_aggregate(kwargs, fake))
            except Exception as error:
                raise UnrepairableError(f"{type(error).__name__}: {error}") from error

    def autocast(self) -> list[tuple[Any, ...]]:
        """The autocast regions that the current node runs under."""
        return [(*region, None, True, None)[:4] for region in self.node.meta.get("autocast", ())]

    # -- what is known -------------------------------------------------------------------------------------------

    def layout(self, value: Any, symbol: sympy.Symbol) -> Layout:
        """Where the padding of an argument is."""
        found = self.layouts.get(value.name, ()) if isinstance(value, Node) else ()
        if not found:
            return Layout()
        if symbol not in found[0]:
            raise UnrepairableError("it is not known where the padding is")
        return found[0][symbol]

    def carried(self, value: Any, dim: int) -> sympy.Symbol | None:
        """The one symbol that a dimension is padded by, at its end and with nothing inside."""
        found = [(s, axis) for s in self.symbols if (axis := self.layout(value, s).get(dim)) is not None]
        if not found:
            return None
        if len(found) > 1 or found[0][1] != PLAIN:
            raise UnrepairableError("the padding is inside of the dimension")
        return found[0][0]

    def written(self, node: Node) -> bool:
        """Whether the memory of a value is changed by the graph."""
        mine = self.sets.get(node.name)
        return any(mine in sets for sets in self.seen.aliasing.writes.values())

    # -- on the device -------------------------------------------------------------------------------------------

    def once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def top(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A shared node behind the placeholders and the shared nodes that exist."""
        last = [*(n for n in self.graph.nodes if n.op == "placeholder"), *self.shared.values()]
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        with self.graph.inserting_after(max(last, key=lambda n: order[n])):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {"val": self.value(target, args, kwargs), "aliases": (), "where": "", "autocast": (), "shared": True}
        if target in _VIEWS:
            new.meta["aliases"] = (args[0],)
        return new

    def count(self, symbol: sympy.Symbol) -> Node:
        """The real size: an int64 tensor without dimensions."""

        def make() -> Node:
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                new = self.graph.placeholder(f"real_{symbol}")
            assert self.normal.fake_mode is not None
            with self.normal.fake_mode:
                value = torch.empty((), dtype=torch.int64, device=self.device)
            new.meta = {"val": value, "real_size": symbol, "where": "", "source": "", "static": None}
            return new

        return self.once(("count", symbol), make)

    def size(self, symbol: sympy.Symbol) -> Node:
        """The size as it stands in shapes: the bucket's, in a segment."""
        for node in self.normal.placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == symbol:
                return node
        for node in self.normal.placeholders:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return self.once(
                        ("size", symbol), lambda node=node, dim=dim: self.top(aten.sym_size.int, node, dim)
                    )
        raise UnrepairableError("the size is not at hand")

    def positions(self, symbol: sympy.Symbol, after: int = 0) -> Node:
        """``0, 1, 2, ...`` along a padded dimension that ``after`` others follow."""
        if after:
            return self.once(
                ("positions", symbol, after),
                lambda: self.top(aten.unsqueeze.default, self.positions(symbol, after - 1), -1),
            )
        size = self.size(symbol)
        return self.once(
            ("positions", symbol, 0), lambda: self.top(aten.arange.default, size, dtype=torch.int64, device=self.device)
        )

    def padded(self, symbol: sympy.Symbol, after: int) -> Node:
        """A mask: true for the padded entries of a dimension that ``after`` others follow."""
        count, positions = self.count(symbol), self.positions(symbol, after)
        return self.once(("padded", symbol, after), lambda: self.top(aten.ge.Tensor, positions, count))

    def last(self, symbol: sympy.Symbol) -> Node:
        """The number of the last real row."""
        count = self.count(symbol)
        return self.once(("last", symbol), lambda: self.top(aten.sub.Tensor, count, 1))

    def rows(self, symbol: sympy.Symbol) -> Node:
        """The numbers of the real rows, and that of the last one again for every padded row."""
        last, positions = self.last(symbol), self.positions(symbol)
        return self.once(("rows", symbol), lambda: self.top(aten.minimum.default, positions, last))

    def number(self, expr: sympy.Expr) -> Node:
        """A size expression as a tensor: the counts, added and multiplied."""
        if isinstance(expr, sympy.Symbol) and expr in self.numbers:
            return self.count(expr)
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            target = aten.add.Tensor if isinstance(expr, sympy.Add) else aten.mul.Tensor
            constant, rest = expr.as_coeff_Add() if isinstance(expr, sympy.Add) else expr.as_coeff_Mul()
            parts = (
                [self.number(e) for e in type(expr).make_args(rest)]
                if rest != expr
                else [self.number(e) for e in expr.args]
            )
            total = parts[0]
            for part in parts[1:]:
                total = self.add(target, total, part)
            neutral = 0 if isinstance(expr, sympy.Add) else 1
            if constant == neutral:
                return total
            if constant.is_Integer:
                return self.add(target, total, int(constant))
        if isinstance(expr, FloorDiv) and expr.args[1].is_Integer and expr.args[1] > 0:
            return self.add(aten.floor_divide.default, self.number(expr.args[0]), int(expr.args[1]))
        raise UnrepairableError(f"{expr} is not arithmetic on padded sizes")

    def masked(self, value: Node, dim: int, symbol: sympy.Symbol, fill: float | int | bool) -> Node:
        """``value`` with a constant in its padded entries along ``dim``."""
        after = value.meta["val"].dim() - 1 - dim
        return self.like(value, self.add(aten.masked_fill.Scalar, value, self.padded(symbol, after), fill))

    def like(self, value: Node, new: Node) -> Node:
        """``new`` is padded as ``value`` is."""
        self.layouts[new.name] = self.layouts.get(value.name, ())
        return new

    def cast(self, value: Node, dtype: torch.dtype) -> Node:
        """``value`` in another dtype."""
        if value.meta["val"].dtype is dtype:
            return value
        return self.like(value, self.add(aten.to.dtype, value, dtype))

    def repeated(self, value: Node, dim: int, symbol: sympy.Symbol) -> Node:
        """``value`` with its last real row in all padded rows along ``dim``."""
        return self.like(value, self.add(aten.index_select.default, value, dim, self.rows(symbol)))

    def mentions(self, value: Any) -> bool:
        """Whether a number depends on a size that is not in the key."""
        return bool(free(value) & set(self.numbers)) and not isinstance(
            value.meta.get("val") if isinstance(value, Node) else value, torch.Tensor
        )

    def expr(self, value: Any) -> sympy.Expr:
        return expr_of(value.meta["val"] if isinstance(value, Node) else value)


_VIEWS = {
    aten.unsqueeze.default, aten.view.default, aten.expand.default, aten.squeeze.dim, aten.narrow.default,
    operator.getitem,
}  # fmt: skip


def _alike(new: Any, old: Any) -> bool:
    """The same structure, shapes and dtypes."""
    if isinstance(old, (tuple, list)):
        return isinstance(new, (tuple, list)) and all(_alike(a, b) for a, b in zip(new, old, strict=True))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    shapes = ([expr_of(s) for s in t.shape] for t in (new, old))
    return new.dtype is old.dtype and next(shapes) == next(shapes)


def dimension(value: Node, dim: Any) -> int:
    """A dimension argument as a non-negative int."""
    if not isinstance(dim, int):
        raise UnrepairableError("the dimension is not a constant")
    return dim % max(value.meta["val"].dim(), 1)


def dimensions(value: Node, dims: Any) -> list[int]:
    """A list of dimensions; all of them for ``None`` or an empty list."""
    if dims is None or dims == []:
        return list(range(value.meta["val"].dim()))
    listed: Sequence[Any] = dims if isinstance(dims, (list, tuple)) else [dims]
    return [dimension(value, d) for d in listed]
