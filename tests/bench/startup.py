"""Start-up: what normalising, planning and recording cost beside Dynamo's own tracing (HF Llama, 16 and 32 layers).

    python tests/bench/startup.py [out.json] [--layers 16 32] [--hidden 64]

``dynamo`` is the first prefill and the first decode step with ``backend="eager"`` on a fresh copy of the model, less
the same two calls again (tracing without running). ``total`` is the same difference with ``backend="bcg"``; the other
columns are what the backend counts itself. All in seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import transformers

import torch_graph_backend as tgb

COLUMNS = ("layers", "graphs", "dynamo", "total", "normalise", "plan", "record", "all but normalise")


def llama(layers: int, hidden: int, vocabulary: int = 128) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def prefill_and_decode(model: Any) -> float:
    """Seconds of a prefill and of one decode step. Sizes are marked dynamic, so that no size is compiled twice."""
    ids = torch.arange(1, 25).view(2, 12)
    for dim in range(2):
        torch._dynamo.maybe_mark_dynamic(ids, dim)
    start = time.perf_counter()
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        cache = out.past_key_values
        for layer in cache.layers:
            for t in (layer.keys, layer.values):
                torch._dynamo.maybe_mark_dynamic(t, 0)
                torch._dynamo.maybe_mark_dynamic(t, 2)
        token = out.logits[:, -1:].argmax(-1)
        torch._dynamo.maybe_mark_dynamic(token, 0)
        positions = torch.full_like(token, ids.shape[1])
        model(input_ids=token, position_ids=positions, past_key_values=cache, use_cache=True)
    return time.perf_counter() - start


def measure(model: Any, backend: str) -> tuple[float, Any]:
    """Seconds that the first run takes beyond a later one, and the counts (of ``bcg``)."""
    torch._dynamo.reset()
    tgb.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend=backend, options={"inductor": "off"} if backend == "bcg" else None)
    first = prefill_and_decode(twin)
    prefill_and_decode(twin)  # `bcg` records here
    later = prefill_and_decode(twin)
    return first - later, tgb.stats(twin)


def report(layers: int, hidden: int) -> dict[str, Any]:
    model = llama(layers, hidden)
    dynamo, _ = measure(model, "eager")
    total, stats = measure(model, "bcg")
    seconds = stats.seconds
    rest = seconds["plan"] + seconds["record"]
    values = (layers, stats.graphs, dynamo, total, seconds["normalise"], seconds["plan"], seconds["record"], rest)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, help="where to write the numbers as JSON")
    parser.add_argument("--layers", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    prefill_and_decode(llama(1, options.hidden))  # imports and first kernels are nobody's start-up
    measure(llama(1, options.hidden), "bcg")
    rows = [report(layers, options.hidden) for layers in options.layers]
    widths = [max(len(name), 9) for name in COLUMNS]
    write = sys.stdout.write
    write("  ".join(name.rjust(width) for name, width in zip(COLUMNS, widths, strict=True)) + "\n")
    for row in rows:
        cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
        write("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + "\n")
    if options.out is not None:
        where = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        options.out.write_text(json.dumps({"hidden": options.hidden, **where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
