"""What all compiled graphs of one device share: the recorder, the lock, the arena, and who may be dropped for memory.

Contract. Whoever runs, records or frees on a device holds ``lock``. ``running`` is true while a call is between its
first and its last step: a call from inside one of its breaks would overwrite the memory that it still needs, so it
works on a state of its own, one level down (``idle``), with a pool and an arena of its own. Nothing here keeps an
entry alive.
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


#: Calls inside breaks of calls inside breaks: deeper ones run eagerly.
MAX_DEPTH = 4


class DeviceState:
    """The shared state of one device, for calls at one ``depth``: 0, or inside a break of so many other calls."""

    def __init__(self, device: torch.device, recorder: CaptureBackend, depth: int = 0) -> None:
        self.device, self.recorder, self.depth = device, recorder, depth
        self.lock: Any = threading.RLock()
        self.inner: DeviceState | None = None
        self.arena = Arena(lambda nbytes: recorder.allocate((nbytes,), (1,), torch.uint8))
        self.running = False
        self._entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        self._clock = itertools.count(1)

    def idle(self) -> DeviceState | None:
        """The state that a call can use now: this one, or one further down if calls are running. The lock is held, so
        they are calls of this thread. ``None``: too many."""
        if not self.running:
            return self
        if self.inner is None:
            recorder = make_recorder(self.device) if self.depth + 1 < MAX_DEPTH else None
            if not isinstance(recorder, CaptureBackend):
                return None
            self.inner = DeviceState(self.device, recorder, self.depth + 1)
        return self.inner.idle()

    def cleanup(self) -> None:
        """Free the pools of this level and those below."""
        self.recorder.cleanup()
        if self.inner is not None:
            self.inner.cleanup()

    def used(self, entry: Entry) -> None:
        """Note that ``entry`` serves a call now."""
        entry.last_used = next(self._clock)
        self._entries.add(entry)

    @property
    def nbytes(self) -> int:
        """Bytes that recordings hold on this device: buffers and pool."""
        below = self.inner.nbytes if self.inner is not None else 0
        return self.arena.nbytes + self.recorder.nbytes + below

    def relieve(self, keep: Entry | None = None, everything: bool = False) -> int:
        """Memory ran out: drop the least recently used half of all recordings but ``keep``'s; returns how many.

        If there is none left to drop but ``keep``'s, that one goes too, and with it the recorder's whole pool: its
        memory goes back to the device only when its last recording is gone. ``everything``: so it does now.
        """
        held = sorted((e for e in self._entries if e.recorded and e is not keep), key=lambda e: e.last_used)
        dropped = held if everything else held[: (len(held) + 1) // 2]
        if keep is not None and keep.recorded and (everything or not held):
            dropped = [*dropped, keep]
        for entry in dropped:
            entry.forget()
        if not any(e.recorded for e in self._entries):
            self.recorder.cleanup()
        self.recorder.trim()
        return len(dropped)

    def give_way(self) -> bool:
        """Free all memory of recordings for somebody who needs it; whether there was any. Not while a call runs on
        them."""
        with self.lock:
            if self.running or not self.recorder.nbytes:
                return False
            self.relieve(everything=True)
            return True


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
            found = _states[device] = DeviceState(device, recorder)
        return found


def cleanup_all() -> None:
    """Free every pool and recording."""
    with _states_lock:
        made = list(_states.values())
        _states.clear()
    for state in made:
        with state.lock:
            state.cleanup()
