"""Eager against compiled, call after call, with every byte that a replay must rewrite spoiled between the calls.

``check_calls`` is what every equality test uses. It compares outputs (values, dtypes, shapes, strides, which memory
they share), arguments after the call, module state after the call, and at the end all earlier outputs once more. It
refuses to pass if the answers were equal only because everything ran eagerly.

The poison. Padding safety means that no padded row reaches a real row, whatever it holds. So the tails are written with
NaN, 1e30 or -1e30 (floats), or with values drawn from the real rows of the same buffer (integers and booleans: they
stay in range, as the contract promises, but are no copy of row 0). Between calls whole buffers are spoiled as well,
which shows a slot or a bridge that is not filled at every replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch_graph_backend as tgb
from torch_graph_backend import registry, slots
from torch_graph_backend.recorders import fill_choice
from torch_graph_backend.runner import CompiledGraph

#: Fills of float tails; ``None`` is the real one (row 0).
POISONS: tuple[float | None, ...] = (float("nan"), 1e30, -1e30, None)

#: What a call is made of: arguments, or a function of the side's own memory (a dict that outlives the call, with the
#: previous output as ``memory["out"]``) that makes them. Each side gets its own copy.
Call = tuple[Any, ...] | Callable[[dict[str, Any]], tuple[Any, ...]]


# -- poison ------------------------------------------------------------------------------------------------------------


class Poison:
    """Writes tails in place of ``slots.fill_tails``; ``value`` is changed by the test from call to call."""

    def __init__(self, seed: int = 0) -> None:
        self.value: float | None = POISONS[0]
        self.generator = torch.Generator().manual_seed(seed)
        self.tails = 0

    def fill_tails(self, targets: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
        for target, row in zip(targets, rows, strict=True):
            self.tails += 1
            if self.value is None:
                target.copy_(row)
            elif target.is_floating_point():
                target.fill_(self.value)
            elif target.dtype is torch.bool:
                target.copy_(torch.randint(0, 2, target.shape, generator=self.generator).bool())
            else:
                target.copy_(self.drawn(target, row))

    def drawn(self, target: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Values drawn element by element from the real rows of the buffer that ``target`` is the tail of."""
        real = real_rows(target, row).flatten()
        if not real.numel():
            return target.clone()
        return real[torch.randint(0, real.numel(), target.shape, generator=self.generator)]

    def spoil(self, state: Sequence[torch.Tensor]) -> None:
        """Overwrite all memory that the next call must write before it reads: slots, bridges, captured values."""
        if self.value is None:
            return
        for graph in registry.all_graphs():
            if graph.plan is None or not graph.entries:
                continue
            keep = {t.untyped_storage().data_ptr() for t in state}
            keep |= {c.untyped_storage().data_ptr() for c in graph.normal.constants.values() if _plain(c)}
            for entry in graph.entries.values():
                for t in (*entry.slots, *entry.counts, *entry.bridges, *entry.static.values()):
                    if _plain(t) and t.untyped_storage().data_ptr() in entry.owned - keep:
                        self._spoil(t)

    def _spoil(self, tensor: torch.Tensor) -> None:
        if 0 in tensor.stride():
            return
        if tensor.dtype is torch.bool:
            tensor.copy_(torch.randint(0, 2, tensor.shape, generator=self.generator).bool())
        else:
            tensor.fill_(self.value if tensor.is_floating_point() else 113)


def real_rows(target: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The real rows in front of a tail, found from where the tail and row 0 lie in their buffer."""
    distance = target.storage_offset() - row.storage_offset()
    dims = [d for d, (a, b) in enumerate(zip(target.stride(), row.stride(), strict=True)) if a != b]
    dims = dims or [d for d, n in enumerate(target.shape) if n == 1 and distance % max(target.stride(d), 1) == 0]
    if len(dims) != 1 or not target.stride(dims[0]):
        return row
    shape = list(target.shape)
    shape[dims[0]] = distance // target.stride(dims[0])
    return target.as_strided(shape, target.stride(), row.storage_offset())


def _plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.layout is torch.strided and not hasattr(value, "__tensor_flatten__")
    )


@contextmanager
def poisoned(seed: int = 0) -> Iterator[Poison]:
    """Every tail that is filled inside is poisoned."""
    poison, real, chosen = Poison(seed), slots.fill_tails, fill_choice.FUSED_FROM
    slots.fill_tails = poison.fill_tails
    fill_choice.FUSED_FROM = None  # one kernel would fill the tails itself
    try:
        yield poison
    finally:
        slots.fill_tails, fill_choice.FUSED_FROM = real, chosen


# -- comparing ---------------------------------------------------------------------------------------------------------


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def compare(got: Any, want: Any, what: str, *, exact: bool = False, tolerance: float = 1e-5) -> None:
    """Two trees of outputs: structure, types, and per tensor dtype, shape, strides, grad flag and values."""
    got_leaves, got_tree = pytree.tree_flatten(got)
    want_leaves, want_tree = pytree.tree_flatten(want)
    assert got_tree == want_tree, f"{what}: structure {got_tree}, eager {want_tree}"
    for i, (a, b) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        where = f"{what}, leaf {i}"
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b), f"{where}: {type(a)}, eager {type(b)}"
            assert a == b, f"{where}: {a!r}, eager {b!r}"
            continue
        compare_tensor(a, b, where, exact, tolerance)


def compare_tensor(got: Any, want: torch.Tensor, where: str, exact: bool, tolerance: float) -> None:
    assert isinstance(got, torch.Tensor), f"{where}: {type(got)}, eager a tensor"
    for name in ("dtype", "device", "shape", "requires_grad", "layout"):
        a, b = getattr(got, name), getattr(want, name)
        assert a == b, f"{where}: {name} {a}, eager {b}"
    if want.layout is torch.strided and want.numel():
        strides = [(a, b) for n, a, b in zip(want.shape, got.stride(), want.stride(), strict=True) if n > 1]
        assert all(a == b for a, b in strides), f"{where}: strides {got.stride()}, eager {want.stride()}"
    got, want = got.detach(), want.detach()
    if want.layout is torch.strided and torch.equal(got, want):  # most of a model's state, at a fraction of the time
        return
    if exact or not want.is_floating_point():
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), f"{where}: not bitwise equal, {error(got, want)}"
        return
    finite = want[want.isfinite()]
    scale = 1.0 + (finite.abs().max().item() if finite.numel() else 0.0)
    close = torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    assert close, f"{where}: {error(got, want)}"


def error(got: torch.Tensor, want: torch.Tensor) -> str:
    difference = (got.double() - want.double()).abs()
    return f"largest difference {difference.nan_to_num(float('inf')).max().item():.3g} in {tuple(want.shape)}"


def sharing(trees: Sequence[Any]) -> list[tuple[int, int]]:
    """Per tensor: which earlier tensor (by index) it shares memory with first, and at what offset in elements.

    Tensors without elements have no memory and share none.
    """
    first: dict[int, int] = {}
    found = []
    for i, t in enumerate(tensors(trees)):
        if not _plain(t) or not t.numel():
            found.append((i, 0))
            continue
        owner = first.setdefault(t.untyped_storage().data_ptr(), i)
        found.append((owner, t.storage_offset() if owner != i else 0))
    return found


# -- the check ---------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What happened: counts over all graphs, how many calls had a bucket above the size, and all outputs."""

    calls: int = 0
    padded: int = 0
    exact: int = 0
    stats: Any = None
    plans: list[Any] = field(default_factory=list)
    got: list[Any] = field(default_factory=list, repr=False)
    want: list[Any] = field(default_factory=list, repr=False)


class Side:
    """One of the two runs: its model, its memory, its arguments."""

    def __init__(self, model: Any, run: Callable[..., Any]) -> None:
        self.model, self.run = model, run
        self.memory: dict[str, Any] = {}
        self.args: tuple[Any, ...] = ()
        self.outputs: list[Any] = []

    @property
    def state(self) -> dict[str, torch.Tensor]:
        if not isinstance(self.model, torch.nn.Module):
            return {}
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def prepare(self, call: Call) -> None:
        self.args = call(self.memory) if callable(call) else copy.deepcopy(call)

    def go(self) -> None:
        out = self.run(*self.args)
        self.memory["out"] = out
        self.outputs.append(out)


def check_calls(
    model: Any,
    calls: Sequence[Call],
    *,
    compiled_kwargs: Mapping[str, Any] | None = None,
    floor: int = 1,
    padded: bool = True,
    eager: Mapping[str, int] | None = None,
    tolerate: Collection[str] = (),
    moves: bool = False,
    tolerance: float = 1e-5,
    poison: Sequence[float | None] = POISONS,
    seed: int = 0,
    bitwise: bool = True,
) -> Report:
    """Run ``calls`` on ``model`` eagerly and compiled, compare everything, and check that graphs did the work.

    ``floor``: at least so many captured kernels in the largest plan. ``padded``: most calls must have padded rows.
    ``eager``: reason codes (with counts) of the calls that are expected to run eagerly; all others must not,
    but for the codes in ``tolerate``, in any number.
    ``bitwise``: calls without padded rows, from equal bits, must give equal bits.
    ``moves``: inputs that segments change may move, so that keys are recorded more than once.
    """
    reference = Side(copy.deepcopy(model), None)  # type: ignore[arg-type]
    reference.run = reference.model
    compiled = Side(model, torch.compile(model, backend="bcg", **(compiled_kwargs or {})))
    report = Report()
    with torch.no_grad(), poisoned(seed) as poisoning:
        for i, call in enumerate(calls):
            poisoning.value = poison[i % len(poison)]
            for side in (reference, compiled):
                side.prepare(call)
            poisoning.spoil([*tensors([compiled.args, compiled.memory, compiled.outputs]), *compiled.state.values()])
            before = _rows()
            same = _same_start(compiled, reference)
            reference.go()
            compiled.go()
            exact = _count_rows(report, before)
            _compare_call(compiled, reference, f"call {i}", exact and same and bitwise, tolerance)
        for i, (got, want) in enumerate(zip(compiled.outputs, reference.outputs, strict=True)):
            compare(got, want, f"output of call {i}, looked at after the last call", tolerance=tolerance)
        report.stats, report.plans = tgb.stats(), tgb.plans()
        report.got, report.want = compiled.outputs, reference.outputs
        _check_counts(report, floor, padded, dict(eager or {}), tolerate, moves)
    return report


def _same_start(compiled: Side, reference: Side) -> bool:
    """Whether both sides start a call from the same bits (an earlier padded call may have left another last digit)."""
    pairs = zip(*(tensors([s.args, s.state]) for s in (compiled, reference)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _compare_call(compiled: Side, reference: Side, what: str, exact: bool, tolerance: float) -> None:
    kind = {"exact": exact, "tolerance": tolerance}
    compare(compiled.outputs[-1], reference.outputs[-1], f"{what}: output", **kind)  # type: ignore[arg-type]
    compare(compiled.args, reference.args, f"{what}: arguments", **kind)  # type: ignore[arg-type]
    compare(compiled.state, reference.state, f"{what}: state", **kind)  # type: ignore[arg-type]
    shared = [sharing([s.args, s.state, s.outputs[-1]]) for s in (compiled, reference)]
    assert shared[0] == shared[1], (
        f"{what}: memory shared by arguments, state and outputs: {shared[0]}, eager {shared[1]}"
    )


def _rows() -> dict[CompiledGraph, tuple[int, int, int]]:
    graphs = registry.all_graphs()
    return {g: (g.ledger.rows_real, g.ledger.rows_computed, sum(g.ledger.eager.values())) for g in graphs}


def _count_rows(report: Report, before: Mapping[CompiledGraph, tuple[int, int, int]]) -> bool:
    """Count one call as padded or exact; whether every graph of it ran at its own size."""
    padded = False
    for graph, (real, computed, _) in _rows().items():
        old_real, old_computed, _ = before.get(graph, (0, 0, 0))
        padded |= computed - old_computed > real - old_real
    report.calls += 1
    report.padded += padded
    report.exact += not padded
    return not padded


def _check_counts(
    report: Report, floor: int, padded: bool, eager: dict[str, int], tolerate: Collection[str], moves: bool
) -> None:
    stats = report.stats
    text = "\n".join([str(stats), *map(str, report.plans)])
    found = {code: n for code, n in stats.eager.items() if code not in tolerate}
    assert found == eager, f"eager calls {found}, expected {eager}\n{text}"
    assert stats.replays == stats.calls - stats.first_calls - sum(stats.eager.values()), text
    keys = [count for graph in stats.keys.values() for count in graph.values()]
    if not moves:
        assert all(k.first_calls == 1 for k in keys), f"a key was not recorded, or recorded twice\n{text}"
        assert stats.recordings == sum(k.replays > 0 for k in keys), text
    captured = max((p.captured_kernels for p in report.plans), default=0)
    assert captured >= floor, f"{captured} captured kernels, at least {floor} expected\n{text}"
    if padded:
        assert stats.padding_waste > 0, text
        assert report.padded * 2 > report.calls, f"{report.padded} of {report.calls} calls were padded\n{text}"
