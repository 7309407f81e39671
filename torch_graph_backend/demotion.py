"""A segment that cannot be recorded runs as Python at every call, while all others stay captured (C7).

Contract. ``demote`` executes nothing: it runs the segment on fake tensors to learn what its outputs are. An output
that is a view of an input is that view of the real input, so that a later segment that writes to it writes to the right
memory; any other output gets memory of its own, into which ``Demoted.take`` copies what the Python returned.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import FakeTensorMode
from torch_graph_backend.plan import CapturedSegment, OpLine

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry


@dataclass(frozen=True, eq=False)
class Demoted:
    """``memory``: per output where later segments read it, ``None`` for a view of an input, which lies there anyway."""

    reason: Reason
    memory: tuple[torch.Tensor | None, ...]

    def take(self, results: Sequence[Any]) -> None:
        """Copy the results of one run to where the other segments read them."""
        for target, value in zip(self.memory, results, strict=True):
            if target is not None:
                _copy(target, value)


def demote(
    entry: Entry, step: CapturedSegment, inputs: Sequence[Any], error: Exception
) -> tuple[Demoted, list[torch.Tensor]]:
    """What to do with a segment whose recording failed with ``error``, and its outputs at their final addresses.

    Raises ``error`` if the outputs cannot be described.
    """
    fn = entry.program.steps[step.index]
    op = failing_op(step, fn.__code__.co_filename, error)
    text = f"segment {step.index} of key {entry.key} could not be recorded"
    text += f" ({op.op}: {error})" if op is not None else f": {error}"
    reason = Reason("capture-failed", text, where=op.where if op is not None else "")
    try:
        with torch.no_grad(), FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in inputs]
            results = fn(*entry.size_args, *fakes)
    except Exception as unknown:  # the recording's error came first, and is the one that is reported
        raise error from unknown
    known = {_storage_id(f): (f, t) for f, t in zip(fakes, inputs, strict=True) if isinstance(f, torch.Tensor)}
    memory: dict[int, torch.Tensor] = {}
    outputs, owned = [], []
    for fake in results:
        if not isinstance(fake, torch.Tensor):
            raise error  # a tuple of tensors, of which a later segment takes one
        base = known.get(_storage_id(fake))
        outputs.append(_view_of(*base, fake) if base is not None else _own(entry, memory, fake))
        owned.append(outputs[-1] if base is None else None)
    return Demoted(reason, tuple(owned)), outputs


def failing_op(step: CapturedSegment, filename: str, error: BaseException) -> OpLine | None:
    """The operation whose line of generated code raised ``error``."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == filename:
            name = linecache.getline(filename, line).split("=")[0].strip()
            return next((op for op in step.ops if op.value == name), None)
    return None


def _storage_id(fake: torch.Tensor) -> int:
    return int(fake.untyped_storage()._cdata)


def _view_of(fake_base: torch.Tensor, base: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    offset = fake.storage_offset() - fake_base.storage_offset() + base.storage_offset()
    if fake.dtype is not base.dtype:  # a view as another dtype counts in its own elements
        offset = fake.storage_offset()
        alias = torch.empty(0, dtype=fake.dtype, device=base.device)
        return alias.set_(base.untyped_storage(), offset, tuple(fake.shape), fake.stride())
    return base.as_strided(tuple(fake.shape), fake.stride(), offset)


def _own(entry: Entry, memory: dict[int, torch.Tensor], fake: torch.Tensor) -> torch.Tensor:
    """Memory outside the pool, one piece a fake storage: two outputs that share memory go on sharing it."""
    key = _storage_id(fake)
    if key not in memory:
        memory[key] = entry.recorder.allocate((fake.untyped_storage().nbytes(),), (1,), torch.uint8)
    tensor = torch.empty(0, dtype=fake.dtype, device=memory[key].device)
    return tensor.set_(memory[key].untyped_storage(), fake.storage_offset(), tuple(fake.shape), fake.stride())


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy, entries that share memory (stride 0) once."""
    for dim, (n, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and n > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
