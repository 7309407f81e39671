"""What Inductor's segments bring on a GPU, beside other modes, in one run.

    python tests/bench/cuda_inductor.py docs/bench/cuda_inductor.json [--work wide] [--only "bcg all"] [--seconds 400]
    python tests/bench/cuda_inductor.py out.json --device cpu --tiny     # does the script itself work?

The decoder of ``cuda_decoder.py`` (16 layers, 2048 wide, bfloat16, SDPA on one sequence) in two workloads: ``small``,
8 to 32 tokens (buckets 16, 32), and ``wide``, 1 to 512 tokens (buckets 32 to 512). Contenders: eager; ``bcg`` with
``inductor`` off, small (32 rows), and all (one compile for all buckets: ``inductor_max_size`` is 0); ``torch.compile``
default and reduce-overhead, both ``dynamic=True``.

Per contender and workload: ``ms`` a call, ``host_ms`` until the call returns, ``by_length``; ``first_seconds`` of all
first calls (compiling, recording); for ``bcg`` ``compile_seconds`` of them in Inductor, compiled segments and compiles
by key, and the reasons of what was not compiled. ``worst_relative``: largest difference from eager. ``error``: root of
the mean squared error against float32 with the same weights, over eager's own.

A contender that fails is reported and the others still run; the file is written after each. None is begun after
``--seconds``. Inductor's cache on disk is empty at the start of every contender: none finds another's code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from cuda_decoder import Setting, clean, decoder, guarded, hidden, milliseconds, relative, reserved, synchronise

import torch_graph_backend as tgb


@dataclass(frozen=True)
class Work:
    """Lengths that are timed, and the buckets of ``bcg``."""

    lengths: tuple[int, ...]
    buckets: tuple[int, ...]


WORK = {
    "small": Work((8, 11, 16, 19, 24, 29, 32), (16, 32)),
    "wide": Work((1, 5, 20, 32, 48, 100, 200, 311, 400, 512), (32, 64, 128, 256, 384, 512)),
}
TINY = {"small": Work((8, 5, 8), (8,)), "wide": Work((3, 20, 40), (4, 32, 64))}
#: In this order: what matters most comes first, should time run out.
CONTENDERS = ("eager", "bcg off", "bcg small", "reduce-overhead", "default", "bcg all")


@contextmanager
def empty_cache() -> Iterator[None]:
    """Inductor's cache on disk in a folder of its own."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # Inductor sets the second to a folder in the first
    before = {name: os.environ.pop(name, None) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[names[0]] = folder
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def contender(name: str, model: Any, work: Work, seconds: int) -> Callable[[Any], Any]:
    if name == "eager":
        return model
    if name.startswith("bcg"):
        kind = name.split()[1]
        options = {"buckets": list(work.buckets), "inductor": kind, "inductor_seconds": seconds}
        options |= {"inductor_max_size": 0} if kind == "all" else {}
        return torch.compile(model, backend="bcg", options=options)
    mode = None if name == "default" else name
    return torch.compile(model, dynamic=True, mode=mode)


def run(s: Setting, name: str, work: Work, seconds: int, reference: dict[int, Any]) -> dict[str, Any]:
    model = decoder(s)
    fast = contender(name, model, work, seconds)
    before, start = reserved(s.device), time.perf_counter()
    for _ in range(1 if name == "eager" else 3):
        for n in sorted(work.lengths, reverse=True):
            fast(hidden(s, n))
    synchronise(s.device)
    first = time.perf_counter() - start
    memory = reserved(s.device) - before
    inputs = {n: hidden(s, n) for n in work.lengths}
    by_length = {n: timed(s, fast, x) for n, x in inputs.items()}
    host = [milliseconds(s.device, lambda x=x: fast(x), host=True) for _ in range(s.rounds) for x in inputs.values()]
    found = {
        "ms": sum(by_length.values()) / len(by_length),
        "host_ms": sum(host) / len(host),
        "by_length": by_length,
        "first_seconds": first,
        "reserved_bytes": memory,
    }
    found |= differences(s, model, fast, inputs, reference)
    if name.startswith("bcg"):
        found |= compiled(fast)
    return found


def timed(s: Setting, fast: Callable[[Any], Any], x: Any) -> float:
    """Milliseconds a call, of calls that follow each other."""
    calls = 4 * s.rounds
    fast(x)
    return milliseconds(s.device, lambda: [fast(x) for _ in range(calls)]) / calls


def differences(s: Setting, model: Any, fast: Any, inputs: dict[int, Any], reference: dict[int, Any]) -> dict[str, Any]:
    """From eager, and from float32: ``reference`` is made by the first contender."""
    if not reference:
        exact = decoder(s).float()
        exact.cos, exact.sin = model.cos.float(), model.sin.float()
        reference.update({n: exact(x.float()) for n, x in inputs.items()})
    worst, sums = 0.0, [0.0, 0.0]
    for n, x in inputs.items():
        want, got = model(x), fast(x)
        worst = max(worst, relative(got, want))
        for k, value in enumerate((got, want)):
            sums[k] += float((value.double() - reference[n].double()).square().sum())
    return {"worst_relative": worst, "error": (sums[0] / sums[1]) ** 0.5 if sums[1] else 0.0}


def compiled(fast: Any) -> dict[str, Any]:
    stats = tgb.stats(fast)
    counts = [(str(k), c) for keys in stats.keys.values() for k, c in keys.items()]
    return {
        "compile_seconds": stats.seconds["inductor"],
        "segments": {k: c.compiled for k, c in counts},
        "compiles": {k: c.compiles for k, c in counts},
        "plain": sorted({str(reason) for _, c in counts for reason in c.plain}),
        "replays": stats.replays,
        "calls": stats.calls,
        "eager": dict(stats.eager),
    }


def show(result: dict[str, Any]) -> None:
    for workload in WORK:
        print(f"{workload}: contender, ms, host ms, first s, compile s, compiles, error / eager's")
        for name, row in result.get(workload, {}).items():
            if "failed" in row:
                print(f"  {name:16} {row['failed']}")
                continue
            extra = f"{row['compile_seconds']:8.1f} {sum(row['compiles'].values()):4d}" if "compiles" in row else ""
            numbers = f"{row['ms']:8.3f} {row['host_ms']:8.3f} {row['first_seconds']:8.1f}"
            print(f"  {name:16} {numbers} {extra:13} {row['error']:6.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--seconds", type=float, default=400, help="no contender is begun after this time")
    parser.add_argument("--cap", type=int, default=75, help="the option inductor_seconds")
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script with")
    args = parser.parse_args()
    s = Setting.tiny(args.device) if args.tiny else Setting(args.device, 16, 2048)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result: dict[str, Any] = {"torch": torch.__version__, "device": name, "layers": s.layers, "width": s.width}
    start = time.perf_counter()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for workload in args.work:
            work = (TINY if args.tiny else WORK)[workload]
            reference: dict[int, Any] = {}
            rows = result.setdefault(workload, {})
            for contender_name in args.only:
                if time.perf_counter() - start > args.seconds:
                    rows[contender_name] = {"failed": "no time left"}
                    continue
                with clean(s.device), empty_cache():
                    rows[contender_name] = guarded(
                        lambda n=contender_name, w=work, r=reference: run(s, n, w, args.cap, r)
                    )
                result["seconds"] = time.perf_counter() - start
                args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(f"{workload}, {contender_name}: {rows[contender_name]['part_seconds']:.0f} s", flush=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    failed = [n for w in WORK for n, row in result.get(w, {}).items() if "failed" in row]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
