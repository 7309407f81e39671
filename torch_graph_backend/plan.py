"""The Plan: what one compiled graph will do, as plain frozen data.

Contract. No tensors and no fx nodes inside: a Plan prints, hashes, compares, pickles and needs no GPU. Values are
named by their node; sizes are sympy expressions over the graph's symbols. ``Slot`` is a static buffer for an argument
that a captured segment reads, ``Bridge`` one for an eager result that a captured segment reads, ``Cut`` the real rows
of a captured value for eager code or for the caller. ``plan_build`` makes it; ``codegen`` and ``runner`` execute it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.symbols import SymbolInfo
from torch_graph_backend.policies import PaddingPolicy

#: Where padding is in one tensor: ((dim, ((rows, outer, inner), ...)), ...); the dim is [outer][rows][inner]. ``rows``
#: is the symbol, or an expression of it alone.
Padding = tuple[tuple[int, tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr], ...]], ...]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by metadata: sizes and strides (elements) as expressions, and where its padding is."""

    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    device: torch.device
    padding: Padding = ()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Ref:
    """Where a step gets a value. ``kind``: ``arg`` (the caller's), ``slot``, ``count``, ``bridge``, ``cut`` (indices
    into the plan), ``static`` (a captured value in static memory), ``eager`` (an eager result), ``const``."""

    kind: str
    key: str | int

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


@dataclass(frozen=True)
class Slot:
    """Static buffer of an argument: filled with the real rows before a replay, its tail as ``policy`` says (with
    ``pad_value``, where the policy has a value)."""

    arg: int
    name: str
    spec: TensorSpec
    policy: PaddingPolicy = PaddingPolicy.REPEAT_ROW
    pad_value: float | int | bool = 0

    def __str__(self) -> str:
        if self.policy is PaddingPolicy.REPEAT_ROW:
            return f"{self.name} {self.spec}"
        value = f" {self.pad_value}" if self.policy.takes_value else ""
        return f"{self.name} {self.spec} {self.policy.value}{value}"


@dataclass(frozen=True)
class Count:
    """A static tensor of one element, filled with the slots: the real size of a bucketed symbol, or the number that
    argument ``arg``, a CPU tensor without dimensions, holds."""

    name: str
    symbol: sympy.Symbol | None
    arg: int = -1
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Bridge:
    """Static buffer of a value that eager code makes or changes: filled after eager step ``after``.

    ``direct``: eager code allocates it uninitialised for an operation to write to; where strides allow it gets the
    buffer's real rows, and nothing has to be copied.
    """

    value: str
    source: Ref
    after: int
    spec: TensorSpec
    direct: bool = False


@dataclass(frozen=True)
class Cut:
    """The real rows of captured ``value``, taken after captured step ``after``, with eager's strides.

    ``private``: a fresh copy (the caller gets it, or eager code may change it); else a view where strides allow.
    """

    value: str
    after: int
    private: bool
    spec: TensorSpec


@dataclass(frozen=True)
class OpLine:
    """One operation as it prints: its value's name, the op, the user's line, why it is eager (if it is), how it was
    rewritten so that it need not be (if it was), and what declaration of the user it is captured by (if it is)."""

    value: str
    op: str
    where: str
    kernel: bool
    reason: Reason | None = None
    repaired: str = ""
    declared: str = ""


@dataclass(frozen=True)
class Step:
    """A captured segment or an eager region. ``inputs`` are (name, where from); ``outputs`` are used later."""

    index: int
    ops: tuple[OpLine, ...]
    inputs: tuple[tuple[str, Ref], ...]
    outputs: tuple[str, ...]

    @property
    def kernels(self) -> int:
        return sum(op.kernel for op in self.ops)


@dataclass(frozen=True)
class CapturedSegment(Step):
    """Recorded once a key, replayed by one launch. ``writes`` names arguments it changes in place. ``last_reads``: per
    output, the last step that reads its memory, through whatever view (the number of steps: after the last one)."""

    writes: tuple[int, ...] = ()
    last_reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class EagerRegion(Step):
    """Runs on the real rows at every call."""


@dataclass(frozen=True)
class Output:
    """One output of the graph: a ``Ref`` to a cut, an eager result, an argument or a constant; or a size or literal.

    ``check`` asks the runtime to copy it if its memory turns out to be ours.
    """

    ref: Ref | None
    size: sympy.Expr | None = None
    literal: Any = None
    check: bool = False


@dataclass(frozen=True)
class Plan:
    """Ordered steps and the memory between them. ``pinned`` are arguments read in place (compared by address);
    ``mutated`` those of them that segments change. ``conditions`` on sizes must hold at the bucket. ``reason`` is set
    if nothing is captured. ``held``: captured values whose memory the caller gets to see (``outputs="view"``).
    ``counts``: the real sizes, and other numbers, that operations read on the device. ``hoisted``: operations on Python
    values alone, whose results are constants of the plan. ``refused``: declared slots whose padding is not applied, by
    the name of the slot. ``declared``: what the plan takes on the user's word."""

    name: str
    device: torch.device
    symbols: tuple[SymbolInfo, ...]
    steps: tuple[CapturedSegment | EagerRegion, ...]
    slots: tuple[Slot, ...]
    bridges: tuple[Bridge, ...]
    cuts: tuple[Cut, ...]
    pinned: tuple[int, ...]
    mutated: tuple[int, ...]
    outputs: tuple[Output, ...]
    placeholders: tuple[str, ...]
    host_ops: int = 0
    conditions: tuple[sympy.Basic, ...] = ()
    reason: Reason | None = None
    held: tuple[str, ...] = ()
    counts: tuple[Count, ...] = ()
    hoisted: int = 0
    refused: tuple[tuple[str, Reason], ...] = ()
    declared: tuple[str, ...] = ()

    @property
    def segments(self) -> tuple[CapturedSegment, ...]:
        return tuple(s for s in self.steps if isinstance(s, CapturedSegment))

    @property
    def regions(self) -> tuple[EagerRegion, ...]:
        return tuple(s for s in self.steps if isinstance(s, EagerRegion))

    @property
    def bucketed(self) -> tuple[SymbolInfo, ...]:
        return tuple(s for s in self.symbols if s.kind == "bucketed")

    @property
    def exact_in_key(self) -> tuple[SymbolInfo, ...]:
        return tuple(s for s in self.symbols if s.kind == "pinned")

    @property
    def captured_kernels(self) -> int:
        return sum(s.kernels for s in self.segments)

    @property
    def eager_kernels(self) -> int:
        return sum(s.kernels for s in self.regions)

    def eager_ops(self) -> Counter[str]:
        """Eager operations that run a kernel, by op name."""
        return Counter(op.op for s in self.regions for op in s.ops if op.kernel)

    def captured_ops(self) -> Counter[str]:
        """Captured operations, views included, by op name."""
        return Counter(op.op for s in self.segments for op in s.ops)

    def repairs(self) -> Counter[str]:
        """Captured operations that were rewritten, by how."""
        return Counter(op.repaired for s in self.segments for op in s.ops if op.repaired)

    def declared_ops(self) -> tuple[OpLine, ...]:
        """Captured operations that would not be captured as they are without a declared padding: an audit's first."""
        return tuple(op for s in self.segments for op in s.ops if op.declared)

    def reasons(self) -> Counter[str]:
        """Eager operations by reason code."""
        return Counter(op.reason.code for s in self.regions for op in s.ops if op.reason is not None)

    def __str__(self) -> str:
        from torch_graph_backend.plan_text import plan_text

        return plan_text(self)
