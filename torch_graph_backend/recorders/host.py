"""``HostRecorder``: a faithful imitation of a CUDA graph on the CPU, for tests and for CI without a GPU.

Recording runs a segment's Python once under a dispatch mode and executes no kernel: views are made for real (they
are metadata), results are allocated from a private pool, everything else is written to a tape. What the tape
freezes is what a CUDA graph freezes: addresses with their layout, scalars, shapes, dtypes. Replay runs the tape on
those addresses and no Python of the segment. So what would corrupt a CUDA graph also corrupts here, deterministically:

* a tensor swapped for another one at the caller's: the replay goes on with the old address;
* a Python value that changed: the replay goes on with the old value;
* a slot that was not refilled: the replay computes on the old rows;
* a boundary value dropped before its last reader was recorded: a later recording overwrites it.

Two deliberate differences. (1) Memory outside the pool that a recording touches (slots, constants) is kept alive by the
recording, where CUDA would keep nothing and read freed memory: stale here, never a crash; but for arguments that
the caller of ``capture_one`` names as weak. (2) Free pool memory
is poisoned (see ``host_pool``), so that an early drop is wrong every time. A segment that Inductor compiled
(``OpaqueSegment``) is recorded as one call on frozen addresses. What breaks the imitation: other code that works on
tensor memory behind the dispatcher (``ctypes`` on ``data_ptr()``): it runs while recording, on poison, and not at
replay.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_graph_backend.errors import CaptureError, ReplayError
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.recorders.base import CaptureBackend, OpaqueSegment, Recording, Segment
from torch_graph_backend.recorders.host_pool import HostPool
from torch_graph_backend.recorders.host_tape import Log, NoHostReads, Tape, extent, unleased

__all__ = ["CaptureError", "HostRecorder", "ReplayError"]


def _release_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames that ``error`` unwound: they hold pool tensors.

    A caller may keep the exception (to report it once); the pool must not stay taken for that long.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]


class HostRecorder(CaptureBackend):
    """Records segments on the CPU the way a CUDA graph would. See the module docstring for what is imitated.

    ``poison=False`` leaves free memory as it is, for measuring. Like every recorder it is not re-entrant.
    """

    def __init__(self, poison: bool = True) -> None:
        self._poison = poison
        self._pool = HostPool(poison)
        self._logs: weakref.WeakSet[Log] = weakref.WeakSet()
        self._capturing = False
        self._inference = False

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    @property
    def device_bytes(self) -> int:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not on every system
            return sys.maxsize

    @property
    def leased_bytes(self) -> int:
        """Bytes of the pool that living tensors hold."""
        return self._pool.leased_nbytes

    def can_run(self) -> Reason | None:
        return Reason("already-capturing") if self._capturing else None

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zero-filled memory outside the pool. Not during a recording: it would be recorded as a kernel."""
        self._refuse_while_capturing("allocate")
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            memory = torch.zeros(extent(shape, stride), dtype=dtype, device="cpu").untyped_storage()
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            return tensor.set_(memory, 0, tuple(shape), tuple(stride))

    @contextlib.contextmanager
    def capture_session(self, inference: bool = False, pool: bool = True) -> Iterator[None]:
        """See the base class (a first run takes ordinary memory here). Whether autocast is on stays as it is:
        operations are recorded below it."""
        collecting, caching, before = gc.isenabled(), torch.is_autocast_cache_enabled(), self._inference
        gc.disable()
        self._inference = inference
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.inference_mode(inference), torch.no_grad():
                yield
        finally:
            self._inference = before
            torch.set_autocast_cache_enabled(caching)
            if collecting:
                gc.enable()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return unleased(self._pool, tensor)

    def poison(self, live: Sequence[torch.Tensor], byte: int) -> None:
        kept = {self._pool.block_at(t.untyped_storage().data_ptr()) for t in live}
        for block in self._pool.blocks:
            if block not in kept:
                block.poison(byte)

    def capture_one(self, segment: Segment, args: Sequence[Any], weak: Sequence[torch.Tensor] = ()) -> Recording:
        """Record ``segment(*args)``. After an exception nothing is recorded and its pool blocks are free."""
        self._refuse_while_capturing("capture_one")
        tape = Tape(self._pool, frozenset(t.untyped_storage().data_ptr() for t in weak))
        poisoned = self._pool.begin()
        self._capturing = True
        try:
            with self.capture_session(self._inference):
                if isinstance(segment, OpaqueSegment):
                    results: Sequence[Any] = tape.opaque(segment, args)
                else:
                    with NoHostReads(), tape:
                        results = segment(*args)
            outputs = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        except BaseException as error:
            _release_frames(error)
            raise
        finally:
            self._capturing = False
        self._pool.end(poisoned)
        log = Log(tape.steps, poisoned)
        self._logs.add(log)
        return Recording(outputs=outputs, handle=log, kernels=len(tape.steps))

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to order: the host executes in program order."""
        return contextlib.nullcontext()

    def replay(self, recording: Recording) -> None:
        """Run the tape, whatever modes the calling thread is in: gradients and autocast are off.

        In inference mode, where normal and inference tensors may be written alike; a tape makes no tensor of its own.
        """
        self._refuse_while_capturing("replay")
        log = recording.handle
        if not isinstance(log, Log) or log not in self._logs:
            raise ReplayError("this segment")
        with (
            torch.inference_mode(),
            torch._C._DisableAutocast(),
            torch._C.DisableTorchFunction(),
        ):
            log.run()

    def cleanup(self) -> None:
        """Give back the pool. All recordings become invalid; tensors still held stay readable. May be used again."""
        self._refuse_while_capturing("cleanup")
        for log in self._logs:
            log.clear()
        self._logs = weakref.WeakSet()
        self._pool.close()
        self._pool = HostPool(self._poison)

    def _refuse_while_capturing(self, what: str) -> None:
        if self._capturing:
            raise CaptureError(f"{type(self).__name__}.{what}", "this recorder is recording")
