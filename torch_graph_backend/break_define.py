"""Defining a break op from a Python function: schema, library, what Dynamo sees, gradients.

Contract. ``define(function)`` makes one operator of ``function`` through ``torch.library.Library``, and ``substitute``
tells Dynamo to write a call of ``function`` into the graph as a call of that operator. The function object itself is
left alone: outside compiled code a call of it is a call of it, and a plan calls it directly, without the dispatcher
(``break_calls``). The operator serves everything else: eager fallbacks, branches of ``torch.cond``, other backends.

What an operator must not do breaks it: return an argument or a view of one, or change one that ``mutates_args`` does
not name. Both are looked for at the first call of each compiled graph.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torch_graph_backend.break_self import instance, number_at
from torch_graph_backend.errors import BreakOpError, MissingFake
from torch_graph_backend.passes.torch_api import OpOverload, below_autograd, destroy_library

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
#: Where operators go whose name has no library.
LIBRARY = "tgb"
#: The parameter that stands for ``self`` in a method's schema: the number of an instance.
SELF = "tgb_self"

_defined: dict[str, BreakOp] = {}


@dataclass(eq=False)
class BreakOp:
    """One break op. ``function`` is what the user wrote; ``name`` is ``library::name`` without an overload.

    ``method``: the first argument of ``call`` and of the operator is the number of the instance. ``warmup`` is called
    instead of the function when sizes are recorded ahead; ``prepare`` runs once a call, before the first segment.
    ``active`` is false once a registration was undone: Dynamo then traces into the function again.
    """

    name: str
    function: Callable[..., Any]
    schema: str
    method: bool
    mutates_args: tuple[str, ...]
    fake: Callable[..., Any] | None
    warmup: Callable[..., Any] | None
    prepare: Callable[..., Any] | None
    keeps_args: bool
    library: torch.library.Library = field(repr=False)
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., Any] | None = None
    active: bool = True

    @property
    def overload(self) -> OpOverload:
        """The operator as it stands in graphs."""
        library, name = self.name.split("::")
        found = getattr(getattr(torch.ops, library), name).default
        assert isinstance(found, OpOverload)
        return found

    @property
    def no_formula(self) -> str:
        """Why there can be no gradient formula for it; empty if there can."""
        schema = self.overload._schema
        if schema.is_mutable or not schema.returns:
            return "changes its arguments, for which there is no gradient formula"
        if any(a.kwarg_only and "Tensor" in str(a.type) for a in schema.arguments):
            return "has a keyword-only tensor argument, for which torch takes no gradient formula"
        return ""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The function on the operator's arguments."""
        if self.method:
            return self.function(instance(args[0], self.name), *args[1:], **kwargs)
        return self.function(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's kernel."""
        result = self.call(*args, **kwargs)
        return result if self.overload._schema.returns else None

    def run_fake(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's fake implementation. Nothing has to be given for an operator without results."""
        if self.fake is None:
            if not self.overload._schema.returns:
                return None
            raise MissingFake(self.name, self.fake_lines())
        if self.method:
            args = (instance(args[0], self.name), *args[1:])
        return self.fake(*args, **kwargs)

    def fake_lines(self) -> list[str]:
        """A fake implementation to start from: as many results as the schema has, like the first tensor argument."""
        schema = self.overload._schema
        names = [a.name for a in schema.arguments]
        first = next((a.name for a in schema.arguments if str(a.type) == "Tensor"), "...")
        names = ["self" if n == SELF else n for n in names]
        results = [
            f"[torch.empty_like({first})]" if str(r.type) != "Tensor" else f"torch.empty_like({first})"
            for r in schema.returns
        ]
        return [
            f"@{self.function.__name__}.register_fake",
            f"def _({', '.join(names)}):",
            f"    return {', '.join(results)}",
        ]

    def run_backward(self, ctx: Any, *grads: Any) -> Any:
        if self.backward is None:
            raise _no_gradient(self)
        return self.backward(ctx, *grads)

    def run_setup_context(self, ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        if self.setup_context is not None:
            self.setup_context(ctx, inputs, output, **keyword_only)


def _no_gradient(op: BreakOp) -> BreakOpError:
    name = op.function.__name__
    if op.overload._schema.is_mutable:
        problem = "changes its arguments, so it has no gradient"
        fix = f"call it under torch.no_grad(), or return the result instead and use {name}.register_autograd"
    elif op.no_formula:
        problem, fix = (
            op.no_formula,
            f"call it under torch.no_grad(), or make it positional and use {name}.register_autograd",
        )
    else:
        problem = "has no gradient formula"
        fix = f"give one with {name}.register_autograd(backward, setup_context=...), or call under torch.no_grad()"
    return BreakOpError(op.name, problem, fix=fix)


def defined(target: Any) -> BreakOp | None:
    """The break op behind an operator of a graph, its packet, its name or its function; None if it is none of ours."""
    if isinstance(target, OpOverload):
        found = _defined.get(str(target._schema.name))
        return found if found is not None and not target._schema.overload_name else None
    if isinstance(target, str):
        return _defined.get(target)
    found = getattr(target, "break_op", None)
    return found if isinstance(found, BreakOp) else None


# -- names and schemas -----------------------------------------------------------------------------------------------


def _name(function: Callable[..., Any], name: str | None) -> str:
    if name is None:
        parts = re.split(r"\W+", f"{function.__module__}.{function.__qualname__}".replace("<locals>", ""))
        base = "_".join(p.strip("_") for p in parts if p.strip("_"))
        name, n = f"{LIBRARY}::{base}", 1
        while name in _defined:  # a function made twice is two ops
            name, n = f"{LIBRARY}::{base}_{n}", n + 1
        return name
    full = name if "::" in name else f"{LIBRARY}::{name}"
    if not _NAME.fullmatch(full) or full.split("::")[0] in ("aten", "prims", "prim", "higher_order"):
        raise BreakOpError(name, "is not a name like 'library::operation', in a library of your own")
    library, op = full.split("::")
    if full not in _defined and hasattr(getattr(torch.ops, library), op):
        raise BreakOpError(name, "exists already", fix=f"use tgb.register_break_op({full!r}) to make it a break")
    return full


def is_method(function: Callable[..., Any]) -> bool:
    """Whether the first parameter is a bare ``self``."""
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and first.name == "self" and first.annotation is inspect.Parameter.empty


def in_class(function: Callable[..., Any]) -> bool:
    """Whether a function was written in the body of a class."""
    parent = function.__qualname__.rpartition(".")[0]
    return bool(parent) and not parent.endswith("<locals>")


def _twin(function: Any) -> types.FunctionType:
    """The same code as another object."""
    code, cells = function.__code__, function.__closure__
    twin = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__, twin.__annotations__ = function.__kwdefaults__, function.__annotations__
    return twin


def _schema(function: types.FunctionType, name: str, mutates: tuple[str, ...], schema: str | None) -> str:
    if schema is not None:
        if not schema.strip().startswith("("):
            raise BreakOpError(
                name, f"the schema {schema!r} does not start with its arguments", fix="'(Tensor x) -> Tensor'"
            )
        text = schema.strip()
        return f"(int {SELF}{', ' if text[1:].lstrip()[:1] != ')' else ''}{text[1:]}" if is_method(function) else text
    signature = inspect.signature(function)
    twin = _twin(function)
    if is_method(function):
        _, *rest = signature.parameters.values()
        number = inspect.Parameter(SELF, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int)
        signature = signature.replace(parameters=[number, *rest])
    if signature.return_annotation is inspect.Signature.empty and mutates:
        signature = signature.replace(return_annotation=None)
    twin.__signature__ = signature  # type: ignore[attr-defined]
    try:
        return torch.library.infer_schema(twin, mutates_args=mutates)
    except (ValueError, TypeError) as error:
        problem = (
            str(error)
            .removeprefix("infer_schema(func): ")
            .split(" Got func with signature")[0]
            .split("The valid types")[0]
        )
        kinds = "Tensor, Optional[Tensor], List[Tensor], int, float, bool, str"
        fix = f"annotate it ({kinds}), or pass schema='(Tensor x) -> Tensor'"
        raise BreakOpError(name, f"no schema: {problem.strip()}", fix=fix) from error


# -- definition ------------------------------------------------------------------------------------------------------


def define(
    function: Any,
    name: str | None = None,
    *,
    mutates_args: Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    schema: str | None = None,
    warmup: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    keeps_args: bool = True,
) -> BreakOp:
    """Make a break op of a Python function. Raises ``BreakOpError`` (BCG301) where that cannot work."""
    if not isinstance(function, types.FunctionType):
        kind = type(function).__name__
        fix = "decorate a plain function (below @staticmethod), or use tgb.register_break_op for what exists"
        raise BreakOpError(
            getattr(function, "__name__", repr(function)), f"is a {kind}, not a Python function", fix=fix
        )
    if defined(function) is not None:
        raise BreakOpError(function.__name__, "is a break op already")
    if isinstance(mutates_args, str):
        raise BreakOpError(function.__name__, f"mutates_args is {mutates_args!r}", fix=f"write ({mutates_args!r},)")
    for given in (fake, warmup, prepare):
        if given is not None and not callable(given):
            raise BreakOpError(function.__name__, f"{given!r} is not callable")
    full = _name(function, name)
    mutates = tuple(mutates_args)
    text = _schema(function, full, mutates, schema)
    if full in _defined:  # defined again, as when a notebook cell runs twice
        destroy_library(_defined.pop(full).library)
    library = torch.library.Library(full.split("::")[0], "FRAGMENT")
    method = is_method(function)
    op = BreakOp(full, function, text, method, mutates, fake, warmup, prepare, keeps_args, library)
    _register(op)
    if schema is not None:
        _take_writes(op)
    _defined[full] = op
    return op


def _take_writes(op: BreakOp) -> None:
    """What a schema given as text says is changed; ``mutates_args`` must not say otherwise."""
    written = tuple(a.name for a in op.overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if op.mutates_args and set(op.mutates_args) != set(written):
        destroy_library(op.library)
        problem = f"mutates_args is {op.mutates_args!r}, but its schema changes {written!r}"
        raise BreakOpError(op.name, problem, fix="write 'Tensor(a!) x' in the schema for each argument that it changes")
    op.mutates_args = written


def _register(op: BreakOp) -> None:
    library, name = op.library, op.name.split("::")[1]
    try:
        library.define(name + op.schema)
    except RuntimeError as error:
        raise BreakOpError(op.name, f"the schema {op.schema!r} is not accepted: {error}") from error
    library.impl(name, op.run, "CompositeExplicitAutograd")
    torch.library.register_fake(op.name, op.run_fake, lib=library)
    schema = op.overload._schema
    if schema.is_mutable or (schema.returns and op.no_formula):
        library.impl(name, functools.partial(_without_gradient, op), "Autograd", with_keyset=True)
    elif schema.returns:
        torch.library.register_autograd(op.name, op.run_backward, setup_context=op.run_setup_context, lib=library)


def _without_gradient(op: BreakOp, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """The Autograd kernel of an op that can have no gradient formula: eager values forwards, an error backwards."""
    result = below_autograd(op.overload, keyset, args, kwargs)
    if not torch.is_grad_enabled():
        return result
    names = [a.name for a in op.overload._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    given = {name: [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)] for name, value in named.items()}
    sources = [t for ts in given.values() for t in ts if t.requires_grad]
    if not sources:
        return result
    for t in [t for name in op.mutates_args for t in given.get(name, ()) if t.is_floating_point()]:
        _NoGradient.apply(op, True, t, *sources)
    return tree_map(lambda t: _NoGradient.apply(op, False, t, *sources) if _differentiable(t) else t, result)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _NoGradient(torch.autograd.Function):
    """Makes a tensor depend on ``sources`` as eager code would have it, with a backward that says what to do."""

    @staticmethod
    def forward(ctx: Any, op: BreakOp, changed: bool, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.op = op
        if changed:
            ctx.mark_dirty(value)
            return value
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_gradient(ctx.op)


def substitute(op: BreakOp) -> Callable[..., Any]:
    """Let Dynamo write the operator wherever it meets the function; returns what to bind in place of the function.

    That is the function itself, but for functions in a class body: Dynamo takes those from the class without asking
    whether they are to be substituted, so a class gets a function that passes its arguments on.
    """
    function, overload = op.function, op.overload
    plain = _twin(function)

    @torch.compiler.assume_constant_result
    def active() -> bool:
        return op.active

    @torch.compiler.assume_constant_result
    def number(address: int) -> int:
        return number_at(address, op.name)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs) if active() else plain(*args, **kwargs)

    def traced_method(this: Any, *args: Any, **kwargs: Any) -> Any:
        return overload(number(id(this)), *args, **kwargs) if active() else plain(this, *args, **kwargs)

    wanted = traced_method if op.method else traced
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(wanted)
    if not op.method and not in_class(function):
        return function

    @functools.wraps(function)
    def passed_on(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return passed_on
