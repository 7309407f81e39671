"""Which compiled graphs exist, and which belong to a model. Weak: it keeps neither graphs nor models alive.

A string backend is never told which model it compiles. A graph belongs to a module if it was given one of the module's
parameters or buffers, or holds one (in any call so far: weights can be replaced); to a function if its code is the
function's. Where there are weights code does not count: all instances of a class share it. A graph without any weights,
such as what lies between two graph breaks, belongs to every module in which its code is a ``forward``.

Dynamo makes at most ``recompile_limit`` graphs of one code object, of all instances of a class together; what needs
another one then runs without any backend, and no count of ours sees it. So reaching the limit is noted here.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from torch_graph_backend.ledger import log
from torch_graph_backend.passes.dynamo_api import backend_of, recompile_limit
from torch_graph_backend.runner import CompiledGraph
from torch_graph_backend.tensor_marks import Mark

#: How Dynamo names the rest of a function behind a graph break; its first line is the function's or the break's.
_RESUMED = "torch_dynamo_resume_in_"


@dataclass(frozen=True)
class _Known:
    """A compiled graph: the code it was traced from, outermost first, what it was given, and whether some of that is a
    weight (or another tensor at a static address)."""

    graph: weakref.ref[CompiledGraph]
    codes: tuple[CodeType, ...]
    given: tuple[Mark, ...]
    weighted: bool


_graphs: list[_Known] = []
#: What to say of each code object of which Dynamo makes no further graphs.
_at_limit: dict[CodeType, str] = {}


def remember(graph: CompiledGraph, codes: Sequence[CodeType], given: Sequence[torch.Tensor], weighted: bool) -> None:
    """Note a compiled graph, the code it was traced from (outermost first), the tensors that it was given, or holds,
    and whether some of them are weights."""
    _graphs[:] = [g for g in _graphs if g.graph() is not None]
    _graphs.append(_Known(weakref.ref(graph), tuple(codes), tuple(map(Mark, given)), weighted))
    if codes:
        _check_limit(codes[0])


def _check_limit(code: CodeType) -> None:
    """Say once that Dynamo will make no further graph of this code."""
    limit = recompile_limit()
    if code in _at_limit or sum(code in g.codes[:1] for g in _graphs) < limit:
        return
    _at_limit[code] = text = (
        f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno}) has {limit} graphs, Dynamo's "
        "limit: calls that need another one run without any backend and are not counted; raise "
        "torch._dynamo.config.recompile_limit before compiling, or mark what changes with torch._dynamo.mark_dynamic"
    )
    log.warning("%s", text)


def limits_of(model: Any = None) -> list[str]:
    """What to say of the code of ``model`` (or of all code, if ``None``) that is at Dynamo's limit of graphs."""
    if model is None:
        return list(_at_limit.values())
    graphs, own = set(graphs_of(model)), _codes_of(unwrap(model))
    mine = {code for g in _graphs if g.graph() in graphs for code in g.codes[:1]} | own
    return [text for code, text in _at_limit.items() if code in mine]


def all_graphs() -> list[CompiledGraph]:
    """Every living compiled graph, oldest first."""
    return [graph for g in _graphs if (graph := g.graph()) is not None]


def graphs_of(model: Any) -> list[CompiledGraph]:
    """The compiled graphs of a module, a compiled module, or a (compiled) function."""
    model = unwrap(model)
    wanted = _codes_of(model)
    mine = weights_of(model)
    if isinstance(model, torch.nn.Module):
        own = (m for m in model.modules() if not type(m).__module__.startswith("torch."))
        wanted = wanted.union(*(_codes_of(m) for m in own))
    return [graph for g in _graphs if (graph := g.graph()) is not None and _is_of(g, graph, mine, wanted)]


def weights_of(model: Any) -> dict[int, torch.Tensor]:
    """Parameters and buffers of a module by their ``id``; nothing of anything else."""
    found = (*model.parameters(), *model.buffers()) if isinstance(model, torch.nn.Module) else ()
    return {id(t): t for t in found}


def _is_of(known: _Known, graph: CompiledGraph, weights: Mapping[int, torch.Tensor], wanted: set[CodeType]) -> bool:
    """Whether a graph is that of a module with these weights, or, where one of both has none, of this code."""
    if weights and known.weighted:
        return any(mark.among(weights) is not None for mark in (*known.given, *graph.given))
    return any(_part_of(code, w) for code in known.codes[:1] for w in wanted)


def _part_of(code: CodeType, whole: CodeType) -> bool:
    """Whether ``code`` is ``whole``, or what Dynamo made of the rest of it behind a graph break."""
    if code is whole:
        return True
    if code.co_filename != whole.co_filename or not code.co_name.startswith(f"{_RESUMED}{whole.co_name}_at_"):
        return False
    if any(_part_of(code, inner) for inner in whole.co_consts if isinstance(inner, CodeType)):
        return False  # of a function inside that has the same name
    lines = [line for _, _, line in whole.co_lines() if line is not None]
    return min(lines) <= code.co_firstlineno <= max(lines)


def unwrap(model: Any) -> Any:
    """The user's own module or function behind ``torch.compile``'s wrappers."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, torch.nn.Module):
        return inner
    return getattr(model, "_torchdynamo_orig_callable", model)


def _codes_of(model: Any) -> set[CodeType]:
    """The code of a function, or that of a module's ``forward``."""
    module = isinstance(model, torch.nn.Module)
    found = {_code(type(model).forward), _code(model.forward)} if module else {_code(model)}
    return {code for code in found if code is not None}


def wraps_bcg(model: Any) -> bool:
    """Whether ``model`` is a ``torch.compile`` wrapper (or a module after ``.compile()``) of this backend."""
    try:
        backend = backend_of(model)
    except LookupError:
        return False
    return getattr(getattr(backend, "compiler_fn", backend), "__name__", "") == "bcg"


def _code(function: Callable[..., Any]) -> CodeType | None:
    function = inspect.unwrap(getattr(function, "_torchdynamo_orig_callable", function))
    return getattr(getattr(function, "__func__", function), "__code__", None)


def close_all() -> None:
    """Close every compiled graph. One that Dynamo keeps goes on, eagerly, and its calls go on being counted."""
    for graph in all_graphs():
        graph.close()


def forget_all() -> None:
    """Close every compiled graph and forget it: Dynamo has dropped them all."""
    close_all()
    _graphs.clear()
    _at_limit.clear()
