"""Trace small functions symbolically and run what the padding proof calls safe, padded and unpadded, side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_graph_backend.passes.alias import hidden_writes, is_random
from torch_graph_backend.passes.layout import Layout, expr_of
from torch_graph_backend.passes.padding import PaddingResult, analyse
from torch_graph_backend.passes.padding_rules_declared import PROMISED
from torch_graph_backend.passes.padding_tails import STALE, Tail

HINT = {"T": 7, "B": 5}
REAL = {"T": 5, "B": 3}
BUCKET = {"T": 10, "B": 6}
#: The one promised argument name.
PROMISE = "promised by the padding harness"
PROMISED[PROMISE] = None
FILLS = ("row0", "random", "nan")
#: What a tail that is kept holds.
JUNK = 1000


class SpecialisedError(AssertionError):
    """Tracing fixed a size (no pass of ours has run)."""


class EagerFailsError(Exception):
    """The function itself does not run at the real size, so there is nothing to compare with."""


@dataclass
class Traced:
    """A traced function: its graph, the symbol of every name, and what the proof says."""

    gm: GraphModule
    symbols: dict[str, sympy.Symbol]
    result: PaddingResult
    eager: frozenset[Node] = frozenset()

    def refused(self) -> dict[str, str]:
        """Refused nodes: packet name -> reason code."""
        names = {
            n: getattr(getattr(n.target, "overloadpacket", n.target), "__name__", str(n.target))
            for n in self.result.reasons
        }
        return {names[n]: reason.code for n, reason in self.result.reasons.items()}


def parse(spec: str) -> tuple[list[str | int], str]:
    """``"i:B,T,8"`` -> dims and kind: ``f`` float, ``i`` index below 4, ``x`` promised index 4 to 7, ``b`` boolean.

    ``t5``: an index below 4 whose padded entries are declared to be 5; ``k``: one whose padded entries are kept.
    """
    kind, _, dims = spec.rpartition(":")
    return [d if d.isalpha() else int(d) for d in dims.split(",") if d], kind or "f"


def tensor(spec: str, sizes: dict[str, int], seed: int) -> torch.Tensor:
    """A real tensor of a spec."""
    dims, kind = parse(spec)
    shape = [sizes[d] if isinstance(d, str) else d for d in dims]
    generator = torch.Generator().manual_seed(seed)
    if kind == "x":
        return torch.randint(4, 8, shape, generator=generator)
    if kind == "i" or kind[0] in "tk":
        return torch.randint(0, 4, shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    return values > 0 if kind == "b" else values


def trace(function: Callable[..., object], specs: Sequence[str]) -> tuple[GraphModule, dict[str, sympy.Symbol]]:
    """The pre-dispatch graph over fake tensors with symbolic sizes, and the symbols by name."""
    tensors = [tensor(spec, HINT, i) for i, spec in enumerate(specs)]
    names = [{k: d for k, d in enumerate(parse(spec)[0]) if isinstance(d, str)} for spec in specs]
    gm, symbols = trace_tensors(function, tensors, names)
    for node, spec in zip(gm.graph.find_nodes(op="placeholder"), specs, strict=True):
        kind = parse(spec)[1]
        node.meta["source"] = PROMISE if kind == "x" else ""
        if kind[0] in "tk":
            node.meta["tail"] = STALE if kind == "k" else Tail(int(kind[1:]))
    return gm, symbols


def trace_tensors(
    function: Callable[..., object], tensors: Sequence[torch.Tensor], names: Sequence[dict[int, str]]
) -> tuple[GraphModule, dict[str, sympy.Symbol]]:
    """As ``trace``, for given tensors; ``names`` has the dynamic dimensions of each, and what they are called."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes, symbols = [], {}
    for i, (value, dims) in enumerate(zip(tensors, names, strict=True)):
        dynamic = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(value.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=dynamic, constraint_sizes=[None] * value.dim())
        fakes.append(mode.from_tensor(value, symbolic_context=context, source=ConstantSource(f"a{i}")))
    with mode, enable_python_dispatcher():
        gm = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    for fake, dims in zip(fakes, names, strict=True):  # after tracing, so that a specialised size shows
        symbols |= {name: expr_of(fake.shape[d]) for d, name in dims.items()}
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and "val" not in node.meta:
            gm.graph.erase_node(node)  # left behind by an operation that raised
    if not all(isinstance(s, sympy.Symbol) for s in symbols.values()):
        raise SpecialisedError("the function specialised a size")
    gm.meta["guards"] = tuple(guard.expr for guard in mode.shape_env.guards)
    return gm, symbols


def written_values(gm: GraphModule) -> set[Node]:
    """Tensor nodes that share memory with something written (over-approximated: whole alias chains)."""
    base: dict[Node, Node] = {}
    written: set[Node] = set()

    def root(node: Node) -> Node:
        while node in base:
            node = base[node]
        return node

    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.all_input_nodes:
            continue
        if any(r.alias_info for r in schema.returns):
            base[node] = node.all_input_nodes[0]
        if schema.is_mutable:
            written.add(root(node.args[0]))
    return {node for node in gm.graph.nodes if root(node) in written}


def prove(function: Callable[..., object], specs: Sequence[str]) -> Traced:
    """Trace and analyse."""
    gm, symbols = trace(function, specs)
    return analysed(gm, symbols)


def analysed(gm: GraphModule, symbols: dict[str, sympy.Symbol], random_is_eager: bool = False) -> Traced:
    """What the proof says of a traced graph; with ``random_is_eager`` random operations are never asked about."""
    eager = frozenset(n for n in gm.graph.nodes if random_is_eager and n.op == "call_function" and is_random(n))
    result = analyse(gm.graph, list(symbols.values()), eager=dict.fromkeys(eager), mutated=written_values(gm))
    return Traced(gm, symbols, result, eager)


def evaluate(expr: object, sizes: dict[sympy.Symbol, int]) -> object:
    """A size expression as a Python number."""
    value = sympy.sympify(expr).subs(sizes)
    if value in (sympy.true, sympy.false):
        return bool(value)
    if not value.is_number:
        raise EagerFailsError(f"{expr} holds a symbol that tracing has replaced")
    return int(value) if value.is_Integer else float(value)


def cut(
    value: torch.Tensor, layouts: dict[sympy.Symbol, Layout], real: dict, bucket: dict, whole: bool
) -> torch.Tensor:
    """The real rows of a padded tensor, read off its layouts, symbol after symbol (``whole``: loose ones too)."""
    sizes = dict(bucket)
    for symbol, layout in layouts.items():
        for d, axis in layout.axes:
            outer, inner = evaluate(axis.outer, sizes), evaluate(axis.inner, sizes)
            rows = axis.count(symbol)
            kept = evaluate(rows, {**sizes, symbol: real[symbol]}) - (0 if whole else axis.loose)
            parts = value.unflatten(d, (outer, evaluate(rows, sizes), inner)).narrow(d + 1, 0, kept)
            value = parts.flatten(d, d + 2)
        sizes[symbol] = real[symbol]
    return value


def fill(
    value: torch.Tensor, layouts: dict[sympy.Symbol, Layout], bucket: dict, how: str, declared: Tail | None = None
) -> torch.Tensor:
    """A tensor padded from outside: row 0 repeated, or junk (indices and booleans always repeat row 0); or as declared,
    where a tail that is kept holds an index that no table has."""
    for symbol, layout in layouts.items():
        for d, _ in layout.axes:
            extra = bucket[symbol] - value.shape[d]
            tail = value.narrow(d, 0, 1).expand(*[extra if k == d else -1 for k in range(value.dim())]).clone()
            if declared is not None:
                tail.fill_(JUNK if declared.value is None else declared.value)
            elif how != "row0" and value.is_floating_point():
                tail = torch.full_like(tail, float("nan")) if how == "nan" else torch.randn_like(tail) * 1e4
            value = torch.cat([value, tail], d)
    return value.clone()


def check(traced: Traced, specs: Sequence[str], how: str) -> int:
    """``check_tensors`` on tensors of the specs at the usual sizes."""
    inputs = [tensor(spec, REAL, i) for i, spec in enumerate(specs)]
    return check_tensors(traced, inputs, REAL, BUCKET, how)


def valid_at(traced: Traced, bucket: dict[str, int]) -> bool:
    """Whether the traced code and the conditions of the proof allow the bucket's sizes (else the key is refused)."""
    sizes = {s: bucket[name] for name, s in traced.symbols.items()}
    conditions = [c for found in traced.result.obligations.values() for c in found]
    return all(evaluate(c, sizes) for c in [*conditions, *traced.gm.meta.get("guards", ())])


def check_tensors(
    traced: Traced, tensors: Sequence[torch.Tensor], real_sizes: dict, bucket_sizes: dict, how: str
) -> int:
    """Run at the real sizes and at the bucket in lockstep; every safe node must agree on real rows.

    Returns how many results were compared. A refused node runs on real rows and is padded again. The run stops at a
    refused write, and at a write through a refused view: what they do to memory is the runtime's matter.
    """
    real = {s: real_sizes[name] for name, s in traced.symbols.items()}
    bucket = {s: bucket_sizes[name] for name, s in traced.symbols.items()}
    env_n: dict[Node, object] = {}
    env_b: dict[Node, object] = {}
    inputs = iter(tensors)
    checked = 0
    detached: set[Node] = set()  # refused views, and views of them
    for node in traced.gm.graph.nodes:
        layouts = traced.result.layouts.get(node, ())
        val = node.meta.get("val")
        if node.op == "output":
            break
        if node.op == "placeholder":
            env_n[node] = next(inputs).clone()
            env_b[node] = fill(env_n[node], layouts[0], bucket, how, node.meta.get("tail"))
            continue
        if node.op == "get_attr":
            env_n[node] = env_b[node] = getattr(traced.gm, node.target)
            continue
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            env_n[node], env_b[node] = evaluate(val.node.expr, real), evaluate(val.node.expr, bucket)
            continue
        try:
            env_n[node] = run(node, env_n)
        except (RuntimeError, IndexError) as error:
            raise EagerFailsError(node.format_node()) from error
        schema = getattr(node.target, "_schema", None)
        if node.target is operator.getitem and node.args[0] in detached:
            detached.add(node)
        if schema is not None and node.all_input_nodes:
            if schema.is_mutable and node.args[0] in detached:
                return checked
            refused = node in traced.result.reasons or node.all_input_nodes[0] in detached
            if refused and any(r.alias_info for r in schema.returns):
                detached.add(node)
        if node in traced.result.reasons or node in traced.eager:
            if getattr(getattr(node.target, "_schema", None), "is_mutable", False) or hidden_writes(node):
                return checked
            env_b[node] = padded(env_n[node], layouts, bucket, how)
            continue
        try:
            env_b[node] = run(node, env_b)
        except (RuntimeError, IndexError):
            if how == "row0":
                raise
            return checked  # positions computed from junk may be none: the proof promises a range to copies of row 0
        for got, want, layout in zip(parts(env_b[node]), parts(env_n[node]), layouts, strict=False):
            if isinstance(want, torch.Tensor):
                if len(layout) < len(real):
                    env_b[node] = env_n[node]
                    continue
                compare(got, want, layout, real, bucket, node)
                checked += 1
    (output,) = traced.gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:  # the caller gets every row, also those that the claim leaves out
        if node not in traced.result.reasons and len(traced.result.layouts[node]) == 1 and node in env_b:
            compare(env_b[node], env_n[node], traced.result.layouts[node][0], real, bucket, node, whole=True)
    for node in traced.gm.graph.find_nodes(op="placeholder"):
        compare(env_b[node], env_n[node], traced.result.layouts[node][0], real, bucket, node)
    return checked


def check_all(traced: Traced, specs: Sequence[str]) -> list[int]:
    """``check`` under every fill (not at all where the bucket would be refused, or the real size has another graph)."""
    return [check(traced, specs, how) for how in FILLS] if valid_at(traced, BUCKET) and valid_at(traced, REAL) else []


def parts(value: object) -> Sequence[object]:
    return value if isinstance(value, (tuple, list)) else (value,)


def run(node: Node, env: dict[Node, object]) -> object:
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
    return node.target(*args, **kwargs)


def padded(value: object, layouts: Sequence[dict], bucket: dict, how: str) -> object:
    """A refused node's result on real rows, padded from outside where it can be."""

    def one(part: object, layout: dict) -> object:
        whole = isinstance(part, torch.Tensor) and len(layout) == len(bucket)
        return fill(part, layout, bucket, how) if whole else part

    if isinstance(value, (tuple, list)):
        if len(value) != len(layouts):
            raise EagerFailsError("the number of results differs from the traced one")
        return [one(p, layout) for p, layout in zip(value, layouts, strict=True)]
    return one(value, layouts[0]) if layouts else value


def compare(got: object, want: object, layout: dict, real: dict, bucket: dict, node: Node, whole: bool = False) -> None:
    """The real rows of ``got`` are ``want``; without ``whole``, those that the claim leaves out are not looked at."""
    if not isinstance(want, torch.Tensor) or len(layout) < len(real):
        return
    kept = cut(got, layout, real, bucket, whole)
    for found in layout.values() if not whole else ():
        for d, axis in found.axes:
            want = want.narrow(d, 0, want.shape[d] - axis.loose)  # what the claim leaves out
    torch.testing.assert_close(
        kept, want, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m: f"{node.format_node()}\n{m}"
    )
