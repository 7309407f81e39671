"""flash-attn 2 and 3: their operations, and attention over a cache, which flash-attn 2 has as a plain function."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_graph_backend.break_ops import break_op
from torch_graph_backend.integrations import register

OPERATIONS = (
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn::_flash_attn_backward",
    "flash_attn::_flash_attn_varlen_backward",
    "flash_attn_3::fwd",
    "flash_attn_3::fwd_combine",
    "flash_attn_3::get_scheduler_metadata",
    "flash_attn_3::_flash_attn_forward",
)

register(OPERATIONS)


@break_op("tgb::flash_attn_with_kvcache", mutates_args=("k_cache", "v_cache"), keeps_args=False)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """``flash_attn.flash_attn_with_kvcache`` as one operation; the caches are changed if ``k`` and ``v`` are given.

    ``q`` (batch, length, heads, dim), ``cache_seqlens`` (batch,) int32, ``block_table`` (batch, blocks) int32.
    """
    from flash_attn import flash_attn_with_kvcache as theirs

    out: Tensor = theirs(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    return out


@flash_attn_with_kvcache.register_fake
def _(q: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty_like(q)
