"""Recorders: one per device, made on first use, with the one lock that guards recording and replaying."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.recorders.base import CaptureBackend
from torch_graph_backend.recorders.cuda import CudaRecorder
from torch_graph_backend.recorders.host import HostRecorder

_recorders: dict[torch.device, tuple[CaptureBackend, Any]] = {}
_lock = threading.Lock()


def recorder_for(device: torch.device) -> tuple[CaptureBackend, Any] | Reason:
    """The recorder of a device and its lock, or why there is none."""
    with _lock:
        found = _recorders.get(device)
        if found is None:
            if device.type == "cpu":
                recorder: CaptureBackend = HostRecorder()
            elif device.type == "cuda" and torch.cuda.is_available():
                recorder = CudaRecorder(device)
            else:
                return Reason("no-recorder", f"there is no recorder for {device.type}")
            found = _recorders[device] = (recorder, threading.RLock())
        return found


def cleanup_all() -> None:
    """Free every pool and recording."""
    with _lock:
        made = list(_recorders.values())
        _recorders.clear()
    for recorder, lock in made:
        with lock:
            recorder.cleanup()
