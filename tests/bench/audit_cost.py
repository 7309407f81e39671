"""What an audit costs: a call of a key that is audited beside one that is not (HF Llama, prefill and decode).

    python tests/bench/audit_cost.py [out.json] [--device cpu|cuda] [--layers 4] [--hidden 256] [--calls 20]

Medians over calls, in milliseconds until the device is done: a replay, a replay that is audited (``every:1``), and
their ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import transformers
from startup import llama

import torch_graph_backend as tgb

#: Name -> (batch, length), each padded to the bucket of (4, 16) or (8, 1).
CALLS = {"prefill": (3, 13), "decode": (7, 1)}


def median_ms(model: Any, option: str, shape: tuple[int, int], calls: int) -> tuple[float, tgb.Stats]:
    """The median of replays, and the counts."""
    torch._dynamo.reset()
    tgb.reset()
    fast = torch.compile(model, backend="bcg", options={"buckets": [4, 8, 16], "audit": option})
    device = next(model.parameters()).device
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    ids = torch.randint(1, 512, shape).to(device)
    for dim in range(2):
        torch._dynamo.maybe_mark_dynamic(ids, dim)
    times = []
    with torch.no_grad():
        for _ in range(calls + 3):
            sync()
            start = time.perf_counter()
            fast(ids, use_cache=False)
            sync()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:]), tgb.stats(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = llama(options.layers, options.hidden, 512).to(options.device)
    rows = []
    for name, shape in CALLS.items():
        plain, off = median_ms(model, "off", shape, options.calls)
        audited, on = median_ms(model, "every:1", shape, options.calls)
        assert off.audits == 0
        assert on.audits == options.calls + 3
        assert not on.audit_failures
        row = {"call": name, "shape": list(shape), "ms": plain, "audited_ms": audited, "ratio": audited / plain}
        rows.append(row)
        print(f"{name:8s} {plain:8.2f} ms, audited {audited:8.2f} ms: {audited / plain:.1f} times", file=sys.stderr)
    found = {
        "layers": options.layers,
        "hidden": options.hidden,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "rows": rows,
    }
    text = json.dumps(found, indent=1)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
