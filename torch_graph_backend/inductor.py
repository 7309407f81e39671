"""Small buckets through Inductor: which keys, which segments, what it may cost, and what happens when it does not work.

Contract. ``prepare`` is asked before anything of a call runs, and never inside a recording. It gives an entry compiled
segments, which its first run and its recording use alike (two calls at one size never differ by tier), and for every
segment that stays with plain kernels a reason. Plain kernels are recorded as ever: nothing here makes a call eager.
Structurally equal segments are compiled once in a process. Inductor never owns a CUDA graph.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from torch_graph_backend.inductor_places import Place, Places, general_layout
from torch_graph_backend.inductor_probe import indices_are_checked, probe
from torch_graph_backend.inductor_segment import (
    Artefact,
    CompiledSegment,
    Decided,
    Output,
    Traced,
    Unsuitable,
    compile_dynamic,
    compile_static,
    static_examples,
    trace,
)
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.alias import is_random, written_args
from torch_graph_backend.passes.dedup import InputFacts, segment_key
from torch_graph_backend.passes.flops import rows_of
from torch_graph_backend.passes.inductor_decisions import deciding
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import cpp_compiler_error, triton_error
from torch_graph_backend.plan import CapturedSegment
from torch_graph_backend.progress import shown
from torch_graph_backend.slots import evaluate

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry
    from torch_graph_backend.runner import CompiledGraph

#: Compiles of one graph that fail one after the other before no further one is tried.
MAX_FAILURES = 3

#: What compiling takes, about, so that nothing is begun that cannot end in time. Measured with a cold cache: 30 layers
#: of Llama as one segment took 200 s on two CPU cores; on an H200, with autotuning, 25 kernels of a 2048-wide decoder
#: took 22 s (``docs/bench/cuda_inductor.json``).
SECONDS_PER_KERNEL = {"cpu": 0.25, "cuda": 1.0}

#: Compiled segments of the process, by structure, as long as some graph keeps them.
_known: weakref.WeakValueDictionary[Hashable, CompiledSegment] = weakref.WeakValueDictionary()


@dataclass
class Compiles:
    """What one graph had compiled: segments (or why not) by structure at a bucket, code that serves several buckets by
    structure, and the seconds it all took. ``made`` counts compiles, shared ones not again."""

    segments: dict[Hashable, CompiledSegment | Reason] = field(default_factory=dict)
    described: dict[Hashable, Described | Reason] = field(default_factory=dict)
    dynamic: dict[Hashable, Artefact | Reason] = field(default_factory=dict)
    seconds: float = 0.0
    made: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Described:
    """What a traced segment leaves behind: its outputs, what it makes, and which inputs it changes."""

    outputs: tuple[Output, ...]
    written: frozenset[int]


# -- policy ------------------------------------------------------------------------------------------------------------


def key_size(graph: CompiledGraph, entry: Entry) -> int:
    """How large a key is: the product of its bucketed sizes; without any, the most rows that a contraction of a segment
    takes (or, without contractions, that any operation makes)."""
    if graph.keys.bucketed:
        return math.prod(entry.size_args[i] for i in graph.keys.bucketed)
    nodes = {n.name: n for n in graph.normal.graph.nodes}
    kernels = [nodes[op.value] for step in entry.plan.segments for op in step.ops if op.kernel]

    def size(n: Any) -> int:
        return evaluate(getattr(getattr(n, "node", None), "expr", n), entry.bucket)

    rows = max((rows_of(n, size) for n in kernels), default=0)
    values = [v for n in kernels if isinstance(v := n.meta.get("val"), torch.Tensor)]
    return rows or max((math.prod(size(n) for n in v.shape[:-1]) for v in values), default=0)


def how(graph: CompiledGraph, entry: Entry) -> str | None:
    """``"static"``, ``"dynamic"`` (one compile for several buckets), or None: plain kernels."""
    config = graph.config
    if config.inductor == "off" or (config.inductor == "small" and not config.inductor_max_size):
        return None
    if key_size(graph, entry) <= config.inductor_max_size:
        return "static"
    return "dynamic" if config.inductor == "all" else None


@functools.cache
def unavailable(kind: str) -> Reason | None:
    """Why nothing can be compiled for this kind of device; asked once a process."""
    lacks = cpp_compiler_error() if kind == "cpu" else triton_error()
    if not lacks:
        return None
    reason = Reason("inductor-unavailable", f"Inductor cannot compile for {kind}: {lacks}")
    log.warning("small buckets keep plain kernels: %s", reason)
    return reason


def prepare(graph: CompiledGraph, entry: Entry, args: Sequence[Any]) -> None:
    """Give ``entry`` its compiled segments. Runs nothing of the call's; raises only where it is interrupted."""
    if entry.prepared:
        return
    entry.prepared = True
    kind = how(graph, entry)
    if kind is None:
        return
    start, before = time.perf_counter(), graph.compiles.made
    work = _Preparation(graph, entry, args, kind)
    reason = unavailable(entry.state.device.type)
    try:
        if reason is None:
            work.run()
        else:
            entry.plain = {step.index: reason for step in entry.plan.segments}
    except Exception as error:  # our own fault: plain kernels are right, and the reason is told
        entry.compiled.clear()
        entry.plain = {step.index: work.failed(step, error) for step in entry.plan.segments}
    except BaseException:  # the user's: the next call begins anew, with the segments that were done
        entry.compiled.clear()
        entry.plain.clear()
        entry.prepared = False
        raise
    seconds = time.perf_counter() - start
    new = graph.compiles.made - before
    if new:
        log.info("%s: key %s: %d compiles took %.1f s", graph.name, entry.key, new, seconds)
    graph.ledger.count_compiles(entry.key, len(entry.compiled), new, seconds, list(entry.plain.values()))


def environment(device: torch.device) -> Hashable:
    """Settings of the process that compiled code depends on."""
    kinds = {"cpu", device.type}
    casts = [(k, torch.get_autocast_dtype(k)) for k in sorted(kinds) if torch.is_autocast_enabled(k)]
    precision = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return str(device), tuple(casts), precision, torch.get_default_dtype(), threads


# -- one key -----------------------------------------------------------------------------------------------------------


class _Preparation:
    """Walks through the segments of one key; knows where every value between them lies."""

    def __init__(self, graph: CompiledGraph, entry: Entry, args: Sequence[Any], kind: str) -> None:
        self.graph, self.entry, self.kind = graph, entry, kind
        self.cache = graph.compiles
        self.nodes = {n.name: n for n in graph.normal.graph.nodes}
        self.places = Places(entry, args)
        self.environment = environment(entry.state.device)
        self.told = False
        self.deciding = {n.name for n in deciding(graph.normal.graph)}

    def decided(self, step: CapturedSegment) -> Decided:
        """What of this segment later operations of the graph decide on."""
        outputs = tuple(i for i, name in enumerate(step.outputs) if name in self.deciding)
        return Decided(
            outputs, any(op.value in self.deciding and written_args(self.nodes[op.value]) for op in step.ops)
        )

    def run(self) -> None:
        steps = self.entry.plan.segments
        wanted = self.graph.config.progress
        for step in shown(steps, f"{self.graph.name}: preparing {self.entry.key}", wanted):
            reason = self.segment(step)
            if reason is not None:
                self.entry.plain[step.index] = reason

    def segment(self, step: CapturedSegment) -> Reason | None:
        """Compile one segment, or say why not; and note where its outputs lie."""
        nodes = [self.nodes[op.value] for op in step.ops]
        try:
            places = {name: self.places.place(ref) for name, ref in step.inputs}
        except Unsuitable as unsuitable:
            return Reason("inductor-unsuitable", f"segment {step.index}: {unsuitable}")
        facts = Places.facts(list(places.values()))
        inputs = dict(zip(places, facts, strict=True))
        key = (self.environment, self.decided(step), segment_key(nodes, inputs, step.outputs, self.at_bucket))
        described = self.describe(step, key, facts)
        if isinstance(described, Reason):
            return described
        for name, out in zip(step.outputs, described.outputs, strict=True):
            self.places.note(step, self.nodes[name], out, list(places.values()))
        if not step.kernels:
            return None
        reason = self.unsafe(step, nodes, facts, described)
        if reason is not None:
            return reason
        found = self.compiled(step, nodes, key, list(places.values()), facts)
        if isinstance(found, Reason):
            return found
        self.entry.compiled[step.index] = found
        return None

    def at_bucket(self, expr: Any) -> int | str:
        try:
            return evaluate(expr, self.entry.bucket)
        except TypeError:  # a float or a boolean of sizes
            return str(expr.xreplace(self.entry.bucket))

    def unsafe(
        self, step: CapturedSegment, nodes: Iterable[Node], facts: Sequence[InputFacts], described: Described
    ) -> Reason | None:
        """What Inductor assumes of a segment's inputs and does not hold."""
        if any(is_random(n) for n in nodes):
            return Reason("inductor-unsuitable", f"segment {step.index} draws random numbers")
        for i in described.written:
            first = facts[i].shares
            others = [k for k, f in enumerate(facts) if f.shares == first]
            if len(others) > 1:
                names = ", ".join(step.inputs[k][0] for k in others[:3])
                return Reason("inductor-unsuitable", f"segment {step.index} changes memory that {names} share")
        return None

    def describe(self, step: CapturedSegment, key: Hashable, facts: Sequence[InputFacts]) -> Described | Reason:
        """The segment's outputs; traced once a structure."""
        found = self.cache.described.get(key)
        if found is None:
            try:
                traced = self.traced(step, facts)
                found = Described(traced.outputs, traced.written)
            except Exception as error:
                found = self.failed(step, error)
            self.cache.described[key] = found
        return found

    def traced(self, step: CapturedSegment, facts: Sequence[InputFacts]) -> Traced:
        mode, examples = static_examples(facts)
        return trace(self.entry.program.steps[step.index], self.entry.size_args, mode, examples, self.decided(step))

    # -- compiling -----------------------------------------------------------------------------------------------

    def compiled(
        self,
        step: CapturedSegment,
        nodes: Sequence[Node],
        key: Hashable,
        places: Sequence[Place],
        facts: Sequence[InputFacts],
    ) -> CompiledSegment | Reason:
        """The compiled segment of this structure: this graph's, the process's, or a new one."""
        cache = self.cache
        kind = (self.kind, key)
        found: CompiledSegment | Reason | None = cache.segments.get(kind) or _known.get(kind)
        if found is None:
            capped = self.capped(step)
            if capped is not None:
                return capped  # not kept: another key may come with more time
            found = self.tried(step, lambda: self.make(step, nodes, places, facts))
            if isinstance(found, CompiledSegment):
                _known[kind] = found
        cache.segments[kind] = found
        return found

    def capped(self, step: CapturedSegment) -> Reason | None:
        cap, spent = self.graph.config.inductor_seconds, self.cache.seconds
        if spent >= cap:
            text = f"segment {step.index} was not compiled: this graph's compiles took {spent:.0f} s of {cap} s"
            return Reason("inductor-time", text)
        rate = SECONDS_PER_KERNEL.get(self.entry.state.device.type, max(SECONDS_PER_KERNEL.values()))
        expected = step.kernels * rate
        if spent + expected > cap:  # a compile that has begun cannot be cut short
            text = f"segment {step.index} was not compiled: {step.kernels} kernels take about {expected:.0f} s, and"
            return Reason("inductor-time", f"{text} {cap - spent:.0f} s of {cap} s are left")
        if self.cache.failures >= MAX_FAILURES:
            text = f"segment {step.index} was not compiled: {MAX_FAILURES} compiles of this graph failed in a row"
            return Reason("inductor-failed", text)
        return None

    def tried(self, step: CapturedSegment, make: Callable[[], CompiledSegment]) -> CompiledSegment | Reason:
        if not self.told:
            self.told = True
            text = (
                "%s: compiling the segments of key %s with Inductor; the call waits (inductor_max_size=0 turns it off)"
            )
            log.warning(text, self.graph.name, self.entry.key)
        start = time.perf_counter()
        try:
            made = make()
            self.cache.failures = 0
            return made
        except Exception as error:
            return self.failed(step, error)
        finally:
            self.cache.seconds += time.perf_counter() - start

    def failed(self, step: CapturedSegment, error: Exception) -> Reason:
        """The reason; the exception is logged, what Inductor merely does not suit is not."""
        if isinstance(error, Unsuitable):
            return Reason("inductor-unsuitable", f"segment {step.index}: {error}")
        self.cache.failures += 1
        text = f"segment {step.index} of key {self.entry.key} could not be compiled: {type(error).__name__}: {error}"
        reason = Reason("inductor-failed", text.splitlines()[0])
        log.warning("%s: a segment keeps plain kernels: %s", self.graph.name, reason, exc_info=error)
        return reason

    def make(
        self, step: CapturedSegment, nodes: Sequence[Node], places: Sequence[Place], facts: Sequence[InputFacts]
    ) -> CompiledSegment:
        """Compile (or take the code that serves several buckets), and probe."""
        traced = self.traced(step, facts)
        artefact = self.dynamic(step, nodes, places, facts) if self.kind == "dynamic" else None
        sizes: tuple[int, ...] = ()
        if artefact is None:
            artefact = compile_static(traced)
            self.cache.made += 1
        else:
            sizes = tuple(self.entry.size_args[i] for i in self.graph.keys.bucketed)
        segment = CompiledSegment(artefact.code, sizes, traced)
        fn, at = self.entry.program.steps[step.index], self.entry.size_args
        inputs = [
            (f, None if i in traced.written else p.readable, p.fill)
            for i, (f, p) in enumerate(zip(facts, places, strict=True))
        ]
        any_integer = self.entry.state.device.type == "cpu" and indices_are_checked(traced.gm)
        probe(segment, lambda *t: fn(*at, *t), inputs, any_integer)
        return segment

    def dynamic(
        self, step: CapturedSegment, nodes: Sequence[Node], places: Sequence[Place], facts: Sequence[InputFacts]
    ) -> Artefact | None:
        """Code that serves this bucket and others; None if this bucket needs its own."""
        entry, bucketed = self.entry, self.graph.keys.bucketed
        if not bucketed or any(entry.size_args[i] < 2 for i in bucketed):
            return None
        symbols = {entry.plan.symbols[i].symbol: f"z{k}" for k, i in enumerate(bucketed)}
        fixed = {s: v for s, v in entry.bucket.items() if s not in symbols}

        def text(expr: Any) -> str:
            import sympy

            named = {s: sympy.Symbol(name, integer=True, positive=True) for s, name in symbols.items()}
            return str(sympy.sympify(expr).xreplace(fixed).xreplace(named))

        layouts = [at for p in places if (at := general_layout(p, entry)) is not None]
        if len(layouts) < len(places):
            return None
        general = {}
        for (name, _), p, f, (stride, _) in zip(step.inputs, places, facts, layouts, strict=True):
            general[name] = replace(f, shape=tuple(map(text, p.spec.shape)), stride=tuple(map(text, stride)))
        key = (self.environment, self.decided(step), segment_key(nodes, general, step.outputs, text))
        found = self.cache.dynamic.get(key)
        sizes = [entry.size_args[i] for i in bucketed]
        if found is None:
            fn = entry.program.steps[step.index]
            inputs = [(f, at) for f, (_, at) in zip(facts, layouts, strict=True)]
            try:
                found = compile_dynamic(fn, entry.size_args, bucketed, inputs, self.decided(step))
                self.cache.made += 1
            except Exception as error:
                found = self.failed(step, error)
            self.cache.dynamic[key] = found
        return found if isinstance(found, Artefact) and found.fits(sizes) else None
