"""mamba-ssm: its scans are functions around compiled kernels, which Dynamo cannot trace; here they are operations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_graph_backend.break_ops import break_op
from torch_graph_backend.integrations import register

OPERATIONS = ("mamba_ssm::*",)

register(OPERATIONS)


@break_op("tgb::mamba_selective_scan", keeps_args=False)
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """``selective_scan_fn(..., return_last_state=True)``: ``u`` (batch, dim, length), ``A`` (dim, state), real.

    Returns the output, like ``u``, and the last state (batch, dim, state) in ``A``'s dtype.
    """
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    out, state = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state=True)
    return out, state.contiguous()


@selective_scan.register_fake
def _(u: Tensor, delta: Tensor, A: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(u), A.new_empty(u.shape[0], *A.shape)


@break_op("tgb::mamba_selective_state_update", mutates_args=("state",), keeps_args=False)
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """``selective_state_update``: one step of every sequence, which changes ``state`` (batch, dim, state) in place."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update as theirs

    out: Tensor = theirs(state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)
    return out


@selective_state_update.register_fake
def _(state: Tensor, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty_like(x)
