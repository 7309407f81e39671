"""Per-call checks: may this call run the plan, and on which key? Every check returns ``Reason | None``.

Contract. Dynamo guards sizes and Python state, but not addresses, not strides of dynamic dimensions, and a
placeholder's dtype can lie; what a recording relies on is checked here on every call, without touching tensor data.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_graph_backend.buckets import Ladder
from torch_graph_backend.errors import BadOption
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import FakeTensorMode, dispatch_mode_active, function_mode_active
from torch_graph_backend.plan import Plan, TensorSpec
from torch_graph_backend.plan_build import spec_of
from torch_graph_backend.shape_key import ShapeKey
from torch_graph_backend.slots import Sizes, evaluate

#: How many sizes of a ladder are tried, from the smallest that fits, before a bucket counts as invalid.
_TRIES = 3
#: How many sizes below a rung are tried where the traced code excludes the rung (``n % 8 != 0`` excludes nearly all).
_NEAR = 8


@dataclass(frozen=True)
class Bounds:
    """What Dynamo and the padding proof assumed about sizes: conditions and ranges over bucketed and pinned symbols.

    They hold at the real size; a bucket where one fails would run another branch than the one that was traced
    (``table[:64][:n]`` at n = 72, ``view(-1, 2)`` at an odd size).
    """

    guards: tuple[sympy.Basic, ...]
    ranges: tuple[tuple[sympy.Symbol, Any, Any], ...]

    @staticmethod
    def of(mode: FakeTensorMode | None, symbols: Sequence[sympy.Symbol], conditions: Sequence[sympy.Basic]) -> Bounds:
        env = mode.shape_env if mode is not None else None
        if env is None:
            return Bounds((), ())
        known = set(symbols)
        guards = {g.expr for g in env.guards if g.expr.free_symbols and g.expr.free_symbols <= known} | set(conditions)
        ranges = [(s, r.lower, r.upper) for s, r in env.var_to_range.items() if s in known]
        return Bounds(tuple(sorted(guards, key=str)), tuple(ranges))

    def limit(self, symbol: sympy.Symbol) -> int:
        """The largest size that the traced code allows: the last bucket is cut down to it."""
        upper = next((high for s, _, high in self.ranges if s == symbol), None)
        return int(upper) if isinstance(upper, sympy.Integer) else sys.maxsize

    def allows(self, symbol: sympy.Symbol, size: int) -> bool:
        """Whether the assumptions about this one symbol alone hold at a size."""
        value = sympy.Integer(size)
        in_range = all(low <= value <= high for s, low, high in self.ranges if s == symbol)
        alone = (g for g in self.guards if g.free_symbols == {symbol})
        return in_range and all(g.xreplace({symbol: value}) == sympy.true for g in alone)

    def near(self, symbol: sympy.Symbol, rung: int, least: int) -> int | None:
        """The largest size from ``rung`` down that the traced code allows: not below ``least``, nor far away."""
        below = range(rung, max(least, rung - _NEAR, 1) - 1, -1)
        return next((size for size in below if self.allows(symbol, size)), None)

    def broken_by(self, sizes: Sizes) -> Reason | None:
        """The first assumption that fails at these sizes."""
        values = {s: sympy.Integer(v) for s, v in sizes.items()}
        for symbol, lower, upper in self.ranges:
            if not (lower <= values[symbol] <= upper):
                return Reason("bucket-invalid", f"{symbol} = {values[symbol]} is outside {lower}..{upper}")
        for guard in self.guards:
            if guard.xreplace(values) != sympy.true:
                return Reason("bucket-invalid", f"the traced code assumes {guard}, which fails at {dict(sizes)}")
        return None


class Keys:
    """Real sizes -> key. ``pick`` returns the key and the bucket's sizes, or the reason why there is none."""

    def __init__(self, plan: Plan, ladders: Sequence[Ladder], bounds: Bounds) -> None:
        self.plan, self.ladders, self.bounds = plan, ladders, bounds
        index = {s.symbol: i for i, s in enumerate(plan.symbols)}
        self.bucketed = [index[s.symbol] for s in plan.bucketed]
        self.pinned = [index[s.symbol] for s in plan.exact_in_key]
        self.cache: dict[tuple[int, ...], tuple[ShapeKey, tuple[int, ...]] | Reason] = {}

    def pick(self, sizes: tuple[int, ...]) -> tuple[ShapeKey, tuple[int, ...]] | Reason:
        """Cached by the sizes that matter to the key; exact sizes do not."""
        what = tuple(sizes[i] for i in (*self.bucketed, *self.pinned))
        found = self.cache.get(what)
        if found is None:
            found = self.cache[what] = self._pick(sizes)
        return found

    def choices(self, wished: Sequence[Any] | None, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Real sizes of the bucketed symbols to record ahead: those wished for (an int means every bucketed symbol), or
        all rungs up to the ones of ``sizes``."""
        if wished is not None:
            found = [tuple(w) if isinstance(w, (tuple, list)) else (w,) * len(self.bucketed) for w in wished]
            for choice in found:
                if len(choice) != len(self.bucketed):
                    raise BadOption("sizes", choice, f"an int or a tuple of {len(self.bucketed)} ints")
            return found
        rungs = []
        for i, ladder in zip(self.bucketed, self.ladders, strict=True):
            top, symbol = ladder.pick(sizes[i]) or 0, self.plan.symbols[i].symbol
            steps = list(itertools.pairwise((0, *(s for s in ladder.sizes if s <= top))))
            rungs.append([self.bounds.near(symbol, rung, below + 1) or rung for below, rung in steps])
        return list(itertools.product(*rungs))

    def _pick(self, sizes: tuple[int, ...]) -> tuple[ShapeKey, tuple[int, ...]] | Reason:
        options = []
        for i, ladder in zip(self.bucketed, self.ladders, strict=True):
            name, n = self.plan.symbols[i].source, sizes[i]
            if n <= 0:
                return Reason("zero-size", f"{name} is {n}")
            first = ladder.pick(n)
            if first is None:
                if ladder.exact and n <= ladder.largest:
                    text = f"{name} is {n}, which is not listed, and padding is 'exact'"
                    return Reason("size-not-listed", text, fix="list the size in options['buckets'], or allow padding")
                text = f"{name} is {n}, the largest bucket is {ladder.largest}"
                return Reason("beyond-largest-bucket", text, fix="list a larger size in options['buckets']")
            options.append(self._candidates(self.plan.symbols[i].symbol, ladder, n, first))
        pinned = tuple(sizes[i] for i in self.pinned)
        broken: Reason | None = None
        for choice in itertools.product(*options):
            bucket = self._bucket(choice, pinned)
            problem = self.bounds.broken_by(bucket)
            if problem is None:
                return ShapeKey.of(choice, pinned), choice
            broken = broken or problem
        assert broken is not None
        return broken

    def _candidates(self, symbol: sympy.Symbol, ladder: Ladder, n: int, first: int) -> list[int]:
        """Sizes to try for ``n`` rows, best first: the next rungs, sizes just below them where the traced code excludes
        the rungs, last of all the exact size, which the traced code was made for."""
        at = ladder.sizes.index(first) if first in ladder.sizes else None
        rungs = [first] if at is None else ladder.sizes[at : at + _TRIES]
        limit = self.bounds.limit(symbol)
        found = [min(b, max(limit, n)) for b in rungs]
        if not ladder.exact and not any(self.bounds.allows(symbol, b) for b in found):
            found += [size for b in found if (size := self.bounds.near(symbol, b, n)) is not None]
        return list(dict.fromkeys([*found, n]))

    def _bucket(self, choice: Sequence[int], pinned: Sequence[int]) -> dict[sympy.Symbol, int]:
        which = [*self.bucketed, *self.pinned]
        return {self.plan.symbols[i].symbol: v for i, v in zip(which, (*choice, *pinned), strict=True)}


class Inputs:
    """What the arguments must look like, beyond what Dynamo guards."""

    def __init__(self, plan: Plan, normal: NormalGraph, written: Sequence[int]) -> None:
        self.plan, self.written = plan, frozenset(written)
        values = [p.meta.get("val") for p in normal.placeholders]
        self.specs = {i: spec_of(v) for i, v in enumerate(values) if isinstance(v, torch.Tensor) and _strided(v)}
        self.aliases: tuple[Any, Reason | None] = (None, None)
        self.expected: dict[tuple[int, ...], list[tuple[int, Any, Any, tuple[int, ...], tuple[int, ...]]]] = {}

    def slot_reason(self, args: Sequence[Any], sizes: tuple[int, ...]) -> Reason | None:
        """Dtype, device, shape and strides of every argument that goes into a slot."""
        expected = self.expected.get(sizes)
        if expected is None:
            if len(self.expected) > 1024:
                self.expected.clear()
            expected = self.expected[sizes] = self._expected([s.arg for s in self.plan.slots], sizes)
        return self._check(args, expected)

    def pinned_reason(self, args: Sequence[Any], sizes: tuple[int, ...]) -> Reason | None:
        """The same for pinned arguments; asked when they are pinned, afterwards only addresses are compared."""
        return self._check(args, self._expected(self.plan.pinned, sizes))

    def _expected(self, which: Sequence[int], sizes: tuple[int, ...]) -> list[Any]:
        at = {s.symbol: v for s, v in zip(self.plan.symbols, sizes, strict=True)}
        return [(i, sp.dtype, sp.device, *_dims(sp, at)) for i in which if (sp := self.specs.get(i)) is not None]

    def _check(self, args: Sequence[Any], expected: list[Any]) -> Reason | None:
        for i, dtype, device, shape, stride in expected:
            t = args[i]
            if t.dtype is not dtype:
                return self._differs("input-dtype", i, t.dtype, dtype)
            if t.device != device:
                return self._differs("input-device", i, t.device, device)
            if t.layout is not torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter):
                return self._differs("input-layout", i, f"{type(t).__name__}, {t.layout}", "a plain strided tensor")
            if t.shape != shape:
                return self._differs("input-shape", i, tuple(t.shape), shape)
            got = t.stride()
            if got != stride and any(n > 1 and a != b for n, a, b in zip(shape, got, stride, strict=True)):
                return self._differs("input-strides", i, got, stride)
        return None

    def _differs(self, code: str, arg: int, got: Any, expected: Any) -> Reason:
        return Reason(code, f"{self.plan.placeholders[arg]} has {got}, the graph was compiled for {expected}")

    def alias_reason(self, args: Sequence[Any], sizes: tuple[int, ...], skip: Collection[int] = ()) -> Reason | None:
        """An argument that the graph changes must not overlap any other (Dynamo does not guard overlaps).

        The answer is kept while all addresses and sizes stay the same. ``skip``: arguments that lie nowhere yet.
        """
        if not self.written:
            return None
        which = [
            i for i in self.specs if i not in skip and not hasattr(args[i], "__tensor_flatten__")
        ]  # those have no memory of their own
        key = (sizes, tuple([args[i].data_ptr() for i in which]))
        if key != self.aliases[0]:
            self.aliases = (key, self._overlap(args, which))
        return self.aliases[1]

    def _overlap(self, args: Sequence[Any], which: Sequence[int]) -> Reason | None:
        extents = ((*_extent(args[i]), i) for i in which if args[i].layout is torch.strided and args[i].numel())
        found = overlap(extents, self.written)
        if found is None:
            return None
        changed, other = (self.plan.placeholders[i] for i in found)
        text = f"{changed}, which the graph changes, overlaps {other}"
        return Reason("aliased-inputs", text, fix="pass tensors that do not share memory")


def overlap(extents: Iterable[tuple[int, int, int]], written: Set[int]) -> tuple[int, int] | None:
    """One of ``written`` and another tensor that overlap, from (first byte, one past the last, number).

    By address alone: two storages can share memory too (NumPy, DLPack).
    """
    reach: dict[bool, tuple[int, int]] = {}  # by whether it is written: the furthest end so far, and whose it is
    for start, end, j in sorted(extents):
        changed = j in written
        for kind, (high, i) in reach.items():
            if start < high and (changed or kind):
                return (i, j) if kind else (j, i)
        reach[changed] = max(reach.get(changed, (end, j)), (end, j))
    return None


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _dims(spec: TensorSpec, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(evaluate(s, sizes) for s in spec.shape), tuple(evaluate(s, sizes) for s in spec.stride)


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte, and one past the last byte, that a tensor with entries can touch."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + int(span) * t.element_size()


def grad_reason(args: Sequence[Any], turns_grad_on: bool) -> Reason | None:
    """Gradients are answered by eager code until training is supported."""
    if not (torch.is_grad_enabled() or turns_grad_on):
        return None
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        fix = "call the model under torch.no_grad() or torch.inference_mode()"
        return Reason("grad", "an argument or parameter requires grad, and gradients are enabled", fix=fix)
    return None


def mode_reason(takes_ambient_device: bool = False) -> Reason | None:
    """A dispatch mode (a FLOP counter, a profiler of ops) must see every operation, and a default device those that
    make tensors wherever it is."""
    if dispatch_mode_active():
        return Reason("dispatch-mode", "a TorchDispatchMode is active and must see every operation")
    if takes_ambient_device and function_mode_active():
        return Reason("dispatch-mode", "a default device or another TorchFunctionMode decides where tensors are made")
    return None
