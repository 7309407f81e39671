"""causal-conv1d: three operations of the library ``DaoAILab``, which its Python functions call with buffers to fill."""

from __future__ import annotations

from torch_graph_backend.integrations import register

OPERATIONS = (
    "DaoAILab::_causal_conv1d_fwd_cpp",
    "DaoAILab::_causal_conv1d_update_cpp",
    "DaoAILab::_causal_conv1d_bwd_cpp",
)

register(OPERATIONS)
