"""Numbers in CPU tensors: never frozen, read from the device where that gives what eager gives, else eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import compare, poisoned
from graph_harness import take_one
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend.passes.host_scalars import host_scalars

H = 8
SIZES = (5, 4, 5, 7, 6, 7, 3, 5)
LADDER: dict[str, Any] = {"options": {"buckets": [8], "min_segment_kernels": 1}, "dynamic": True}


class Scaled(nn.Module):
    """Reads ``number``, a Python float that changes from call to call, between two linears."""

    def __init__(self, use: Callable[[Tensor, float], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.use, self.number = use, 0.5
        self.first, self.second = nn.Linear(H, H, dtype=dtype), nn.Linear(H, H, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.use(self.first(x), self.number).relu())


def in_place(h: Tensor, f: float) -> Tensor:
    h = h * 2
    h += f
    h *= f
    return h


USES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "product": lambda h, f: h * f,
    "sum": lambda h, f: f + h,
    "difference": lambda h, f: h - f,
    "reversed difference": lambda h, f: f - h,
    "quotient": lambda h, f: h / f,
    "in place": in_place,
    "comparison": lambda h, f: torch.where(h > f, h, -h),
    "computed": lambda h, f: h * (f * 2 + 1) - (1 + f / 3),
    "twice": lambda h, f: (h * f).square() * f,
    "an integer tensor": lambda h, f: h * ((h * 4).long() * f),
    "to a tensor without dimensions": lambda h, f: h * (h[0, 0] + f),
    "an epsilon": lambda h, f: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + f),
}
#: There is no form with a tensor that gives the same.
LEFT: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked fill": lambda h, f: h.masked_fill(h > 0, f),  # which raises for a number that does not fit
    "power": lambda h, f: h.abs() ** f,
    "scaled sum": lambda h, f: torch.add(h, h, alpha=f),
    "a new tensor": lambda h, f: h + torch.full((H,), f, device=h.device),
    "a reversed quotient": lambda h, f: h * (2 / f),
}


def test_numbers_that_do_not_fit(device: str) -> None:
    """Would catch a fill that raises where the arithmetic gives infinity, and numbers that are rounded twice."""
    torch._dynamo.reset()
    model = Scaled(lambda h, f: (h * f).clamp(-9, 9) + (h > f) + f / h.abs().clamp(1)).eval().to(device)
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for number in (0.5, 1e300, -1e300, float("inf"), float("nan"), 1e-300, 16777217.0, 0.1):
            model.number = number
            x = torch.randn(5, H, device=device)
            compare(compiled(x), model(x), f"{number}", tolerance=1e-5)
    assert tgb.stats(model).replays > 0


@pytest.mark.inductor
def test_compiled_segments_read_them_too(device: str) -> None:
    """Would catch a small key that is not compiled because a segment of it reads a number, and a number that is frozen
    in compiled code."""
    torch._dynamo.reset()
    model = Scaled(lambda h, f: h * f).eval().to(device)
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for number in (0.5, 3.0, -2.0):
            model.number = number
            x = torch.randn(5, H, device=device)
            compare(compiled(x), model(x), f"{number}", tolerance=1e-5)
    stats = tgb.stats(model)
    assert stats.replays == 2, stats
    (keys,) = stats.keys.values()
    assert [(c.compiled, c.plain) for c in keys.values()] == [(1, ())], stats


def check(model: Scaled, device: str = "cpu", dtype: torch.dtype = torch.float32, exact: bool = True) -> Any:
    """Calls of changing size and number; the plan of the last graph, and the numbers of recordings and calls."""
    torch._dynamo.reset()
    tgb.reset()
    model = model.eval().to(device)
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad(), poisoned() as poison:
        for k, n in enumerate(SIZES):
            poison.value = (float("nan"), 1e4, None)[k % 3]
            model.number = 0.37 + k / 7
            x = torch.randn(n, H, dtype=dtype, device=device)
            want, got = model(x), compiled(x)
            compare(got, want, f"call {k}", tolerance=2e-2 if dtype is not torch.float32 else 1e-5)
    stats = tgb.stats(model)
    assert stats.replays >= len(SIZES) - 3, stats
    return tgb.plans(model)[-1]


@pytest.mark.parametrize("name", USES)
def test_a_module_float_is_read_on_the_device(device: str, name: str) -> None:
    """Would catch a number that is frozen, one that cuts the recording, and one of another precision."""
    plan = check(Scaled(USES[name]), device)
    assert len(plan.steps) == 1, plan
    assert any(c.symbol is None for c in plan.counts), plan
    assert "numbers of the caller's, read on the device: L['self'].number" in str(plan)
    assert "real sizes" not in str(plan)


@pytest.mark.parametrize("name", LEFT)
def test_what_takes_no_tensor_stays_eager(device: str, name: str) -> None:
    plan = check(Scaled(LEFT[name]), device)
    assert plan.reasons()["exact-symbol"] >= 1, plan
    assert plan.captured_ops()["aten.linear"] == 2, plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(device: str, dtype: torch.dtype) -> None:
    """A kernel takes the number in single precision: rounded to half before, the last digit would differ."""
    for name in ("product", "sum", "difference", "quotient"):
        plan = check(Scaled(USES[name], dtype), device, dtype)
        assert len(plan.steps) == 1, plan

    def alone(x: Tensor, f: Tensor) -> Tensor:
        return x * f.item()

    x = torch.randn(4096, dtype=dtype)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        seen = take_one(alone, x, torch.tensor(0.1, dtype=torch.float64))
    host_scalars(seen.normal, torch.device("cpu"), lambda n: None)
    gm = torch.fx.GraphModule({}, seen.graph)
    order = [n.meta.get("host_copy") for n in gm.graph.nodes if n.op == "placeholder"]
    args = list(seen.args)
    filled = [torch.tensor(0.1, dtype=torch.float32) if k is not None else args.pop(0) for k in order]
    (got,) = gm(*filled)
    assert torch.equal(got, x * 0.1)
    assert not torch.equal(got, x * torch.tensor(0.1, dtype=dtype))


def test_a_scalar_that_the_caller_passes(device: str) -> None:
    """A CPU tensor without dimensions among tensors of the device, as temperatures and learning rates come."""

    def step(x: Tensor, w: Tensor, temperature: Tensor) -> Tensor:
        return torch.softmax((x @ w) / temperature, -1) @ w + temperature

    compiled = torch.compile(step, backend="bcg", options={"buckets": [8], "min_segment_kernels": 1})
    w = torch.randn(H, H, device=device)
    with torch.no_grad(), poisoned():
        for k, n in enumerate(SIZES):
            x, t = torch.randn(n, H, device=device), torch.tensor(0.5 + k)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x, w, t), step(x, w, t), rtol=1e-5, atol=1e-5)
    plan = tgb.plans(compiled)[-1]
    assert len(plan.steps) == 1, plan
    assert tgb.stats(compiled).replays > 0


def test_an_integer_that_is_read() -> None:
    """A position in a tensor, read on the host and used as a number: in no key, and never frozen."""

    def step(x: Tensor, w: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        number = k.item()
        return (x @ w + number) @ w, torch.arange(H) + number

    w = torch.randn(H, H)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad(), poisoned():
        compiled = torch.compile(step, backend="bcg", options={"buckets": [8], "min_segment_kernels": 1})
        for k, n in enumerate(SIZES):
            x, at = torch.randn(n, H), torch.tensor(10**9 + k)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            compare(compiled(x, w, at), step(x, w, at), f"call {k}")
    plan = tgb.plans(compiled)[-1]
    assert len(plan.steps) == 1, plan
    assert {c.dtype for c in plan.counts} == {torch.float32, torch.int64}
    assert tgb.stats(compiled).replays > 0


def test_a_scalar_on_another_device() -> None:
    """The rewriting alone, with tensors without data for those of a GPU."""

    def step(x: Tensor, t: Tensor, half: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * t, half + t, half * 2

    meta = torch.device("meta")
    args = torch.empty(3, device=meta), torch.tensor(2.0), torch.empty(3, device=meta, dtype=torch.float16)
    seen = take_one(step, *args)
    host_scalars(seen.normal, meta, lambda n: None)
    product, total, _ = [n for n in seen.graph.nodes if n.op == "call_function"]
    assert product.args[1].meta["host_copy"] == 1
    assert product.args[1].meta["val"].device == meta
    assert "host_copy" not in total.args[1].meta  # the kernel would round the number to half precision first


def test_one_that_is_changed_is_left_alone() -> None:
    """Would catch a number that is read at the beginning of the call and not when eager reads it."""

    def step(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        y = x @ w
        t.add_(1)
        return (y * t.item()) @ w

    w = torch.randn(H, H)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(step, backend="bcg", options={"min_segment_kernels": 1})
        with torch.no_grad():
            ours, theirs = torch.tensor(1.0), torch.tensor(1.0)
            for n in SIZES:
                x = torch.randn(n, H)
                torch._dynamo.maybe_mark_dynamic(x, 0)
                torch.testing.assert_close(compiled(x, w, ours), step(x, w, theirs), rtol=1e-4, atol=1e-4)
    plan = tgb.plans(compiled)[-1]
    assert plan.reasons()["data-dependent"] == 1, plan
    assert not plan.counts


def test_a_break_op_gets_its_number() -> None:
    """An operation that the user wants eager is not rewritten."""
    tgb.register_break_op("aten::mul.Tensor")
    plan = check(Scaled(USES["product"]))
    assert plan.reasons()["break-op"] == 1, plan
    assert not plan.counts, plan
