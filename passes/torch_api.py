"""The private PyTorch names this project uses, in one place, with what they were checked on.

Everything here exists under the same name in torch 2.11 and 2.13 unless a line says otherwise. No other module may
import from a private torch module; a new torch version is checked by reading this page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_aggregate
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PythonPrinter",
    "TracingContext",
    "clear_cublas_workspaces",
    "data_ptrs_equal",
    "dispatch_mode_active",
    "enable_python_dispatcher",
    "end_allocate_to_pool",
    "enter_autocast",
    "exit_autocast",
    "free_unbacked_symbols",
    "log_api_usage",
    "make_fx",
    "map_aggregate",
    "set_grad_enabled",
]

#: What Dynamo emits for ``with torch.autocast(...)`` and ``with torch.no_grad()`` inside a graph.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled
#: A call for statistics that Dynamo keeps in the graph; it computes nothing.
log_api_usage = torch._C._log_api_usage_once

#: C++ comparison of addresses; only CUDA builds have it.
_compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def data_ptrs_equal(tensors: list[Any], pointers: Sequence[int], which: Sequence[int]) -> bool:
    """Whether ``tensors[i]`` lies at ``pointers[i]`` for every ``i`` of ``which`` (both lists are equally long)."""
    if _compare is not None:
        return bool(_compare(tensors, pointers, which))
    return all(tensors[i].data_ptr() == pointers[i] for i in which)


def clear_cublas_workspaces() -> None:
    """Drop the cuBLAS workspaces of every handle and stream (a no-op without CUDA)."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocate_to_pool(device: torch.device, pool: Any) -> None:
    """Take the CUDA allocator off a graph pool (what ``capture_end`` does, unless it fails before)."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(index, pool)


def dispatch_mode_active() -> bool:
    """Whether the caller is under a ``TorchDispatchMode``."""
    return torch._C._len_torch_dispatch_stack() > 0
