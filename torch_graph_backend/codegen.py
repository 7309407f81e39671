"""Plan + graph -> Python source: one function a step, a driver, and size arithmetic. No fx, no sympy at call time.

Contract. ``generate(plan, normal)`` returns a ``Program``: ``steps[i](sizes..., inputs...) -> tuple of outputs`` for
captured segments and eager regions alike, and ``run(args, sizes, frame)``, a straight line through the steps.
``source`` is the text (readable in tracebacks). Sizes are Python ints: the bucket's in a captured segment, the real
ones in an eager region. A value is deleted after its last use, so eager memory is freed as eager code would free it.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_graph_backend.break_calls import Check, FirstCall, callee
from torch_graph_backend.passes.capturable import is_size
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.symbols import expr_of
from torch_graph_backend.passes.torch_api import OpOverload, PythonPrinter
from torch_graph_backend.plan import CapturedSegment, EagerRegion, Plan, Ref

_COUNTER = itertools.count()
#: Names that the generated module defines or reads itself.
_RESERVED = {"run", "sizes_of", "math", "torch", "A", "S", "F", *keyword.kwlist, *dir(builtins)}
_LITERALS = (int, bool, str, type(None))


@dataclass(frozen=True, eq=False)
class Program:
    """Executable form of a plan. ``sizes_of(args)`` reads the values of ``plan.symbols`` from the arguments."""

    source: str
    steps: tuple[Callable[..., tuple[Any, ...]], ...]
    run: Callable[..., tuple[Any, ...]]
    sizes_of: Callable[[Sequence[Any]], tuple[int, ...]]
    breaks: tuple[FirstCall, ...] = ()

    def watch_breaks(self) -> None:
        """Look at what break ops do once more, at the next call."""
        for first in self.breaks:
            first.arm()


def size_code(expr: sympy.Expr | int) -> str:
    """Python source of a size expression over variables named as the symbols."""
    return str(PythonPrinter().doprint(sympy.sympify(expr)))


def size_function(names: Sequence[str], exprs: Sequence[sympy.Expr | bool]) -> Callable[..., tuple[int, ...]]:
    """``f(*symbol values) -> tuple`` of all expressions, compiled once."""
    body = ", ".join(size_code(e) for e in exprs)
    return _execute(f"def sizes({', '.join(names)}):\n    return ({body}{',' if exprs else ''})\n", {})["sizes"]


def _execute(source: str, scope: dict[str, Any]) -> dict[str, Any]:
    filename = f"<torch_graph_backend {next(_COUNTER)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope |= {"math": math, "torch": torch}
    exec(compile(source, filename, "exec"), scope)
    return scope


def generate(plan: Plan, normal: NormalGraph) -> Program:
    """The program of ``plan``; ``normal`` holds the operations and constants behind its names."""
    writer = _Writer(plan, normal)
    parts = [writer.step(s) for s in plan.steps] + [writer.driver(), writer.sizes()]
    source = "\n".join(parts)
    scope = _execute(source, dict(writer.bound))
    for first in writer.breaks.values():
        if first is not None:
            first.place(scope, writer.by_id[id(first)])
    steps = tuple(scope[f"step_{s.index}"] for s in plan.steps)
    breaks = tuple(first for first in writer.breaks.values() if first is not None)
    return Program(source, steps, scope["run"], scope["sizes_of"], breaks)


def probed(
    plan: Plan, normal: NormalGraph, step: CapturedSegment, probe: Callable[[str, Any], None]
) -> Callable[..., tuple[Any, ...]]:
    """``Program.steps[step.index]`` with ``probe(name, value)`` called behind every operation."""
    writer = _Writer(plan, normal)
    source = writer.step(step, probe=writer.bind(probe, "probe"))
    found: Callable[..., tuple[Any, ...]] = _execute(source, dict(writer.bound))[f"step_{step.index}"]
    return found


class _Writer:
    def __init__(self, plan: Plan, normal: NormalGraph) -> None:
        self.plan, self.normal = plan, normal
        self.nodes = {n.name: n for n in normal.graph.nodes}
        self.bound: dict[str, Any] = {}
        self.by_id: dict[int, str] = {}
        self.breaks: dict[Any, FirstCall | None] = {}
        self.symbols = [s.name for s in plan.symbols]

    # -- names ---------------------------------------------------------------------------------------------------

    def bind(self, value: Any, hint: str) -> str:
        """A global of the generated module that holds ``value``."""
        found = self.by_id.get(id(value))
        if found is None:
            name = "".join(c if c.isalnum() else "_" for c in hint)
            taken = (self.bound, self.symbols, self.nodes, _RESERVED)
            while any(name in names for names in taken) or name.startswith(("step_", "B_")) or not name.isidentifier():
                name = f"{name}_" if name[:1].isalpha() and not name.startswith(("step_", "B_")) else f"op_{name}"
            self.bound[name] = value
            found = self.by_id[id(value)] = name
        return found

    def text(self, value: Any) -> str:
        """Source of one argument tree."""
        if isinstance(value, Node):
            verdict_size = is_size(value.meta.get("val")) and self.is_host(value)
            return f"({size_code(expr_of(value.meta['val']))})" if verdict_size else value.name
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"({size_code(value.node.expr)})"
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.text(v) for v in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if value else "()"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if type(value) in _LITERALS:
            return repr(value)
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        return self.bind(value, f"k_{type(value).__name__}_{len(self.bound)}")

    def is_host(self, node: Node) -> bool:
        """Size arithmetic that the symbols' values give: computed where it is used."""
        value = node.meta["val"]
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return node.name not in self.scheduled
        return node.name not in self.scheduled and all(str(s) in self.symbols for s in value.node.expr.free_symbols)

    @property
    def scheduled(self) -> set[str]:
        cached = self.__dict__.get("_scheduled")
        if cached is None:
            cached = self.__dict__["_scheduled"] = {op.value for s in self.plan.steps for op in s.ops}
        return cached

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, step: CapturedSegment | EagerRegion, probe: str = "") -> str:
        params = ", ".join([*self.symbols, *(name for name, _ in step.inputs), *(f"B_{i}" for i in self.direct(step))])
        kind = "captured segment" if isinstance(step, CapturedSegment) else "eager region"
        lines = [f"def step_{step.index}({params}):  # {kind}, {step.kernels} kernels"]
        nodes = [self.nodes[op.value] for op in step.ops]
        last = self.last_uses(nodes, step.outputs)
        regions: tuple[Any, ...] = ()
        for node in nodes:
            wanted = node.meta.get("autocast", ())
            if wanted != regions:
                regions = wanted
                lines += [f"    {'    ' * i}with {self.autocast(r)}:" for i, r in enumerate(regions)]
            indent = "    " * (1 + len(regions))
            row = next((i for i, b in enumerate(self.plan.bridges) if b.direct and b.value == node.name), None)
            lines.append(f"{indent}{node.name} = {self.call(node) if row is None else f'B_{row}'}")
            check = self.check(node)
            if check is not None:
                lines.append(f"{indent}{check}")
            if probe:
                lines.append(f"{indent}{probe}({node.name!r}, {node.name})")
            if last.get(node):
                lines.append(f"{indent}del {', '.join(last[node])}")
        inner = ", ".join(step.outputs)
        lines.append(f"    return ({inner}{',' if step.outputs else ''})")
        return "\n".join(lines) + "\n"

    def last_uses(self, nodes: list[Node], outputs: Sequence[str]) -> dict[Node, list[str]]:
        """Names to delete after each node: values made in this step whose last use (or making) it is."""
        at: dict[str, Node] = {}
        for node in nodes:
            at[node.name] = node
            for arg in node.all_input_nodes:
                if arg.name in at:
                    at[arg.name] = node
        out: dict[Node, list[str]] = {}
        for name, node in at.items():
            if name not in outputs:
                out.setdefault(node, []).append(name)
        return out

    def autocast(self, region: tuple[Any, ...]) -> str:
        device, dtype, enabled, cache = (*region, None, None, None)[:4]
        kwargs = f"dtype={self.text(dtype)}, enabled={enabled!r}, cache_enabled={cache!r}"
        return f"{self.bind(torch.autocast, 'autocast')}({device!r}, {kwargs})"

    def call(self, node: Node) -> str:
        target = node.target
        if getattr(target, "__name__", "") == "getitem" and target.__module__ in ("_operator", "operator"):
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        found = self.breaks[target] if target in self.breaks else self.breaks.setdefault(target, callee(node))
        target = target if found is None else found
        hint = str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", type(target).__name__)
        args = [self.text(a) for a in node.args] + [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        return f"{self.bind(target, hint)}({', '.join(args)})"

    def check(self, node: Node) -> str | None:
        """A statement that compares the results of a break op with what its fake implementation promised."""
        if self.breaks.get(node.target) is None:
            return None
        return Check(node, self.dim, self.bind).line()

    def dim(self, size: Any) -> str | None:
        """Source of a size; None if only the data knows it."""
        expr = expr_of(size)
        known = all(str(s) in self.symbols for s in getattr(expr, "free_symbols", ()))
        return size_code(expr) if known else None

    # -- driver --------------------------------------------------------------------------------------------------

    def driver(self) -> str:
        lines = ["def run(A, S, F):  # arguments, real sizes, frame", f"    {self.unpacked('S')}", "    F.fill(A)"]
        dead = self.dead_after()
        for step in self.plan.steps:
            if isinstance(step, CapturedSegment):
                cuts = [f"cut_{i}" for i, c in enumerate(self.plan.cuts) if c.after == step.index]
                target = f"{', '.join(cuts)}, = " if cuts else ""
                lines.append(f"    {target}F.segment({step.index})")
            else:
                rows = (f"F.rows({i})" for i in self.direct(step))
                args = ", ".join([*self.symbols, *(self.ref(r) for _, r in step.inputs), *rows])
                target = f"{', '.join(f'v_{o}' for o in step.outputs)}, = " if step.outputs else ""
                lines.append(f"    {target}step_{step.index}({args})")
            sources = [self.ref(b.source) for b in self.plan.bridges if b.after == step.index]
            if sources:
                lines.append(f"    F.bridge({step.index}, ({', '.join(sources)},))")
            if dead.get(step.index):
                lines.append(f"    del {', '.join(dead[step.index])}")
        outputs = ", ".join(self.output(o) for o in self.plan.outputs)
        lines.append(f"    return ({outputs}{',' if self.plan.outputs else ''})")
        return "\n".join(lines) + "\n"

    def direct(self, step: CapturedSegment | EagerRegion) -> list[int]:
        """The bridges that a step gets to write into, in place of memory of its own."""
        if isinstance(step, CapturedSegment):
            return []
        made = {op.value for op in step.ops}
        return [i for i, b in enumerate(self.plan.bridges) if b.direct and b.value in made]

    def dead_after(self) -> dict[int, list[str]]:
        """Per step, the driver's values whose last use (or making) it is: eager code would have freed them by then."""
        at: dict[str, int] = {}
        for step in self.plan.steps:
            made = [f"cut_{i}" for i, c in enumerate(self.plan.cuts) if c.after == step.index]
            made += [f"v_{o}" for o in step.outputs] if isinstance(step, EagerRegion) else []
            used = [] if isinstance(step, CapturedSegment) else [self.ref(r) for _, r in step.inputs]
            used += [self.ref(b.source) for b in self.plan.bridges if b.after == step.index]
            at.update({name: step.index for name in (*made, *used) if name in at or name in made})
        for out in self.plan.outputs:
            if out.ref is not None:
                at.pop(self.ref(out.ref), None)
        found: dict[int, list[str]] = {}
        for name, index in at.items():
            found.setdefault(index, []).append(name)
        return found

    def unpacked(self, source: str) -> str:
        return f"({', '.join(self.symbols)},) = {source}" if self.symbols else "pass"

    def ref(self, ref: Ref) -> str:
        if ref.kind == "arg":
            return f"A[{ref.key}]"
        if ref.kind == "const":
            return self.bind(self.normal.constants[str(ref.key)], str(ref.key))
        return {"cut": f"cut_{ref.key}", "eager": f"v_{ref.key}", "count": f"F.counts[{ref.key}]"}[ref.kind]

    def output(self, out: Any) -> str:
        if out.ref is not None:
            text = self.ref(out.ref)
            return f"F.own({text})" if out.check else text
        return f"({size_code(out.size)})" if out.size is not None else self.text(out.literal)

    def sizes(self) -> str:
        reads = [f"A[{s.arg}]" if s.dim is None else f"A[{s.arg}].size({s.dim})" for s in self.plan.symbols]
        return f"def sizes_of(A):\n    return ({', '.join(f'int({r})' for r in reads)}{',' if reads else ''})\n"
