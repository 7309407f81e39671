"""torch_graph_backend: CUDA-graph segments for any PyTorch model, through ``torch.compile(model, backend="bcg")``."""

from importlib.metadata import PackageNotFoundError, version

from torch_graph_backend.ahead import capture
from torch_graph_backend.backend import bcg, close, reset
from torch_graph_backend.break_ops import Registered, break_op, break_ops, register_break_op, unregister_break_op
from torch_graph_backend.debug import debug_dir
from torch_graph_backend.declare import (
    declare_capture_safe,
    declare_indices,
    declare_row_local,
    declare_trash_row,
    undeclare_capture_safe,
    undeclare_indices,
    undeclare_row_local,
    undeclare_trash_row,
)
from torch_graph_backend.errors import TorchGraphBackendError
from torch_graph_backend.explain import Explanation, explain, plans
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.plan import Plan
from torch_graph_backend.policies import GraphSlot, PaddingPolicy
from torch_graph_backend.shape_key import ShapeKey
from torch_graph_backend.stats import Stats, measure, stats
from torch_graph_backend.step import Step, current_step
from torch_graph_backend.would_replay import would_replay

try:
    __version__ = version("torch-graph-backend")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Explanation",
    "GraphSlot",
    "PaddingPolicy",
    "Plan",
    "Reason",
    "Registered",
    "ShapeKey",
    "Stats",
    "Step",
    "TorchGraphBackendError",
    "bcg",
    "break_op",
    "break_ops",
    "capture",
    "close",
    "current_step",
    "debug_dir",
    "declare_capture_safe",
    "declare_indices",
    "declare_row_local",
    "declare_trash_row",
    "explain",
    "measure",
    "plans",
    "register_break_op",
    "reset",
    "stats",
    "undeclare_capture_safe",
    "undeclare_indices",
    "undeclare_row_local",
    "undeclare_trash_row",
    "unregister_break_op",
    "would_replay",
]
