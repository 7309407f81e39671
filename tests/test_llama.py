"""The main job in small: an unmodified Hugging Face Llama generates with ``backend="bcg"`` what it does eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import POISONS, poisoned

import torch_graph_backend as tgb

transformers = pytest.importorskip("transformers")

LAYERS, VOCAB = 4, 97
#: (batch, prompt length), in an order that goes up and down and comes back.
PAIRS = ((1, 9), (1, 10), (3, 37), (5, 50), (2, 7), (1, 30), (3, 21), (4, 12))


def llama(layers: int = LAYERS, seed: int = 0) -> Any:
    """A random Llama with grouped queries, in float32, without gradients."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # every run has the same number of tokens
    return model


def prompt(batch: int, length: int, left: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Token ids and a mask; ``left`` gives the padding on the left of each row."""
    g = torch.Generator().manual_seed(100 * batch + length)
    ids = torch.randint(1, VOCAB, (batch, length), generator=g)
    mask = torch.ones_like(ids)
    for row, n in enumerate(left):
        ids[row, :n], mask[row, :n] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = [prompt(b, n) for b, n in PAIRS] + [prompt(4, 15, (0, 3, 7, 11))]


def generate(model: Any, inputs: dict[str, torch.Tensor], new: int = 6, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=new, do_sample=False, **kwargs)


class CountingBackend:
    """Counts the graphs that Dynamo makes, and those whose attention has a mask, and runs them eagerly."""

    def __init__(self) -> None:
        self.graphs = self.masked = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        attention = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        self.masked += any(n.kwargs.get("attn_mask") is not None for n in attention)
        return gm.forward


@contextmanager
def compiled(model: Any, backend: Any) -> Iterator[Any]:
    """A copy of ``model`` whose forward is compiled."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend=backend)
    yield twin


#: Attention as HF writes it: grouped keys and values are repeated by a reshape that copies.
ATTENTION = {"aten.cat", "aten.scaled_dot_product_attention", "aten.reshape"}
#: What the mask of a padded batch is made of; it has the exact kv length.
MASK = {
    f"aten.{op}"
    for op in ("to.device", "add.Tensor", "arange", "new_ones", "le.Tensor", "__and__.Tensor", "index.Tensor")
}


def check_plans(plans: Sequence[Any], allowed: set[str]) -> None:
    """All linears captured in every plan; eager kernels only as listed."""
    for plan in plans:
        assert plan.captured_ops()["aten.linear"] == 7 * LAYERS + 1, f"a linear runs eagerly\n{plan}"
        extra = set(plan.eager_ops()) - allowed
        assert not extra, f"eager kernels beyond attention and its cache: {extra}\n{plan}"
        attention = plan.eager_ops()["aten.scaled_dot_product_attention"]
        assert attention in (0, LAYERS), f"attention is eager in {attention} of {LAYERS} layers\n{plan}"
        masks = {op: n for op, n in plan.eager_ops().items() if op in MASK and n > 2}
        assert not masks, f"a mask is made more than once a call: {masks}\n{plan}"


@pytest.mark.slow
def test_dynamic_cache() -> None:
    """Would catch: a Dynamo graph more than another backend gets (a guard of ours), a token that differs, a linear that
    is not captured, other eager work than attention and its cache, a call that silently runs eagerly."""
    model = llama()
    want = [generate(model, p) for p in PROMPTS]
    counting = CountingBackend()
    with compiled(model, counting) as twin:
        for i, p in enumerate(PROMPTS):
            if i == len(PAIRS):
                masked = counting.masked
            generate(twin, p)
    with compiled(model, "bcg") as twin, poisoned() as poison:
        for i, (p, expected) in enumerate(zip(PROMPTS, want, strict=True)):
            if i == len(PAIRS):
                ordinary = tgb.plans(twin)
            poison.value = POISONS[i % len(POISONS)]
            got = generate(twin, p)
            assert torch.equal(got, expected), f"tokens of prompt {i} differ: {got.tolist()}, eager {expected.tolist()}"
        stats, plans = tgb.stats(twin), tgb.plans(twin)
    assert stats.graphs == counting.graphs, f"{stats.graphs} graphs, any other backend gets {counting.graphs}"
    assert not stats.eager, stats
    assert stats.calls == 6 * len(PROMPTS), stats
    assert stats.replays == stats.calls - stats.first_calls, stats
    assert stats.replays > stats.first_calls, stats
    assert stats.padding_waste > 0, stats
    assert poison.tails > 0
    # Transformers masks a batch without padding too where it takes compiling for exporting: up to 5.17 at least, and
    # later ones with torch 2.11, whose Dynamo holds ``torch.compiler.is_exporting()`` for true.
    check_plans(ordinary, ATTENTION | MASK if masked else ATTENTION)
    check_plans(plans, ATTENTION | MASK)
    assert any(p.bucketed and p.eager_ops()["aten.scaled_dot_product_attention"] for p in ordinary)


@pytest.mark.slow
def test_no_recording_as_the_cache_grows() -> None:
    """Would catch: the kv length in a key or in a captured shape, which would record every step anew."""
    model = llama()
    p = prompt(1, 11)
    want = generate(model, p, new=44)
    with compiled(model, "bcg") as twin:
        short = generate(twin, p, new=14)
        before = tgb.stats(twin)
        long = generate(twin, p, new=44)
        after = tgb.stats(twin)
    assert torch.equal(short, want[:, : short.shape[1]])
    assert torch.equal(long, want)
    assert after.replays - before.replays >= 43, f"{before}\n{after}"
    # The prefill is recorded on its second call; decode steps are recorded once, in the first run.
    assert after.recordings - before.recordings <= 1, f"{before}\n{after}"
    assert after.first_calls == before.first_calls, f"{before}\n{after}"
    assert after.graphs == before.graphs, "the growing cache made Dynamo compile again"


@pytest.mark.slow
def test_static_cache() -> None:
    """Would catch: a cache written at the wrong rows or by padded ones, a cache of one ``generate`` read by the next
    (each makes a new one of equal shape, at another address), linears that leave the captured side with it."""
    model = llama()
    kwargs = {"cache_implementation": "static", "disable_compile": True}
    prompts = [*PROMPTS[:5], PROMPTS[0], PROMPTS[2], PROMPTS[-1]]
    want = [generate(model, p, **kwargs) for p in prompts]
    with compiled(model, "bcg") as twin:
        for i, (p, expected) in enumerate(zip(prompts, want, strict=True)):
            assert torch.equal(generate(twin, p, **kwargs), expected), f"tokens of prompt {i} differ"
        stats, plans = tgb.stats(twin), tgb.plans(twin)
    # A cache is as long as its prompt and answer: the bucket of the longest prompt is cut down to it.
    assert not stats.eager, stats
    assert stats.replays > stats.first_calls, stats
    assert stats.replays == stats.calls - stats.first_calls, stats
    for plan in plans:
        assert plan.captured_ops()["aten.linear"] == 7 * LAYERS + 1, f"a linear runs eagerly\n{plan}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_logits_and_cache() -> None:
    """Tokens hide small errors: logits and the cache's own tensors of a prefill and three steps, within 1e-5."""
    model = llama()
    with compiled(model, "bcg") as twin, torch.no_grad():
        for batch, length in ((2, 13), (2, 9), (2, 10), (2, 13)):
            p = prompt(batch, length)
            outs = [m(**p, use_cache=True) for m in (model, twin)]
            for _ in range(3):
                for layer in range(LAYERS):
                    a, b = (o.past_key_values.layers[layer] for o in outs)
                    torch.testing.assert_close(b.keys, a.keys, rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(b.values, a.values, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(outs[1].logits, outs[0].logits, rtol=1e-5, atol=1e-5)
                assert outs[1].logits.stride() == outs[0].logits.stride()
                token = outs[0].logits[:, -1:].argmax(-1)
                outs = [m(token, past_key_values=o.past_key_values) for m, o in zip((model, twin), outs, strict=True)]
        stats = tgb.stats(twin)
    assert not stats.eager, stats
    assert stats.replays > 0, stats


def test_start_up_is_reported() -> None:
    """Would catch a start-up time that nobody can see: normalise, plan and record are counted and printed."""
    with compiled(llama(2), "bcg") as twin:
        generate(twin, prompt(1, 5), new=4)
        seconds = tgb.stats(twin).seconds
        text = str(tgb.stats(twin))
    assert all(seconds[part] > 0 for part in ("normalise", "plan", "record")), seconds
    assert "seconds: normalise" in text
