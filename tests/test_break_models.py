"""A hybrid model, scan and attention over sequences of different lengths, prefill and decode, equal to eager.

On a GPU the attention is FlashAttention as PyTorch has it, in bfloat16; on a CPU its body is written out. Sequences lie
one after the other; what belongs to whom comes from a context that ``prepare`` turns into offsets once a step.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_graph_backend as tgb

HEADS, DIM, STATES, LONGEST, SEQUENCES = 2, 16, 4, 64, 3
WIDTH = HEADS * DIM
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@dataclass
class Batch:
    """New tokens and tokens already in the cache, by sequence."""

    new: list[int]
    past: list[int]


BATCH: ContextVar[Batch] = ContextVar("batch")
PREPARED: list[Batch] = []


def offsets(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def prepare(step: tgb.Step) -> dict[str, Any]:
    """Offsets of queries and keys, shared by all layers."""
    batch = BATCH.get()
    PREPARED.append(batch)
    total = [n + p for n, p in zip(batch.new, batch.past, strict=True)]
    return {"batch": batch, "total": total, "q": offsets(batch.new), "k": offsets(total)}


def like(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q)


@tgb.break_op("tgb_models::attend", mutates_args=("cache",), fake=like, prepare=prepare, keeps_args=False)
def attend(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
    plan = tgb.current_step().prepared(attend)
    batch, keys = plan["batch"], [[], []]
    for i, (kk, vv) in enumerate(zip(k.split(batch.new), v.split(batch.new), strict=True)):
        for j, new in enumerate((kk, vv)):
            cache[j, i, batch.past[i] : plan["total"][i]] = new
            keys[j].append(cache[j, i, : plan["total"][i]])
    if q.is_cuda:
        flat = [torch.cat(part) for part in keys]
        limits = max(batch.new), max(plan["total"])
        starts = [plan[name].to(q.device) for name in "qk"]
        return torch.ops.aten._flash_attention_forward(q, *flat, *starts, *limits, 0.0, True, False)[0]
    out = torch.empty_like(q)
    done = 0
    for n, ks, vs in zip(batch.new, *keys, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[done : done + n], ks) / DIM**0.5
        hidden = torch.ones(n, len(ks), dtype=torch.bool).triu(len(ks) - n + 1)
        out[done : done + n] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), vs)
        done += n
    return out


class Scan(nn.Module):
    """A selective scan whose state lives in the module; a method is the break."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH + 2 * STATES)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(-torch.rand(WIDTH, STATES))
        self.register_buffer("state", torch.zeros(SEQUENCES, WIDTH, STATES))

    @tgb.break_op(fake=lambda self, u, *_: torch.empty_like(u), keeps_args=False)
    def scan(self, u: Tensor, delta: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out, at = torch.empty_like(u), 0
        for i, n in enumerate(BATCH.get().new):
            for t in range(at, at + n):
                step = (delta[t] * u[t])[:, None] * b[t]
                self.state[i] = self.state[i] * torch.exp(delta[t][:, None] * self.a) + step
                out[t] = (self.state[i] * c[t]).sum(-1)
            at += n
        return out

    def forward(self, x: Tensor) -> Tensor:
        u, delta, b, c = self.wide(x).split((WIDTH, WIDTH, STATES, STATES), -1)
        return x + self.out(self.scan(u, F.softplus(delta), b, c))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(2, SEQUENCES, LONGEST, HEADS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, HEADS, DIM).unbind(1)
        return x + self.out(attend(q, k, v, self.cache).reshape(-1, WIDTH))


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_and_decode_of_a_hybrid_model(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ours = nn.Sequential(Scan(), Attention(), Scan(), Attention()).to(device, dtype)
    eager = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="bcg", fullgraph=True)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {}
    with torch.no_grad():
        for prompt in ([5, 3, 4], [2, 7, 4], [6, 4, 3], [5, 3, 4]):
            for model in (ours, eager):
                for memory in model.buffers():
                    memory.zero_()
            past = [0] * SEQUENCES
            for new in (prompt, *([[1] * SEQUENCES] * 3)):
                BATCH.set(Batch(new, past))
                x = torch.randn(sum(new), WIDTH, device=device, dtype=dtype)
                torch._dynamo.maybe_mark_dynamic(x, 0)
                expected = eager(x)
                PREPARED.clear()
                torch.testing.assert_close(compiled(x), expected, **tolerance)
                assert len(PREPARED) == 1
                past = [p + n for p, n in zip(past, new, strict=True)]
    stats = tgb.stats(compiled)
    assert stats.replays >= 10
    assert not stats.eager
    (plan,) = tgb.plans(compiled)
    assert len(plan.segments) == 5
    assert set(dict(plan.eager_ops())) == {"tgb_models.attend", "tgb.test_break_models_Scan_scan"}
