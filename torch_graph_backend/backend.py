"""The entry point: ``torch.compile(model, backend="bcg")`` calls ``bcg`` with every graph that Dynamo makes.

Contract. A plain callable, named by the entry point ``bcg`` in group ``torch_dynamo_backends`` (and never also by
``register_backend``: two registrations of one name are an error). Wrong options raise; everything else that goes wrong
while a plan is made ends in the Dynamo graph run as it came, with a reason.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_graph_backend import debug, registry
from torch_graph_backend.break_ops import break_predicate
from torch_graph_backend.buffer_registry import BufferRegistry
from torch_graph_backend.config import Config
from torch_graph_backend.declare import report_unmatched
from torch_graph_backend.device_state import cleanup_all, state_of
from torch_graph_backend.errors import StrictModeError
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.alias import has_hidden_effects, is_random
from torch_graph_backend.passes.classify import Classified, classify
from torch_graph_backend.passes.copy_back import copied_for_nothing, copy_back
from torch_graph_backend.passes.dynamo_api import reset_with_dynamo
from torch_graph_backend.passes.hoist import hoist
from torch_graph_backend.passes.host_scalars import host_scalars
from torch_graph_backend.passes.normalize import NormalGraph, NormaliseError, normalise
from torch_graph_backend.passes.padding_rules_declared import TRASH, trash_row_of
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.slot_proof import prove
from torch_graph_backend.passes.source_lines import function_name
from torch_graph_backend.passes.symbols import find_symbols, unreadable
from torch_graph_backend.passes.torch_api import TracingContext
from torch_graph_backend.plan import Plan
from torch_graph_backend.plan_build import Declared, build_plan
from torch_graph_backend.runner import MAX_COPIED, CompiledGraph
from torch_graph_backend.step import stepped
from torch_graph_backend.strides import doubtful


def bcg(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph. ``options``: see ``torch_graph_backend.config.Config``. Raises only for wrong options
    and, under ``strict``, if nothing can be captured (with ``"ops"``: if any operation but a break op cannot). Returns
    a ``CompiledGraph``, or, if a break op of the graph has a ``prepare``, a function that runs it and calls the
    ``CompiledGraph``."""
    config = Config.parse(options, mode)
    codes = TracingContext.get_traced_code() or []
    reset_with_dynamo(bcg)
    graph = _Compiler(gm, _name(gm, codes), config).compile()
    debug.dump(graph)
    given = (*example_inputs, *gm.parameters(), *gm.buffers())  # under Inductor's freezing weights are in the graph
    static = ((n.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") for n in gm.graph.nodes)
    weighted = len(given) > len(example_inputs) or any(static)
    registry.remember(graph, codes, [t for t in given if isinstance(t, torch.Tensor)], weighted)
    if config.strict and graph.reason is not None:
        raise StrictModeError(_with_line(graph, graph.reason), graph.name)
    reason = _left_eager(graph)
    if reason is not None:
        raise StrictModeError(reason, f"all of {graph.name}")
    return stepped(graph, gm)


def _with_line(graph: CompiledGraph, reason: Reason) -> Reason:
    """A graph's reason with a line of the user's: that of its first eager operation, or of the function."""
    ops = [op for region in (graph.plan.regions if graph.plan is not None else ()) for op in region.ops if op.reason]
    if reason.code == "nothing-to-capture" and ops and ops[0].reason is not None:
        first = ops[0].reason
        return Reason(reason.code, f"{reason.text}, {first.code} first: {first.text}", first.where, first.advice)
    function, _, line = graph.name.rstrip(")").partition(" (")
    return reason.at(f"{line} in {function}" if line else "")


def _left_eager(graph: CompiledGraph) -> Reason | None:
    """Under ``strict="ops"``: why the first eager operation is eager that is no break op and runs a kernel."""
    if graph.config.strict != "ops" or graph.plan is None:
        return None
    ops = [op for region in graph.plan.regions for op in region.ops]
    return next((op.reason for op in ops if op.kernel and op.reason and op.reason.code != "break-op"), None)


def reset() -> None:
    """Close every compiled graph and free all memory of ours. What Dynamo still has compiled runs eagerly from now on,
    and is counted; ``torch._dynamo.reset()`` drops that too, and its counts."""
    registry.close_all()
    cleanup_all()


def _dynamo_was_reset() -> None:
    registry.forget_all()
    cleanup_all()


def close(model: Any) -> None:
    """Free the recordings and buffers of ``model``'s graphs; its later calls run eagerly, with the reason ``disabled``.

    Modules of one class may share a graph (Dynamo's choice): of a shared one, only this model's recordings are dropped.
    A graph that has no weights at all, as there may be between two graph breaks, is closed for all of them.
    Memory of the pool, which all models of a device share, goes back to the device with its last recording.
    """
    mine = registry.weights_of(registry.unwrap(model))
    for graph in registry.graphs_of(model):
        given = [mark.among(mine) for mark in graph.given]
        if mine and any(t is None for t in given):
            graph.release({t.data_ptr() for t in given if t is not None})
        else:
            graph.close()


bcg.reset = _dynamo_was_reset  # type: ignore[attr-defined]


def _name(gm: GraphModule, codes: Sequence[Any]) -> str:
    """How a graph is called in texts: the user's ``forward`` (decorators in between are no help), or the function."""
    trace = next(
        (n.meta.get("stack_trace") for n in gm.graph.nodes if n.op.startswith("call") and n.meta.get("stack_trace")), ""
    )
    name = function_name(trace)
    if name.startswith("forward") or not codes:
        return name or "graph"
    return f"{codes[0].co_name} ({os.path.basename(codes[0].co_filename)}:{codes[0].co_firstlineno})"


class _Compiler:
    """Normalise, classify, plan; keeps what is needed to plan anew when an input cannot stay pinned."""

    def __init__(self, gm: GraphModule, name: str, config: Config) -> None:
        self.gm, self.name, self.config = gm, name, config
        self.graph = CompiledGraph(gm, name, config, config.off_reason())
        self.is_break = break_predicate(config.break_ops)
        self.moving: frozenset[str] = frozenset()
        #: Those of them that a segment could not change in a copy either.
        self.uncopied: set[str] = set()
        self.refused: dict[str, Reason] = {}

    def compile(self) -> CompiledGraph:
        try:
            self.plan()
        except NormaliseError as error:
            self.graph.reason = self.graph.reason or error.reason
        except Exception as error:  # our own fault: the user still gets the eager answer, and the reason
            log.warning("%s: no plan could be made", self.name, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            self.graph.reason = self.graph.reason or Reason("normalise-failed", f"no plan could be made: {text}")
        if self.graph.reason is not None:
            log.info("%s: not captured: %s", self.name, self.graph.reason)
        self.is_break.report(self.name)
        report_unmatched()
        graph, proxy = self.graph, weakref.proxy(self.graph)
        self.graph = proxy  # type: ignore[assignment]  # no cycle: a graph goes when Dynamo drops it
        graph.replan = self.replan  # type: ignore[method-assign]
        return graph

    def plan(self) -> None:
        """Make the plan; once more where it shows that it was made on a wrong premise."""
        start = time.perf_counter()
        normal = self.normalised()
        inputs, symbols, device = normal.placeholders, set(find_symbols(normal.placeholders)), _device(normal)
        middle = time.perf_counter()
        normal = self.rewritten(normal, device)
        registry = BufferRegistry(self.config.slots, normal.placeholders, self.config.phase)
        kernels, views = self.config.min_segment_kernels, self.config.outputs == "view"
        tails, names = registry.tails, registry.names
        proved = prove(normal, lambda graph: self.judge(graph, device), kernels, tails, names, registry.vet)
        normal, classified = proved.normal, proved.classified
        in_vain = copied_for_nothing(normal, lambda n: classified.verdicts[n].kind == "capture")
        if in_vain:
            self.uncopied |= in_vain
            return self.plan()
        registry.refuse(proved.refused)
        refused = tuple((registry.declared[i].name, reason) for i, reason in registry.refused.items())
        declared = Declared(registry.policy, proved.declared, refused)
        plan = build_plan(self.name, device, normal, classified, views, declared)
        if set(find_symbols(inputs)) != symbols:  # operations showed that a size is fixed (2 <= s <= 2), but too late
            return self.plan()
        self.graph.registry = registry
        self.hand_over(plan, normal, classified)
        self.graph.seconds = {"normalise": middle - start, "plan": time.perf_counter() - middle}

    def normalised(self) -> NormalGraph:
        """The one IR, with what is known of its arguments."""
        normal = normalise(self.gm, self.is_break)
        for placeholder in normal.placeholders:
            placeholder.meta[TRASH] = self.trash_row(placeholder)
            if placeholder.name in self.moving:  # read through a slot like any other argument
                placeholder.meta["unpinned"] = placeholder.meta.get("static", False)
                placeholder.meta["static"] = False
        unread = unreadable(normal.placeholders)
        if unread is not None:
            raise NormaliseError(unread)
        return normal

    def rewritten(self, normal: NormalGraph, device: torch.device) -> NormalGraph:
        """The graph as it is judged: constants hoisted, numbers read on the device, moving arguments copied."""
        normal = host_scalars(hoist(normal, device, self.is_break), device, self.is_break)
        if self.moving:
            normal = copy_back(normal, device, self.moving - self.uncopied, self.is_break, MAX_COPIED)
        return normal

    def judge(self, graph: NormalGraph, device: torch.device) -> Classified:
        return classify(
            graph,
            device,
            self.is_break,
            moving=self.moving,
            min_kernels=self.config.min_segment_kernels,
            view_outputs=self.config.outputs == "view",
            borrows=self.is_break.borrows,
            touches_state=self.is_break.touches_state,
            refused=self.refused,
        )

    def hand_over(self, plan: Plan, normal: NormalGraph, classified: Classified) -> None:
        """Let the graph use a plan, if its device can record."""
        graph = self.graph
        found = state_of(plan.device)
        if isinstance(found, Reason):
            graph.plan, graph.reason, graph.normal = plan, graph.reason or found, normal
            return
        layouts = {n.name: by_symbol for n, by_symbol in classified.layouts.items()}
        written = _written_args(normal, classified)
        pure = not written and not any(is_random(n) or has_hidden_effects(n) for n in normal.graph.nodes)
        graph.reason = graph.reason or (None if pure else doubtful(normal.graph))
        graph.adopt(plan, normal, layouts, written, found, pure)
        self.report(plan)

    def trash_row(self, placeholder: Node) -> int | None:
        """The row of an argument that nobody reads, if it has one."""
        value = placeholder.meta.get("val")
        row = trash_row_of(placeholder.meta.get("source") or placeholder.name, dict(self.config.trash_rows))
        if row is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return None
        if isinstance(value.shape[0], int) and row >= value.shape[0]:
            log.warning("%s: %s has no trash row %d", self.name, placeholder.meta.get("source"), row)
            return None
        return row

    def report(self, plan: Plan) -> None:
        log.debug("%s", plan)
        for _, reason in plan.refused:
            log.warning("%s: not applied: %s", self.name, reason)
        for op in plan.declared_ops():
            log.info("%s: %s %s", self.name, op.op, op.declared)
        read = {s.arg for s in plan.slots}
        for i, slot in self.graph.registry.declared.items():
            if i not in read:
                log.info(
                    "%s: slot %r is not used: no segment reads this argument through a buffer", self.name, slot.name
                )
        for name in self.graph.registry.unknown:
            log.warning("%s: options['slots'][%r] names no argument of this graph", self.name, name)
        for name in self.config.unmatched([s.source for s in plan.bucketed]):
            log.warning("%s: options['buckets'][%r] matches no bucketed size of this graph", self.name, name)

    def replan(self, moving: Sequence[str] = (), refused: Mapping[str, Reason] | None = None) -> None:
        """Plan again. The addresses of the inputs ``moving`` do not stay: they are copied in, and back if they are
        small (else what changes them is eager). The operations ``refused``, by the name of their node, failed an audit
        and are eager from now on."""
        self.moving |= frozenset(moving)
        self.refused |= refused or {}
        self.plan()
        self.graph.reason = self.graph.reason or _left_eager(self.graph)
        debug.dump(self.graph)


def _device(normal: NormalGraph) -> torch.device:
    """The device most values live on, tensors without data aside; a graph without tensors counts as CPU."""
    counts: dict[torch.device, int] = {}
    for node in normal.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            counts[value.device] = counts.get(value.device, 0) + 1
    accelerators = {d: n for d, n in counts.items() if d.type != "cpu"}
    return max(accelerators or counts, key=lambda d: counts[d], default=torch.device("cpu"))


def _written_args(normal: NormalGraph, classified: Classified) -> list[int]:
    aliasing = classified.aliasing
    return [i for i, p in enumerate(normal.placeholders) if aliasing.written(p)]
