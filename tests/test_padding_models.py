"""Unmodified dense transformers, padded in batch and length: everything but the mixing operations is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import poisoned

import torch_graph_backend as tgb
from torch_graph_backend.plan import CapturedSegment

transformers = pytest.importorskip("transformers")

GEOMETRY = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROOM = {"max_position_embeddings": 128, "intermediate_size": 64}
ATTENTION = {"aten.scaled_dot_product_attention"}


def llama() -> Any:
    config = transformers.LlamaConfig(**GEOMETRY, **ROOM, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def qwen() -> Any:
    config = transformers.Qwen3Config(**GEOMETRY, **ROOM, num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def gpt() -> Any:
    names = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, **names)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**GEOMETRY, **ROOM))


#: Per model, what may be eager, and operations that must be captured, with how often at least.
MODELS: dict[str, tuple[Callable[[], Any], set[str], dict[str, int]]] = {
    # 7 linears a layer and the head; 2 norms a layer and the last; rotary: cos, sin, and a negation for q and k
    "llama": (llama, ATTENTION, {"aten.linear": 15, "aten.rsqrt": 5, "aten.silu": 2, "aten.cos": 1, "aten.neg": 4}),
    "qwen": (qwen, ATTENTION, {"aten.linear": 15, "aten.rsqrt": 9, "aten.silu": 2, "aten.sin": 1, "aten.neg": 4}),
    "gpt": (gpt, ATTENTION, {"aten.addmm": 8, "aten.linear": 1, "aten.layer_norm": 5, "aten.tanh": 2}),
    # its position ids are a buffer, whose rows beyond the length may hold anything: see docs/padding.md
    "bert": (bert, {*ATTENTION, "aten.embedding", "aten.gather"},
             {"aten.linear": 13, "aten.layer_norm": 5, "aten.gelu": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_dense_operations_are_captured(name: str) -> None:
    """Would catch a rule that stops knowing an operation of the models that people run."""
    make, may_be_eager, must = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    compiled = torch.compile(model, backend="bcg")
    options = {} if name == "bert" else {"use_cache": False}
    with torch.no_grad(), poisoned() as poison:
        for k, (batch, length) in enumerate(((2, 11), (2, 9), (3, 13), (2, 11), (3, 13), (2, 9))):
            poison.value = (float("nan"), 1e30, None)[k % 3]
            ids = torch.randint(1, 97, (batch, length))
            for dim in range(2):
                torch._dynamo.maybe_mark_dynamic(ids, dim)
            got, want = compiled(ids, **options)[0], model(ids, **options)[0]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert tgb.stats(compiled).replays >= 3
    for plan in tgb.plans(compiled):
        eager = {
            op.op: str(op.reason) for step in plan.steps if not isinstance(step, CapturedSegment) for op in step.ops
        }
        assert set(eager) <= may_be_eager, eager
        captured = [op.op for step in plan.steps if isinstance(step, CapturedSegment) for op in step.ops]
        for op, least in must.items():
            assert captured.count(op) >= least, (op, captured.count(op))
