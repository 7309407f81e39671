"""Warming up break ops before a key is recorded ahead: ``break_op(..., warmup=...)``.

Contract (C2). No break op runs for real. One that has a ``warmup`` gets that called in its place, once for each set of
shapes in a key: its tensors are zeros of the bucket's shapes and strides, in memory of their own; but a tensor of the
caller's without a padded size (a weight, a cache), which is given as it is unless the op changes it. Sizes are the
bucket's. What the call returns is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from torch_graph_backend.break_define import BreakOp, defined
from torch_graph_backend.break_self import instance
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.capturable import tensors_of
from torch_graph_backend.passes.symbols import expr_of
from torch_graph_backend.plan import EagerRegion
from torch_graph_backend.plan_build import spec_of
from torch_graph_backend.slots import buffer_strides, evaluate

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry


def warm_breaks(entry: Entry, step: EagerRegion, args: Sequence[Any], seen: set[Any]) -> None:
    """Call the warm-ups of a region's break ops; ``seen`` holds what was warmed up already."""
    for op, node in _with_warmup(entry, step):
        try:
            given, kwargs = _Arguments(entry, op, args).of(node)
        except _UnknownSizeError:
            log.debug("%s is not warmed up: a size of its arguments is known from data alone", op.name)
            continue
        what = op.name, given[0] if op.method else None, tuple(map(_look, tensors_of([*given, *kwargs.values()])))
        if what in seen:
            continue
        seen.add(what)
        assert op.warmup is not None
        if op.method:
            given[0] = instance(given[0], op.name)
        op.warmup(*given, **kwargs)


def _with_warmup(entry: Entry, step: EagerRegion) -> Iterator[tuple[BreakOp, Node]]:
    wanted = {line.value for line in step.ops}
    for node in entry.normal.graph.nodes:
        op = defined(node.target) if node.name in wanted else None
        if op is not None and op.warmup is not None:
            yield op, node


def _look(t: torch.Tensor) -> Any:
    return tuple(t.shape), t.stride(), t.dtype


class _UnknownSizeError(Exception):
    """A size that no argument tells."""


class _Arguments:
    """The arguments of one break op at a bucket."""

    def __init__(self, entry: Entry, op: BreakOp, args: Sequence[Any]) -> None:
        self.entry, self.op, self.args = entry, op, args
        self.padded = {s.symbol for s in entry.plan.bucketed}

    def of(self, node: Node) -> tuple[list[Any], dict[str, Any]]:
        names = [a.name for a in self.op.overload._schema.arguments]
        given = [self.value(a, name) for a, name in zip(node.args, names, strict=False)]
        return given, {name: self.value(a, name) for name, a in node.kwargs.items()}

    def value(self, arg: Any, name: str) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(self.value(a, name) for a in arg)
        fake = arg.meta.get("val") if isinstance(arg, Node) else arg
        if isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size(expr_of(fake))
        if not isinstance(arg, Node) or not isinstance(fake, torch.Tensor):
            return fake
        theirs = arg.op == "placeholder" and not any(expr_of(n).free_symbols & self.padded for n in fake.shape)
        if theirs and name not in self.op.mutates_args:
            return self.args[self.entry.normal.placeholders.index(arg)]
        return self.zeros(fake)

    def size(self, expr: Any) -> int | float:
        if not expr.free_symbols <= self.entry.bucket.keys():
            raise _UnknownSizeError
        return evaluate(expr, self.entry.bucket)

    def zeros(self, fake: torch.Tensor) -> torch.Tensor:
        spec = spec_of(fake)
        for expr in (*spec.shape, *spec.stride):
            self.size(expr)
        shape, stride = buffer_strides(spec, self.entry.bucket)
        return torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device).zero_()
