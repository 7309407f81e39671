"""flash-linear-attention: functions around Triton kernels, which Dynamo is told not to trace; here, operations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_graph_backend.break_ops import break_op
from torch_graph_backend.integrations import register

OPERATIONS = ("fla::*",)

register(OPERATIONS)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, v.shape[2], k.shape[3], v.shape[3])
    return torch.empty_like(v), k.new_empty(state, dtype=torch.float32)


@break_op("tgb::fla_chunk_gated_delta_rule", fake=_fake, keeps_args=False)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``chunk_gated_delta_rule(..., output_final_state=True)``: ``q`` and ``k`` (batch, length, heads, K), ``v``
    (batch, length, heads, V). Returns the output, like ``v``, and final states (sequences, heads, K, V) in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as theirs

    out, state = theirs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    return out, state


@break_op("tgb::fla_fused_recurrent_gated_delta_rule", fake=_fake, keeps_args=False)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``fused_recurrent_gated_delta_rule(..., output_final_state=True)``; shapes as in ``chunk_gated_delta_rule``."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as theirs

    out, state = theirs(
        q,
        k,
        v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    return out, state
