"""Constants that Python values make are made once, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import check_calls
from torch import Tensor, nn

import torch_graph_backend as tgb

H = 8
ORIGINAL, LOCAL, PADS, RANKS, BATCH, IMAGE = 15, 8, 1, 2, 2, 100


def staged(batch: int, local: int, image: int, device: torch.device) -> dict[str, Any] | None:
    """Boundaries of the real and the padded rows of a sequence over ranks: lengths staged on the host, then summed."""
    if RANKS <= 1 or PADS == 0:
        return None
    whole = RANKS * (local + image)
    valid = whole - PADS
    lengths = torch.tensor([valid, PADS], device=device, dtype=torch.int32).repeat(batch)
    bounds = torch.zeros(2 * batch + 1, dtype=torch.int32, device=device)
    bounds[1:] = lengths.cumsum(0)
    return {"bounds": bounds, "pad_start": valid, "pad_end": whole, "longest": max(valid, PADS)}


def on_device(batch: int, local: int, image: int, device: torch.device) -> dict[str, Any] | None:
    """The same, computed where it is needed."""
    if RANKS <= 1 or PADS == 0:
        return None
    whole = RANKS * (local + image)
    valid = whole - PADS
    starts = torch.arange(batch, device=device, dtype=torch.int32) * whole
    bounds = torch.zeros(2 * batch + 1, dtype=torch.int32, device=device)
    bounds[1::2] = starts + valid
    bounds[2::2] = starts + whole
    return {"bounds": bounds, "pad_start": valid, "pad_end": whole, "longest": max(valid, PADS)}


class Shard(nn.Module):
    """Uses the boundaries between two linears, and returns them."""

    def __init__(self, form: Callable[..., dict[str, Any] | None]) -> None:
        super().__init__()
        self.form = form
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, dict[str, Any] | None]:
        meta = self.form(x.shape[0], x.shape[1], image.shape[0], x.device)
        assert meta is not None
        kept = torch.arange(x.shape[1], device=x.device) < meta["bounds"][1]
        return self.second(self.first(x) * kept[:, None]), meta


def fresh() -> None:
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("form", [staged, on_device])
def test_both_forms_of_the_boundaries_are_captured(form: Callable[..., Any]) -> None:
    """Would catch a frozen or a wrong boundary, one that a later call sees changed, and an island in front of it."""
    fresh()
    assert -(-ORIGINAL // RANKS) == LOCAL
    args = [(torch.randn(BATCH, LOCAL, H), torch.randn(IMAGE, 3)) for _ in range(4)]
    report = check_calls(Shard(form).eval(), args, padded=False)
    (plan,) = report.plans
    assert len(plan.steps) == 1, plan
    assert plan.hoisted >= 2, plan
    assert "hoisted: " in str(plan)
    bounds = form(BATCH, LOCAL, IMAGE, torch.device("cpu"))["bounds"]
    assert bounds.tolist() == [0, 215, 216, 431, 432]


@pytest.mark.parametrize("form", [staged, on_device])
def test_both_forms_with_changing_sizes(form: Callable[..., Any]) -> None:
    """The boundaries are data that depends on sizes then: read on the device, or made eagerly, but never stale."""
    fresh()
    shapes = ((2, 8), (3, 8), (2, 8), (4, 6), (3, 8), (3, 9))
    args = [(torch.randn(b, n, H), torch.randn(IMAGE + b, 3)) for b, n in shapes]
    check_calls(Shard(form).eval(), args, compiled_kwargs={"dynamic": True, "options": {"buckets": [4, 12]}})


class Returns(nn.Module):
    """Hands out what Python values alone determine: as made, a view of it, and what was computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        literal, steps = torch.tensor([3.0, 4.0], device=x.device), torch.arange(H, device=x.device)
        kept = torch.full((H,), 0.5, device=x.device)
        return self.second(self.first(x) * kept * literal[0] + steps), literal, steps[2:], kept, torch.ones(3)


@pytest.mark.parametrize("form", [staged, on_device, None])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_returned_is_the_callers_own(form: Callable[..., Any] | None, dynamic: bool, device: str) -> None:
    """Would catch a constant of the plan that the caller gets, and changes for all calls to come."""
    fresh()
    model = (Returns() if form is None else Shard(form)).eval().to(device)
    options = {"buckets": [4, 12], "min_segment_kernels": 1}
    compiled = torch.compile(model, backend="bcg", dynamic=dynamic, options=options)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in (2, 3, 2, 2, 3, 3, 4, 2):
            x, image = torch.randn(batch, LOCAL, H, device=device), torch.randn(IMAGE, 3, device=device)
            args = (x,) if form is None else (x, image)
            got, want = (torch.utils._pytree.tree_leaves(f(*args)) for f in (compiled, model))
            for a, b in zip(got, want, strict=True):
                if not isinstance(b, Tensor):
                    assert a == b
                    continue
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
                a.sub_(7)
                kept.append((a, b - 7))
        for a, b in kept:  # nor does a later call write to it
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert tgb.stats(model).replays >= 4


def run(function: Callable[..., Any], calls: int = 4, **kwargs: Any) -> Any:
    fresh()
    w = torch.randn(H, H)
    report = check_calls(function, [(torch.randn(3, H), w) for _ in range(calls)], padded=False, **kwargs)
    return report.plans[0]


def test_a_chain_of_constants() -> None:
    """Rotary frequencies and a causal mask: nothing of them is computed at a call."""

    def rotate(x: Tensor, w: Tensor) -> Tensor:
        frequency = 1.0 / 10000 ** (torch.arange(0, H, 2).float() / H)
        angle = torch.arange(3).float()[:, None] * frequency
        mask = torch.full((3, 3), -1.0).triu(1)
        return mask @ torch.cat([x[:, ::2] * angle.cos(), x[:, 1::2] * angle.sin()], -1) @ w

    plan = run(rotate)
    left = set(plan.captured_ops())
    assert not left & {"aten.arange", "aten.full", "aten.cos", "aten.triu", "aten.pow.Scalar"}, plan


def changed(x: Tensor, w: Tensor) -> Tensor:
    steps = torch.arange(H).float()
    steps += x[0]
    return (steps * (x @ w)) @ w


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(H).float()
    return (steps * (x @ w)) @ w, steps


def returned_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(H).float()
    return (steps * (x @ w)) @ w, steps[2:]


def random(x: Tensor, w: Tensor) -> Tensor:
    return (torch.rand(H) * 0 + x @ w) @ w


def large(x: Tensor, w: Tensor) -> Tensor:
    return torch.full((1 << 12, H), 0.5)[:3] * (x @ w) @ w


@pytest.mark.parametrize("function", [changed, returned, returned_view, random, large], ids=lambda f: f.__name__)
def test_not_hoisted(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed, seen by the caller, random or large is made at every call."""
    monkeypatch.setattr("torch_graph_backend.passes.hoist.MAX_BYTES", 1 << 10)
    plan = run(function)
    made = set(plan.captured_ops()) | set(plan.eager_ops())
    assert made & {"aten.arange", "aten.rand", "aten.full"}, plan


def test_a_break_on_constants_runs_at_every_call() -> None:
    """Would catch user code that is run once, when the plan is made."""
    tgb.register_break_op("aten::triu")
    try:
        plan = run(lambda x, w: (torch.full((3, 3), -1.0).triu(1) @ x @ w) @ w)
    finally:
        tgb.unregister_break_op("aten::triu")
    assert plan.eager_ops()["aten.triu"] == 1, plan


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", [staged, on_device])
def test_both_forms_on_cuda(form: Callable[..., Any]) -> None:
    """The staged form copies from pageable memory: as an operation it could not be recorded at all."""
    fresh()
    model = Shard(form).eval().cuda()
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(4):
            x, image = torch.randn(BATCH, LOCAL, H, device="cuda"), torch.randn(IMAGE, 3, device="cuda")
            (got, meta), (want, theirs) = compiled(x, image), model(x, image)
            torch.testing.assert_close(got, want)
            assert torch.equal(meta["bounds"], theirs["bounds"])
    (plan,) = tgb.plans(model)
    assert len(plan.steps) == 1, plan
    assert tgb.stats(model).replays == 3
