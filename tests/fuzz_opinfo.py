"""Soundness fuzz over torch's own operator samples: whatever the padding proof allows must hold numerically.

    python tests/fuzz_opinfo.py [--part 0/2] [--write]      all of it (about half an hour on one core)

A *query* is one OpInfo sample with one of its sizes padded, or two. The operation is traced and analysed; then it is
run at the real and at the bucket's size in lockstep under several fills (``padding_harness.check_tensors``): every
node that is not refused must agree on the real rows. ``test_fuzz_opinfo.py`` runs a slice in CI and compares the number
of *safe* queries (nothing refused) with ``fuzz_baseline.json``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from padding_harness import EagerFailsError, analysed, check_tensors, trace_tensors, valid_at
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

BASELINE = Path(__file__).with_name("fuzz_baseline.json")
FILLS = ("nan", "random", "row0")

#: Operations that cannot be asked: they compile code, need another device, or print.
SKIPPED = ("jiterator", "to_sparse", "_segment_reduce", "empty", "new_empty", "as_strided_partial_views")


@dataclass
class Tally:
    """Counts of one run. ``safe`` counts, per operation, the queries of which nothing was refused."""

    counts: Counter[str] = field(default_factory=Counter)
    safe: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Query:
    """One call: ``function(*tensors)`` with the named dimensions padded."""

    name: str
    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    names: tuple[dict[int, str], ...]
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.name} {[tuple(t.shape) for t in self.tensors]} padded {self.sizes}"


def queries(op: Any, dtype: torch.dtype, most: int, inplace: bool, pairs: bool, per_sample: int) -> Iterator[Query]:
    """The queries of one operation."""
    call = op.inplace_variant if inplace else op.op
    samples = op.sample_inputs("cpu", dtype, requires_grad=False)
    for sample in itertools.islice(samples, most):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.layout is torch.strided]
        if inplace and sample.broadcasts_input:
            continue
        tensors = tuple(leaves[i].detach().clone(memory_format=torch.contiguous_format) for i in where)

        def function(*values: torch.Tensor, leaves: Any = leaves, spec: Any = spec, where: Any = where) -> Any:
            whole = list(leaves)
            for i, value in zip(where, values, strict=True):
                whole[i] = value
            first, args, kwargs = tree_unflatten(whole, spec)
            return call(first, *args, **kwargs)

        sizes = sorted({n for t in tensors for n in t.shape if n >= 2}, reverse=True)[:per_sample]
        choices: list[tuple[int, ...]] = [(n,) for n in sizes]
        if pairs and len(sizes) > 1:
            choices.append((sizes[0], sizes[1]))
        for choice in choices:
            label = {n: f"s{k}" for k, n in enumerate(choice)}
            names = tuple({d: label[n] for d, n in enumerate(t.shape) if n in label} for t in tensors)
            yield Query(op.formatted_name, function, tensors, names, {label[n]: n for n in choice})


def ask(query: Query, tally: Tally, fills: Sequence[str]) -> None:
    """Trace, analyse, run; everything found goes into ``tally``."""
    tally.counts["queries"] += 1
    try:
        gm, symbols = trace_tensors(query.function, query.tensors, query.names)
    except Exception:  # data-dependent control flow, a size that must be constant, ...
        tally.counts["not traceable"] += 1
        return
    traced = analysed(gm, symbols, random_is_eager=True)
    result = traced.result
    bucket = {name: n + 2 for name, n in query.sizes.items()}
    for node, reason in result.reasons.items():
        if reason.code == "unknown-op":
            tally.unknown[str(node.target)] += 1
    try:
        if not valid_at(traced, bucket):
            tally.counts["bucket refused"] += 1
            return
        for how in fills:
            torch.manual_seed(0)
            check_tensors(traced, query.tensors, query.sizes, bucket, how)
    except EagerFailsError:
        tally.counts["eager fails"] += 1
        return
    except Exception as error:
        line = " | ".join(str(error).strip().splitlines()[:3])[:300]
        tally.violations.append(f"{query}: {type(error).__name__}: {line}")
        return
    if result.reasons or traced.eager:
        tally.counts["refused"] += 1
    else:
        tally.counts["safe"] += 1
        tally.safe[query.name] += 1


def dtype_of(op: Any) -> torch.dtype | None:
    """What an operation is sampled in: float32 if it can, else an integer or boolean type."""
    supported = op.supported_dtypes("cpu")
    return next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in supported), None)


def operations() -> list[Any]:
    """Every operation of torch's database that can be asked, in a stable order."""
    usable = [op for op in op_db if not any(skip in op.name for skip in SKIPPED) and dtype_of(op) is not None]
    return sorted(usable, key=lambda op: op.formatted_name)


def fuzz(
    ops: Sequence[Any], *, samples: int = 12, per_sample: int = 2, fills: Sequence[str] = FILLS, full: bool = True
) -> Tally:
    """Ask everything about some operations; ``full`` adds in-place forms and two padded sizes."""
    tally = Tally()
    for op in ops:
        dtype = dtype_of(op)
        assert dtype is not None
        for inplace in (False, True) if full and op.inplace_variant is not None else (False,):
            torch.manual_seed(0)
            try:
                made = list(queries(op, dtype, samples, inplace, full, per_sample))
            except (RuntimeError, ImportError, NotImplementedError):
                tally.counts["no samples"] += 1  # a library that this machine does not have
                continue
            with collected():
                for query in made:
                    ask(query, tally, fills)
    return tally


@contextmanager
def collected() -> Iterator[None]:
    """No garbage is collected inside: samples come from generators under ``no_grad``, and one that is thrown away while
    an operation is traced puts its switching of gradients into the graph."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="0/1", help="which part of the operations: 0/2 and 1/2 are all")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--out", type=Path, help="where to write the safe counts as JSON")
    parser.add_argument("--slice", action="store_true", help="one sample of each, as in CI")
    parser.add_argument("--tally", action="store_true", help="write everything found as JSON, and nothing else")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    start = time.perf_counter()
    ops = [op for op in operations()[part::parts] if options.only in op.name]
    tally = fuzz(ops, samples=1, per_sample=1, fills=("nan",), full=False) if options.slice else fuzz(ops)
    write = sys.stdout.write
    if options.tally:
        write(json.dumps({"counts": tally.counts, "safe": tally.safe, "violations": tally.violations}))
        return 0
    write(f"{dict(tally.counts)} in {time.perf_counter() - start:.0f} s\n")
    write(f"operations with a safe verdict: {len(tally.safe)}\n")
    write("no rule: " + ", ".join(f"{name} ({n})" for name, n in tally.unknown.most_common()) + "\n")
    write("".join(f"VIOLATION {line}\n" for line in tally.violations))
    if options.out:
        options.out.write_text(json.dumps(dict(sorted(tally.safe.items())), indent=1) + "\n")
    return bool(tally.violations)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sys.exit(main())
