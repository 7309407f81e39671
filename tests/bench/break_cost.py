"""What a break costs on the host beyond the op's own call, in microseconds, and where it goes.

    python tests/bench/break_cost.py [out.json] [--device cpu|cuda] [--layers 4 20] [--repeat 200]

A model of N equal layers (linear, an op on three tensors, linear) is replayed for two N; the difference by layer, less
the op's own call, is ``beyond`` (with the launch of a segment) and ``host`` (without). The parts are timed one by one
on the same plan: ``launch`` a segment, ``cut`` its outputs, ``check`` what the generated step adds to the bare
function, ``bridge`` the results. On a CPU a "launch" runs the segment's operations: the other columns are what counts.
Times are host times: on a GPU nothing waits for the device but the end of each sample.
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

import torch
import torch._dynamo
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.plan import CapturedSegment
from torch_graph_backend.slots import take_all

COLUMNS = ("op", "beyond", "host", "launch", "cut", "check", "bridge", "own call")


def like(q: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(q)


@tgb.break_op("bench::copies", fake=like)
def copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@tgb.break_op("bench::views", fake=like, keeps_args=False)
def views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@tgb.break_op("bench::into", mutates_args=("out",), keeps_args=False)
def into(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    pass


def with_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    into(q, k, v, out)
    return out


@torch.library.custom_op("bench::custom", mutates_args=())
def custom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


custom.register_fake(like)

#: What is compiled, and the bare function behind it.
OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "break_op": (copies, copies),
    "break_op, keeps_args=False": (views, views),
    "break_op, out argument": (with_out, with_out),
    "torch.library.custom_op": (custom, custom._init_fn),
}


class Net(torch.nn.Module):
    def __init__(self, layers: int, width: int, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.op = op
        self.parts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4 * layers))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.parts), 4):
            q, k, v, o = self.parts[i : i + 4]
            x = x + o(self.op(q(x), k(x), v(x)))
        return x


def microseconds(call: Callable[[], Any], repeat: int, sync: Callable[[], None]) -> float:
    """Host time of a call that nothing disturbed (the tenth part of the samples is faster); no queue of launches fills
    within a sample."""
    for _ in range(5):
        call()
    samples = []
    for _ in range(repeat):
        sync()
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.quantiles(samples, n=10)[0]


def measure(
    op: Callable[..., Tensor], bare: Callable[..., Any], layers: list[int], args: argparse.Namespace
) -> dict[str, float]:
    """The columns for one op."""
    sync = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    totals: dict[int, float] = {}
    parts: dict[str, float] = {}
    for n in layers:
        torch._dynamo.reset()
        tgb.reset()
        x = torch.randn(args.rows, args.width, device=args.device)
        torch._dynamo.mark_dynamic(x, 0)
        model = Net(n, args.width, op).to(args.device)
        compiled = torch.compile(model, backend="bcg", options={"inductor": "off"})
        with torch.no_grad():
            for _ in range(3):
                compiled(x)
            assert tgb.stats(compiled).replays == 2, tgb.stats(compiled)
            (graph,) = registry.all_graphs()
            given = given_to(graph, compiled, x)
            totals[n] = microseconds(lambda: graph(*given), args.repeat, sync)  # noqa: B023
            parts = part_times(graph, given, bare, args.repeat, sync)
    slope = (totals[layers[1]] - totals[layers[0]]) / (layers[1] - layers[0])
    own = parts["own call"]
    return {"beyond": slope - own, "host": slope - own - parts["launch"], **parts}


def given_to(graph: Any, compiled: Callable[..., Any], x: Tensor) -> tuple[Any, ...]:
    """The arguments that Dynamo passes to the graph."""
    seen: list[tuple[Any, ...]] = []
    run = graph.run
    graph.run = lambda entry, sizes, args: seen.append(tuple(args)) or run(entry, sizes, args)
    compiled(x)
    del graph.run
    return seen[-1]


def part_times(
    graph: Any, given: tuple[Any, ...], bare: Callable[..., Any], repeat: int, sync: Any
) -> dict[str, float]:
    """The parts of one break in the middle of the plan."""
    (entry,) = graph.entries.values()
    sizes = graph.program.sizes_of(given)
    frame = entry.frame(sizes, list(given))
    frame.fill(given)
    segments = [s for s in graph.plan.steps if isinstance(s, CapturedSegment)]
    segment = segments[len(segments) // 2]
    step = graph.plan.steps[segment.index + 1]
    cuts = dict(
        zip([f"cut:{i}" for i, _ in entry.cuts_after[segment.index]], frame.segment(segment.index), strict=True)
    )
    inputs = [cuts[f"{ref.kind}:{ref.key}"] if ref.kind == "cut" else given[ref.key] for _, ref in step.inputs]
    made_here = {o.value for o in step.ops}
    inputs += [frame.rows(i) for i, b in enumerate(graph.plan.bridges) if b.direct and b.value in made_here]
    run = graph.program.steps[step.index]
    qkv = list(cuts.values())[:3]
    made = run(*sizes, *inputs)
    bridged = [made[list(step.outputs).index(b.value)] for b in graph.plan.bridges if b.after == step.index]

    def cut() -> None:
        take_all(frame.views[segment.index])

    own = microseconds(lambda: bare(*qkv), repeat, sync)
    return {
        "launch": microseconds(lambda: entry.recorder.replay(entry.recordings[segment.index]), repeat, sync),
        "cut": microseconds(cut, repeat, sync),
        "check": microseconds(lambda: run(*sizes, *inputs), repeat, sync) - own,
        "bridge": microseconds(lambda: frame.bridge(step.index, bridged), repeat, sync),
        "own call": own,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", help="write the table to this file as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", nargs=2, type=int, default=[4, 20])
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (op, bare) in OPS.items():
        found = measure(op, bare, args.layers, args)
        rows.append({"op": name, **{k: round(v, 2) for k, v in found.items()}})
        print("  ".join(f"{c} {rows[-1][c]}" for c in COLUMNS), file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    result = {"torch": torch.__version__, "device": name, "rows": args.rows, "width": args.width, "breaks": rows}
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
