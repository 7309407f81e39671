"""``would_replay``: what a call would do, told without making it.

Contract. No model code runs, nothing compiles, nothing is counted, allocated or recorded. ``None`` means: this call,
made now by this thread, would replay. Any doubt is a ``Reason`` with code ``unknown``, never ``None``.

How. Dynamo keeps, by code object, what it compiled and the guards of each. Evaluating guards runs no user code but
reads of attributes, which is what a call does too. The entry whose guards hold tells the graph; the sources that Dynamo
wrote down (``L['x']``, ``L['self']._parameters['weight']``) tell which object each argument of the graph is. A frame
with a graph break, a function around the compiled one, hooks and several backends on one code are not followed.
Functions of declared slots (``source_fn``, ``post_fill``, ``slice_fn``) are the user's, and not called either:
``BufferRegistry.untold`` says which of them leave a doubt.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from torch_graph_backend import registry
from torch_graph_backend.passes.dynamo_api import backend_of, cache_entries
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.runner import CompiledGraph

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _UnknownError(Exception):
    """Why nothing can be said; becomes a ``Reason``."""


def would_replay(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Reason | None:
    """Why ``model(*args, **kwargs)`` would not replay now, or ``None`` if it would. Has no side effects.

    ``model`` is a module or function that was compiled with this backend (the wrapper, or what was given to it).
    ``not-recorded`` means that such a call is a first call, or the one that records; ``unknown`` that it cannot be
    told: a graph break, code around the compiled function, hooks. Gradients, streams and modes count as they are now.
    """
    try:
        function, scope = _frame(registry.unwrap(model), args, kwargs)
        found = _serving(model, function, scope)
        if found is None:
            return Reason("not-recorded", "nothing was compiled for such a call yet")
        graph, values = found
    except _UnknownError as why:
        return Reason("unknown", str(why))
    except Exception as error:  # torch's own structures differ by version: say so, and never guess
        return Reason("unknown", f"the call could not be looked up: {type(error).__name__}: {error}")
    return graph.replay_reason(values)


def _frame(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FunctionType, dict[str, Any]]:
    """The function whose code Dynamo sees, and the local variables that a call would begin with."""
    function = model
    if isinstance(model, torch.nn.Module):
        if type(model).__call__ is not torch.nn.Module.__call__:
            raise _UnknownError(f"{type(model).__name__} has a __call__ of its own")
        if any(getattr(model, name, None) for name in _HOOKS):
            raise _UnknownError("the module has hooks")
        function = model.forward
    if isinstance(function, MethodType):
        args, function = (function.__self__, *args), function.__func__
    if not isinstance(function, FunctionType):
        raise _UnknownError(f"{type(function).__name__} is neither a function nor a module")
    bound = inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    bound.apply_defaults()
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function, {**bound.arguments, **{name: cell.cell_contents for name, cell in cells}}


def _serving(model: Any, function: FunctionType, scope: dict[str, Any]) -> tuple[CompiledGraph, list[Any]] | None:
    """The graph that Dynamo would call, with its arguments; ``None`` if it would compile."""
    wanted = backend_of(model)
    found: tuple[Any, CompiledGraph] | None = None
    seen: list[CompiledGraph | None] = []
    for entry in cache_entries(function.__code__):
        graph, broken = _graph_of(entry.code, function.__globals__)
        seen.append(graph)
        if graph is None or not entry.guard_manager.check(scope):
            continue
        if (wanted is not None and entry.backend != wanted) or (found is not None and entry.backend == found[0]):
            continue
        if found is not None:
            raise _UnknownError("the function was compiled with different options, and either may be called")
        if broken or getattr(entry, "isolate_recompiles_id", -1) >= 0:
            raise _UnknownError("the function has a graph break, or a cache of its own for a region")
        found = entry.backend, graph
    if found is None:
        if any(g not in seen for g in registry.graphs_of(model)):
            raise _UnknownError("what was compiled is not the function's own code: there is other code around it")
        return None
    graph = found[1]
    normal = graph.ir
    if normal is None:
        return graph, []
    names = [p.meta.get("source") for p in normal.placeholders]
    return graph, [_read(name, scope, function.__globals__) for name in names]


def _graph_of(code: CodeType, scope: dict[str, Any]) -> tuple[CompiledGraph | None, bool]:
    """The first graph of ours that a frame compiled by Dynamo calls, and whether that is not all of it."""
    names = [n for n in code.co_names if n.startswith("__compiled_fn")]
    broken = len(names) > 1 or any(n.startswith("__resume_at") for n in code.co_names)
    for name in names:
        graph: Any = scope.get(name)
        while not isinstance(graph, CompiledGraph) and hasattr(graph, "_torchdynamo_orig_callable"):
            graph = graph._torchdynamo_orig_callable
        if isinstance(graph, CompiledGraph):
            return graph, broken
    return None, broken


@functools.lru_cache(4096)
def _code(source: str) -> CodeType:
    """A source as code: compiling it takes several times as long as reading what it names."""
    return compile(source, "<source of an argument>", "eval")


def _read(source: str | None, local: dict[str, Any], world: dict[str, Any]) -> Any:
    """The object that Dynamo's name for an argument means in this call."""
    if not source:
        raise _UnknownError("an argument of the graph has no source")
    try:
        return eval(_code(source), {"L": local, "G": world, "__builtins__": {}})
    except Exception as error:
        raise _UnknownError(f"{source} cannot be read: {type(error).__name__}: {error}") from None
