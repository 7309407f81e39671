"""What ``explain`` finds, as frozen data: per user line what is left eager, why, what it costs, and what changes it.

Contract. No tensors and no fx nodes inside. Costs are kernels (operations that compute something; one may launch
several kernels of the device) and FLOPs at the sizes of the example that was traced. ``unknown`` counts kernels whose
FLOPs nobody can tell; their FLOPs are in no sum. The costs of all lines and of what is captured add up to the total.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch_graph_backend.passes.flops import FlopCounter
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import size_hint
from torch_graph_backend.plan import CapturedSegment, OpLine, Plan, Step
from torch_graph_backend.runner import CompiledGraph
from torch_graph_backend.stats import inductor_lines

_WHERE = re.compile(r"(?P<file>[^:()]+):(?P<line>\d+)(?: in (?P<function>[^:]+))?(?:: (?P<source>.*))?")
_NAMED = re.compile(r"(?P<function>[^()]+) \((?P<file>[^:()]+):(?P<line>\d+)\)")


@dataclass(frozen=True)
class Cost:
    """Kernels, FLOPs of those whose FLOPs are known, and how many are not."""

    kernels: int = 0
    flops: int = 0
    unknown: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.kernels + other.kernels, self.flops + other.flops, self.unknown + other.unknown)

    @staticmethod
    def total(costs: Iterable[Cost]) -> Cost:
        return sum(costs, Cost())

    def to_dict(self) -> dict[str, int]:
        return {"kernels": self.kernels, "flops": self.flops, "unknown_flops": self.unknown}


@dataclass(frozen=True)
class Cause:
    """One reason on one line: the first text of its code there, the operations (name, how often), and their cost."""

    reason: Reason
    ops: tuple[tuple[str, int], ...]
    cost: Cost
    graphs: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        r = self.reason
        about = {"code": r.code, "text": r.text, "fix": r.advice, "soft": r.soft}
        return {**about, "ops": dict(self.ops), **self.cost.to_dict(), "graphs": list(self.graphs)}


@dataclass(frozen=True)
class Line:
    """One line of the user's code with something left eager. ``where`` is ``"file.py:12 in forward: y = f(x)"``."""

    where: str
    causes: tuple[Cause, ...]

    @property
    def cost(self) -> Cost:
        return Cost.total(c.cost for c in self.causes)

    def to_dict(self) -> dict[str, Any]:
        found = _WHERE.fullmatch(self.where) or _NAMED.fullmatch(self.where)
        parts = found.groupdict() if found else {}
        return {
            "where": self.where,
            "file": parts.get("file"),
            "line": int(parts["line"]) if parts.get("line") else None,
            "function": parts.get("function"),
            "source": parts.get("source"),
            **self.cost.to_dict(),
            "causes": [c.to_dict() for c in self.causes],
        }


@dataclass(frozen=True)
class StepCost:
    """One step of a plan and what it costs."""

    step: Step
    cost: Cost

    @property
    def captured(self) -> bool:
        return isinstance(self.step, CapturedSegment)

    def to_dict(self) -> dict[str, Any]:
        ops = Counter(op.op for op in self.step.ops if op.kernel)
        kind = "captured" if self.captured else "eager"
        views = sum(not op.kernel for op in self.step.ops)
        return {"index": self.step.index, "kind": kind, **self.cost.to_dict(), "views": views, "ops": dict(ops)}


@dataclass(frozen=True)
class GraphPart:
    """One compiled graph. ``reason`` says why none of its calls runs the plan; ``calls`` are eager calls so far, by
    code; ``sizes`` the values of the plan's symbols in the example, ``None`` where it depends on data."""

    index: int
    name: str
    plan: Plan | None
    reason: Reason | None
    steps: tuple[StepCost, ...]
    sizes: tuple[tuple[str, int | None], ...]
    calls: tuple[tuple[int, Reason], ...]
    nodes: int = 0
    """Operations of the Dynamo graph, if there is no plan."""
    inductor: tuple[str, ...] = ()
    """What Inductor compiled of the keys so far, and why not the rest."""

    @property
    def cost(self) -> Cost:
        """Of the whole graph."""
        if self.plan is None:
            return Cost(self.nodes, 0, self.nodes)
        return Cost.total(s.cost for s in self.steps)

    @property
    def captured(self) -> Cost:
        """What segments do; nothing if the graph runs eagerly as a whole."""
        return Cost() if self.reason else Cost.total(s.cost for s in self.steps if s.captured)

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        values = dict(self.sizes)
        return {
            "index": self.index,
            "name": self.name,
            "device": None if plan is None else str(plan.device),
            "reason": None if self.reason is None else _reason_dict(self.reason),
            **self.cost.to_dict(),
            "captured": self.captured.to_dict(),
            "segments": 0 if plan is None else len(plan.segments),
            "breaks": 0 if plan is None else len(plan.regions),
            "sizes": [
                {"symbol": s.name, "source": s.source, "kind": s.kind, "why": s.why, "value": values.get(s.source)}
                for s in (plan.symbols if plan is not None else ())
            ],
            "steps": [s.to_dict() for s in self.steps],
            "inductor": list(self.inductor),
            "eager_calls": [{"count": n, **_reason_dict(r)} for n, r in self.calls],
        }


def _reason_dict(reason: Reason) -> dict[str, Any]:
    return {
        "code": reason.code,
        "text": reason.text,
        "where": reason.where,
        "fix": reason.advice,
        "soft": reason.soft,
    }


# -- making them -----------------------------------------------------------------------------------------------------


class _Costs:
    """The cost of each operation of one graph."""

    def __init__(self, graph: CompiledGraph) -> None:
        normal = graph.ir
        self.nodes = {n.name: n for n in normal.graph.nodes} if normal is not None else {}
        self.counter = FlopCounter()

    def of(self, op: OpLine) -> Cost:
        if not op.kernel:
            return Cost()
        flops = self.counter.count(self.nodes[op.value]) if op.value in self.nodes else None
        return Cost(1, flops or 0, int(flops is None))


def graph_part(index: int, graph: CompiledGraph) -> GraphPart:
    """What is known of one compiled graph."""
    plan, ledger = graph.plan, graph.ledger
    calls = tuple((n, ledger.eager_texts[code]) for code, n in ledger.eager.most_common())
    if plan is None:
        nodes = sum(n.op.startswith("call") for n in graph.gm.graph.nodes)
        return GraphPart(index, graph.name, None, graph.reason, (), (), calls, nodes)
    costs = _Costs(graph)
    steps = tuple(StepCost(s, Cost.total(map(costs.of, s.ops))) for s in plan.steps)
    told = tuple(inductor_lines(ledger.keys))
    return GraphPart(index, graph.name, plan, graph.reason, steps, tuple(_sizes(graph)), calls, inductor=told)


def _sizes(graph: CompiledGraph) -> Iterable[tuple[str, int | None]]:
    plan, normal = graph.plan, graph.ir
    if plan is None or normal is None:
        return
    for symbol in plan.symbols:
        value = normal.placeholders[symbol.arg].meta["val"]
        yield symbol.source, size_hint(value if symbol.dim is None else value.shape[symbol.dim])


@dataclass
class _Group:
    reason: Reason
    ops: Counter[str] = field(default_factory=Counter)
    cost: Cost = Cost()
    graphs: dict[int, None] = field(default_factory=dict)

    def add(self, op: str, cost: Cost, graph: int) -> None:
        self.ops[op] += 1
        self.cost += cost
        self.graphs[graph] = None

    def cause(self) -> Cause:
        return Cause(self.reason, tuple(self.ops.most_common()), self.cost, tuple(self.graphs))


def lines_of(graphs: Iterable[tuple[CompiledGraph, GraphPart]]) -> tuple[Line, ...]:
    """Everything left eager, by user line, the costliest first: by FLOPs, unknown ones, and kernels."""
    groups: dict[str, dict[str, _Group]] = {}

    def group(where: str, reason: Reason) -> _Group:
        return groups.setdefault(where, {}).setdefault(reason.code, _Group(reason))

    for graph, part in graphs:
        plan, reason = part.plan, part.reason
        if reason is not None and (plan is None or plan.reason is None):  # what could be captured, but is not
            lost = part.cost if plan is None else Cost.total(s.cost for s in part.steps if s.captured)
            group(reason.where or part.name, reason).add("the whole graph", lost, part.index)
        costs = _Costs(graph)
        for op in (op for region in (plan.regions if plan is not None else ()) for op in region.ops):
            if op.reason is not None:
                group(op.where, op.reason).add(op.op, costs.of(op), part.index)
    lines = [Line(where, tuple(g.cause() for g in found.values())) for where, found in groups.items()]
    return tuple(sorted(lines, key=lambda x: (-x.cost.flops, -x.cost.unknown, -x.cost.kernels)))
