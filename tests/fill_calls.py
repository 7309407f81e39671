"""Whole calls that fill their slots with one kernel, beside the same calls with grouped copies: bit for bit.

Used by ``test_fill_calls.py`` and by ``bench/fill_check.py``, which decides on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.policies import PaddingPolicy as P
from torch_graph_backend.recorders import fill_choice

BUCKETS = [8, 16]
#: Real sizes in the order of the calls; most come again.
SIZES = (5, 6, 3, 12, 7, 5, 8, 16, 1, 6, 3, 13)
#: Shapes (``None``: the padded size) and dtypes: every size of an element that the kernel knows, and layouts that are
#: not padded on dimension 0. Repeated until there are enough.
KINDS: tuple[tuple[tuple[int | None, ...], torch.dtype], ...] = (
    ((None, 4), torch.float32),
    ((None,), torch.int64),
    ((None, 8), torch.bfloat16),
    ((None,), torch.int32),
    ((3, None), torch.int64),
    ((None,), torch.bool),
    ((None, 3), torch.uint8),
    ((None,), torch.float64),
    ((None, 2, 2), torch.float16),
    ((None, 5), torch.complex64),
)


@contextmanager
def chosen(enabled: bool, *devices: str) -> Iterator[None]:
    """The kernel is used from one slot on (or never), also on these kinds of devices."""
    before = fill_choice.ENABLED, fill_choice.FUSED_FROM, fill_choice.DEVICES
    fill_choice.ENABLED, fill_choice.FUSED_FROM = enabled, 1
    fill_choice.DEVICES = {*before[2], *devices}
    try:
        yield
    finally:
        fill_choice.ENABLED, fill_choice.FUSED_FROM, fill_choice.DEVICES = before


def model(count: int) -> Callable[..., Any]:
    """A function of ``count`` arguments that reads each of them; new at every call, so that nothing is shared."""

    def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.relu(xs[0] @ xs[0].new_ones(4, 4))
        for k, x in enumerate(xs):
            wide = torch.view_as_real(x).flatten(1) if x.is_complex() else x.float()
            first = KINDS[k % len(KINDS)][0][0]
            rows = wide.sum(0) if first else wide.reshape(wide.shape[0], -1).sum(-1)
            total = total + rows.unsqueeze(-1) * (k + 1)  # which says that the sizes are equal
        return total, total.sin()

    return f


def sources(count: int, n: int, device: torch.device | str, seed: int) -> list[torch.Tensor]:
    """Arguments at a real size, which is the one size that changes: with a symbol for every dimension Dynamo would not
    know that they are one size, and most would be no slots."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(count):
        shape, dtype = KINDS[k % len(KINDS)]
        values = torch.randint(0, 90, tuple(n if d is None else d for d in shape), generator=generator)
        found.append((values % 2 if dtype is torch.bool else values).to(dtype).to(device))
        torch._dynamo.maybe_mark_dynamic(found[-1], shape.index(None))
    return found


def declared(count: int, policies: Sequence[P]) -> dict[str, dict[str, Any]]:
    """One policy after the other, with a value where they take one."""
    which = [policies[k % len(policies)] for k in range(count)]
    return {f"xs.{k}": {"padding": p.value, **({"pad_value": 1} if p.takes_value else {})} for k, p in enumerate(which)}


@dataclass
class Seen:
    """What the calls of one run left behind: their results, and all slots after each."""

    results: list[list[torch.Tensor]] = field(default_factory=list)
    slots: list[list[torch.Tensor]] = field(default_factory=list)
    #: Kinds of fillers, and fills by one launch alone.
    kinds: set[str] = field(default_factory=set)
    #: Numbers of slots that a fill serves.
    counts: set[int] = field(default_factory=set)
    launches: list[int] = field(default_factory=list)

    def differs(self, other: Seen) -> str:
        """Where two runs are not the same bit for bit; empty if they are."""
        for name in ("results", "slots"):
            for k, (a, b) in enumerate(zip(getattr(self, name), getattr(other, name), strict=True)):
                for i, (x, y) in enumerate(zip(a, b, strict=True)):
                    if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(bits(x), bits(y)):
                        return f"{name} of call {k}, number {i} ({x.dtype}, {list(x.shape)})"
        return ""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def entries(f: Any) -> list[Any]:
    return [e for g in registry.graphs_of(f) if g.plan is not None and g.plan.bucketed for e in g.entries.values()]


def fillers(f: Any) -> list[Any]:
    return [frame.slot_filler for e in entries(f) for frame in e.frames.values()]


def run(
    enabled: bool,
    count: int,
    policies: Sequence[P],
    device: torch.device | str,
    sizes: Sequence[int] = SIZES,
    around: Callable[[Any, int], None] | None = None,
) -> Seen:
    """Calls at ``sizes``, each with three sets of arguments: two that lie elsewhere, and the first once more.
    ``around(f, k)`` is called before the ``k``-th size."""
    torch._dynamo.reset()
    tgb.reset()
    seen, kept = Seen(), []
    made: set[int] = set()
    with torch.no_grad(), chosen(enabled, "cpu"):
        options = {"buckets": BUCKETS, "slots": declared(count, policies)}
        f = torch.compile(model(count), backend="bcg", options=options)
        for k, n in enumerate(sizes):
            if around is not None:
                around(f, k)
            sets = [sources(count, n, device, 100 * k + j) for j in range(2)]
            kept.append(sets)  # alive: so later ones lie elsewhere
            for args in (sets[0], sets[1], sets[0], sets[0], sets[1]):
                before = tgb.stats(f).fill_launches
                seen.results.append([t.clone() for t in f(*args)])
                seen.launches.append(tgb.stats(f).fill_launches - before)
                for entry in entries(f):
                    if id(entry) not in made:  # what KEEP_PAD finds in new memory is nobody's
                        made.add(id(entry))
                        for slot, buffer in zip(entry.plan.slots, entry.slots, strict=True):
                            if slot.policy is P.KEEP_PAD:
                                buffer.zero_()
                seen.slots.append([t.clone() for e in entries(f) for t in e.slots])
        seen.kinds = {type(x).__name__ for x in fillers(f)}
        seen.counts = {len(x.real) for x in fillers(f)}
        assert not [g.plan.refused for g in registry.graphs_of(f) if g.plan is not None and g.plan.refused]
        assert not tgb.stats(f).eager, tgb.stats(f)
    return seen


def compared(count: int, policies: Sequence[P], device: torch.device | str, **more: Any) -> str:
    """What is wrong with whole calls through the kernel; empty if nothing is."""
    plain, fused = (run(enabled, count, policies, device, **more) for enabled in (False, True))
    if plain.kinds != {"Filler"} or fused.kinds != {"FusedFiller"}:
        return f"the fillers are {plain.kinds} and {fused.kinds}"
    if plain.counts != {count} or fused.counts != {count}:
        return f"there are {plain.counts} and {fused.counts} slots"
    if 1 not in fused.launches:
        return f"no call was filled by one launch: {fused.launches}"
    return fused.differs(plain)
