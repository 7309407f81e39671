"""May the fill kernel be turned on (``ENABLED`` in ``recorders/fill_choice.py``)? One command on a GPU says so:

    python tests/bench/fill_check.py [out.json] [--seconds 110]

Whole calls through the kernel are compared with the same calls through grouped copies, bit for bit: 2, 10 and 40 slots
of mixed dtypes, every padding policy, changing sizes, sources that move, other streams, each device there is while
another one is current. Then whole replays are timed both ways, with sources at addresses seen before and at new ones.
The last line is the verdict; the exit status is 0 for yes. Whatever does not fit in the time is said, and is a no.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fill_calls

from torch_graph_backend import config
from torch_graph_backend.policies import PaddingPolicy as P
from torch_graph_backend.recorders import fill_triton

COUNTS = (2, 10, 40)
BUCKET, REAL = 64, 50


def checks(devices: int) -> list[tuple[str, Callable[[], str]]]:
    """Name, and what is wrong (empty: nothing)."""
    here = torch.device("cuda", 0)
    found: list[tuple[str, Callable[[], str]]] = [
        (f"{c} slots, all policies", partial(fill_calls.compared, c, list(P), here)) for c in COUNTS
    ]
    found += [(f"10 slots, {p.value}", partial(fill_calls.compared, 10, [p], here)) for p in P]
    found.append(("10 slots, other streams", lambda: other_streams(here)))
    for at in range(1, min(devices, 2)):
        there = torch.device("cuda", at)
        found.append((f"10 slots on {there}, {here} current", partial(fill_calls.compared, 10, list(P), there)))
    return found


def other_streams(device: torch.device) -> str:
    """The stream changes before every size."""
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    before = torch.cuda.current_stream(device)

    def change(_: Any, k: int) -> None:
        streams[k % 3].wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(streams[k % 3])

    try:
        return fill_calls.compared(10, list(P), device, around=change)
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.set_stream(before)


def timed(count: int, enabled: bool, device: torch.device, repeat: int) -> dict[str, float]:
    """Median microseconds of a whole replay, until it returns and until the device is done."""
    torch._dynamo.reset()
    with torch.no_grad(), fill_calls.chosen(enabled):
        f = torch.compile(fill_calls.model(count), backend="bcg", dynamic=True, options={"buckets": [BUCKET]})
        same = fill_calls.sources(count, REAL, device, 0)
        for args in (fill_calls.sources(count, REAL - 1, device, 1), same, same, same, same):
            f(*args)
        fresh = [fill_calls.sources(count, REAL, device, 2 + k) for k in range(repeat)]
        found = {}
        for name, sets in (("same", [same] * repeat), ("new", fresh)):
            host, total = [], []
            for args in sets:
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                f(*args)
                returned = time.perf_counter()
                torch.cuda.synchronize(device)
                host.append((returned - start) * 1e6)
                total.append((time.perf_counter() - start) * 1e6)
            found[f"{name}_host_us"], found[f"{name}_total_us"] = statistics.median(host), statistics.median(total)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=110)
    options = parser.parse_args()
    why = "there is no CUDA device" if not torch.cuda.is_available() else fill_triton.missing()
    why = why or fill_triton.failure(torch.device("cuda", 0))
    if why:
        print(f"may be enabled: not known, {why}")
        return 2
    start = time.perf_counter()
    config.DEFAULT_INDUCTOR_MAX_SIZE = 0  # plain kernels: compiling would take the time, and changes no fill
    torch._dynamo.config.recompile_limit = 64
    wrong: list[str] = []
    equal: dict[str, str] = {}
    for name, check in checks(torch.cuda.device_count()):
        if time.perf_counter() - start > options.seconds - 20:
            wrong.append(f"there was no time for {name}")
            continue
        try:
            equal[name] = check()
        except Exception as error:  # it is the verdict; the other checks may tell more
            equal[name] = f"{type(error).__name__}: {error}"
        print(f"{time.perf_counter() - start:6.1f} s  {name}: {equal[name] or 'same bits'}", flush=True)
        wrong += [f"{name}: {equal[name]}"] if equal[name] else []
    rows: list[dict[str, Any]] = []
    for count in COUNTS:
        pair = [timed(count, enabled, torch.device("cuda", 0), 200) for enabled in (False, True)]
        rows += [{"slots": count, "way": w, **row} for w, row in zip(("grouped", "fused"), pair, strict=True)]
        for row in rows[-2:]:
            print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        for kind, slack in (("same", 1.0), ("new", 1.1)):
            a, b = (p[f"{kind}_total_us"] for p in pair)
            if b > slack * a:
                wrong.append(f"{count} slots, {kind} addresses: {b:.1f} us against {a:.1f} of grouped copies")
    verdict = "yes" if not wrong else "no: " + "; ".join(wrong)
    if options.out is not None:
        result = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "verdict": verdict}
        result |= {"seconds": time.perf_counter() - start, "equal": {k: not v for k, v in equal.items()}, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - start:.1f} s; may be enabled: {verdict}")
    return 0 if verdict == "yes" else 1


if __name__ == "__main__":
    sys.exit(main())
