"""Python functions and module classes that exist already, made operations without touching their source.

Contract. ``adopt(target)`` defines an operation of a function, or of a class's ``forward``, and returns what undoes it.
A function stays the object it is; a class gets a ``forward`` that passes on to its own (of the user's classes only:
PyTorch's are refused), because Dynamo does not ask about functions that it finds in a class. Undone, Dynamo traces into
the function again; graphs compiled before keep what they have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch_graph_backend.break_define import BreakOp, define, in_class, substitute
from torch_graph_backend.errors import BreakOpError

#: Everything adopted so far: Dynamo's substitution of a function cannot be taken back, so it is made once.
_adopted: dict[Any, tuple[BreakOp, Callable[..., Any], dict[str, Any]]] = {}
_target_of: dict[str, Any] = {}

_FIXED = ("mutates_args", "schema")


def target_of(name: str) -> Any:
    """The function or class behind an operator's name; None if it was not made by ``adopt``."""
    return _target_of.get(name)


def adopt(target: Any, settings: dict[str, Any]) -> Callable[[], None]:
    """Make ``target`` an operation. ``settings`` are those of ``break_op``; ``fake`` is needed."""
    is_class = isinstance(target, type)
    function = target.forward if is_class else target
    if not is_class and in_class(function):
        fix = "decorate it with @tgb.break_op, or register the class if it is a module's forward"
        raise BreakOpError(function.__qualname__, "is a method, which Dynamo takes from its class", fix=fix)
    if settings.get("fake") is None:
        parameters = [p.name for p in inspect.signature(function).parameters.values()]
        first = next((p for p in parameters if p != "self"), "...")
        fix = f"pass fake=lambda {', '.join(parameters)}: torch.empty_like({first}), or whatever its results look like"
        raise BreakOpError(target.__name__, "needs a fake implementation, as Dynamo must not look inside", fix=fix)
    op, bound = _operation(target, function, settings)
    op.active, op.fake = True, settings["fake"]
    op.warmup, op.prepare = settings.get("warmup"), settings.get("prepare")
    op.keeps_args = settings.get("keeps_args", True)
    if not is_class:
        return lambda: setattr(op, "active", False)
    own = "forward" in vars(target)
    target.forward = bound

    def undo() -> None:
        op.active = False
        if own:
            target.forward = function
        else:
            del target.forward

    return undo


def _operation(
    target: Any, function: Callable[..., Any], settings: dict[str, Any]
) -> tuple[BreakOp, Callable[..., Any]]:
    fixed = {name: settings[name] for name in _FIXED if name in settings}
    if target not in _adopted:
        op = define(function, **settings)
        _adopted[target] = op, substitute(op), fixed
        _target_of[op.name] = target
    op, bound, before = _adopted[target]
    if fixed != before:
        raise BreakOpError(target.__name__, "was registered with another schema or mutates_args before")
    return op, bound
