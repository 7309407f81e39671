"""Dry run of a key: are the captured segments well formed at the bucket's sizes?

The segments run once on fake tensors at the bucket's exact sizes, before anything real runs. What symbolic sizes let
through at ``n`` and not at the bucket (a table sliced past its end, a view of an odd size) shows as an exception or
another shape, and the key is refused with a reason instead of being wrong. The same run tells how much memory the
segments may ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_graph_backend.entry import Entry
from torch_graph_backend.passes.capturable import tensors_of
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import FakeTensorMode
from torch_graph_backend.plan import Ref
from torch_graph_backend.plan_build import spec_of
from torch_graph_backend.slots import evaluate

#: Shape, stride, dtype and device of a tensor; a tuple of these for several tensors.
Metadata = Any


def bucket_reason(entry: Entry) -> Reason | None:
    """Why this key cannot run at its bucket; ``None`` if it can. Notes in the entry what its segments return, and
    how many bytes they ask for."""
    values: dict[str, Metadata] = {}
    seen: dict[Any, tuple[list[Metadata], int]] = {}
    nodes = {n.name: n for n in entry.normal.graph.nodes}
    demand = 0
    with torch.no_grad(), FakeTensorMode(), Asked() as asked:
        for step in entry.plan.segments:
            try:
                inputs = [_input(entry, ref, values) for _, ref in step.inputs]
                outputs, nbytes = _run(entry.program.steps[step.index], entry.size_args, inputs, seen, asked)
            except Exception as error:
                text = f"segment {step.index} does not run at {entry.key}: {type(error).__name__}: {error}"
                return Reason("bucket-invalid", text)
            demand += nbytes
            for name, made in zip(step.outputs, outputs, strict=True):
                for got, planned in zip(_flat(made), tensors_of(nodes[name].meta["val"]), strict=True):
                    expected = tuple(evaluate(s, entry.bucket) for s in spec_of(planned).shape)
                    if got[0] != expected or got[2] is not planned.dtype:
                        text = f"{name} is {got[2]} {list(got[0])} at {entry.key}, planned {list(expected)}"
                        return Reason("bucket-invalid", text)
            values.update(zip(step.outputs, outputs, strict=True))
    entry.planned = {name: _flat(made) for name, made in values.items()}
    entry.demand = demand
    return None


class Asked(TorchDispatchMode):
    """Counts the bytes of all results that have memory of their own: no order of freeing them asks for more."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self.nbytes += sum(t.nbytes for t in tensors_of(made))
        return made


def _run(
    step: Callable[..., Any],
    sizes: Sequence[int],
    inputs: Sequence[Metadata],
    seen: dict[Any, tuple[list[Metadata], int]],
    asked: Asked,
) -> tuple[list[Metadata], int]:
    """What a segment returns, and the bytes it asks for. Segments of equal code on equal metadata, as in layer after
    layer, run once."""
    code = step.__code__
    # Names of local variables are no part of it; consts by their text, since 1, 1.0 and True are equal.
    same = (code.co_code, code.co_names, repr(code.co_consts), tuple(inputs))
    if same not in seen:
        given, before = [*map(_fake, inputs)], asked.nbytes
        seen[same] = [_metadata(value) for value in step(*sizes, *given)], asked.nbytes - before
    return seen[same]


def _metadata(value: Any) -> Metadata:
    if isinstance(value, (tuple, list)):
        return tuple(_metadata(v) for v in value)
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _flat(made: Metadata) -> list[Metadata]:
    """The tensors of one value."""
    if len(made) == 4 and isinstance(made[2], torch.dtype):
        return [made]
    return [tensor for part in made for tensor in _flat(part)]


def _fake(made: Metadata) -> Any:
    tensors = [torch.empty_strided(shape, stride, dtype=d, device=at) for shape, stride, d, at in _flat(made)]
    return tensors[0] if _flat(made) == [made] else tensors


def _input(entry: Entry, ref: Ref, values: dict[str, Metadata]) -> Metadata:
    if ref.kind == "static":
        return values[str(ref.key)]
    if ref.kind == "const":
        return _metadata(entry.normal.constants[str(ref.key)])
    if ref.kind == "count":
        return _metadata(entry.counts[int(ref.key)])
    if ref.kind in ("slot", "bridge"):
        return _metadata(entry.slots[int(ref.key)] if ref.kind == "slot" else entry.bridges[int(ref.key)])
    spec = spec_of(entry.normal.placeholders[int(ref.key)].meta["val"])
    shape, stride = (tuple(evaluate(s, entry.bucket) for s in dims) for dims in (spec.shape, spec.stride))
    return shape, stride, spec.dtype, spec.device
