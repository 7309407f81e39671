"""What filling the slots of a key costs on a GPU: grouped copies (``Filler``) beside one kernel (``FusedFiller``).

    python tests/bench/fill.py [out.json] [--repeat 200]

For 2, 10 and 40 slots, a mix as a decode step has it: index vectors, lengths, ``[3, T]`` positions, rows of hidden
states. 50 real rows of 64. ``host``: microseconds until the call returns, nothing waited for before; ``total``: until
the device is done; ``kernels``: what the profiler counts. ``same``: the sources lie where they lay at the last call;
``fresh``: at addresses that were never seen. Both ways are compared with each other first, at several sizes, and the
number of times that Triton compiled is written down.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sympy
import torch

from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.recorders import fill_triton
from torch_graph_backend.slots import Factor, Filler, Window

N = sympy.Symbol("N", integer=True, positive=True)
BUCKET = 64
REAL = 50
SIZES = (33, 48, 50, 63, 64)
COUNTS = (2, 10, 40)
HIDDEN = 2048
#: Shapes (None: the padded size), dtype; repeated until there are enough.
MIX: tuple[tuple[tuple[int | None, ...], torch.dtype], ...] = (
    ((None,), torch.int64),
    ((None, HIDDEN), torch.bfloat16),
    ((None,), torch.int32),
    ((3, None), torch.int64),
    ((None,), torch.int64),
)
#: What the tails hold.
TAILS: dict[str, tuple[Tail | None, ...]] = {
    "row 0": (None,),
    "declared": (Tail(0), None, Tail(1), Tail(0), Tail(0)),
    "constant": (Tail(0),),
}


class Slots:
    """Buffers of a key, and sources of it at a real size."""

    def __init__(self, count: int, tails: tuple[Tail | None, ...], device: torch.device) -> None:
        self.kinds = [MIX[i % len(MIX)] for i in range(count)]
        self.tails = [tails[i % len(tails)] for i in range(count)]
        self.device = device
        self.buffers = [torch.zeros(at(shape, BUCKET), dtype=d, device=device) for shape, d in self.kinds]
        self.windows = [Window(((shape.index(None), (Factor(BUCKET, N),)),)) for shape, _ in self.kinds]
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def sources(self, n: int) -> list[torch.Tensor]:
        return [torch.randint(1, 9, at(shape, n), device=self.device).to(d) for shape, d in self.kinds]

    def grouped(self, n: int) -> Filler:
        return Filler(self.buffers, self.windows, {N: n}, tails=self.tails, numbers=[(self.count, n)])

    def fused(self, n: int) -> Any:
        strides = [torch.empty(at(shape, n), device="meta").stride() for shape, _ in self.kinds]
        made = fill_triton.fused(
            self.buffers, self.windows, {N: n}, strides, tails=self.tails, numbers=[(self.count, n)]
        )
        assert made is not None
        return made

    def state(self) -> list[torch.Tensor]:
        return [t.clone() for t in (*self.buffers, self.count)]

    def spoil(self) -> None:
        for t in (*self.buffers, self.count):
            t.fill_(77)


def at(shape: tuple[int | None, ...], n: int) -> tuple[int, ...]:
    return tuple(n if d is None else d for d in shape)


def agree(slots: Slots) -> int:
    """Both ways leave the same bits, at several sizes; returns how many."""
    for n in SIZES:
        sources = slots.sources(n)
        seen = []
        for filler in (slots.grouped(n), slots.fused(n)):
            slots.spoil()
            filler.fill(sources)
            seen.append(slots.state())
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), f"the two ways differ at {n}"
    return len(SIZES)


def timed(call: Callable[[], None], repeat: int) -> tuple[float, float]:
    """Median host and total microseconds of a call that begins with an idle device."""
    host, total = [], []
    for i in range(repeat + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        if i >= 20:
            host.append((returned - start) * 1e6)
            total.append((done - start) * 1e6)
    return statistics.median(host), statistics.median(total)


def kernels(call: Callable[[], None]) -> int:
    """Device operations of one call, copies from the host included."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len([e for e in found if "ynchron" not in e.name])


def fresh_sets(slots: Slots, count: int) -> list[list[torch.Tensor]]:
    """Sources at addresses of their own, all alive."""
    return [slots.sources(REAL) for _ in range(count)]


def measured(slots: Slots, repeat: int) -> list[dict[str, Any]]:
    rows = []
    sources, others = slots.sources(REAL), fresh_sets(slots, 40)
    for way, filler in (("grouped", slots.grouped(REAL)), ("fused", slots.fused(REAL))):
        host, total = timed(lambda f=filler: f.fill(sources), repeat)  # type: ignore[misc]
        row = {"way": way, "addresses": "same", "host_us": host, "total_us": total}
        row["operations"] = filler.launches
        row["kernels"] = kernels(lambda f=filler: f.fill(sources))  # type: ignore[misc]
        rows.append(row)
        if way == "fused":
            filler.known.clear()
        turn = iter(range(10**9))

        def next_set(f: Any = filler) -> None:
            if isinstance(f, fill_triton.FusedFiller):
                f.known.clear()
            f.fill(others[next(turn) % len(others)])  # noqa: B023 (called before the next round)

        host, total = timed(next_set, repeat)
        rows.append({"way": way, "addresses": "fresh", "host_us": host, "total_us": total})
    return rows


def bound(slots: Slots, repeat: int) -> dict[str, Any]:
    """The same launch without Triton's argument handling: what its Python costs. (No public interface.)"""
    filler, sources = slots.fused(REAL), slots.sources(REAL)
    filler.fill(sources)
    addresses = next(iter(filler.known.values()))
    numbers = (fill_triton.HEAD, fill_triton.COLUMNS, fill_triton.BLOCK)
    try:
        kernel = fill_triton.fill_kernel[filler.grid](filler.table, addresses, filler.blocks, *numbers)
        launch = kernel[(filler.grid[0], 1, 1)]

        def call() -> None:
            launch(filler.table, filler.known[tuple([t.data_ptr() for t in sources])], filler.blocks, *numbers)

        slots.spoil()
        call()
        mine = slots.state()
        filler.fill(sources)
        assert all(torch.equal(a, b) for a, b in zip(mine, slots.state(), strict=True))
        host, total = timed(call, repeat)
    except Exception as error:  # another version of Triton: written down, and no reason to stop
        return {"way": "fused, bound", "addresses": "same", "error": f"{type(error).__name__}: {error}"[:200]}
    return {"way": "fused, bound", "addresses": "same", "host_us": host, "total_us": total}


def compiled_kernels() -> int | None:
    """How many variants of the kernel Triton has compiled; ``None`` if this version keeps it elsewhere."""
    try:
        return sum(len(c[0]) for c in fill_triton.fill_kernel.device_caches.values())
    except (AttributeError, TypeError, IndexError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--repeat", type=int, default=200)
    options = parser.parse_args()
    why = "there is no CUDA device" if not torch.cuda.is_available() else fill_triton.missing()
    if why:
        print(f"not measured: {why}")
        return 1
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    found: list[dict[str, Any]] = []
    for name, tails in TAILS.items():
        for count in COUNTS:
            slots = Slots(count, tails, device)
            checked = agree(slots)
            for row in (*measured(slots, options.repeat), bound(slots, options.repeat)):
                found.append({"tails": name, "slots": count, "sizes_checked": checked, **row})
                print(
                    f"{name:9} {count:3} slots  {row['way']:12} {row['addresses']:6} "
                    f"host {row.get('host_us', -1):7.1f} us  total {row.get('total_us', -1):7.1f} us  "
                    f"kernels {row.get('kernels', '')}{row.get('error', '')}"
                )
    result = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "bucket": BUCKET,
        "real_rows": REAL,
        "hidden": HIDDEN,
        "repeat": options.repeat,
        "compiled_kernels": compiled_kernels(),
        "rows": found,
    }
    print(f"Triton compiled {result['compiled_kernels']} variants of the kernel")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
