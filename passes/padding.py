"""The padding proof: which nodes of an ATen graph give the same real rows at a bucket's size as at the real size.

``analyse`` interprets the graph once over ``layout.Layout``. A node is safe for a symbol if its rule finds where the
padding of its arguments ends up in its result; what a rule cannot place is refused with a ``Reason``. A refused node,
like one that runs eagerly anyway, works on real rows and its result is padded again from outside, so its consumers
start from the natural layout: one refusal never poisons more than its own node.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .layout import INDEPENDENT, Fact, Layout, expr_of, mentions, natural, natural_of, shape_of
from .padding_facts import derive, in_range
from .padding_rules_base import UNBOUNDED, Call, Operand, RefusedError, check_exact
from .padding_rules_declared import TRASH, is_promised
from .padding_rules_table import KNOWN, MAY_ALIAS, SIZE_READS, base_name, find_entry, is_known, unknown
from .padding_state import (
    Outputs,
    PerSymbol,
    TensorState,
    Verdict,
    has_tensor,
    involves,
    knows,
    named,
    size_mentions,
    with_trash,
)
from .padding_tails import Tail, with_tail
from .padding_values import Span, spans
from .padding_views import exposes
from .reasons import Reason
from .torch_api import OpOverload

__all__ = ["KNOWN", "Layout", "PaddingResult", "analyse", "is_known", "natural"]

LAID_OUT = "cannot be laid out"


@dataclass(frozen=True)
class PaddingResult:
    """What ``analyse`` found.

    ``reasons``: the nodes that are not padding-safe for some symbol. ``layouts``: per node, per output tensor (an empty
    mapping where an output is not a tensor), the layout for every symbol; a symbol is missing if the tensor cannot be
    padded for it (``natural`` is ``None``). ``obligations``: conditions on sizes that must hold with every symbol at
    its *bucket*, else the captured node would read out of bounds (``s <= rows`` of a sliced or indexed table).
    """

    reasons: dict[Node, Reason]
    layouts: dict[Node, tuple[dict[sympy.Symbol, Layout], ...]]
    obligations: dict[Node, tuple[sympy.Basic, ...]] = field(default_factory=dict)


def analyse(
    graph: Graph, symbols: Sequence[sympy.Symbol], *, eager: Mapping[Node, object], mutated: Collection[Node]
) -> PaddingResult:
    """Find the padding-safe nodes of a pre-dispatch ATen graph whose ``symbols`` are bucketed.

    ``eager``: nodes that run on real rows whatever is found here. ``mutated``: tensor values whose memory, or an alias
    of it, is written by some operation of the graph; their content is never taken for constant.
    """
    escaped: dict[Node, Reason] = {}
    while True:
        worker = _Interpreter(tuple(symbols), eager, frozenset(mutated), escaped)
        result = worker.run(graph)
        found = worker.escaping()
        if not found:
            return result
        escaped |= found


class _Interpreter:
    """One forward pass over a graph. All state is per call; verdicts are shared between structurally equal nodes."""

    def __init__(
        self,
        symbols: tuple[sympy.Symbol, ...],
        eager: Mapping[Node, object],
        mutated: frozenset[Node],
        escaped: Mapping[Node, Reason],
    ):
        self.symbols = symbols
        self.eager = eager
        self.mutated = mutated
        self.escaped = escaped
        self.values: dict[Node, Outputs] = {}
        self.sizes: dict[Node, sympy.Expr] = {}
        self.windows: set[Node] = set()
        self.memo: dict[object, Verdict] = {}
        self.result = PaddingResult({}, {}, {})
        self.first: dict[Node, Node] = {}
        self.float_bound = False

    def run(self, graph: Graph) -> PaddingResult:
        for node in graph.nodes:
            if node.op == "output":
                self.result.layouts[node] = ()
                continue
            outputs = self.visit(node)
            self.values[node] = outputs
            self.result.layouts[node] = tuple(self.by_symbol(out) for out in outputs)
        return self.result

    def by_symbol(self, tensor: TensorState | None) -> dict[sympy.Symbol, Layout]:
        if tensor is None:
            return {}
        return {s: layout for s, layout in zip(self.symbols, tensor.layouts, strict=True) if layout is not None}

    def visit(self, node: Node) -> Outputs:
        """The values of a node, with its reason recorded if it is refused."""
        val = node.meta.get("val")
        if node.op == "get_attr" and val is None:
            val = getattr(node.graph.owning_module, str(node.target), None)
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            self.sizes[node] = expr_of(val)
        if "real_size" in node.meta:
            return self.count(val, node.meta["real_size"])
        if node.op in ("placeholder", "get_attr"):
            tail = node.meta.get("tail") if node not in self.mutated else None
            return with_trash(self.natural(val, self.given(node, val), tail), node.meta.get(TRASH))
        if node.target is operator.getitem and isinstance(node.args[0], Node) and isinstance(node.args[1], int):
            source = self.values[node.args[0]]
            if node.args[0] in self.first:
                self.first[node] = self.first[node.args[0]]
            if node.args[0] in self.windows:
                self.windows.add(node)
            if isinstance(val, (tuple, list)):  # a list among the results, which no rule makes
                return self.natural(val)
            if isinstance(node.args[0].meta.get("val"), (tuple, list)):
                return (source[node.args[1]],)
        if node in self.eager or node in self.escaped:
            self.track_window(node, ())
            self.first[node] = node
            if node not in self.eager:
                self.result.reasons[node] = self.escaped[node]
            return self.with_spans(node, self.natural(val))
        return self.judge(node, val)

    def natural(self, val: object, span: Span | None = None, tail: Tail | None = None) -> Outputs:
        """Values that are padded from outside, with copies of row 0 or as ``tail`` says."""
        outputs: list[TensorState | None] = []
        for part in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(part, torch.Tensor):
                shape = shape_of(part)
                layouts = tuple(with_tail(natural_of(shape, s), tail) for s in self.symbols)
                outputs.append(TensorState(shape, part.dtype, layouts, span))
            else:
                outputs.append(None)
        return tuple(outputs) if any(outputs) or isinstance(val, (tuple, list)) else ()

    def count(self, val: Any, symbol: sympy.Symbol) -> Outputs:
        """A tensor that holds the real size of a symbol, at the real size and at the bucket alike."""
        known = Layout(fact=Fact("count"))
        return (
            TensorState(shape_of(val), val.dtype, tuple(known if s == symbol else INDEPENDENT for s in self.symbols)),
        )

    def given(self, node: Node, val: object) -> Span | None:
        """What is known of the entries of an argument (the user's promise) or of a constant (its values)."""
        if node in self.mutated or not isinstance(val, torch.Tensor) or val.dtype.is_floating_point:
            return None
        return Span(None) if node.op == "placeholder" and is_promised(node.meta.get("source", "")) else None

    def with_spans(self, node: Node, outputs: Outputs) -> Outputs:
        """The outputs of an eager node with what is known of their values."""
        if not any(outputs) or not isinstance(node.target, OpOverload):
            return outputs
        args = tuple(self.argument(a) for a in node.args)
        kwargs = {name: self.argument(a) for name, a in node.kwargs.items()}
        found = self.spans(node, args, kwargs, outputs)
        return tuple(t and replace(t, span=span) for t, span in zip(outputs, found, strict=True))

    def spans(self, node: Node, args: tuple, kwargs: dict, outputs: Outputs) -> tuple[Span | None, ...]:
        if node in self.mutated or not isinstance(node.target, OpOverload):
            return (None,) * len(outputs)
        dtypes = tuple(None if t is None else t.dtype for t in outputs)
        return spans(node.target, named(node.target, args, kwargs), dtypes)

    def escaping(self) -> dict[Node, Reason]:
        """Captured nodes whose loose entries reach a reader that takes them for real rows."""
        found = {}
        for node, outputs in self.values.items():
            loose = any(axis.loose for t in outputs if t for x in t.layouts if x for _, axis in x.axes)
            if loose and any(u.op == "output" or u in self.eager or u in self.result.reasons for u in node.users):
                text = f"{node.target}: its last entries look past the end of the real rows, and are not cut off"
                found[node] = Reason("padding", text)
        return found

    def judge(self, node: Node, val: object) -> Outputs:
        """Apply the rule of a node, or the memoised verdict of a structurally equal one."""
        fresh = self.natural(val)
        args = tuple(self.argument(a) for a in node.args)
        kwargs = tuple((name, self.argument(a)) for name, a in node.kwargs.items())
        written = self.written(node)
        window = any(a in self.windows for a in written)
        mutable = node in self.mutated
        key = (node.target, args, kwargs, fresh, mutable, window, self.float_bound, "reserved" in node.meta)
        verdict = self.memo.get(key)
        if verdict is None:
            verdict = self.memo[key] = self.verdict(node, args, dict(kwargs), fresh, mutable, window)
        self.float_bound |= verdict.float_bound
        if verdict.reason is not None:
            self.result.reasons[node] = self.traced_back(node, verdict.reason)
        if verdict.obligations:
            self.result.obligations[node] = verdict.obligations
        outputs = tuple(
            None if out is None else TensorState(out.shape, out.dtype, layouts, span)
            for out, layouts, span in zip(fresh, verdict.layouts, verdict.spans, strict=True)
        )
        self.track_window(node, outputs)
        return outputs

    def traced_back(self, node: Node, reason: Reason) -> Reason:
        """The reason, with the first operation of the path that was refused, where this one only follows it."""
        first = next((self.first[a] for a in node.all_input_nodes if a in self.first), None)
        if first is None or LAID_OUT not in reason.text:
            self.first[node] = node
            return reason
        self.first[node] = first
        where = first.meta.get("where")
        return replace(reason, text=f"{reason.text}; it follows {first.target}" + (f" at {where}" if where else ""))

    def argument(self, arg: object) -> object:
        """What a rule may know of an argument: its sizes and layouts, the expression of a size, or a constant."""
        if isinstance(arg, Node):
            if arg in self.sizes:
                return self.sizes[arg]
            values = self.values[arg]
            return (values[0] if len(values) == 1 else values) if values else None
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return expr_of(arg)
        if isinstance(arg, (tuple, list)):
            return tuple(self.argument(a) for a in arg)
        if isinstance(arg, slice):
            return (self.argument(arg.start), self.argument(arg.stop), self.argument(arg.step))
        return tuple(self.argument(a) for a in arg.values()) if isinstance(arg, dict) else arg

    def written(self, node: Node) -> list[Node]:
        """The argument nodes that an operation writes to."""
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            return []
        named: dict[str, Any] = (
            dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
        )
        names = [a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write]
        return [named[name] for name in names if isinstance(named.get(name), Node)]

    def track_window(self, node: Node, outputs: Outputs) -> None:
        """Remember views, and views of them, whose padded entries may be no padding of their memory."""
        op = node.target
        if not isinstance(op, OpOverload):
            aliases = True
        else:
            aliases = any(r.alias_info for r in op._schema.returns) or base_name(op) in MAY_ALIAS
        tensors = [a for a in node.all_input_nodes if self.values.get(a)] if aliases else []
        if any(a in self.windows for a in tensors):
            self.windows.add(node)
        elif tensors and isinstance(op, OpOverload):
            sources = [t.shape for t in self.values[tensors[0]] if t is not None]
            if sources and exposes(node, max(sources, key=len), self.symbols):
                self.windows.add(node)

    def verdict(self, node: Node, args: tuple, kwargs: dict, fresh: Outputs, mutable: bool, window: bool) -> Verdict:
        """Judge a node for every symbol; one refusal resets its layouts for all of them."""
        name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "call")
        known = self.spans(node, args, kwargs, fresh)
        columns, obligations, float_bound = [], [], False
        for i, symbol in enumerate(self.symbols):
            try:
                found, conditions, tainted = self.for_symbol(node, i, symbol, args, kwargs, fresh, window)
            except RefusedError as refused:
                text = f"{name}: {refused.text} (padded size {symbol})"
                layouts = tuple(() if t is None else t.layouts for t in fresh)
                return Verdict(Reason(refused.code, text, fix=refused.fix), layouts, known)
            changes = mutable and any(x.uniform or x.fact for x in found)
            columns.append([replace(x, uniform=False, fact=None) for x in found] if changes else found)
            obligations += conditions
            float_bound |= tainted
        by_output = tuple(tuple(column[k] for column in columns) for k in range(len(fresh)))
        if not all(self.consistent(layouts) for layouts in by_output):
            text = f"{name}: two padded sizes share a dimension, and it is not known which one is outside"
            return Verdict(Reason("derived-size", text), tuple(() if t is None else t.layouts for t in fresh), known)
        return Verdict(None, by_output, known, tuple(dict.fromkeys(obligations)), float_bound)

    def consistent(self, layouts: PerSymbol) -> bool:
        """In a dimension that carries two symbols, exactly one lies outside the other: [B][T] or [T][B].

        Each symbol is judged alone, so a fresh tensor of size B * T has a layout for either, but not for both (unless
        it is uniform: then any will do).
        """
        if all(layout is None or layout.uniform or not layout.axes for layout in layouts):
            return True
        placed: dict[int, list[tuple[sympy.Symbol, sympy.Expr]]] = {}
        for symbol, layout in zip(self.symbols, layouts, strict=True):
            for dim, axis in layout.axes if layout is not None else ():
                placed.setdefault(dim, []).append((symbol, axis.outer))
        for entries in placed.values():
            for k, (a, outer_a) in enumerate(entries):
                for b, outer_b in entries[k + 1 :]:
                    if mentions(outer_a, b) == mentions(outer_b, a):
                        return False
        return True

    def for_symbol(
        self, node: Node, i: int, symbol: sympy.Symbol, args: tuple, kwargs: dict, fresh: Outputs, window: bool
    ) -> tuple[list[Layout], list[sympy.Basic], bool]:
        """The layouts of the outputs for one symbol, the conditions, and whether a float write lost a bound."""
        trivial = [INDEPENDENT] * len(fresh)
        involved = involves((args, tuple(kwargs.values())), symbol)
        involved = involved or knows((args, tuple(kwargs.values())), i)
        if not involved and not any(t is not None and involves(t, symbol) for t in fresh):
            return trivial, [], False
        op = node.target
        entry = find_entry(op)
        reads_size = isinstance(op, OpOverload) and base_name(op) in SIZE_READS
        if not any(fresh) and (reads_size or not has_tensor((args, tuple(kwargs.values())))):
            return trivial, [], False
        if entry is None or not isinstance(op, OpOverload):
            raise unknown(op)
        call = self.bind(op, i, symbol, args, kwargs, fresh)
        call.reserved = "reserved" in node.meta
        for name, value in call.args.items():
            if name not in entry.sizes and size_mentions(value, symbol):
                raise RefusedError("the size itself is used as data")
        if not entry.loose and any(axis.loose for o in call.tensors() for _, axis in o.layout.axes):
            raise RefusedError("reads entries that look past the end of the real rows")
        returned = entry.rule(call)
        layouts = [returned] if isinstance(returned, Layout) else list(returned)
        if len(layouts) != len(fresh):
            raise RefusedError("the result has another structure than its rule expects", "unknown-op")
        layouts, tainted = self.finish(call, layouts, window)
        return layouts, call.obligations, tainted

    @staticmethod
    def bind(op: OpOverload, i: int, symbol: sympy.Symbol, args: tuple, kwargs: dict, fresh: Outputs) -> Call:
        """The arguments by schema name, tensors as this symbol sees them."""

        def seen(value: object) -> object:
            if isinstance(value, TensorState):
                layout = value.layouts[i]
                if layout is None:
                    raise RefusedError(f"an argument of sizes {list(value.shape)} {LAID_OUT}", "derived-size")
                return Operand(value.shape, value.dtype, layout, value.span)
            return tuple(seen(v) for v in value) if isinstance(value, tuple) else value

        bound = {name: seen(value) for name, value in named(op, args, kwargs).items()}
        shapes = tuple(None if t is None else t.shape for t in fresh)
        return Call(op, symbol, bound, shapes, tuple(None if t is None else t.dtype for t in fresh))

    def finish(self, call: Call, layouts: list[Layout], window: bool) -> tuple[list[Layout], bool]:
        """Check the outputs, keep unknown bounds, and hold a written argument to its own layout."""
        operands = call.tensors()
        bounded = any(o.layout.bound is not None for o in operands)
        recast = self.float_bound and any(o.carries and o.dtype.is_floating_point for o in operands)
        for k, layout in enumerate(layouts):
            dtype = call.dtypes[k]
            if dtype is None:
                continue
            whole = not dtype.is_floating_point
            if layout.axes and layout.bound is None and (bounded or (recast and whole)):
                layouts[k] = replace(layout, bound=UNBOUNDED)
            check_exact(call, k, layouts[k])
            fact = derive(call, layouts[k]) if k == 0 else None
            layouts[k] = replace(layouts[k], fact=fact, bound=None if in_range(fact) else layouts[k].bound)
        if not call.op._schema.is_mutable:
            return layouts, False
        target = next(iter(call.args.values()))
        if not isinstance(target, Operand) or len(layouts) != 1:
            raise RefusedError("writes something else than its first argument", "unknown-op")
        return self.write(target, layouts[0], window)

    @staticmethod
    def write(target: Operand, value: Layout, window: bool) -> tuple[list[Layout], bool]:
        """The memory keeps its layout: the value must fit it, and must not smuggle in indices that count on."""
        if window:
            raise RefusedError("padded rows change memory that has no padding")
        if value.axes != target.layout.axes and not value.uniform:
            raise RefusedError("the written rows are padded differently than the memory they go to")
        tainted = value.bound is not None and value.bound != target.layout.bound
        if tainted and not target.dtype.is_floating_point:
            raise RefusedError("indices that count on in padded rows are written to memory")
        return [Layout(target.layout.axes, False, target.layout.bound)], tainted
