"""Values at which compiled code goes wrong, a segment compiled by itself, and the comparison with eager code.

What is promised: the integers, booleans, NaN and infinities of eager code, the bits of eager code for float64, and for
other floats an error against float64 of at most 1.5 times eager's (and a last digit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_graph_backend.inductor_segment import CompiledSegment, Unsuitable, compile_static, static_examples, trace
from torch_graph_backend.passes.dedup import InputFacts
from torch_graph_backend.passes.torch_api import cpp_rounds_halves

NAN, INF = float("nan"), float("inf")
BOUND = 1.5
HALVES = (torch.float16, torch.bfloat16)

FLOATS = [
    NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-30, -1e-30, 1e-8, -1e-8, 1e-4, -1e-4, 0.1, 0.3, 0.5, -0.5, 1.0,
    -1.0, 1.5, 2.5, -2.5, 3.5, 0.9999, 1.0001, 2.0, 3.0, -3.0, 6.0, 7.0, -7.0, 10.0, -10.0, -5.5, -12.5, 13.0, 20.0,
    21.0, 25.0, -25.0, -50.0, 50.0, 88.0, 89.0, -88.0, -89.0, -104.0, 100.0, -100.0, 127.5, 255.0, 256.0, 300.0, -300.0,
    1000.3, -1000.3, 32767.0, 65504.0, 65536.0, 70000.0, 2147483648.0, -2147483649.0, 1e10, -1e10, 9.3e18, -9.3e18,
    1e19, 1e25, 1e30, -1e30, 3e38, -3e38,
]  # fmt: skip
_SMALL = [0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 8, 31, 100, -100, 127]
INTS = {
    torch.int64: [*_SMALL, 32, 33, 63, 64, 65, 255, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1],
    torch.int32: [*_SMALL, 32, 33, 63, 64, 65, 255, 2**24 + 1, 2**31 - 1, -(2**31)],
    torch.int8: [*_SMALL, -128],
    torch.uint8: [0, 1, 2, 3, 5, 7, 8, 31, 32, 33, 100, 127, 128, 254, 255],
    torch.bool: [True, False],
}


def values(dtype: torch.dtype) -> Tensor:
    """Special values and random ones of several sizes."""
    if not dtype.is_floating_point:
        return torch.tensor(INTS[dtype] * 8, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    special = torch.tensor(FLOATS, dtype=torch.float64)
    sizes = torch.tensor([1.0, 10.0, 0.01, 1e3])[torch.randint(0, 4, (192,), generator=g)]
    return torch.cat([special, torch.randn(192, generator=g, dtype=torch.float64) * sizes]).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each special value with many others."""
    if not dtype.is_floating_point:
        v = torch.tensor(INTS[dtype], dtype=dtype)
        return v.repeat_interleave(len(v)), v.repeat(len(v))
    g = torch.Generator().manual_seed(3)
    v = values(dtype)
    return v.repeat(6), torch.cat([v[torch.randperm(len(v), generator=g)] for _ in range(6)])


def segment(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> CompiledSegment:
    """``function`` as a segment, compiled for the layouts of ``args``."""
    facts = [InputFacts(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, 0, i) for i, t in enumerate(args)]
    mode, examples = static_examples(facts)
    traced = trace(lambda *t: tuple(function(*t)), (), mode, examples)
    return CompiledSegment(compile_static(traced).code, (), traced)


def difference(got: Tensor, want: Tensor, exact: Tensor | None) -> str:
    """How ``got`` breaks the promise; empty if it does not. ``exact``: the values from float64."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {list(got.shape)}, eager {want.dtype} {list(want.shape)}"
    if not got.dtype.is_floating_point:
        return f"{int((got != want).sum())} of {got.numel()} values differ" if not torch.equal(got, want) else ""
    if not torch.equal(got.isnan(), want.isnan()):
        return f"{int((got.isnan() != want.isnan()).sum())} NaN here or there"
    same = (got == want) | got.isnan()
    if not same.all() and got.dtype is not torch.float64 and exact is not None:
        return _error(got, want, exact)
    if not same.all():
        first = (~same).flatten().nonzero()[0]
        return f"{int((~same).sum())} values differ, such as {got.flatten()[first]} for {want.flatten()[first]}"
    zeros = (got == 0) & (got.signbit() != want.signbit()) & (got.dim() < 2)
    return f"{int(zeros.sum())} zeros of the other sign" if zeros.any() else ""


def _error(got: Tensor, want: Tensor, exact: Tensor) -> str:
    if not torch.equal(got.isinf(), want.isinf()) or not torch.equal(
        got.isinf() * got.sign(), want.isinf() * want.sign()
    ):
        return f"{int((got.isinf() != want.isinf()).sum())} infinities here or there"
    finite = got.isfinite() & exact.isfinite()
    a, b, r = got[finite].double(), want[finite].double(), exact[finite]
    digit, least = torch.finfo(got.dtype).eps, torch.finfo(got.dtype).smallest_normal
    beyond = (a - r).abs() > BOUND * (b - r).abs() + digit * r.abs() + digit * least
    if got.dim() < 2 and beyond.any():  # one operation on each value
        i = int(beyond.nonzero()[0])
        return f"{int(beyond.sum())} errors beyond the bound, such as {a[i]} for {r[i]}, eager {b[i]}"
    if r.numel() and _size(a - r) > BOUND * _size(b - r) + 0.5 * digit * _size(r):
        return f"error {_size(a - r):.3g}, eager {_size(b - r):.3g}"
    return ""


def _size(t: Tensor) -> float:
    largest = float(t.abs().max())
    return largest * float((t / largest).square().mean().sqrt()) if largest else 0.0


def compare(table: dict[str, Callable[..., Tensor]], args: Sequence[Tensor]) -> list[str]:
    """All functions of ``table`` in one segment: what breaks the promise, by name. Functions that eager code refuses
    for these arguments are left out."""
    wants = {name: want for name, f in table.items() if (want := _refused(f, args)) is not None}
    try:
        code = segment(lambda *t: [table[name](*t).clone() for name in wants], *args)
    except Unsuitable as why:
        if cpp_rounds_halves() or "does not round" not in str(why):
            raise
        if len(table) == 1:  # halves are in it, which this version keeps to plain kernels
            return []
        return [text for name, f in table.items() for text in compare({name: f}, args)]
    with torch.no_grad():
        got = code(*(t.clone() for t in args))
    found = []
    for (name, want), value in zip(wants.items(), got, strict=True):
        exact = _refused(table[name], [t.double() for t in args]) if want.is_floating_point() else None
        text = difference(value, want, exact)
        if text:
            found.append(f"{name}: {text}")
    return found


def _refused(function: Callable[..., Tensor], args: Sequence[Tensor]) -> Tensor | None:
    try:
        return function(*(t.clone() for t in args))
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        return None
