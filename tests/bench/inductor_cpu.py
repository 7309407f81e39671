"""What Inductor's segments bring on a CPU: ratios to eager of the same run, and what compiling cost.

    python tests/bench/inductor_cpu.py docs/bench/inductor_cpu.json [--rounds 30]

Models: an MLP (layers of pointwise work between small products), and a Llama-like decoder that decodes one token a
call with a static cache, as one segment. Each is called eagerly, with ``inductor="off"`` and with the default; the
three take turns, ten calls each, so that a busy machine slows all alike. ``ratio``: median milliseconds over eager's.
The host recorder is an imitation, made for tests: "off" shows what that costs, which a GPU does not pay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import torch_graph_backend as tgb


class Mlp(nn.Module):
    def __init__(self, layers: int = 16, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = layer(norm(x))
            x = x + torch.sigmoid(h) * h * 0.5 + torch.tanh(h) * 0.1
        return x


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, width // heads))

    def forward(self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(rms(x, self.norm1)).view(1, 1, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
        self.keys.index_copy_(2, at, turned(k, cos, sin))
        self.values.index_copy_(2, at, v)
        a = F.scaled_dot_product_attention(turned(q, cos, sin), self.keys, self.values, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(rms(x, self.norm2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """Decodes one token: ``(ids (1, 1), at (1,))`` to logits ``(1, 1, vocabulary)``."""

    def __init__(
        self, layers: int = 4, width: int = 64, heads: int = 4, length: int = 64, vocabulary: int = 128
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, length) for _ in range(layers))
        self.norm, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin())
        self.register_buffer("positions", torch.arange(length))

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        x, cos, sin = self.embedding(ids), self.cos[at], self.sin[at]
        mask = (self.positions <= at)[None, None, None]
        for layer in self.layers:
            x = layer(x, at, cos, sin, mask)
        return self.head(rms(x, self.norm))


def contenders(make: Callable[[], nn.Module]) -> dict[str, Callable[..., Tensor]]:
    """The same weights three times."""
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(make().eval())
    options = {"buckets": [8, 16, 32, 64]}
    return {
        "eager": models[0],
        "off": torch.compile(models[1], backend="bcg", options={**options, "inductor": "off"}),
        "small": torch.compile(models[2], backend="bcg", options=options),
    }


def measure(
    make: Callable[[], nn.Module], arguments: Callable[[int], tuple[Tensor, ...]], rounds: int
) -> dict[str, Any]:
    """``arguments(i)``: those of call ``i``."""
    runs = contenders(make)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    worst = 0.0
    for r in range(rounds + 1):
        outputs: dict[str, list[Tensor]] = {name: [] for name in runs}
        for name, run in runs.items():
            for i in range(10 * r, 10 * r + 10):
                args = arguments(i)
                start = time.perf_counter()
                outputs[name].append(run(*args))
                if r:  # the first round compiles, records and warms up
                    seconds[name].append(time.perf_counter() - start)
        for got, want in zip(outputs["small"], outputs["eager"], strict=True):
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    eager = statistics.median(seconds["eager"])
    stats = tgb.stats(runs["small"])
    found = [count for keys in stats.keys.values() for count in keys.values()]
    return {
        "eager_ms": 1000 * eager,
        "ratio": {name: statistics.median(times) / eager for name, times in seconds.items() if name != "eager"},
        "worst_relative": worst,
        "compile_seconds": stats.seconds["inductor"],
        "segments": sum(c.compiled for c in found),
        "compiles": sum(c.compiles for c in found),
        "plain": [str(reason) for c in found for reason in c.plain],
    }


def mlp_rows(i: int) -> tuple[Tensor, ...]:
    x = torch.randn(8 - i % 3, 64, generator=torch.Generator().manual_seed(i))
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return (x,)


def tokens(i: int) -> tuple[Tensor, ...]:
    return torch.tensor([[i * 7 % 128]]), torch.tensor([i % 64])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--rounds", type=int, default=30, help="of ten calls each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__, "threads": 1, "rounds": args.rounds}
    with torch.no_grad():
        result["mlp"] = measure(Mlp, mlp_rows, args.rounds)
        result["llama_decode"] = measure(Llama, tokens, args.rounds)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name in ("mlp", "llama_decode"):
        row = result[name]
        ratios = ", ".join(f"inductor {k}: {v:.2f} of eager" for k, v in row["ratio"].items())
        cost = f"{row['compiles']} compiles {row['compile_seconds']:.1f} s"
        print(f"{name}: eager {row['eager_ms']:.2f} ms; {ratios}; {cost}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
