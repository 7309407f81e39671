"""Attention of PyTorch itself by kernel: variable lengths, and what ``scaled_dot_product_attention`` becomes.

``F.scaled_dot_product_attention`` is not listed: it is captured where that is proved safe.
"""

from __future__ import annotations

from torch_graph_backend.integrations import register

OPERATIONS = (
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_out",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "higher_order::flex_attention",
)

register(OPERATIONS)
