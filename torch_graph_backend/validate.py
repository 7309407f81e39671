"""Dry run of a key: are the captured segments well formed at the bucket's sizes?

The segments run once on fake tensors at the bucket's exact sizes, before anything real runs. What symbolic sizes let
through at ``n`` and not at the bucket (a table sliced past its end, a view of an odd size) shows as an exception or
another shape, and the key is refused with a reason instead of being wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_graph_backend.entry import Entry
from torch_graph_backend.passes.capturable import tensors_of
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import FakeTensorMode
from torch_graph_backend.plan import Ref
from torch_graph_backend.plan_build import spec_of
from torch_graph_backend.slots import evaluate


def bucket_reason(entry: Entry) -> Reason | None:
    """Why this key cannot run at its bucket; ``None`` if it can."""
    values: dict[str, Any] = {}
    nodes = {n.name: n for n in entry.normal.graph.nodes}
    with torch.no_grad(), FakeTensorMode() as mode:
        for step in entry.plan.segments:
            try:
                inputs = [_fake(entry, ref, values, nodes, mode) for _, ref in step.inputs]
                outputs = entry.program.steps[step.index](*entry.size_args, *inputs)
            except Exception as error:
                text = f"segment {step.index} does not run at {entry.key}: {type(error).__name__}: {error}"
                return Reason("bucket-invalid", text)
            for name, value in zip(step.outputs, outputs, strict=True):
                for got, planned in zip(tensors_of(value), tensors_of(nodes[name].meta["val"]), strict=True):
                    expected = tuple(evaluate(s, entry.bucket) for s in spec_of(planned).shape)
                    if tuple(got.shape) != expected or got.dtype is not planned.dtype:
                        text = f"{name} is {got.dtype} {list(got.shape)} at {entry.key}, planned {list(expected)}"
                        return Reason("bucket-invalid", text)
            values.update(zip(step.outputs, outputs, strict=True))
    return None


def _fake(entry: Entry, ref: Ref, values: dict[str, Any], nodes: dict[str, Any], mode: FakeTensorMode) -> Any:
    if ref.kind == "static":
        return values[str(ref.key)]
    if ref.kind == "const":
        value = entry.normal.constants[str(ref.key)]
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
    if ref.kind in ("slot", "bridge"):
        buffer = entry.slots[int(ref.key)] if ref.kind == "slot" else entry.bridges[int(ref.key)]
        return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=buffer.device)
    spec = spec_of(entry.normal.placeholders[int(ref.key)].meta["val"])
    shape, stride = ([evaluate(s, entry.bucket) for s in dims] for dims in (spec.shape, spec.stride))
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device)
