"""The private names of ``torch._dynamo`` that this project uses: the other page of ``torch_api``, with its rules.

Everything here exists under the same name in torch 2.11 and 2.13 unless a line says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.eval_frame
from torch._guards import CompileContext


def reset_with_dynamo(backend: Any) -> None:
    """Have the next ``torch._dynamo.reset()`` call ``backend.reset()``.

    ``torch.compile`` asks for that when it is called, and each reset forgets it: a function compiled before the last
    reset would be compiled again without.
    """
    torch._dynamo.eval_frame.cached_backends.setdefault(id(backend), backend)


def recompile_limit() -> int:
    """How many graphs Dynamo makes of one code object (inside a compile: the limit given to that compile)."""
    return int(torch._dynamo.config.recompile_limit)


def compile_id() -> str:
    """The id of Dynamo's compilation in progress in this thread, such as ``"0/1"``; empty outside of one."""
    found = CompileContext.current_compile_id()
    return "" if found is None else str(found)


def on_bytecode(hook: Any) -> Any:
    """Have ``hook(code, new_code)`` (which returns None) called with every code object that Dynamo makes; ``.remove()``
    the result to stop it."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    return register_bytecode_hook(hook)


def cache_entries(code: CodeType) -> list[Any]:
    """What Dynamo has compiled of a code object, in the order in which it tries them. Each entry has ``code`` (what
    Dynamo made), ``backend``, and ``guard_manager.check(locals)``, which evaluates the guards and runs nothing."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(code))


def backend_of(model: Any) -> Any:
    """The backend that a ``torch.compile`` wrapper (or a module after ``.compile()``) calls, as cache entries have it;
    ``None`` if ``model`` is no wrapper. Raises ``LookupError`` for a wrapper that is not built as in 2.11 and 2.13."""
    context: Any = None
    wrapper: Any = None
    if isinstance(model, torch.nn.Module):
        context, wrapper = getattr(model, "dynamo_ctx", None), getattr(model, "_compiled_call_impl", None)
    elif getattr(model, "_torchdynamo_orig_callable", None) is not None:
        wrapper = model
    if context is None and wrapper is None:
        return None
    if context is None:
        context = inspect.getclosurevars(wrapper).nonlocals.get("self")
    callback: Any = getattr(context, "callback", None)
    backend = callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if backend is callback:
        raise LookupError("the backend of this wrapper cannot be found")
    return backend


def is_in_graph(function: Callable[..., Any]) -> bool:
    """Whether Dynamo writes a call of ``function`` into the graph as it is, instead of tracing into it."""
    from torch._dynamo import trace_rules, variables

    return trace_rules.lookup(function) is variables.TorchInGraphFunctionVariable


def break_behind(gm: Any) -> tuple[str, Any] | None:
    """Why Dynamo ended a graph before the function's end: the text, and the innermost frame of the user's code
    (``filename``, ``lineno``, ``name``) or ``None``. ``None`` if the graph ends where the function does."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), (reason.user_stack[-1] if reason.user_stack else None)


def skipped_frames() -> int:
    """How many functions Dynamo looked at so far and did not compile (they run as without ``torch.compile``)."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"] - counters["frames"]["ok"])
