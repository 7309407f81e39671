"""May the fill kernel be turned on (``ENABLED`` in ``recorders/fill_choice.py``)? One command on a GPU says so:

    python tests/bench/fill_check.py [out.json] [--seconds 110] [--only bits times]

Whole calls through the kernel are compared with the same calls through grouped copies, bit for bit: 2, 10 and 40 slots
of mixed dtypes, every padding policy, changing sizes, sources that move, other streams, each device there is while
another one is current. Then whole replays are timed both ways, with sources at addresses seen before and at new ones.
The last line is the verdict: from how many slots on no replay is slower through the kernel; the exit status is 0 if
there is such a number. Whatever does not fit in the time is said, and is a no.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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
#: How much longer a replay through the kernel may take: sources that lie where they lay before, and new ones, whose
#: addresses have to be put on the device.
SLACK = {"same": 1.0, "new": 1.1}


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


def timed(count: int, device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Microseconds of whole replays until they return and until the device is done, and of the fill in them alone: both
    ways by turns, so that a busy host disturbs both. Of many samples the tenth part is faster than what is given."""
    torch._dynamo.reset()
    with torch.no_grad(), fill_calls.chosen(True):
        f = torch.compile(fill_calls.model(count), backend="bcg", options={"buckets": [BUCKET]})
        same = fill_calls.sources(count, REAL, device, 0)
        for args in (fill_calls.sources(count, REAL - 1, device, 1), same, same, same, same):
            f(*args)
        (frame,) = (
            x for e in fill_calls.entries(f) for x in e.frames.values() if x.slot_filler.real[0].shape[0] == REAL
        )
        assert len(frame.slot_args) == count
        ways = {"grouped": frame.slot_filler.make(), "fused": frame.slot_filler}
        samples: dict[tuple[str, str], list[float]] = {}
        for k in range(repeat):
            fresh = {way: fill_calls.sources(count, REAL, device, 2 * k + 2 + i) for i, way in enumerate(ways)}
            for kind in ("same", "new"):
                for way, filler in ways.items():
                    frame.slot_filler = filler
                    found = one_replay(f, same if kind == "same" else fresh[way], filler, device)
                    for name, value in found.items():
                        samples.setdefault((way, f"{kind}_{name}"), []).append(value)
    tenth = {key: statistics.quantiles(values, n=10)[0] for key, values in samples.items()}
    return [{"slots": count, "way": way, **{name: v for (w, name), v in tenth.items() if w == way}} for way in ways]


def one_replay(f: Callable[..., Any], args: Sequence[Any], filler: Any, device: torch.device) -> dict[str, float]:
    """One call from an empty queue."""
    fill, spent = type(filler).fill, []

    def measured(*arguments: Any) -> None:
        start = time.perf_counter()
        fill(filler, *arguments)
        spent.append(time.perf_counter() - start)

    filler.fill = measured
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    f(*args)
    returned = time.perf_counter()
    torch.cuda.synchronize(device)
    total = time.perf_counter() - start
    del filler.fill
    return {"fill_us": 1e6 * sum(spent), "host_us": 1e6 * (returned - start), "total_us": 1e6 * total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--only", nargs="+", choices=("bits", "times"), default=("bits", "times"))
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
    for name, check in checks(torch.cuda.device_count()) if "bits" in options.only else ():
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
    faster: dict[int, bool] = {}
    for count in COUNTS if "times" in options.only else ():
        pair = timed(count, torch.device("cuda", 0), 200)
        rows += pair
        for row in pair:
            print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        faster[count] = all(pair[1][f"{k}_total_us"] <= SLACK[k] * pair[0][f"{k}_total_us"] for k in SLACK)
    least = min((c for c in faster if all(faster[d] for d in faster if d >= c)), default=None)
    if "times" in options.only and least is None:
        wrong.append("it is slower with many slots")
    fine = f"yes, from {least} slots on" if "times" in options.only else "its bits are those of copies"
    verdict = "no: " + "; ".join(wrong) if wrong else fine
    if options.out is not None:
        result = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "verdict": verdict}
        result |= {"seconds": time.perf_counter() - start, "equal": {k: not v for k, v in equal.items()}, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - start:.1f} s; may be enabled: {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
