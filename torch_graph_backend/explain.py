"""``explain``, ``stats``, ``plans``: what a model's graphs are, and what happened to its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_graph_backend import registry
from torch_graph_backend.ledger import KeyCount
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.plan import Plan
from torch_graph_backend.runner import CompiledGraph
from torch_graph_backend.shape_key import ShapeKey


@dataclass(frozen=True)
class Stats:
    """Counts over all graphs of a model. ``calls`` counts calls of compiled graphs (a model with graph breaks makes
    several a step); ``calls == replays + first_calls + sum(eager.values())``. ``padding_waste`` is the share of
    computed rows that were padding, 0.0 to 1.0. ``seconds``: normalise, plan, record. ``limits``: a sentence for each
    code object that has as many graphs as Dynamo makes of one (further ones run without a backend, and uncounted)."""

    graphs: int
    replays: int
    first_calls: int
    recordings: int
    eager: Counter[str]
    reasons: dict[str, Reason]
    padding_waste: float
    seconds: dict[str, float]
    keys: dict[str, dict[ShapeKey, KeyCount]] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        return self.replays + self.first_calls + sum(self.eager.values())

    def __str__(self) -> str:
        lines = [
            f"{self.graphs} graphs, {self.calls} calls: {self.replays} replayed, {self.first_calls} first calls, "
            f"{sum(self.eager.values())} eager; {self.recordings} recordings, padding waste {self.padding_waste:.1%}"
        ]
        for code, n in self.eager.most_common():
            lines.append(f"  eager {n:5d} x {self.reasons[code]}")
        lines += [f"  recompile limit: {text}" for text in self.limits]
        for name, keys in self.keys.items():
            if keys:
                counts = ", ".join(
                    f"{k}: {c.first_calls}+{c.replays}" for k, c in sorted(keys.items(), key=lambda i: str(i[0]))
                )
                lines.append(f"  {name}: keys (first calls + replays) {counts}")
        lines.append("  seconds: " + ", ".join(f"{k} {v:.2f}" for k, v in self.seconds.items()))
        return "\n".join(lines)


def stats(model: Any = None) -> Stats:
    """Counts of ``model`` (a module, a compiled module or function), or of everything compiled if ``None``."""
    graphs = registry.all_graphs() if model is None else registry.graphs_of(model)
    eager: Counter[str] = Counter()
    reasons: dict[str, Reason] = {}
    seconds = {"normalise": 0.0, "plan": 0.0, "record": 0.0}
    for g in graphs:
        eager.update(g.ledger.eager)
        reasons.update(g.ledger.eager_texts)
        for name, value in g.seconds.items():
            seconds[name] += value
        seconds["record"] += sum(k.record_seconds for k in g.ledger.keys.values())
    computed = sum(g.ledger.rows_computed for g in graphs)
    waste = 1 - sum(g.ledger.rows_real for g in graphs) / computed if computed else 0.0
    return Stats(
        len(graphs),
        sum(g.ledger.replays for g in graphs),
        sum(g.ledger.first_calls for g in graphs),
        sum(g.ledger.recordings for g in graphs),
        eager,
        reasons,
        waste,
        seconds,
        {f"{i} {g.name}": dict(g.ledger.keys) for i, g in enumerate(graphs)},
        tuple(registry.limits_of(model)),
    )


def plans(model: Any = None) -> list[Plan]:
    """The plans of ``model``'s graphs, in the order they were compiled (without graphs that have no plan)."""
    graphs = registry.all_graphs() if model is None else registry.graphs_of(model)
    return [g.plan for g in graphs if g.plan is not None]


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What is captured of ``model``, what is not, and why, with the user's lines.

    If ``model`` was compiled with this backend already, its graphs are described and nothing runs. Else it is compiled
    and *called once* with these arguments, without gradients (the text says so; sizes are then as Dynamo takes them on
    a first call, static unless marked).
    """
    graphs = registry.graphs_of(model)
    ran = not graphs
    if ran:
        known = {id(g) for g in registry.all_graphs()}
        with torch.no_grad():
            torch.compile(registry.unwrap(model), backend="bcg")(*args, **kwargs)
        graphs = [g for g in registry.all_graphs() if id(g) not in known]
    head = "The model was compiled and called once to find this out." if ran else "From the graphs compiled so far."
    parts = [f"{head} {len(graphs)} graph{'s' if len(graphs) != 1 else ''}."]
    parts += [_graph_text(i, g) for i, g in enumerate(graphs)]
    return "\n".join(parts)


def _graph_text(index: int, graph: CompiledGraph) -> str:
    if graph.plan is None:
        return f"Graph {index} {graph.name}: runs as Dynamo made it: {graph.reason}"
    text = f"Graph {index}: {graph.plan}"
    if graph.reason is not None and graph.plan.reason is None:
        text += f"\n  runs eagerly: {graph.reason}"
    return text
