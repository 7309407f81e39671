"""Caches under padding: an unmodified Llama with ``StaticCache``, and a cache of our own that is read by slot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import POISONS, check_calls, poisoned
from test_llama import LAYERS, VOCAB, compiled, llama
from torch import Tensor, nn

import torch_graph_backend as tgb

transformers = pytest.importorskip("transformers")

#: Tokens a call, in both directions and with repetitions; 1 is a graph of its own.
TOKENS = (9, 5, 7, 12, 3, 4, 9, 2, 1, 7, 1, 12)
BATCH, ROOM = 2, 96


def cache_state(cache: Any) -> list[Tensor]:
    """Everything a static cache holds: keys, values and how long it is."""
    return [t for layer in cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)]


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])])
def test_static_cache_is_one_graph(device: str) -> None:
    """Logits, the whole cache and its length equal eager's after each of 12 calls of changing size, tokens padded.

    Would catch: a padded token that writes to the cache or counts as one, a mask that lets it be seen, a length that is
    frozen, a cut anywhere in the model.
    """
    model = llama().to(device)
    close = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-4}
    caches = [transformers.StaticCache(config=model.config, max_cache_len=ROOM) for _ in range(2)]
    if device == "cuda":  # a cache made by the first call moves its length to the device: cut there
        heads, size = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
        for cache in caches:
            cache.early_initialization(BATCH, heads, size, torch.float32, torch.device(device))
    g = torch.Generator().manual_seed(3)
    with compiled(model, "bcg") as twin, poisoned() as poison, torch.no_grad():
        for i, n in enumerate(TOKENS):
            poison.value = POISONS[i % len(POISONS)]
            ids = torch.randint(1, VOCAB, (BATCH, n), generator=g).to(device)
            want, got = (m(ids, past_key_values=c).logits for m, c in zip((model, twin), caches, strict=True))
            torch.testing.assert_close(got, want, **close)
            for mine, theirs in zip(*map(cache_state, caches), strict=True):
                torch.testing.assert_close(theirs, mine, **close)
        stats, plans = tgb.stats(twin), tgb.plans(twin)
    assert sum(TOKENS) <= ROOM
    assert not stats.eager, stats
    assert stats.replays > 0, stats
    assert stats.padding_waste > 0, stats
    assert poison.tails > 0
    for plan in plans:
        assert len(plan.steps) == 1, plan
        assert plan.captured_ops()["aten.scaled_dot_product_attention"] == LAYERS, plan
    (padded,) = (p for p in plans if p.bucketed)
    assert padded.repairs() == {
        "padded rows write what the last real row writes": 2 * LAYERS,
        "reads the real size on the device": LAYERS,
    }


SLOTS, PLACES, HEADS, HEAD = 7, 16, 2, 4
H = HEADS * HEAD


class SlotDecoder(nn.Module):
    """One decode step: each row of the batch owns a slot of the cache, and is at a place of its own."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, H), nn.Linear(H, 31, bias=False)
        self.qkv, self.out = (nn.ModuleList([nn.Linear(H, n) for _ in range(layers)]) for n in (3 * H, H))
        for i in range(layers):
            for name in ("keys", "values"):
                self.register_buffer(f"{name}_{i}", torch.zeros(SLOTS, PLACES, HEADS, HEAD))
        self.register_buffer("lengths", torch.zeros(SLOTS, dtype=torch.int64))

    def forward(self, ids: Tensor, slots: Tensor) -> Tensor:
        h, at = self.embedding(ids), self.lengths[slots]
        seen = (torch.arange(PLACES) <= at[:, None])[:, None, None]
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(h).view(-1, 3, HEADS, HEAD).unbind(1)
            keys, values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            keys[slots, at], values[slots, at] = k, v
            k, v = keys[slots].transpose(1, 2), values[slots].transpose(1, 2)
            y = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen)
            h = h + out(y.flatten(1))
        self.lengths[slots] = at + 1
        return self.head(h)


def test_cache_by_slot_is_one_graph_with_a_padded_batch() -> None:
    """Would catch: a padded row that writes to slot 0, or to a slot that a real row owns, other than what is there."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    steps = []
    for n in (3, 2, 5, 4, 3, 6, 2, 3, 5, 4):
        slots = torch.randperm(SLOTS, generator=g)[:n]
        steps.append((torch.randint(0, 31, (n,), generator=g), slots))
    model = SlotDecoder().eval()
    for call in steps:
        for t in call:
            torch._dynamo.mark_dynamic(t, 0)
    report = check_calls(copy.deepcopy(model), steps, compiled_kwargs={"options": {"buckets": [4, 7]}})
    (plan,) = report.plans
    assert len(plan.steps) == 1, plan
    assert plan.repairs() == {"padded rows write what the last real row writes": 5}, plan
