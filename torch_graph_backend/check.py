"""``bcg check``: what is not captured of somebody's callable, by their line, and whether that passes.

Contract. The target's file is run as an import is, and its callable is called once for each example: compiled with
this backend, without gradients, in the mode (train or eval) that the module left it in. It passes if every kernel is
captured or in a registered break op, Dynamo made no graph break, and no call ran eagerly as a whole. With a share
asked for, that share of the kernels must be captured, whatever the breaks. Without a graph nothing passes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_graph_backend import registry
from torch_graph_backend.config import Config
from torch_graph_backend.errors import BadOption, UnknownOption
from torch_graph_backend.explain import PLAIN, Explanation
from torch_graph_backend.explanation import graph_part, lines_of
from torch_graph_backend.passes.dynamo_api import break_behind, skipped_frames
from torch_graph_backend.passes.source_lines import line_of
from torch_graph_backend.stats import stats

#: The function of the module that makes example inputs, unless an expression is given.
INPUTS = "example_inputs"


class TargetError(ValueError):
    """The target, its inputs or the options cannot be had; the message says why, and names the target."""

    def __init__(self, target: str, problem: str) -> None:
        super().__init__(f"{target} {problem}")


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph, what it says of it, and its first hint. ``where`` and ``fix`` may be empty."""

    where: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return self.text + (f"; at {self.where}" if self.where else "") + (f"; fix: {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Check:
    """The outcome. ``min_share``: the share of kernels that had to be captured, 0.0 to 1.0, or None for all.

    ``skipped``: functions that Dynamo did not compile at all. ``limits``: what reached Dynamo's limit of graphs.
    """

    target: str
    calls: int
    explanation: Explanation
    breaks: tuple[GraphBreak, ...]
    skipped: int
    limits: tuple[str, ...]
    min_share: float | None = None

    @property
    def share(self) -> float:
        """The share of kernels that is captured or in a registered break op, 0.0 to 1.0 (0.0 of nothing)."""
        total = self.explanation.total.kernels
        meant = sum(
            c.cost.kernels for line in self.explanation.lines for c in line.causes if c.reason.code == "break-op"
        )
        return (self.explanation.captured.kernels + meant) / total if total else 0.0

    @property
    def failures(self) -> tuple[str, ...]:
        """Why it does not pass, one sentence each; empty if it does."""
        if not self.explanation.graphs:
            skipped = f" and skipped {self.skipped} function(s)" if self.skipped else ""
            return (f"Dynamo made no graph{skipped}, so nothing is captured; TORCH_LOGS=graph_breaks says why",)
        if self.min_share is not None:
            return (
                () if self.share >= self.min_share else (f"{self.share:.1%} captured, {self.min_share:.1%} asked for",)
            )
        found = [] if self.share == 1 else [f"{self.share:.1%} of the kernels are captured or in a registered break op"]
        found += [f"{len(self.breaks)} graph break(s): what lies between graphs runs eagerly"] if self.breaks else []
        for graph in self.explanation.graphs:
            if graph.reason is None:  # else its kernels are counted as eager already
                found += [f"{n} call(s) ran eagerly: {reason}" for n, reason in graph.calls]
        return (*found, *self.limits)

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: what ``Explanation.to_dict`` has, and ``target``, ``calls``, ``ok``,
        ``failures``, ``captured_share``, ``min_share``, ``graph_breaks`` (``where``, ``text``, ``fix``),
        ``skipped_functions`` and ``limits``."""
        return {
            "target": self.target,
            "ok": self.ok,
            "failures": list(self.failures),
            "captured_share": self.share,
            "min_share": self.min_share,
            "calls": self.calls,
            "graph_breaks": [asdict(b) for b in self.breaks],
            "skipped_functions": self.skipped,
            "limits": list(self.limits),
            **self.explanation.to_dict(),
            "ran_model": True,
        }

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.calls} call(s)", str(self.explanation)]
        lines += [f"Graph break: {b}" for b in self.breaks]
        lines += [f"Not captured: {text}" for text in self.failures] or [f"OK: {self.share:.1%} captured"]
        return "\n".join(lines)


def check(
    target: str,
    *,
    inputs: str | None = None,
    min_share: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Check:
    """Compile ``target`` (``"path/module.py:callable"``), call it once for each example, and say what is captured.

    ``inputs``: a Python expression in the module's namespace (``torch`` is known); without it the module's function
    ``example_inputs()`` is called. Either gives a tuple of positional arguments, a dict of keyword arguments, or a list
    of those, one for each call; anything else is the only argument.

    Raises ``TargetError`` for a target, inputs or options that cannot be had; what the callable raises is passed on.
    """
    options = {**PLAIN, **(options or {})}
    try:
        Config.parse(options)
    except (UnknownOption, BadOption) as error:
        raise TargetError(target, f"cannot be compiled: {error}") from error
    module, function = _load(target)
    calls = _calls(module, inputs)
    known = {id(g) for g in registry.all_graphs()}
    skipped = skipped_frames()
    wrapped = registry.wraps_bcg(function)
    compiled = function if wrapped else torch.compile(function, backend="bcg", options=options)
    with torch.no_grad():
        for args, kwargs in calls:
            compiled(*args, **kwargs)
    graphs = [g for g in registry.all_graphs() if id(g) not in known]
    parts = tuple(graph_part(i, g) for i, g in enumerate(graphs))
    explanation = Explanation(False, parts, lines_of(zip(graphs, parts, strict=True)))
    breaks = dict.fromkeys(b for g in graphs if (b := _break(g)) is not None)
    skipped = skipped_frames() - skipped
    return Check(target, len(calls), explanation, tuple(breaks), skipped, stats(function).limits, min_share)


def _break(graph: Any) -> GraphBreak | None:
    found = break_behind(graph.gm)
    if found is None:
        return None
    text, frame = found
    where = "" if frame is None else line_of(frame.filename, frame.lineno, frame.name)
    return GraphBreak(where, *_said(text))


def _said(text: str) -> tuple[str, str]:
    """Dynamo's headline with its explanation, and its first hint. Older reasons are one line."""
    head, *more = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    found = {key: value for key, _, value in (line.partition(": ") for line in reversed(more))}
    return ": ".join([head, *filter(None, [found.get("Explanation")])]), found.get("Hint", "")


# -- the target ------------------------------------------------------------------------------------------------------


def _load(target: str) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and its callable; a module class is made without arguments."""
    name, colon, path = target.rpartition(":")
    if not colon or not name or not path:
        raise TargetError(target, "is not MODULE.py:CALLABLE")
    module = _file(target, Path(name)) if name.endswith(".py") else _module(target, name)
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise TargetError(target, f"has no {part!r}")
        found = getattr(found, part)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        found = found()
    if not callable(found):
        raise TargetError(target, f"is a {type(found).__name__}, which cannot be called")
    body = found.forward if isinstance(found, torch.nn.Module) else found
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise TargetError(target, "does nothing when it is called: it is a coroutine or a generator")
    return module, found


def _file(target: str, path: Path) -> ModuleType:
    """A file run as a module; what lies beside it can be imported, as from a script."""
    if not path.is_file():
        raise TargetError(target, "names no file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with _importing_from(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def _module(target: str, name: str) -> ModuleType:
    with _importing_from(Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name and not name.startswith(f"{error.name}."):
                raise
            raise TargetError(target, f"there is no module {name!r}") from error


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _calls(module: ModuleType, inputs: str | None) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each call."""
    if inputs is not None:
        given = eval(inputs, {"torch": torch, **vars(module)})
    elif hasattr(module, INPUTS):
        given = getattr(module, INPUTS)()
    else:
        raise TargetError(module.__name__, f"has no function {INPUTS}(), and no --inputs are given")
    calls = given if isinstance(given, list) else [given]
    if not calls:
        raise TargetError(module.__name__, "gives no inputs: the list is empty")
    return [_arguments(call) for call in calls]


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(call, dict):
        return (), call
    return (call if isinstance(call, tuple) else (call,)), {}
