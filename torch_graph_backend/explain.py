"""``explain`` and ``plans``: what is captured of a model, what is not, and why, with the user's lines.

Contract. Looking never changes what is looked at: a model that was compiled is described and nothing runs. A model that
was not is compiled and called once, and the result says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from torch_graph_backend import registry
from torch_graph_backend.explanation import Cost, GraphPart, Line, graph_part, lines_of
from torch_graph_backend.plan import Plan
from torch_graph_backend.plan_text import plan_text
from torch_graph_backend.runner import CompiledGraph

#: To see what is captured nothing has to be compiled.
PLAIN: dict[str, Any] = {"inductor": "off"}
#: Lines and causes of a line that the text shows; the dict has all.
_LINES_SHOWN, _CAUSES_SHOWN = 12, 4


class Explanation(str):
    """The text of ``explain`` (it is a string), with what it was made of.

    ``ran``: whether the model had to be compiled and called once. ``lines``: everything left eager, by user line, the
    costliest first. ``graphs``: the compiled graphs. ``captured`` and ``total``: their cost.
    """

    ran: bool
    graphs: tuple[GraphPart, ...]
    lines: tuple[Line, ...]

    def __new__(cls, ran: bool, graphs: tuple[GraphPart, ...], lines: tuple[Line, ...]) -> Explanation:
        self = super().__new__(cls, _text(ran, graphs, lines))
        self.ran, self.graphs, self.lines = ran, graphs, lines
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.ran, self.graphs, self.lines

    @property
    def captured(self) -> Cost:
        return Cost.total(g.captured for g in self.graphs)

    @property
    def total(self) -> Cost:
        return Cost.total(g.cost for g in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON.

        ``ran_model`` (bool); ``total`` and ``captured`` (``kernels``, ``flops``, ``unknown_flops``: kernels whose FLOPs
        are in no sum), ``share`` of each that is captured (None of nothing); ``lines``: per user line ``where``,
        ``file``, ``line``, ``function``, ``source``, cost and ``causes`` (``code``, ``text``, ``fix``, ``soft``,
        ``ops``, cost, ``graphs``); ``graphs``: ``name``, ``device``, ``reason``, cost, ``segments``, ``breaks``,
        ``sizes``, ``steps``, ``inductor``, ``eager_calls``.
        """
        captured, total = self.captured, self.total
        return {
            "ran_model": self.ran,
            "total": total.to_dict(),
            "captured": captured.to_dict(),
            "share": {
                "kernels": _share(captured.kernels, total.kernels),
                "flops": _share(captured.flops, total.flops),
            },
            "lines": [line.to_dict() for line in self.lines],
            "graphs": [g.to_dict() for g in self.graphs],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What is captured of ``model``, what is not, why, what that costs, and what would change it.

    If ``model`` was compiled with this backend already, its graphs are described and nothing runs. Else it is compiled
    and *called once* with these arguments, without gradients (the text says so; sizes are then as Dynamo takes them on
    a first call, static unless marked). A ``torch.compile`` wrapper that was not called yet is called with its options.
    """
    graphs = registry.graphs_of(model)
    ran = not graphs
    if ran:
        graphs = _made_by_calling(model, args, kwargs)
    parts = tuple(graph_part(i, g) for i, g in enumerate(graphs))
    return Explanation(ran, parts, lines_of(zip(graphs, parts, strict=True)))


def _made_by_calling(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[CompiledGraph]:
    known = {id(g) for g in registry.all_graphs()}
    wrapped = registry.wraps_bcg(model)
    with torch.no_grad():
        (model if wrapped else torch.compile(registry.unwrap(model), backend="bcg", options=PLAIN))(*args, **kwargs)
    return [g for g in registry.all_graphs() if id(g) not in known]


def plans(model: Any = None) -> list[Plan]:
    """The plans of ``model``'s graphs, in the order they were compiled (without graphs that have no plan, or that
    ``tgb.reset()`` closed)."""
    graphs = registry.all_graphs() if model is None else registry.graphs_of(model)
    return [g.plan for g in graphs if g.plan is not None and not g.closed]


# -- text --------------------------------------------------------------------------------------------------------------


def _text(ran: bool, graphs: tuple[GraphPart, ...], lines: tuple[Line, ...]) -> str:
    head = "The model was compiled and called once to find this out." if ran else "From the graphs compiled so far."
    captured, total = Cost.total(g.captured for g in graphs), Cost.total(g.cost for g in graphs)
    share = f" Captured: {_of(captured.kernels, total.kernels, 'kernels')}" if graphs else ""
    if total.flops:
        share += f", {_of(captured.flops, total.flops, 'FLOPs')}"
    if total.unknown and total.flops:
        share += f" and {_count(total.unknown, 'kernel')} of unknown FLOPs"
    parts = [f"{head} {len(graphs)} graph{'s' if len(graphs) != 1 else ''}.{share}{'.' if share else ''}"]
    parts += [_graph_text(g) for g in graphs]
    if lines:
        parts.append("Left eager, by source line, the costliest first:")
        parts += [_line_text(line, len(graphs)) for line in lines[:_LINES_SHOWN]]
    if len(lines) > _LINES_SHOWN:
        rest = Cost.total(line.cost for line in lines[_LINES_SHOWN:])
        parts.append(f"  and {len(lines) - _LINES_SHOWN} more lines: {_cost_text(rest)}")
    return "\n".join(parts)


def _graph_text(graph: GraphPart) -> str:
    if graph.plan is None:
        text = f"Graph {graph.index} {graph.name}: runs as Dynamo made it: {graph.reason}"
    else:
        text = f"Graph {graph.index}: {plan_text(graph.plan, reasons=False)}"
        if graph.reason is not None and graph.plan.reason is None:
            text += f"\n  runs eagerly: {graph.reason}"
        at = ", ".join(f"{source} = {'?' if n is None else n}" for source, n in graph.sizes[:4])
        more = f", and {len(graph.sizes) - 4} more" if len(graph.sizes) > 4 else ""
        if graph.cost.flops or graph.cost.unknown:
            captured = sum(s.cost.flops for s in graph.steps if s.captured)
            text += f"\n  FLOPs{' at ' + at + more if at else ''}: {_of(captured, graph.cost.flops, 'in segments')}"
            if graph.cost.unknown:
                text += f"; {_count(graph.cost.unknown, 'kernel')} of unknown FLOPs"
    text += "".join(f"\n  {line}" for line in graph.inductor)
    for n, reason in graph.calls if graph.reason is None else ():
        text += f"\n  eager calls so far: {n} x {reason}"
    return text


def _line_text(line: Line, graphs: int) -> str:
    texts = [f"  {line.where or 'no source line'}"]
    for cause in line.causes[:_CAUSES_SHOWN]:
        where = f" in graph {', '.join(map(str, cause.graphs))}" if graphs > 1 else ""
        texts.append(f"    {cause.reason.code}: {cause.reason.text}")
        texts.append(f"      cost: {_cost_text(cause.cost)}{where}; fix: {cause.reason.advice}")
    if len(line.causes) > _CAUSES_SHOWN:
        texts.append(f"    and {len(line.causes) - _CAUSES_SHOWN} more reasons")
    return "\n".join(texts)


def _cost_text(cost: Cost) -> str:
    text = _count(cost.kernels, "kernel") if cost.kernels else "no kernel (views)"
    text += f", {_si(cost.flops)}FLOPs" if cost.flops else ""
    return text + (f", {cost.unknown} of unknown FLOPs" if cost.unknown else "")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"


def _of(part: int, whole: int, what: str) -> str:
    """``"9 of 10 kernels (90.0%)"``, with a unit's prefix for large numbers."""
    share = _share(part, whole)
    text = f"{_si(part).strip()} of {_si(whole).strip()} {what}"
    return text + (f" ({share:.1%})" if share is not None else "")


def _si(n: int) -> str:
    """``"1.23 M"``: three digits and a prefix; small numbers as they are."""
    value, prefixes = float(n), iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while value >= 999.5 and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{n} " if not prefix else f"{value:.3g} {prefix}"


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
