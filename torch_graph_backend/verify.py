"""The option ``verify_memory``: check at every replay that no segment reads memory that its call did not write or pin.

Contract (C1). Each segment is replayed twice, with everything of ours that no later step of this call may read
overwritten by one byte and then by another; what it writes is put back in between. Results that differ bit by bit
were computed from memory that somebody else may own by then. A third replay, with the first byte again, tells a
segment that is merely not deterministic (atomics) from one that reads what it must not. Slow: for tests and for
hunting a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_graph_backend.errors import MemoryFault
from torch_graph_backend.frames import Frame
from torch_graph_backend.plan import CapturedSegment
from torch_graph_backend.slots import take_all

#: NaN in floats and -1 in integers; then a number that no model computes.
BYTES = (0xFF, 0x41)


class CheckedFrame(Frame):
    """A frame that checks every segment it replays."""

    cached = False

    def fill(self, args: Sequence[Any]) -> None:
        self.args = args
        for chunk in self.entry.lease.chunks:  # what is not filled now must not look as if it were
            chunk.fill_(BYTES[0])
        super().fill(args)

    def segment(self, index: int) -> list[torch.Tensor]:
        step = self.entry.plan.steps[index]
        assert isinstance(step, CapturedSegment)
        state = self._live(step)
        before = [t.clone() for t in state]
        runs = [self._run(step, state, before, byte) for byte in BYTES]
        if not _equal(*runs):
            again = self._run(step, state, before, BYTES[0])
            if _equal(runs[0], again):
                raise MemoryFault(index, str(self.entry.key))
        return take_all(self.views.get(index, ()))

    def _live(self, step: CapturedSegment) -> list[torch.Tensor]:
        """What this call still needs when ``step`` begins: earlier results with a reader to come, filled buffers, and
        the arguments that the segment changes."""
        entry = self.entry
        live = [*entry.slots, *entry.counts]
        live += [b for b, planned in zip(entry.bridges, entry.plan.bridges, strict=True) if planned.after < step.index]
        for earlier in entry.plan.segments:
            if earlier.index < step.index:
                for name, last in zip(earlier.outputs, earlier.last_reads, strict=True):
                    if last >= step.index or name in entry.plan.held:
                        live += _tensors(entry.static[name])
        return live + [self.args[i] for i in step.writes]

    def _run(
        self, step: CapturedSegment, state: list[torch.Tensor], before: list[torch.Tensor], byte: int
    ) -> list[torch.Tensor]:
        """Everything the segment left behind, after a replay with ``byte`` wherever nobody has written."""
        entry = self.entry
        for chunk in entry.lease.chunks:
            chunk.fill_(byte)
        entry.recorder.poison(state, byte)
        with torch.inference_mode(any(t.is_inference() for t in state)):
            for tensor, value in zip(state, before, strict=True):
                _restore(tensor, value)
        entry.recorder.replay(entry.recordings[step.index])
        made = [t for name in step.outputs for t in _tensors(entry.static[name])]
        return [t.clone() for t in (*made, *state)]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def _restore(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy back, entries that share memory (stride 0) once."""
    for dim, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and n > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit: NaN equals the same NaN."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(left, right, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
