"""When two runs of a segment left the same: bit for bit, but for rounding where nothing better can be asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_graph_backend.plan import OpLine

#: Relative to the largest entry: rounding differs between two shapes, a leak is larger.
_ROUNDING = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3}
_HALF_ROUNDING = 6e-2
#: Entries this small beside the inputs may be nothing but rounding.
_NOISE = 1e-2

#: Operations that add floats up by atomics on these kinds of devices, in an order that no two runs need share (the list
#: of ``torch.use_deterministic_algorithms``). Two outcomes may come again and again, and a third one later.
ATOMIC = {
    f"aten.{name}"
    for name in (
        "index_add", "index_put", "_index_put_impl", "_unsafe_index_put", "index_reduce", "put", "scatter",
        "scatter_add", "scatter_reduce", "bincount", "histc", "cumsum", "cumprod", "embedding_bag", "_embedding_bag",
    )
}  # fmt: skip
ATOMIC_DEVICES = {"cuda"}


def adds_in_any_order(ops: Sequence[OpLine], device: torch.device) -> bool:
    """Whether equal runs of these operations may differ in last digits."""
    names = {".".join(op.op.split(".")[:2]).removesuffix("_") for op in ops}
    return device.type in ATOMIC_DEVICES and bool(names & ATOMIC)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaN equals the same NaN."""
    return torch.equal(_bits(left), _bits(right))


def close(left: torch.Tensor, right: torch.Tensor, scale: float) -> bool:
    """But for rounding. ``scale``: the largest entry of what went in."""
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    tolerance = _ROUNDING.get(left.dtype, _HALF_ROUNDING)
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    largest = max(float(largest_of(right)), _NOISE * scale, _NOISE)
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True)


def largest_of(tensor: torch.Tensor) -> torch.Tensor | float:
    """The largest finite magnitude of floating-point entries."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    sizes = tensor.abs().float()
    return torch.where(torch.isfinite(sizes), sizes, 0.0).max()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
