"""Masked variances and what is made of them: as precise as eager's, with its NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from repair_harness import INF, NAN, Program, fills_of, program
from test_repair_reductions import BUCKET, FLOATS, PLACES, compare, merged, sizes, values
from torch import Tensor
from torch.nn import functional as F

Op = Callable[..., Any]

STATISTICS: dict[str, Op] = {
    "var": lambda x, d, k: x.var(d, keepdim=k),
    "std": lambda x, d, k: x.std(d, keepdim=k),
    "std of a population": lambda x, d, k: x.std(d, correction=0, keepdim=k),
    "var less three": lambda x, d, k: x.var(d, correction=3, keepdim=k),
    "var less a half": lambda x, d, k: x.var(d, correction=0.5, keepdim=k),
    "var plus two": lambda x, d, k: x.var(d, correction=-2, keepdim=k),
    "var_mean": lambda x, d, k: torch.var_mean(x, d, keepdim=k),
    "std_mean": lambda x, d, k: torch.std_mean(x, d, correction=0, keepdim=k),
    "of var_mean, the mean": lambda x, d, k: torch.var_mean(x, d, keepdim=k)[1],
    "of std_mean, the deviation": lambda x, d, k: torch.std_mean(x, d, keepdim=k)[0],
}


def repaired(op: Op, example: Tensor, dims: tuple[int, ...]) -> Program:
    p = program(op, example, dims)
    assert p.captured, [v.reason for v in p.seen.verdicts.values() if v.reason]
    assert p.repaired
    return p


def check(op: Op, dtype: torch.dtype, shape: Callable[[int, int], tuple[int, ...]], dims: tuple[int, ...]) -> None:
    p = repaired(op, values(shape(5, 6), dtype, 0), dims)
    for i, (n, m) in enumerate(sizes()):
        for odd in (False, True):
            x = values(shape(n, m), dtype, i, odd)
            for fill in fills_of(dtype):
                compare(p, x, fill, f"size {n}, {m}; padded rows hold {fill}")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("keepdim", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name: str, place: str, keepdim: bool) -> None:
    """Would catch: a padded row that is counted, a number of entries that is not the real one, a wrong NaN."""
    shape, dims, along = PLACES[place]
    for dtype in FLOATS if place in ("first", "everything") else FLOATS[:2]:
        check(lambda x: STATISTICS[name](x, along, keepdim), dtype, shape, dims)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dims", [(1,), (0, 1)], ids=["inner", "both"])
@pytest.mark.parametrize("name", STATISTICS)
def test_padding_inside_of_the_dimension(name: str, dims: tuple[int, ...]) -> None:
    for keepdim in (False, True):
        op = merged(lambda x, k=keepdim: STATISTICS[name](x, 0, k))
        check(op, torch.float64, lambda n, m: (m if 0 in dims else 4, n, 3), dims)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("form", ["unbiased", "flag of all", "several", "no dims", "negative dims"])
def test_forms(form: str) -> None:
    """The overloads and spellings of one operation."""
    op = {
        "unbiased": lambda x: x.var(0, unbiased=False),
        "flag of all": lambda x: x.std(False),
        "several": lambda x: x.var((0, 2)),
        "no dims": lambda x: x.var([]),
        "negative dims": lambda x: torch.std_mean(x, (-1, -3)),
    }[form]
    check(op, torch.float32, lambda n, m: (n, 2, 3), (0,))


def error(x: Tensor, want: Tensor) -> float:
    return float((x.double() - want).abs().max())


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3, 1e5])
@pytest.mark.parametrize("name", ["var", "std", "var of all", "mean"])
def test_as_precise_as_eager(name: str, offset: float) -> None:
    """Against double precision: at most one and a half times as far off as eager, or half a last digit."""
    op: Op = {
        "var": lambda x: x.var(0),
        "std": lambda x: x.std(0),
        "var of all": lambda x: x.var(),
        "mean": lambda x: torch.var_mean(x, 0)[1],
    }[name]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        p = repaired(op, torch.zeros(5, 6, dtype=dtype), (0,))
        for n in (2, 100, 1000):
            x = (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) + offset).to(dtype)
            exact = op(-x.double())  # the program negates its argument first
            (got,), (want,) = p.got(x, {0: 1024}, NAN), p.want(x)
            digit = float(torch.finfo(dtype).eps) * float(exact.abs().max())
            if not torch.isfinite(want).all():  # a half that overflows
                assert torch.equal(got.isnan(), want.isnan())
                continue
            assert error(got, exact) <= 1.5 * max(error(want, exact), digit / 2), (dtype, n)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_rows_do_not_deviate(dtype: torch.dtype) -> None:
    """Would catch a mean that is rounded, so that what is exactly zero in eager is not, and 0 / 0 is infinite."""
    for op in (lambda x: x.var(0), lambda x: x.std(0, correction=9), lambda x: torch.var_mean(x, 0)):
        p = repaired(op, torch.zeros(5, 2, 3, dtype=dtype), (0,))
        for n in range(1, 9):
            for value in (0.1, -1 / 3, 1e4 + 0.1, 3e38):
                if value < torch.finfo(dtype).max:
                    compare(p, torch.full((n, 2, 3), value).to(dtype), INF, f"{n} rows of {value}")


ORDERED: dict[str, tuple[Op, tuple[int, ...]]] = {
    "rows": (lambda x: torch.var_mean(x, 0), (40000, 3)),
    "everything": (lambda x: torch.var_mean(x), (70000,)),
    "two dimensions": (lambda x: torch.std_mean(x, (0, 1)), (300, 200, 3)),
    "around one": (lambda x: torch.var_mean(x, (0, 2)), (300, 3, 200)),
}


@pytest.mark.parametrize("name", ORDERED)
def test_the_mean_of_an_infinite_entry(name: str) -> None:
    """Eager's is infinite if that entry is the last, in any number of threads, else NaN. Would catch another order."""
    op, shape = ORDERED[name]
    p = repaired(op, torch.zeros(shape), (0,))
    for place in (0, shape[0] // 2 - 1, shape[0] * 3 // 4, shape[0] - 1):
        for column in (0, -1):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(place))
            x[place].view(-1)[column] = INF
            for a, b in zip(p.got(x, {0: shape[0] + 100}, 3.0), p.want(x), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_where_the_order_is_not_known() -> None:
    """A transposed tensor is read in the order of its memory."""
    op = lambda x: torch.var_mean(x.transpose(0, 1), (0, 1))  # noqa: E731
    p = program(op, torch.zeros(20, 30, 3), (0,))
    assert not p.captured
    assert not p.repaired


LARGE = (
    (0.9, (1, 0, 0)),
    (0.9, (1, 1, 1)),
    (0.2, (1, -1, 1)),  # whose sum does not overflow in any order
    (0.3, (1, 1, 1)),
    (0.0, (1, -1, 1)),
    (0.0, (1, 1, 0.5)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_large_entries(dtype: torch.dtype) -> None:
    """Would catch a sum, or squares, that overflow where eager's do not, and the other way round."""
    large = torch.finfo(dtype).max
    for op in (lambda x: x.var(0), lambda x: x.std(0), lambda x: x.std(), lambda x: torch.std_mean(x, 0)):
        p = repaired(op, torch.zeros(5, 2, dtype=dtype), (0,))
        for scale, signs in LARGE:
            size = large * scale or large**0.6  # whose square is too large, and its root is not
            x = torch.tensor(signs, dtype=torch.float64)[:, None].expand(3, 2) * size
            compare(p, x.to(dtype), NAN, f"{signs} times {size}")


NORMALISED: dict[str, tuple[Op, tuple[int, ...], int]] = {
    "batch": (lambda x: F.batch_norm(x, None, None, training=True), (4, 3), 0),
    "images": (lambda x: F.batch_norm(x, None, None, training=True, eps=1e-3), (4, 3, 2, 2), 0),
    "tokens": (lambda x: F.batch_norm(x, None, None, training=True), (2, 3, 4), 2),
    "weighted": (
        lambda x: F.batch_norm(x, None, None, x.new_tensor([1.0, 2, 3]), x.new_tensor([3.0, 2, 1]), True),
        (4, 3, 5),
        0,
    ),
    "instances": (lambda x: F.instance_norm(x), (2, 3, 4), 2),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NORMALISED)
def test_normalised_by_its_own_statistics(name: str, dtype: torch.dtype) -> None:
    op, shape, dim = NORMALISED[name]
    p = repaired(op, torch.zeros(shape, dtype=dtype), (dim,))
    for n in (2, 5, 8):
        for odd in (False, True):
            x = values((*shape[:dim], n, *shape[dim + 1 :]), dtype, n, odd)
            for fill in fills_of(dtype):
                if name == "instances" and dtype in FLOATS[2:]:
                    return no_worse(p, op, x, fill)
                compare(p, x, fill, f"size {n}; padded rows hold {fill}")


def no_worse(p: Program, op: Op, x: Tensor, fill: Any) -> None:
    """Eager normalises instances in half precision by a mean that is rounded to it: 0.9878 for 0.998."""
    (got,), (want,), exact = p.got(x, dict.fromkeys(p.dims, BUCKET), fill), p.want(x), op(-x.double())
    assert error(got, exact) <= max(error(want, exact), torch.finfo(x.dtype).eps)


def test_the_layout_of_what_is_normalised() -> None:
    """Eager lays a transposed batch out anew; a repair, which works entry by entry, would keep its strides."""
    p = program(lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True), torch.randn(5, 4, 3), (0,))
    assert not p.captured
    assert not p.repaired
    p = program(lambda x: F.batch_norm(x, None, None, training=True), torch.randn(5, 3, 4), (0,))
    assert p.repaired


def test_running_statistics_stay_eager() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    p = program(lambda x: F.batch_norm(x, mean, var, training=True), torch.randn(5, 3), (0,))
    assert not p.captured
    assert not p.repaired
