"""Masked reductions, one by one: equal to eager whatever padded rows hold, in every dtype, place and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from repair_harness import INF, NAN, Program, fills_of, program
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8)
BUCKET = 8

Op = Callable[..., Any]

#: Reductions of ``x`` over ``dim`` (``None``: everything) and the dtypes that they take.
ANY = (*FLOATS, *INTS, torch.bool)
REDUCTIONS: dict[str, tuple[Op, tuple[torch.dtype, ...]]] = {
    "sum": (lambda x, d, k: x.sum(d, k), ANY),
    "nansum": (lambda x, d, k: x.nansum(d, k), FLOATS),
    "mean": (lambda x, d, k: x.mean(d, k), FLOATS),
    "mean in double": (lambda x, d, k: x.mean(d, k, dtype=torch.float64), ANY),
    "mean in single": (lambda x, d, k: x.mean(d, k, dtype=torch.float32), (*FLOATS[:1], *FLOATS[2:], *INTS)),
    "mean of whole numbers in half": (lambda x, d, k: x.mean(d, k, dtype=torch.float16), INTS),
    "nanmean": (lambda x, d, k: x.nanmean(d, k), FLOATS),
    "amax": (lambda x, d, k: x.amax(() if d is None else d, k), ANY),
    "amin": (lambda x, d, k: x.amin(() if d is None else d, k), ANY),
    "logsumexp": (lambda x, d, k: x.logsumexp(tuple(range(x.dim())) if d is None else d, k), FLOATS),
    "special logsumexp": (lambda x, d, k: torch.special.logsumexp(x, 0 if d is None else d, k), FLOATS[:1]),
    "aminmax": (lambda x, d, k: torch.aminmax(x, dim=d, keepdim=k), ANY),
    "largest alone": (lambda x, d, k: torch.aminmax(x, dim=d, keepdim=k).max, FLOATS[:1]),
    **{
        f"norm {p}": (lambda x, d, k, p=p: torch.linalg.vector_norm(x, p, d, k), FLOATS)
        for p in (0, 1, 2, 2.5, 0.5, INF, -INF, -1, -2.0)
    },
    "norm in double": (lambda x, d, k: torch.linalg.vector_norm(x, 3, d, k, dtype=torch.float64), FLOATS[:1]),
    "norm by name": (lambda x, d, k: x.norm("fro", () if d is None else d, k), FLOATS[:1]),
    "old norm": (lambda x, d, k: torch.ops.aten.norm.ScalarOpt_dim(x, None, [0] if d is None else [d], k), FLOATS[:1]),
    "softmax": (lambda x, d, k: x.softmax(0 if d is None else d), FLOATS),
}

#: Reductions of everything to one number, or along one dimension alone.
FLAT: dict[str, tuple[Op, tuple[torch.dtype, ...]]] = {
    "argmax": (lambda x: x.argmax(), (*FLOATS, *INTS)),
    "argmin": (lambda x: x.argmin(), (*FLOATS, *INTS)),
    "max": (lambda x: x.max(), ANY),
    "min": (lambda x: x.min(), ANY),
    "sum": (lambda x: x.sum(), ANY),
    "mean": (lambda x: x.mean(), FLOATS),
    "any": (lambda x: x.any(), ANY),
    "all": (lambda x: x.all(), ANY),
    "count": (lambda x: x.count_nonzero(), ANY),
    "prod": (lambda x: x.prod(), (torch.float64, torch.int64)),
    "norm": (lambda x: x.norm(), FLOATS),
}

#: Where the padding is: shape of the argument by its real sizes, padded dimensions, and the reduced one.
PLACES: dict[str, tuple[Callable[[int, int], tuple[int, ...]], tuple[int, ...], int | None]] = {
    "first": (lambda n, m: (n, 3), (0,), 0),
    "last": (lambda n, m: (3, n), (1,), -1),
    "inner": (lambda n, m: (2, n, 3), (1,), 1),
    "both, one reduced": (lambda n, m: (n, m, 3), (0, 1), -2),
    "everything": (lambda n, m: (n, m, 2), (0, 1), None),
    "everything, last": (lambda n, m: (2, 2, n), (2,), None),
}


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, odd: bool = False) -> Tensor:
    """Real entries; ``odd``: with NaN, infinities and equal entries among them."""
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=g) > 0.5
    x = torch.randn(shape, generator=g) * 3
    if not dtype.is_floating_point:
        return (x.abs() if dtype is torch.uint8 else x * 9).to(dtype)
    if odd:
        pick = torch.randint(0, 7, shape, generator=g)
        table = torch.tensor([NAN, INF, -INF, 0.0, 1.0])
        x = torch.where(pick < (5 if seed % 2 else 4), table[pick.clamp(max=4)], x)
        x = x.nan_to_num(nan=0.5, posinf=INF, neginf=-INF) if seed % 3 else x
    return x.to(dtype)


def sizes() -> Iterator[tuple[int, int]]:
    """Real sizes of a bucket and its neighbour: one row, all of them, some."""
    yield from ((1, 3), (BUCKET, 1), (5, BUCKET), (3, 2), (BUCKET - 1, 4))


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-14}


def compare(p: Program, x: Tensor, fill: Any, note: str) -> None:
    room = dict.fromkeys(p.dims, BUCKET)
    for a, b in zip(p.got(x, room, fill), p.want(x), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), note
        rtol = max(TOLERANCE.get(t.dtype, 0.0) for t in (b, x.to(b.dtype)))
        text = f"{note}\nreal {x}\ngot {a}\neager {b}"
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, t=text: f"{m}\n{t}")


def check(op: Op, dtype: torch.dtype, shape: Callable[[int, int], tuple[int, ...]], dims: tuple[int, ...]) -> None:
    p = program(op, values(shape(5, 6), dtype, 0), dims)
    assert p.captured, [v.reason for v in p.seen.verdicts.values() if v.reason]
    assert p.repaired
    for i, (n, m) in enumerate(sizes()):
        for odd in (False, True) if dtype.is_floating_point else (False,):
            x = values(shape(n, m), dtype, i, odd)
            for fill in fills_of(dtype):
                compare(p, x, fill, f"size {n}, {m}; padded rows hold {fill}")


@pytest.mark.parametrize("keepdim", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, place: str, keepdim: bool) -> None:
    """Would catch: a filler that changes a result, a padded row that is counted, a real NaN that is hidden."""
    op, dtypes = REDUCTIONS[name]
    shape, dims, along = PLACES[place]
    if along is None and name in ("softmax", "old norm", "special logsumexp") and 0 not in dims:
        along = dims[0]
    for dtype in dtypes if place == "first" else dtypes[:: max(1, len(dtypes) - 1)]:
        check(lambda x: op(x, along, keepdim), dtype, shape, dims)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FLAT)
def test_of_everything(name: str, place: str) -> None:
    """Would catch a position that counts padded entries, or that is not the first one of several."""
    op, dtypes = FLAT[name]
    shape, dims, _ = PLACES[place]
    for dtype in dtypes:
        check(op, dtype, shape, dims)


def merged(op: Op) -> Op:
    """``op`` of a tensor whose padded dimensions were folded into one."""
    return lambda x: op(x.reshape(-1, x.shape[-1]))


INSIDE: dict[str, tuple[Op, bool]] = {
    **{name: (lambda x, op=op: op(x, 0, False), False) for name, (op, d) in REDUCTIONS.items() if torch.float64 in d},
    **{f"{name}, kept": (lambda x, op=op: op(x, 0, True), False) for name, (op, d) in REDUCTIONS.items() if d[1:]},
    **{f"{name} of all": (op, False) for name, (op, _) in FLAT.items()},
    "any": (lambda x: (x > 0.2).any(0), False),
    "all": (lambda x: (x > -4).all(0), False),
    "count": (lambda x: x.count_nonzero(0), False),
    "two dimensions": (lambda x: x.sum((0, 1)), False),
    "largest with its place": (lambda x: x.max(0), True),
    "place": (lambda x: x.argmax(0), True),
    "product": (lambda x: x.prod(0), True),
}
ALONE = {"softmax", "softmax, kept"}


@pytest.mark.parametrize("dims", [(1,), (0, 1)], ids=["inner", "both"])
@pytest.mark.parametrize("name", INSIDE)
def test_padding_inside_of_the_dimension(name: str, dims: tuple[int, ...]) -> None:
    """``[B * T]``: where padding lies between real rows, the mask is of ``[B, T]``. Would catch a mask of the end."""
    op, alone = INSIDE[name]
    dtype = torch.int32 if "whole" in name else torch.float32 if "single" in name else torch.float64

    def shape(n: int, m: int) -> tuple[int, ...]:
        return (m if 0 in dims else 4, n, 3)

    if not (alone or name in ALONE):
        return check(merged(op), dtype, shape, dims)
    p = program(merged(op), values(shape(5, 6), dtype, 0), dims)
    assert not p.captured
    assert not p.repaired


def test_what_has_no_masked_form_is_left_alone() -> None:
    """Would catch a repair of what a filler could change places with, or of what is not known."""
    x = torch.randn(5, 3)
    for op in (
        lambda x: x.median(0),
        lambda x: x.mode(0),
        lambda x: x.kthvalue(1, 0),
        lambda x: x.sort(0),
        lambda x: x.quantile(0.5, 0),
        lambda x: torch.linalg.vector_norm(x, NAN, 0),
        lambda x: x.double().mean(0, dtype=torch.float16),
        lambda x: x.t().argmax(keepdim=True),
    ):
        p = program(op, x, (0,))
        assert not p.captured
        assert not p.repaired


def test_half_precision_sums_do_not_overflow() -> None:
    """Would catch a sum, or a sum of squares, that is taken in half precision."""
    for op in (lambda x: x.mean(0), lambda x: torch.linalg.vector_norm(x, dim=0), lambda x: x.nanmean(0)):
        p = program(op, torch.zeros(5, 3, dtype=torch.float16), (0,))
        for n in (1, 5, 8):
            x = torch.full((n, 3), 2e4, dtype=torch.float16)
            for fill in fills_of(x.dtype):
                compare(p, x, fill, f"{n} rows")
