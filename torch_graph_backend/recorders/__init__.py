"""Recorders: what records and replays segments on one kind of device."""

from __future__ import annotations

import torch

from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.recorders.base import CaptureBackend
from torch_graph_backend.recorders.cuda import CudaRecorder
from torch_graph_backend.recorders.host import HostRecorder


def make_recorder(device: torch.device) -> CaptureBackend | Reason:
    """A new recorder for a device, or why there is none."""
    if device.type == "cpu":
        return HostRecorder()
    if device.type == "cuda" and torch.cuda.is_available():
        return CudaRecorder(device)
    return Reason("no-recorder", f"there is no recorder for {device.type}")
