"""Classified graph -> Plan: who reads what from where.

Contract. Pure. A captured segment reads slots, pinned arguments, constants, static values and bridges; an eager
region reads the caller's arguments, cuts, eager results and constants. Memory that changes is tracked by *version*
(how often its alias set was written before the reader, in program order), so that every reader sees the state it
would see eagerly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_graph_backend.passes.alias import is_tensor_value
from torch_graph_backend.passes.capturable import is_size, name_of
from torch_graph_backend.passes.classify import Classified, is_view
from torch_graph_backend.passes.declared import relied_on
from torch_graph_backend.passes.layout import Layout
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.padding import natural
from torch_graph_backend.passes.padding_rules_declared import TRASH
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.source_lines import where
from torch_graph_backend.passes.symbols import expr_of
from torch_graph_backend.passes.torch_api import OpOverload
from torch_graph_backend.plan import (
    Bridge,
    CapturedSegment,
    Count,
    Cut,
    EagerRegion,
    OpLine,
    Output,
    Padding,
    Plan,
    Ref,
    Slot,
    TensorSpec,
)
from torch_graph_backend.policies import PaddingPolicy

#: They allocate and write nothing.
_UNINITIALISED = frozenset(
    [
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    ]
)


@dataclass(frozen=True)
class Declared:
    """What a user declared, as far as the proof accepts it: ``padding`` of an argument's slot, by its index; captured
    operations that rely on it, by name; and what was refused."""

    padding: Callable[[int], tuple[PaddingPolicy, float | int | bool]] = lambda _: (PaddingPolicy.REPEAT_ROW, 0)
    nodes: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[tuple[str, Reason], ...] = ()


def build_plan(
    name: str,
    device: torch.device,
    normal: NormalGraph,
    classified: Classified,
    view_outputs: bool = False,
    declared: Declared | None = None,
) -> Plan:
    """The plan of one compiled graph. ``view_outputs`` as ``classify`` was told."""
    return _Builder(name, device, normal, classified, view_outputs, declared or Declared()).build()


def spec_of(value: torch.Tensor, padding: Padding = ()) -> TensorSpec:
    """A fake tensor's metadata as expressions."""
    return TensorSpec(
        tuple(expr_of(s) for s in value.shape),
        tuple(expr_of(s) for s in value.stride()),
        value.dtype,
        value.device,
        padding,
    )


def padding_of(layouts: dict[sympy.Symbol, Layout]) -> Padding:
    """Per dimension, the padded factors of all symbols."""
    dims: dict[int, list[tuple[sympy.Expr, sympy.Expr, sympy.Expr]]] = {}
    for symbol, layout in layouts.items():
        for dim, axis in layout.axes:
            dims.setdefault(dim, []).append((axis.count(symbol), axis.outer, axis.inner))
    return tuple((d, tuple(_one_inside_the_other(dims[d]))) for d in sorted(dims))


def _one_inside_the_other(
    entries: list[tuple[sympy.Expr, sympy.Expr, sympy.Expr]],
) -> list[tuple[sympy.Expr, sympy.Expr, sympy.Expr]]:
    """A uniform tensor fits any layout and may come with two that do not fit each other: the second goes inside."""
    if len(entries) == 2:
        (a, outer_a, inner_a), (b, outer_b, _) = entries
        if not (b.free_symbols & outer_a.free_symbols or a.free_symbols & outer_b.free_symbols):
            return [(a, outer_a, inner_a), (b, outer_a * a, sympy.cancel(inner_a / b))]
    return entries


class _Builder:
    def __init__(
        self,
        name: str,
        device: torch.device,
        normal: NormalGraph,
        classified: Classified,
        view_outputs: bool,
        declared: Declared,
    ) -> None:
        self.name, self.device, self.normal, self.c = name, device, normal, classified
        self.declared = declared
        self.view_outputs = view_outputs
        self.args = {n: i for i, n in enumerate(normal.placeholders)}
        self.step_of = {n: i for i, p in enumerate(classified.phases) for n in p.nodes}
        self.captured = {n for p in classified.phases if p.captured for n in p.nodes}
        self.slots: dict[Node, Slot] = {}
        self.counts: dict[Node, Count] = {}
        self.bridges: dict[tuple[Node, int], Bridge] = {}
        self.cuts: dict[tuple[Node, int], Cut] = {}
        self.pinned: dict[int, None] = {}
        self.used: dict[int, dict[Node, None]] = {i: {} for i in range(len(classified.phases))}
        self.bucketed = [s.symbol for s in classified.symbols if s.kind == "bucketed"]
        self.shown = {n for n in normal.graph.nodes if any(u.op == "output" for u in n.users)}

    def build(self) -> Plan:
        phases = self.c.phases
        inputs = [self.step_inputs(i) for i in range(len(phases))]
        outputs = tuple(self.output(a) for a in self.flat_outputs())
        steps = tuple(self.step(i, ins) for i, ins in enumerate(inputs))
        mutated = sorted({a for s in steps if isinstance(s, CapturedSegment) for a in s.writes})
        captured = any(isinstance(s, CapturedSegment) for s in steps)
        return Plan(
            self.name,
            self.device,
            self.c.symbols,
            steps,
            tuple(self.slots.values()),
            tuple(replace(b, direct=self.direct(value)) for (value, _), b in self.bridges.items()),
            tuple(self.cuts.values()),
            tuple(sorted(self.pinned)),
            tuple(mutated),
            outputs,
            tuple(n.meta.get("source") or n.name for n in self.normal.placeholders),
            sum(v.kind == "host" for v in self.c.verdicts.values()),
            self.c.conditions,
            None if captured else Reason("nothing-to-capture"),
            self.held() if self.view_outputs else (),
            tuple(self.counts.values()),
            self.normal.hoisted,
            self.declared.refused,
            tuple(dict.fromkeys((*relied_on([n for n in self.c.verdicts if n in self.captured]), *self.on_tails()))),
        )

    def on_tails(self) -> list[str]:
        """A text for each captured operation that relies on a declared tail (an audit tries those out too)."""
        found = self.declared.nodes
        nodes = [n for n in self.c.verdicts if n in self.captured and n.name in found and TRASH not in n.meta]
        return [f"{name_of(n)} {found[n.name]}" for n in nodes]

    # -- steps ---------------------------------------------------------------------------------------------------

    def step_inputs(self, index: int) -> tuple[tuple[str, Ref], ...]:
        phase = self.c.phases[index]
        inside = set(phase.nodes)
        found: dict[str, Ref] = {}
        for node in phase.nodes:
            for arg in node.all_input_nodes:
                if arg not in inside and not self.is_host(arg):
                    # Memory order puts readers of two versions of a value into two steps: one name, one reference.
                    found[arg.name] = self.read(arg, node, phase.captured)
        return tuple(found.items())

    def step(self, index: int, inputs: tuple[tuple[str, Ref], ...]) -> CapturedSegment | EagerRegion:
        phase = self.c.phases[index]
        ops = tuple(self.op_line(n) for n in phase.nodes)
        outputs = tuple(n.name for n in phase.nodes if n in self.used[index])
        if not phase.captured:
            return EagerRegion(index, ops, inputs, outputs)
        sets = {s for n in phase.nodes for s in self.c.aliasing.writes.get(n, ())}
        writes = tuple(i for n, i in self.args.items() if self.c.aliasing.set_of.get(n) in sets)
        last_reads = tuple(self.last_read(n) for n in phase.nodes if n in self.used[index])
        return CapturedSegment(index, ops, inputs, outputs, writes, last_reads)

    def held(self) -> tuple[str, ...]:
        """Captured values that the caller sees, as they are or through a view."""
        sets = {self.c.aliasing.set_of.get(n) for n in self.shown} - {None}
        return tuple(n.name for n in self.step_of if n in self.captured and self.c.aliasing.set_of.get(n) in sets)

    def last_read(self, value: Node) -> int:
        """The last step that reads the memory of ``value``, which views of it may do as well."""
        set_id = self.c.aliasing.set_of.get(value)
        members = self.c.aliasing.members[set_id] if set_id is not None else (value,)
        if any(m in self.shown and m not in self.captured for m in members):
            return len(self.c.phases)
        read = [self.step_of[u] for m in members for u in m.users if u in self.step_of]
        taken = [cut.after for (node, _), cut in self.cuts.items() if node in members]
        return max([self.step_of[value], *read, *taken])

    def op_line(self, node: Node) -> OpLine:
        verdict = self.c.verdicts[node]
        declared = self.declared.nodes.get(node.name, "") if verdict.kind == "capture" else ""
        return OpLine(
            node.name, name_of(node), where(node), not is_view(node), verdict.reason, verdict.repaired, declared
        )

    def is_host(self, node: Node) -> bool:
        if node.op == "placeholder":
            return is_size(node.meta.get("val"))
        verdict = self.c.verdicts.get(node)
        return verdict is not None and verdict.kind == "host"

    # -- reading -------------------------------------------------------------------------------------------------

    def version(self, value: Node, reader: Node) -> int:
        """How often the memory of ``value`` was changed before ``reader``."""
        set_id = self.c.aliasing.set_of.get(value)
        return self.c.aliasing.version.get((reader, set_id), 0) if set_id is not None else 0

    def eager_writes(self, value: Node) -> bool:
        set_id = self.c.aliasing.set_of.get(value)
        return any(set_id in sets and n not in self.captured for n, sets in self.c.aliasing.writes.items())

    def read(self, value: Node, reader: Node, captured: bool) -> Ref:
        if value.op == "get_attr":
            return Ref("const", value.name)
        if "real_size" in value.meta:
            self.counts.setdefault(value, Count(value.name, value.meta["real_size"]))
            return Ref("count", list(self.counts).index(value))
        if "host_copy" in value.meta:
            count = Count(value.name, None, value.meta["host_copy"], value.meta["val"].dtype)
            self.counts.setdefault(value, count)
            return Ref("count", list(self.counts).index(value))
        version = self.version(value, reader)
        if not captured:
            return self.read_eagerly(value, version)
        if value.op == "placeholder":
            return self.read_argument(value, version)
        # A captured base that eager code has changed since must be read from the eager copy.
        if value in self.captured and not (version > 0 and self.eager_writes(value)):
            self.used[self.step_of[value]][value] = None
            return Ref("static", value.name)
        return self.bridge(value, version)

    def read_argument(self, value: Node, version: int) -> Ref:
        """Pinned arguments are read in place, at any version; others through a slot, or a bridge once changed."""
        arg = self.args[value]
        changed_here = any(
            n in self.captured and self.c.aliasing.set_of.get(value) in sets
            for n, sets in self.c.aliasing.writes.items()
        )
        if value.meta.get("static") or changed_here:
            self.pinned[arg] = None
            return Ref("arg", arg)
        if version > 0:
            return self.bridge(value, version)
        if value not in self.slots:
            tensor = value.meta["val"]
            name = value.meta.get("source") or value.name
            spec = spec_of(tensor, self.natural_padding(tensor))
            self.slots[value] = Slot(arg, name, spec, *self.declared.padding(arg))
        return Ref("slot", list(self.slots).index(value))

    def read_eagerly(self, value: Node, version: int) -> Ref:
        if value.op == "placeholder":
            return Ref("arg", self.args[value])
        if value in self.captured:
            return self.cut(value, 0 if self.eager_writes(value) else version)
        self.used[self.step_of[value]][value] = None
        return Ref("eager", value.name)

    def bridge(self, value: Node, version: int) -> Ref:
        key = (value, version)
        if key not in self.bridges:
            after = max([self.step_of.get(value, -1), *self.writers_before(value, version)])
            tensor = value.meta["val"]
            self.bridges[key] = Bridge(
                value.name, self.read_eagerly(value, version), after, spec_of(tensor, self.natural_padding(tensor))
            )
        return Ref("bridge", list(self.bridges).index(key))

    def direct(self, value: Node) -> bool:
        """Whether a bridged value can lie in the bridge from the start: it is allocated uninitialised, a declared write
        fills it, no other state of its memory is bridged, and the caller does not get it."""
        if value in self.captured or value.target not in _UNINITIALISED:
            return False
        set_id = self.c.aliasing.set_of[value]
        members = self.c.aliasing.members[set_id]
        writers = [n for n, sets in self.c.aliasing.writes.items() if set_id in sets]
        declared = all(isinstance(n.target, OpOverload) and not n.meta.get("opaque") for n in writers)
        bridged = sum(node in members for node, _ in self.bridges)
        return bool(writers) and declared and bridged == 1 and not any(m in self.shown for m in members)

    def cut(self, value: Node, version: int) -> Ref:
        key = (value, version)
        if key not in self.cuts:
            after = max([self.step_of[value], *self.writers_before(value, version, captured=True)])
            self.used[self.step_of[value]][value] = None
            spec = spec_of(value.meta["val"], self.captured_padding(value))
            self.cuts[key] = Cut(value.name, after, value in self.c.private, spec)
        return Ref("cut", list(self.cuts).index(key))

    def writers_before(self, value: Node, version: int, captured: bool = False) -> list[int]:
        """Steps of the writers that made ``version`` of the memory of ``value``."""
        set_id = self.c.aliasing.set_of.get(value)
        versions = self.c.aliasing.version
        return [
            self.step_of[n]
            for n, sets in self.c.aliasing.writes.items()
            if set_id in sets
            and n in self.step_of
            and versions[n, set_id] < version
            and (n in self.captured) == captured
        ]

    def natural_padding(self, tensor: torch.Tensor) -> Padding:
        layouts = {s: natural(tensor, s) for s in self.bucketed}
        return padding_of({s: found for s, found in layouts.items() if found is not None})

    def captured_padding(self, value: Node) -> Padding:
        source, index = value, 0
        if value.target is operator.getitem:
            source, index = value.args[0], value.args[1]  # type: ignore[assignment]
        found = self.c.layouts.get(value) or self.c.layouts.get(source)
        if not found:
            return ()
        return padding_of(found[index] if len(found) > 1 and value not in self.c.layouts else found[0])

    # -- outputs -------------------------------------------------------------------------------------------------

    def flat_outputs(self) -> Sequence[Any]:
        result = next(n for n in self.normal.graph.nodes if n.op == "output").args[0]
        return result if isinstance(result, (tuple, list)) else (result,)

    def output(self, item: Any) -> Output:
        if not isinstance(item, Node):
            return Output(None, expr_of(item) if isinstance(item, torch.SymInt) else None, item)
        if self.is_host(item):
            return Output(None, expr_of(item.meta["val"]))
        if item.op == "get_attr":
            return Output(Ref("const", item.name))
        if item.op == "placeholder":
            return Output(Ref("arg", self.args[item]))
        end = 1 << 30
        if item in self.captured and not self.eager_writes(item):
            return Output(self.cut(item, self.last_version(item)))
        return Output(self.read_eagerly(item, end), check=is_tensor_value(item.meta.get("val")))

    def last_version(self, value: Node) -> int:
        set_id = self.c.aliasing.set_of.get(value)
        return sum(set_id in sets for sets in self.c.aliasing.writes.values())
