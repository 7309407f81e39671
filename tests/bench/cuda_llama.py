"""HF Llama on a GPU: logits against eager, and milliseconds a token, in one run; a table and a JSON file.

    python tests/bench/cuda_llama.py --json out.json [--layers 16] [--hidden 2048]

Correctness: fp32, prefill and decode logits at several (batch, length) pairs, relative to the largest eager logit.
Speed: bf16 greedy decode of a growing ``DynamicCache``; eager and ``bcg`` in the same process.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import torch_graph_backend as tgb

PAIRS = [(1, 9), (1, 10), (3, 37), (5, 50), (2, 17), (3, 40), (4, 64), (2, 21), (5, 33), (3, 12)]


def model(layers: int, hidden: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        vocab_size=32000,
    )
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def steps(m: LlamaForCausalLM, batch: int, length: int, count: int, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of one prefill and ``count`` decode steps fed with given tokens (so that runs stay comparable)."""
    out = m(tokens[:batch, :length], use_cache=True)
    logits = [out.logits[:, -1]]
    for i in range(count):
        out = m(tokens[:batch, length + i : length + i + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1])
    return logits


def parity(layers: int, hidden: int) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, fast = model(layers, hidden, torch.float32), model(layers, hidden, torch.float32)
    fast.compile(backend="bcg", options={"inductor": "off"})
    tokens = torch.randint(0, 32000, (8, 128), device="cuda")
    rows = []
    for batch, length in PAIRS + PAIRS:
        expected, got = (steps(m, batch, length, 3, tokens) for m in (plain, fast))
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, got, strict=True))
        rows.append({"batch": batch, "length": length, "relative_error": worst})
    stats = tgb.stats(fast)
    print(stats)
    return {"pairs": rows, "worst": max(r["relative_error"] for r in rows), **counts(stats)}


def counts(stats: Any) -> dict[str, Any]:
    return {
        "calls": stats.calls,
        "replays": stats.replays,
        "first_calls": stats.first_calls,
        "eager": dict(stats.eager),
        "seconds": stats.seconds,
    }


def decode_ms(m: LlamaForCausalLM, batch: int, length: int, tokens: torch.Tensor, count: int = 64) -> float:
    """Milliseconds a decode step, after a first pass over the same lengths."""
    for _ in range(2):
        out = m(tokens[:batch, :length], use_cache=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            step = tokens[:batch, length + i : length + i + 1]
            out = m(step, past_key_values=out.past_key_values, use_cache=True)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    return 1000 * elapsed / count


def speed(layers: int, hidden: int) -> list[dict[str, Any]]:
    plain, fast = model(layers, hidden, torch.bfloat16), model(layers, hidden, torch.bfloat16)
    fast.compile(backend="bcg", options={"inductor": "off"})
    tokens = torch.randint(0, 32000, (8, 512), device="cuda")
    rows = []
    for batch, length in [(1, 100), (4, 173), (3, 173)]:
        row: dict[str, Any] = {"batch": batch, "length": length}
        row["eager_ms"] = decode_ms(plain, batch, length, tokens)
        row["bcg_ms"] = decode_ms(fast, batch, length, tokens)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(),
        "layers": args.layers,
        "hidden": args.hidden,
    }
    with torch.no_grad():
        result["parity_fp32"] = parity(args.layers, args.hidden)
        result["decode_bf16"] = speed(args.layers, args.hidden)
    with open(args.json, "w") as file:
        json.dump(result, file, indent=1)
    print(f"fp32 parity: worst relative error {result['parity_fp32']['worst']:.2e} over {2 * len(PAIRS)} pairs")
    for row in result["decode_bf16"]:
        what = f"batch {row['batch']}, prompt {row['length']}"
        print(f"{what}: eager {row['eager_ms']:.2f} ms, bcg {row['bcg_ms']:.2f} ms a token")


if __name__ == "__main__":
    main()
