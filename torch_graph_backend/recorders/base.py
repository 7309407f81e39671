"""The recorder interface: what a device must offer so that a segment can be recorded once and replayed.

Contract (design C1, C2). A *segment* is a Python callable over tensors at bucket shapes. ``capture_one`` runs its
Python once and must execute no kernel; ``replay`` executes the recorded kernels on the recorded addresses and no
Python of the segment. The base class holds no state. A recorder is not re-entrant: the caller holds one lock
around ``capture_session`` and ``replay_session``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_graph_backend.passes.reasons import Reason

Segment = Callable[..., Sequence[Any]]

#: What PyTorch raises where a device, or the host, has no memory left.
SHORTAGE = (torch.OutOfMemoryError, MemoryError)


class OpaqueSegment(abc.ABC):
    """A segment whose kernels do not pass the dispatcher (compiled code): a recorder that watches operations records
    it as one call. ``compute`` runs the kernels: it changes inputs in place and returns new tensors, laid out as
    ``layouts`` says (shape, stride, dtype), that share no memory with anything. ``assemble`` makes the segment's
    outputs from the inputs and from such tensors, wherever they lie, without running a kernel."""

    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]

    @abc.abstractmethod
    def compute(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor]: ...

    @abc.abstractmethod
    def assemble(self, inputs: Sequence[Any], made: Sequence[torch.Tensor]) -> tuple[Any, ...]: ...

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.assemble(inputs, self.compute(inputs))


@dataclass(frozen=True, eq=False)
class Recording:
    """One recorded segment: ``outputs`` are the static results (in pool memory), ``handle`` is the recorder's own.

    Holding ``outputs`` keeps their memory out of the pool's free list. A caller that drops a boundary value before
    its last reader has been recorded lets a later recording reuse the block, exactly as in a CUDA graph pool.
    ``kernels`` counts recorded operations that execute something (0: replay is free).
    """

    outputs: tuple[Any, ...]
    handle: Any
    kernels: int


class CaptureBackend(abc.ABC):
    """Records segments on one device. See the module docstring for the contract of each method."""

    #: Whether an uncaptured run allocates from the pool.
    first_runs_in_pool: ClassVar[bool] = False
    #: Whether memory of a dropped recording goes back to the device while others are kept.
    frees_parts: ClassVar[bool] = True

    @abc.abstractmethod
    def can_run(self) -> Reason | None:
        """Why nothing can be recorded or replayed right now, e.g. the caller is already capturing."""

    def settings(self) -> Hashable:
        """Settings of the process by which kernels are chosen when they are launched: a recording freezes them, and a
        call under others needs one of its own. (Dynamo guards some, and compiles anew; those are not here.)"""
        return ()

    @abc.abstractmethod
    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory outside the pool (slots, bridges, arenas); normal tensors even under ``inference_mode``."""

    @abc.abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same layout on the same memory that does not keep the memory.

        Through it a boundary value can be read at every replay although nobody holds its block: the replay writes it
        anew before. It must not be read at any other time.
        """

    @abc.abstractmethod
    def poison(self, live: Sequence[torch.Tensor], byte: int) -> None:
        """Write ``byte`` into all memory of the pool that none of the ``live`` tensors lies in (a debug aid)."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of the pool, in use or free."""

    @property
    @abc.abstractmethod
    def device_bytes(self) -> int:
        """Bytes of memory that the device has."""

    def trim(self) -> None:  # noqa: B027 (nothing to do is a fine default)
        """Give memory that nobody uses back to the device, as far as that is possible."""

    def has_room(self, nbytes: int) -> bool:
        """Whether the pool surely gets so many bytes. Gives back memory that nobody uses if it would not otherwise."""
        return True

    @abc.abstractmethod
    def capture_session(self, inference: bool = False, pool: bool = True) -> AbstractContextManager[None]:
        """Around every segment that runs uncaptured: the stream and the pool of the recording.

        Not the ``pool`` between replays of other segments: blocks that are free may be theirs. For the same reason
        nothing that was allocated from the pool may outlive its call.

        Turns off the garbage collector, gradients and the autocast weight cache, and inference mode unless
        ``inference`` (a segment changes an inference tensor, which nothing else may).
        """

    def record_session(self, inference: bool = False) -> AbstractContextManager[None]:
        """Around the recording of all segments of a key: a capture session, plus what only a recording needs."""
        return self.capture_session(inference)

    @abc.abstractmethod
    def capture_one(self, segment: Segment, args: Sequence[Any], weak: Sequence[torch.Tensor] = ()) -> Recording:
        """Record ``segment(*args)`` without executing it. ``args`` are tensors at their final addresses.

        The memory of the ``weak`` ones is not kept alive: the caller replays only while they lie where they lay.
        """

    @abc.abstractmethod
    def replay_session(self) -> AbstractContextManager[None]:
        """Around one call of the plan, recorded or not: stream order with whoever ran one last."""

    @abc.abstractmethod
    def replay(self, recording: Recording) -> None:
        """Execute the recorded kernels on the recorded addresses."""

    @abc.abstractmethod
    def cleanup(self) -> None:
        """Free the pool and every recording. Replaying a recording afterwards raises."""
