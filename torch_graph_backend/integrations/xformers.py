"""xformers: its kernels are operations of three libraries, by generation.

``memory_efficient_attention`` itself takes bias objects, which no operation can: Dynamo traces it down to these.
"""

from __future__ import annotations

from torch_graph_backend.integrations import register

OPERATIONS = (
    "xformers::efficient_attention_forward_cutlass",
    "xformers::efficient_attention_forward_ck",
    "xformers::efficient_attention_forward_small_k",
    "xformers::efficient_attention_forward_decoder_ck",
    "xformers::efficient_attention_forward_decoder_splitk_ck",
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
)

register(OPERATIONS)
