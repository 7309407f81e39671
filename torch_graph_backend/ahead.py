"""Recording ahead: ``capture(model, *args, sizes=...)`` records keys before calls need them, largest first.

Contract (C2). The model is called once with the given arguments, as a call of the user's: its effects are those of one
eager call. Everything else executes captured segments alone, on zeros, to load their kernels; no break op runs but one
that was declared with ``warmup=``. What those segments change in the caller's tensors is saved before and put back.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torch_graph_backend.errors import BadOption, NothingToRecord
from torch_graph_backend.instances import Instance
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.shape_key import ShapeKey, recording_order

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry
    from torch_graph_backend.runner import CompiledGraph

Size = int | Sequence[int]


@dataclass
class Wish:
    """What ``capture`` asks of the graphs that its one call reaches. ``done``: per graph name and key, a reason if it
    could not be recorded."""

    sizes: tuple[Size, ...] | None
    done: list[tuple[str, str, Reason | None]] = field(default_factory=list)


_wish: contextvars.ContextVar[Wish | None] = contextvars.ContextVar("tgb_capture", default=None)


def current_wish() -> Wish | None:
    """The wish of a ``capture`` that is under way in this thread."""
    return _wish.get()


def capture(model: Callable[..., Any], *args: Any, sizes: Sequence[Size] | None = None, **kwargs: Any) -> int:
    """Call ``model(*args, **kwargs)`` once and record it for ``sizes``; returns how many keys are recorded now.

    ``model`` was compiled with ``backend="bcg"``. ``sizes``: real sizes of the bucketed dimension (tuples where a graph
    has two), each recorded at the bucket it falls into; ``None``: every bucket up to the one of this call. Sizes that
    are pinned (a cache's length) are those of ``args``. Gradients are off. Mark the sizes of ``args`` as later calls
    have them marked: for ``mark_dynamic`` and ``maybe_mark_dynamic`` Dynamo makes different graphs. Raises
    ``NothingToRecord`` if no graph could record anything, with the reasons, and ``BadOption`` for other ``sizes``.
    """
    wish = Wish(None if sizes is None else _sizes(sizes))
    token = _wish.set(wish)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        _wish.reset(token)
    recorded = sum(reason is None for _, _, reason in wish.done)
    if not recorded:
        raise NothingToRecord([f"{name} {key}: {reason}" for name, key, reason in wish.done])
    return recorded


def _sizes(sizes: Any) -> tuple[Size, ...]:
    """What was asked for, checked."""
    accepted = "a list, not empty, of ints (or tuples of ints) of at least 1"
    if isinstance(sizes, str) or not isinstance(sizes, Collection) or not sizes:
        raise BadOption("sizes", sizes, accepted)
    for size in sizes:
        numbers = size if isinstance(size, (tuple, list)) and size else [size]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers):
            raise BadOption("sizes", size, accepted)
    return tuple(sizes)


def serve(graph: CompiledGraph, wish: Wish, args: list[Any]) -> None:
    """Record the wished keys of one graph, whose call with ``args`` just ended. The caller holds the lock."""
    _wish.set(None)  # the segments of this graph call no other graph; a nested capture would be a surprise
    try:
        for key, found in _keys(graph, wish.sizes, args):
            reason = found if isinstance(found, Reason) else _record(graph, found, args)
            wish.done.append((graph.name, str(key), reason))
    finally:
        _wish.set(wish)


def _keys(
    graph: CompiledGraph, wished: Sequence[Size] | None, args: list[Any]
) -> Iterator[tuple[ShapeKey, Entry | Reason]]:
    """The keys to record, largest first, each with its entry or why it has none."""
    real = graph.program.sizes_of(args)
    picked: dict[ShapeKey, tuple[Any, tuple[int, ...]]] = {}
    for choice in graph.keys.choices(wished, real):
        sizes = list(real)
        for i, n in zip(graph.keys.bucketed, choice, strict=True):
            sizes[i] = n
        found = graph.keys.pick(tuple(sizes))
        key, bucket = (ShapeKey.of(choice, ()), found) if isinstance(found, Reason) else found
        picked.setdefault(key, (bucket, tuple(sizes)))
    if wished is not None and not graph.keys.bucketed:
        log.warning("%s: no size is dynamic, only this call's are recorded; mark dimensions as dynamic", graph.name)
    for key in recording_order(picked):
        bucket, at = picked[key]
        yield key, bucket if isinstance(bucket, Reason) else _entry(graph, key, bucket, at, args)


def _entry(
    graph: CompiledGraph, key: ShapeKey, bucket: Sequence[int], sizes: tuple[int, ...], args: list[Any]
) -> Entry | Reason:
    instance = graph.instances.find(args) or graph.new_instance(args)  # new if an audit has just changed the plan
    if not isinstance(instance, Instance):
        return instance or Reason("moving-input")
    state = graph.state.idle()
    assert state is not None
    at = graph.place(key, instance, state)
    entry = graph.entries.get(at) or graph.make_entry(key, bucket, sizes, instance, state)
    if isinstance(entry, Reason):
        return entry
    graph.entries[at] = entry
    state.used(entry)
    return entry.refused or graph.inputs.pinned_reason(args, sizes) or entry


def _record(graph: CompiledGraph, entry: Entry, args: list[Any]) -> Reason | None:
    if entry.recorded:
        return None
    graph.prepare(entry, args)
    with saved([args[i] for i in entry.plan.mutated]):
        entry.warm_up(args)
    return graph.record(entry, args) or entry.uncaptured


@contextlib.contextmanager
def saved(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put back what the body changes in ``tensors``. Memory that several of them share is saved once each: all the same
    values are put back."""
    with torch.no_grad():
        copies = [t.clone() for t in tensors]
    try:
        yield
    finally:
        with torch.inference_mode(any(t.is_inference() for t in tensors)), torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
