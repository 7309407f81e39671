"""Repaired reductions in whole calls, on each kind of device: recorded, replayed at several sizes, poisoned tails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import poisoned, tensors
from torch import Tensor

import torch_graph_backend as tgb

NAN, INF = float("nan"), float("inf")
#: Of ``[n, 16]``, padded in front.
OPS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda h: h.mean(0),
    "mean in single": lambda h: h.mean(0, dtype=torch.float32),
    "mean of everything": lambda h: h.mean(),
    "var": lambda h: h.var(0),
    "std of a population": lambda h: h.std(0, correction=0),
    "var of everything": lambda h: h.var(),
    "variance of a pair": lambda h: torch.var_mean(h, 0)[0],
    "norm": lambda h: torch.linalg.vector_norm(h, dim=0),
    "norm of order 3": lambda h: torch.linalg.vector_norm(h, 3, 0),
    "least norm": lambda h: torch.linalg.vector_norm(h, -INF, 0),
    "logsumexp": lambda h: h.logsumexp(0),
    "nanmean": lambda h: h.nanmean(0),
    "nansum": lambda h: h.nansum(0),
    "aminmax": lambda h: torch.aminmax(h, dim=0),
    "argmax": lambda h: h.argmax(0),
    "argmax of everything": lambda h: h.argmax(),
    "softmax": lambda h: h.softmax(0).sum(1),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (5, 7, 5, 8, 3, 2, 6, 7)


def rows(n: int, dtype: torch.dtype, device: str, odd: bool) -> Tensor:
    """Every value is one of half precision."""
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16).to(dtype)
    if odd:
        x[0, 0], x[-1, 1], x[0, 2], x[-1, 3], x[n // 2, 4] = NAN, INF, -INF, -INF, INF
    x = x.to(device)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


@pytest.mark.usefixtures("no_grad")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", OPS)
def test_in_whole_calls(name: str, device: str) -> None:
    """Would catch: a mask, a count or a filler that is wrong in a recording alone, or by this device's kernels."""
    op = OPS[name]
    for dtype in DTYPES:

        def f(x: Tensor) -> Any:
            found = op(-x)
            odd = tensors(found)[0].isnan().sum()  # the product behind it is what makes the repair pay
            return found, (torch.ones_like(x) + odd) @ torch.eye(16, dtype=x.dtype, device=x.device)

        torch._dynamo.reset()
        tgb.reset()
        fast = torch.compile(f, backend="bcg", options={"buckets": [8]})
        with poisoned() as poison:
            for odd in (False, True):
                for n in SIZES:
                    x = rows(n, dtype, device, odd)
                    got, want = tensors(fast(x)), tensors(f(x))
                    exact = tensors(f(x.double()))
                    for a, b, c in zip(got, want, exact, strict=True):
                        close(a, b, c, f"{name}, {dtype}, {n} rows, odd: {odd}")
        assert poison.tails > 0
        stats = tgb.stats(fast)
        assert stats.replays >= len(SIZES), stats
        (plan,) = [p for p in tgb.plans(fast) if p.bucketed]
        assert plan.repairs(), plan
        assert len(plan.steps) == 1, plan


def close(got: Tensor, want: Tensor, exact: Tensor, where: str) -> None:
    """Eager's layout, its NaN and infinities, integers equal; and an error of at most 1.5 times its own."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), where
    if not got.is_floating_point():
        assert torch.equal(got, want), where
        return
    finite = want.isfinite()
    assert torch.equal(got.isnan(), want.isnan()), f"{where}: {got} for {want}"
    assert torch.equal(got[~finite & ~want.isnan()], want[~finite & ~want.isnan()]), f"{where}: {got} for {want}"
    error, own = ((t.double() - exact.double())[finite].abs() for t in (got, want))
    if error.numel():
        bound = 1.5 * float(own.max()) + 4 * torch.finfo(got.dtype).eps * float(want[finite].abs().max())
        assert float(error.max()) <= bound, f"{where}: error {float(error.max()):.3g}, eager {float(own.max()):.3g}"
