"""Which compiled graphs exist, and which belong to a model. Weak: it keeps neither graphs nor models alive.

A string backend is never told which model it compiles. A graph belongs to a module if it was given one of the module's
parameters or buffers, or if its code is the module's ``forward``; to a function if its code is the function's.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from torch_graph_backend.runner import CompiledGraph

_graphs: list[tuple[weakref.ref[CompiledGraph], tuple[CodeType, ...], list[weakref.ref[torch.Tensor]]]] = []


def remember(graph: CompiledGraph, codes: Sequence[CodeType], weights: Sequence[torch.Tensor]) -> None:
    """Note a compiled graph, the code it was traced from (outermost first) and the weights it was given."""
    _graphs[:] = [g for g in _graphs if g[0]() is not None]
    _graphs.append((weakref.ref(graph), tuple(codes), [weakref.ref(w) for w in weights]))


def all_graphs() -> list[CompiledGraph]:
    """Every living compiled graph, oldest first."""
    return [g for ref, _, _ in _graphs if (g := ref()) is not None]


def graphs_of(model: Any) -> list[CompiledGraph]:
    """The compiled graphs of a module, a compiled module, or a (compiled) function."""
    model = unwrap(model)
    if isinstance(model, torch.nn.Module):
        mine = {id(t) for t in (*model.parameters(), *model.buffers())}
        codes = {_code(type(model).forward), _code(model.forward)}
        if mine:
            return [g for ref, _, ws in _graphs if (g := ref()) is not None and any(id(w()) in mine for w in ws)]
    else:
        codes = {_code(model)}
    codes.discard(None)
    return [g for ref, cs, _ in _graphs if (g := ref()) is not None and codes & set(cs[:1])]


def unwrap(model: Any) -> Any:
    """The user's own module or function behind ``torch.compile``'s wrappers."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, torch.nn.Module):
        return inner
    return getattr(model, "_torchdynamo_orig_callable", model)


def _code(function: Callable[..., Any]) -> CodeType | None:
    function = inspect.unwrap(getattr(function, "_torchdynamo_orig_callable", function))
    return getattr(getattr(function, "__func__", function), "__code__", None)


def forget_all() -> None:
    """Close every compiled graph and forget it."""
    for graph in all_graphs():
        graph.close()
    _graphs.clear()
