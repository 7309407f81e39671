"""Recorders: one per device, made on first use, with the one lock that guards recording and replaying."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.recorders.base import CaptureBackend
from torch_graph_backend.recorders.host import HostRecorder

_recorders: dict[torch.device, tuple[CaptureBackend, Any]] = {}
_lock = threading.Lock()


def recorder_for(device: torch.device) -> tuple[CaptureBackend, Any] | Reason:
    """The recorder of a device and its lock, or why there is none."""
    with _lock:
        found = _recorders.get(device)
        if found is None:
            if device.type != "cpu":
                return Reason("no-recorder", f"recording on {device.type} is not supported by this version")
            found = _recorders[device] = (HostRecorder(), threading.RLock())
        return found


def cleanup_all() -> None:
    """Free every pool and recording."""
    with _lock:
        made = list(_recorders.values())
        _recorders.clear()
    for recorder, lock in made:
        with lock:
            recorder.cleanup()
