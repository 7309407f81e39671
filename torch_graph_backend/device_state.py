"""What all compiled graphs of one device share: the recorder, the lock, the arena, and who may be dropped for memory.

Contract. Whoever runs, records or frees on a device holds ``lock``. ``running`` is true while a call is between its
first and its last step: a call from inside one of its breaks would overwrite the memory that it still needs. Nothing
here keeps an entry alive.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torch_graph_backend.arena import Arena
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.recorders import make_recorder
from torch_graph_backend.recorders.base import CaptureBackend

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry


class DeviceState:
    """The shared state of one device."""

    def __init__(self, recorder: CaptureBackend) -> None:
        self.recorder = recorder
        self.lock: Any = threading.RLock()
        self.arena = Arena(lambda nbytes: recorder.allocate((nbytes,), (1,), torch.uint8))
        self.running = False
        self._entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        self._clock = itertools.count(1)

    def used(self, entry: Entry) -> None:
        """Note that ``entry`` serves a call now."""
        entry.last_used = next(self._clock)
        self._entries.add(entry)

    @property
    def nbytes(self) -> int:
        """Bytes that recordings hold on this device: buffers and pool."""
        return self.arena.nbytes + self.recorder.nbytes

    def relieve(self, keep: Entry | None = None) -> int:
        """Memory ran out: drop the least recently used half of all recordings but ``keep``'s; returns how many.

        If there is none left to drop but ``keep``'s, that one goes too, and with it the recorder's whole pool: its
        memory goes back to the device only when its last recording is gone.
        """
        held = sorted((e for e in self._entries if e.recorded and e is not keep), key=lambda e: e.last_used)
        dropped = held[: (len(held) + 1) // 2]
        if keep is not None and not held and keep.recorded:
            dropped = [keep]
        for entry in dropped:
            entry.forget()
        if not any(e.recorded for e in self._entries):
            self.recorder.cleanup()
        self.recorder.trim()
        return len(dropped)


_states: dict[torch.device, DeviceState] = {}
_states_lock = threading.Lock()


def state_of(device: torch.device) -> DeviceState | Reason:
    """The shared state of a device, made on first use, or why nothing can be recorded there."""
    with _states_lock:
        found = _states.get(device)
        if found is None:
            recorder = make_recorder(device)
            if isinstance(recorder, Reason):
                return recorder
            found = _states[device] = DeviceState(recorder)
        return found


def cleanup_all() -> None:
    """Free every pool and recording."""
    with _states_lock:
        made = list(_states.values())
        _states.clear()
    for state in made:
        with state.lock:
            state.recorder.cleanup()
