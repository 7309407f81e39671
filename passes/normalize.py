"""Dynamo graph -> one graph of ATen overloads that keeps in-place ops, views, symbolic sizes and user lines.

Contract. ``normalise(gm)`` returns a ``NormalGraph`` whose every ``call_function`` node is an ``OpOverload``, a size
computation, ``operator.getitem``, a higher-order op, or (rarely) a Dynamo node that could not be traced and is kept
as it came (``meta["opaque"]``). ``meta`` of each node: ``val`` (fake tensors / SymInts), ``where`` (user's line),
``autocast`` (the regions it runs under), ``aliases`` (inputs whose storage its result shares). Nothing is executed.
``NormaliseError`` means: run the Dynamo graph as it is; its ``reason`` says why.

Repeated layers. A Dynamo node is traced with ``make_fx(pre_dispatch=True)`` once per *structure* (target, shapes as
expressions, strides, dtypes, constants, autocast state) and the traced template is instantiated for every other
node of that structure: layers 2..n of a model cost a dictionary lookup a node. Measured on a 2-core CPU: a trace is
2-3 ms, so a 32-layer model costs its one layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .cleanup import drop_dead, fold_constant_copies
from .higher_order import KEPT, expand
from .reasons import Reason
from .source_lines import user_line
from .templates import (
    Method,
    NormaliseError,
    Template,
    allow_real_constants,
    callable_of,
    is_fixed,
    is_identity,
    is_nested,
    leaf_key,
    leaves_of,
    mode_key,
    trace_template,
)
from .torch_api import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    enable_python_dispatcher,
    enter_autocast,
    exit_autocast,
    log_api_usage,
    map_aggregate,
    set_grad_enabled,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class NormalGraph:
    """The one IR. ``constants`` are the tensors and subgraphs behind ``get_attr`` nodes.

    ``turns_grad_on`` is true if the code enables gradients itself, so that ``no_grad`` around the call proves
    nothing. ``traced`` and ``reused`` count structures traced and nodes instantiated from a template, ``hoisted``
    nodes that became constants (``hoist``).
    """

    graph: Graph
    constants: dict[str, Any]
    placeholders: tuple[Node, ...]
    fake_mode: FakeTensorMode | None
    turns_grad_on: bool
    traced: int
    reused: int
    hoisted: int = 0


@dataclass
class _State:
    graph: Graph = field(default_factory=Graph)
    constants: dict[str, Any] = field(default_factory=dict)
    autocast: list[tuple[Any, ...]] = field(default_factory=list)
    templates: dict[Any, Template] = field(default_factory=dict)
    turns_grad_on: bool = False
    traced: int = 0
    reused: int = 0


def normalise(gm: GraphModule, is_break: Callable[[Node], object] | None = None) -> NormalGraph:
    """Normalise a Dynamo graph. Raises ``NormaliseError``; never changes ``gm``. A higher-order op that ``is_break``
    claims stays whole."""
    fakes = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    fake_mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    if fake_mode is None:
        fake_mode = _fake_mode_of(gm)
    worker = _Normaliser(fake_mode, is_break)
    with ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(allow_real_constants(fake_mode))
            stack.enter_context(fake_mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        stack.enter_context(worker.closing_autocast())
        outputs = worker.run_graph(gm, None)
    return worker.finish(outputs)


def _fake_mode_of(gm: GraphModule) -> FakeTensorMode | None:
    """A graph without tensor inputs has its fake mode on inner values, or none at all."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


class _Normaliser:
    """Walks Dynamo nodes in order and emits ATen nodes. ``env`` maps a Dynamo node to a tree of emitted nodes."""

    def __init__(self, fake_mode: FakeTensorMode | None, is_break: Callable[[Node], object] | None = None) -> None:
        self.fake_mode, self.is_break = fake_mode, is_break
        self.s = _State()
        self.placeholders: list[Node] = []

    # -- walking -------------------------------------------------------------------------------------------------

    def run_graph(self, gm: GraphModule, args: list[Any] | None) -> Any:
        """Emit the nodes of ``gm``; ``args`` bind its placeholders (``None``: they become placeholders of ours)."""
        env: dict[Node, Any] = {}
        bound = iter(args or ())
        for node, members in _units(gm.graph):
            if node.op == "placeholder":
                env[node] = self.placeholder(node) if args is None else next(bound)
            elif node.op == "get_attr":
                env[node] = self.attribute(gm, node)
            elif node.op == "output":
                return map_aggregate(node.args[0], lambda a: env[a] if isinstance(a, Node) else a)
            elif len(members) > 1:
                self.region(gm, members, env)
            else:
                env[node] = self.call(gm, node, env)
        return ()

    def placeholder(self, node: Node) -> Node:
        new = self.s.graph.placeholder(node.name)
        new.meta.update(val=node.meta.get("example_value"), where=user_line(node.meta.get("stack_trace")))
        source = getattr(node, "_dynamo_source", None)
        name = getattr(source, "name", "") if source is not None else ""
        new.meta["source"] = name() if callable(name) else str(name)
        tensor_dict = node.meta.get("tensor_dict") or {}
        new.meta["static"] = tensor_dict.get("_dynamo_static_input_type")
        self.placeholders.append(new)
        return new

    def attribute(self, gm: GraphModule, node: Node) -> Node:
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        new = self.constant(value, str(node.target))
        if self.fake_mode is not None and isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            # A real tensor (Dynamo leaves them in the graph under Inductor's freezing) would be changed while tracing.
            new.meta["val"] = self.fake_mode.from_tensor(value, static_shapes=True)
        return new

    def constant(self, value: Any, hint: str) -> Node:
        """A ``get_attr`` node for a tensor or a subgraph; one object, one node."""
        for name, known in self.s.constants.items():
            if known is value:
                return next(n for n in self.s.graph.nodes if n.op == "get_attr" and n.target == name)
        name = f"const_{len(self.s.constants)}_{hint.replace('.', '_')}"
        self.s.constants[name] = value
        new = self.s.graph.create_node("get_attr", name, (), {}, name=name)
        new.meta.update(val=value, where="")
        return new

    def call(self, gm: GraphModule, node: Node, env: dict[Node, Any]) -> Any:
        target = node.target
        if target is enter_autocast:
            return self.enter_autocast(node)
        if target is exit_autocast:
            return self.exit_autocast()
        if getattr(target, "__name__", "") in ("_enter_inference_mode", "_exit_inference_mode"):
            text = "the code switches inference mode itself, which decides what kind of tensors it makes"
            raise NormaliseError(Reason("normalise-failed", text, user_line(node.meta.get("stack_trace"))))
        if target is set_grad_enabled:
            self.s.turns_grad_on |= bool(node.args[0])
            return None
        args: Any = map_aggregate(node.args, lambda a: env[a] if isinstance(a, Node) else a)
        kwargs: Any = map_aggregate(node.kwargs, lambda a: env[a] if isinstance(a, Node) else a)
        if target is operator.getitem and isinstance(args[0], (tuple, list, dict)):
            return args[0][args[1]]
        if isinstance(target, HigherOrderOperator):
            return self.higher_order(gm, node, args, kwargs)
        if node.op == "call_module":
            return self.opaque(node, self.constant(gm.get_submodule(str(target)), str(target)), args, kwargs)
        if is_nested(node):
            return self.opaque(node, None, args, kwargs, "nested tensors are not")
        if node.op == "call_method" and target == "item" and is_fixed(node.meta.get("example_value")):
            return self.fixed_number(node, args[0])
        try:
            return self.traced(callable_of(node), node, args, kwargs)
        except NormaliseError as error:
            raise NormaliseError(error.reason.at(user_line(node.meta.get("stack_trace")))) from error
        except Exception as error:  # the node stays as Dynamo recorded it, and says so
            return self.opaque(node, None, args, kwargs, f"{type(error).__name__}: {error}")

    def fixed_number(self, node: Node, tensor: Node) -> Node:
        """``tensor.item()`` whose value Dynamo has fixed: that value is not in the key of a trace."""
        new = self.s.graph.call_function(aten.item.default, (tensor,))
        self.annotate(new, node, node.meta["example_value"])
        return new

    # -- regions and modes ---------------------------------------------------------------------------------------

    @contextmanager
    def closing_autocast(self) -> Iterator[None]:
        """Autocast regions entered while walking are left again, also after an exception."""
        self._contexts: list[Any] = []
        try:
            yield
        finally:
            while self._contexts:
                exit_autocast(self._contexts.pop())

    def enter_autocast(self, node: Node) -> None:
        self._contexts.append(enter_autocast(*node.args, **node.kwargs))
        self.s.autocast.append(tuple(node.args))

    def exit_autocast(self) -> None:
        exit_autocast(self._contexts.pop())
        self.s.autocast.pop()

    def higher_order(self, gm: GraphModule, node: Node, args: Any, kwargs: Any) -> Any:
        assert isinstance(node.target, HigherOrderOperator)
        if self.is_break is None or not self.is_break(node):
            found = expand(node.target, args, lambda function, a: self.traced(function, node, a, {}), self.run_graph)
            if found is not KEPT:
                return found
        new = self.s.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        self.annotate(new, node, node.meta.get("example_value"))
        return self.unpack(new, new.meta["val"])

    def region(self, gm: GraphModule, members: list[Node], env: dict[Node, Any]) -> None:
        """Trace several Dynamo nodes as one: a ``vmap`` region has no meaning node by node.

        Not before dispatch, where the operations on batched tensors would be seen instead of what they become.
        """
        inside = set(members)
        outside = [a for n in members for a in n.all_input_nodes if a not in inside]
        outside = list(dict.fromkeys(outside))
        results = [n for n in members if any(u not in inside for u in n.users)]

        def body(*values: Any) -> tuple[Any, ...]:
            local = dict(zip(outside, values, strict=True))
            for n in members:
                a = map_aggregate(n.args, lambda x: local[x] if isinstance(x, Node) else x)
                k = map_aggregate(n.kwargs, lambda x: local[x] if isinstance(x, Node) else x)
                local[n] = callable_of(n)(*a, **k)
            return tuple(local[n] for n in results)

        try:
            values = self.traced(body, members[-1], tuple(env[n] for n in outside), {}, memo=False)
        except NormaliseError:
            raise
        except Exception as error:
            text = f"a functional transform could not be traced: {type(error).__name__}: {error}"
            raise NormaliseError(
                Reason("normalise-failed", text, user_line(members[0].meta.get("stack_trace")))
            ) from error
        for n in members:
            env[n] = None
        env.update(zip(results, values, strict=True))

    # -- one node ------------------------------------------------------------------------------------------------

    def traced(self, function: Callable[..., Any], node: Node, args: Any, kwargs: Any, memo: bool = True) -> Any:
        leaves, spec_key = leaves_of((args, kwargs))
        if not leaves:
            return self.without_tensors(function, node, args, kwargs)
        key = (function, spec_key, tuple(leaf_key(n) for n in leaves), mode_key()) if memo else None
        try:
            template = self.s.templates.get(key) if key is not None else None
        except TypeError:  # an unhashable constant: trace it on its own
            key, template = None, None
        if template is None:
            template = trace_template(function, leaves, args, kwargs, pre_dispatch=memo)
            self.s.traced += 1
            if key is not None and not template.makes_sizes:
                self.s.templates[key] = template
        else:
            self.s.reused += 1
        return self.instantiate(template, leaves, node)

    def without_tensors(self, function: Callable[..., Any], node: Node, args: Any, kwargs: Any) -> Any:
        """A call with constants only: a factory (traced) or plain Python (computed now)."""
        if node.op == "call_function" and node.target in (log_api_usage,):
            return None
        template = trace_template(function, [], args, kwargs)
        return self.instantiate(template, [], node)

    def instantiate(self, template: Template, leaves: list[Node], node: Node) -> Any:
        env: dict[Node, Any] = {}
        inputs = iter(leaves)
        for old in template.graph.nodes:
            if old.op == "placeholder":
                env[old] = next(inputs)
            elif old.op == "get_attr":
                env[old] = self.constant(template.constants[str(old.target)], str(old.target))
            elif old.op == "output":
                return map_aggregate(old.args[0], lambda a: env[a] if isinstance(a, Node) else a)
            elif old.target is operator.getitem and isinstance(env[old.args[0]], (tuple, list)):
                env[old] = env[old.args[0]][old.args[1]]
            elif old.target in (aten.lift_fresh_copy.default, aten.detach_.default):
                # A literal tensor: the constant itself (its users are checked for mutation when the plan is made).
                env[old] = self.fresh_constant(old, env, node)
            elif is_identity(old):
                env[old] = env[old.args[0]]
            else:
                new = self.s.graph.node_copy(old, lambda a: env[a])
                self.annotate(new, node, old.meta.get("val"))
                new.meta["aliases"] = tuple(env[a] for a in old.meta["aliases"] if isinstance(env[a], Node))
                env[old] = self.unpack(new, new.meta["val"])
        return None

    def fresh_constant(self, old: Node, env: dict[Node, Any], node: Node) -> Node:
        source: Node = env[old.all_input_nodes[0]]
        if old.target is aten.detach_.default:
            return source
        new = self.s.graph.call_function(aten.clone.default, (source,))
        self.annotate(new, node, old.meta.get("val"))
        new.meta["aliases"] = ()
        return new

    def opaque(self, node: Node, module: Node | None, args: Any, kwargs: Any, why: str = "a module call") -> Any:
        if module is not None:
            target: Any = _call_module
            args = (module, *args)
        else:
            target = node.target if node.op == "call_function" else Method(str(node.target))
        new = self.s.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=node.name)
        self.annotate(new, node, node.meta.get("example_value"))
        new.meta["opaque"] = why
        return self.unpack(new, new.meta["val"])

    def annotate(self, new: Node, node: Node, value: Any) -> None:
        new.meta["val"] = value
        new.meta["where"] = user_line(node.meta.get("stack_trace"))
        new.meta["stack_trace"] = node.meta.get("stack_trace")
        new.meta["autocast"] = tuple(self.s.autocast)
        new.meta["origin"] = node.target  # what the user called, for break registrations
        new.meta.setdefault("aliases", ())

    def unpack(self, new: Node, value: Any) -> Any:
        """A tuple result becomes a tuple of ``getitem`` nodes, so that later indexing is by structure."""
        if not isinstance(value, (tuple, list)) or isinstance(value, torch.Size):
            return new
        items = []
        for i, v in enumerate(value):
            item = self.s.graph.call_function(operator.getitem, (new, i))
            item.meta.update(new.meta, val=v, aliases=(new,))
            items.append(self.unpack(item, v))
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)

    def finish(self, outputs: Any) -> NormalGraph:
        self.s.graph.output(outputs)
        fold_constant_copies(self.s.graph)
        drop_dead(self.s.graph)
        return NormalGraph(
            self.s.graph,
            self.s.constants,
            tuple(self.placeholders),
            self.fake_mode,
            self.s.turns_grad_on,
            self.s.traced,
            self.s.reused,
        )


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _units(graph: Graph) -> Iterator[tuple[Node, list[Node]]]:
    """Nodes one by one, except that a functional-transform region comes as one group."""
    group: list[Node] = []
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        opens = name.endswith("_increment_nesting")
        closes = name.endswith("_decrement_nesting")
        depth += opens
        if depth:
            group.append(node)
            depth -= closes
            if not depth:
                yield group[-1], group
                group = []
        else:
            yield node, [node]
