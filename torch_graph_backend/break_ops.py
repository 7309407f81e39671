"""Break ops: operations that are never recorded and always run eagerly, on the real rows, between segments.

Contract. A registration is process-wide and applies to graphs compiled afterwards; ``options={"break_ops": [...]}``
adds to it for one compile. A target is an ATen or custom ``OpOverload`` or packet, its name (``"mylib::attention"``,
also before the library is imported), a torch function as the user calls it (``F.scaled_dot_product_attention``), or
a higher-order op (``flex_attention``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node

from torch_graph_backend.errors import BreakOpError
from torch_graph_backend.passes.capturable import name_of
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import HigherOrderOperator, OpOverload, OpOverloadPacket

_registered: dict[Any, None] = {}


def _key(target: Any) -> Any:
    """What a registration is stored under: a name for operators (they may be reloaded), the object for functions."""
    if isinstance(target, OpOverload):
        return str(target._schema.name) + "." + (target._overloadname or "default")
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if isinstance(target, torch.library.CustomOpDef):
        return str(target._qualname)
    if isinstance(target, str):
        name = target.strip().replace(".", "::", 1) if "::" not in target else target.strip()
        if "::" not in name or not all(name.split("::")):
            raise BreakOpError(target, "is not a name like 'library::operation'")
        return name
    if isinstance(target, torch.nn.Module) or (isinstance(target, type) and issubclass(target, torch.nn.Module)):
        name = getattr(target, "__name__", type(target).__name__)
        raise BreakOpError(name, "modules cannot be break ops; mark the function that it calls")
    if callable(target) and isinstance(target, Hashable):
        return target
    raise BreakOpError(repr(target), "is neither an operator, a name like 'library::operation', nor a function")


def register_break_op(target: Any) -> Any:
    """Make an existing operation a break. Returns ``target``. Raises ``BreakOpError`` (BCG301) for anything else."""
    _registered[_key(target)] = None
    return target


def unregister_break_op(target: Any) -> None:
    """Undo ``register_break_op``. Raises ``BreakOpError`` if it was not registered."""
    if _registered.pop(_key(target), 0) == 0:
        raise BreakOpError(str(target), "is not registered")


def break_ops() -> tuple[Any, ...]:
    """All registered break ops: names and functions, in the order of registration."""
    return tuple(_registered)


def break_predicate(extra: Iterable[Any] = ()) -> Callable[[Node], Reason | None]:
    """The test that the classifier uses: registered now, or listed in ``extra`` (one compile's option)."""
    keys = {**_registered, **{_key(t): None for t in extra}}

    def is_break(node: Node) -> Reason | None:
        if keys and any(name in keys for name in _names(node)):
            return Reason("break-op", f"{name_of(node)} is registered as a break")
        return None

    return is_break


def _names(node: Node) -> list[Any]:
    target, origin = node.target, node.meta.get("origin")
    names: list[Any] = [origin] if callable(origin) else []
    if isinstance(target, OpOverload):
        full = str(target._schema.name)
        names += [full, f"{full}.{target._overloadname or 'default'}"]
    elif isinstance(target, HigherOrderOperator):
        names.append(f"higher_order::{target.name()}")
    elif callable(target):
        names.append(target)
    return names
