"""Break ops: operations that are never recorded and always run eagerly, on the real rows, between segments.

Contract. ``break_op`` makes one of a function; ``register_break_op`` makes an existing operation one. Registrations are
process-wide and apply to graphs compiled afterwards; ``options={"break_ops": ...}`` changes that for one compile. A
target is an ATen or custom ``OpOverload`` or packet, its name (``"mylib::attention"``, also before the library is
imported; ``"mylib::*"`` is a whole library), a torch function as the user calls it
(``F.scaled_dot_product_attention``), a higher-order op (``flex_attention``), a Python function (which becomes an
operator, so it needs a fake implementation) or an ``nn.Module`` class (whose ``forward`` becomes one). A registration
that matches nothing is reported once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, overload

import torch
from torch.fx import Node

from torch_graph_backend.break_adopt import adopt, target_of
from torch_graph_backend.break_define import BreakOp, define, defined, substitute
from torch_graph_backend.config import Without
from torch_graph_backend.errors import BreakOpError, nearest
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.capturable import name_of
from torch_graph_backend.passes.dynamo_api import is_in_graph
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import HigherOrderOperator, OpOverload, OpOverloadPacket

#: Functions that make a higher-order op, under the name of that op.
_HIGHER_ORDER = {
    ("torch", "cond"): "cond",
    ("torch._higher_order_ops.while_loop", "while_loop"): "while_loop",
    ("torch._higher_order_ops.map", "map"): "map_impl",
    ("torch._higher_order_ops.scan", "scan"): "scan",
    ("torch._higher_order_ops.associative_scan", "associative_scan"): "associative_scan",
    ("torch.nn.attention.flex_attention", "flex_attention"): "flex_attention",
}


class BreakFunction(Protocol):
    """A function that is a break op: called as before, and with these attributes."""

    break_op: BreakOp
    op: OpOverload
    register_fake: Callable[[Callable[..., Any]], Callable[..., Any]]
    register_autograd: Callable[..., None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Registered:
    """One registration. ``target`` is a name or a function, ``by`` is ``decorator``, ``call`` or ``integration``.

    It equals its target, so that ``"aten::tanh" in break_ops()`` asks for one. ``found`` has the number of operations
    that matched in the graphs compiled so far, and whether a compile without a match was reported.
    """

    target: Any
    by: str
    undo: Callable[[], None] | None = None
    found: dict[str, int] = field(default_factory=lambda: {"matches": 0, "reported": 0})

    @property
    def matches(self) -> int:
        """Operations that matched, over all graphs compiled so far."""
        return self.found["matches"]

    def __eq__(self, other: object) -> bool:
        return bool(self.target == (other.target if isinstance(other, Registered) else other))

    def __hash__(self) -> int:
        return hash(self.target)


_registered: dict[Any, Registered] = {}


# -- the decorator ---------------------------------------------------------------------------------------------------


@overload
def break_op(function: Callable[..., Any], /) -> BreakFunction: ...


@overload
def break_op(
    name: str | None = None,
    /,
    *,
    mutates_args: Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    schema: str | None = None,
    warmup: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    keeps_args: bool = True,
) -> Callable[[Callable[..., Any]], BreakFunction]: ...


def break_op(
    target: Any = None,
    /,
    *,
    mutates_args: Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    schema: str | None = None,
    warmup: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    keeps_args: bool = True,
) -> Any:
    """Make a function a break op: ``@break_op``, or ``@break_op("library::name", mutates_args=("cache",), ...)``.

    Compiled code has it as one opaque operation, which runs as the plain function, on real rows, at every call. So it
    may read Python state (a context variable, ``current_step()``) and launch any kernel. Elsewhere it stays the
    function that it is. Its annotations give the schema, as ``torch.library.infer_schema`` reads them: ``Tensor``,
    ``Optional[Tensor]``, ``List[Tensor]``, ``int``, ``float``, ``bool``, ``str``, and tuples of tensors or ``None`` as
    the result. A method works: the operation keeps to the instance that it was compiled with.

    * ``mutates_args``: names of the tensor arguments that it changes.
    * ``fake``: same parameters; returns empty tensors of the results' shapes, dtypes and devices. Can be given later
      with ``function.register_fake``. An op without results needs none.
    * ``schema``: such as ``"(Tensor x, int n) -> Tensor"``, where annotations cannot say it.
    * ``warmup``: called instead of the function when sizes are recorded ahead of the first call.
    * ``prepare``: ``prepare(step)`` runs once a call of the compiled graph, before its first segment, however many
      layers call the op; ``current_step().prepared(function)`` is what it returned.
    * ``keeps_args``: False promises that the function keeps no argument, nor a view of one, after it returned. It is
      then given views of recorded memory instead of copies.

    Results must be new tensors: not an argument, not a view of one. Raises ``BreakOpError`` (BCG301) if it cannot work.
    """
    if target is not None and not isinstance(target, (str, types.FunctionType)):
        if isinstance(target, (OpOverload, OpOverloadPacket, torch.library.CustomOpDef)):
            problem = "is an operator already"
            raise BreakOpError(_name_of(target), problem, fix="use tgb.register_break_op(...) to make it a break")
        define(target)  # raises, and says why
    settings = {"mutates_args": mutates_args, "fake": fake, "schema": schema, "warmup": warmup, "prepare": prepare}

    def make(function: Callable[..., Any]) -> BreakFunction:
        op = define(function, target if isinstance(target, str) else None, keeps_args=keeps_args, **settings)  # type: ignore[arg-type]
        _registered[op.name] = Registered(op.name, "decorator")
        return _dressed(substitute(op), op)

    return make(target) if isinstance(target, types.FunctionType) else make


def _dressed(function: Callable[..., Any], op: BreakOp) -> BreakFunction:
    """The function with the attributes of a break op."""

    def register_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the fake implementation: same parameters, empty tensors as results."""
        op.fake = fake
        return fake

    def register_autograd(backward: Callable[..., Any], /, *, setup_context: Callable[..., Any] | None = None) -> None:
        """Give the gradient, as ``torch.library.register_autograd`` takes it."""
        if op.no_formula:
            raise BreakOpError(op.name, op.no_formula)
        op.backward, op.setup_context = backward, setup_context

    for f in {function, op.function}:
        f.break_op, f.op = op, op.overload  # type: ignore[attr-defined]
        f.register_fake, f.register_autograd = register_fake, register_autograd  # type: ignore[attr-defined]
    return cast(BreakFunction, function)


# -- the registry ----------------------------------------------------------------------------------------------------


def _key(target: Any) -> Any:
    """What a registration is stored under: a name for operators (they may be reloaded), the object for functions."""
    if isinstance(target, Registered):
        return _key(target.target)
    if isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator, torch.library.CustomOpDef)):
        return _name_of(target)
    if isinstance(target, str):
        name = target.strip().replace(".", "::", 1) if "::" not in target else target.strip()
        if "::" not in name or not all(name.split("::")):
            raise BreakOpError(target, "is not a name like 'library::operation'")
        return name
    if isinstance(target, torch.nn.Module):
        problem = "is a module; register its class, or mark the function that it calls"
        raise BreakOpError(type(target).__name__, problem)
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        if target.__module__.split(".")[0] == "torch":
            problem = "is PyTorch's own class, which stays as it is"
            raise BreakOpError(target.__name__, problem, fix="register a subclass, or the function that it calls")
        return target
    found = defined(target)
    if found is not None:
        return found.name
    higher = _HIGHER_ORDER.get((getattr(target, "__module__", ""), getattr(target, "__name__", "")))
    if higher is not None:
        return f"higher_order::{higher}"
    if callable(target) and isinstance(target, Hashable):
        return target
    raise BreakOpError(repr(target), "is neither an operator, a name like 'library::operation', nor a function")


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target._schema.name) + "." + (target._overloadname or "default")
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    return str(target._qualname)


def register_break_op(target: Any, *, by: str = "call", **settings: Any) -> Any:
    """Make what exists a break. Returns ``target``.

    ``settings`` are those of ``break_op``, for a Python function or an ``nn.Module`` class: ``fake`` at least, as
    Dynamo must not look inside. Of a class it is ``forward`` that becomes an operation (the class gets a ``forward``
    that passes on to its own): the arguments must be what an operator takes, ``fake`` has ``self`` first, and
    parameters are read when it runs. Raises ``BreakOpError`` (BCG301) for anything else.
    """
    key = _key(target)
    made = isinstance(key, type) or (isinstance(key, types.FunctionType) and not is_in_graph(key))
    if settings and not made:
        raise BreakOpError(str(target), f"takes no {', '.join(settings)}", fix="it is an operation with its own")
    undo = adopt(key, settings) if made and key not in _registered else None
    if key not in _registered:
        _registered[key] = Registered(key, by, undo)
    return target


def unregister_break_op(target: Any) -> None:
    """Undo ``register_break_op``. Raises ``BreakOpError`` if it was not registered."""
    found = _registered.pop(_key(target), None)
    if found is None:
        raise BreakOpError(str(target), "is not registered")
    if found.undo is not None:
        found.undo()


def break_ops() -> tuple[Registered, ...]:
    """All break ops, in the order of registration: what each is, who made it, and how many operations it matched."""
    return tuple(_registered.values())


# -- one compile -----------------------------------------------------------------------------------------------------


class Breaks:
    """The break ops of one compile: registered now, or listed in its options. Called with a node: why it is a break."""

    def __init__(self, extra: Iterable[Any] = ()) -> None:
        entries = list(extra)
        self.extra = {_key(t): t for t in entries if not isinstance(t, Without)}
        self.without = {_key(t.target) for t in entries if isinstance(t, Without)}
        self.registered = dict(_registered)
        self.keys = {k for k in (*self.registered, *self.extra) if k not in self.without}
        self.matched: dict[Any, set[Node]] = {}
        self.seen: set[str] = set()

    def __call__(self, node: Node) -> Reason | None:
        names = _names(node)
        self.seen.update(n for n in names if isinstance(n, str) and not n.endswith("*"))
        found = [name for name in names if name in self.keys]
        for name in found:
            self.matched.setdefault(name, set()).add(node)
        return Reason("break-op", f"{name_of(node)} is registered as a break") if found else None

    def borrows(self, node: Node) -> bool:
        """The function behind this node promises to keep none of its arguments."""
        op = defined(node.target)
        return op is not None and not op.keeps_args

    def touches_state(self, node: Node) -> bool:
        """The function behind this node may change memory that it does not get as an argument."""
        return defined(node.target) is not None

    def report(self, graph: str) -> None:
        """Count what matched; say once what did not."""
        for key, registration in self.registered.items():
            registration.found["matches"] += len(self.matched.get(key, ()))
            silent = registration.by != "call" or registration.matches or registration.found["reported"]
            if silent or key in self.without:
                continue
            registration.found["reported"] = 1
            log.warning("break op %s matched nothing in %s%s", key, graph, self.hint(key))
        for key in self.extra:
            if key not in self.matched:
                log.warning("options['break_ops']: %s matched nothing in %s%s", key, graph, self.hint(key))

    def hint(self, key: Any) -> str:
        """What may be wrong with a registration that matched nothing."""
        if isinstance(key, types.FunctionType) and defined(key) is None and not is_in_graph(key):
            return ": Dynamo traces into Python functions; register it with a fake before compiling"
        close = nearest(key, self.seen) if isinstance(key, str) else None
        return f"; did you mean {close!r}?" if close else ""


def break_predicate(extra: Iterable[Any] = ()) -> Breaks:
    """The test that the classifier uses: registered now, or listed in ``extra`` (one compile's option)."""
    return Breaks(extra)


def _names(node: Node) -> list[Any]:
    target, origin = node.target, node.meta.get("origin")
    names: list[Any] = [origin] if callable(origin) else []
    if isinstance(target, OpOverload):
        full = str(target._schema.name)
        names += [full, f"{full}.{target._overloadname or 'default'}", f"{target.namespace}::*"]
        names += [t for t in [target_of(full)] if t is not None]
    elif isinstance(target, HigherOrderOperator):
        names.append(f"higher_order::{target.name()}")
    elif callable(target):
        names.append(target)
    return names
