"""What may not be recorded, kind by kind: equal to eager over changing sizes, the reason said, the rest captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import check_calls, compare, poisoned
from torch import Tensor, nn

import torch_graph_backend as tgb

H = 8
SIZES = (5, 4, 5, 7, 6, 7, 3, 5)
LADDER: dict[str, Any] = {"options": {"buckets": [8], "min_segment_kernels": 1}, "dynamic": True}
Middle = Callable[..., Tensor]


class Around(nn.Module):
    """An operation of some kind between two linears."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x), *rest).relu())


def square(h: Tensor) -> Tensor:
    """A matrix that is not singular, of a fixed size."""
    return h.t() @ h + torch.eye(H, device=h.device)


def in_parts(h: Tensor, sizes: Tensor) -> Tensor:
    parts = torch.split(h, sizes.tolist())
    return torch.cat([p * (k + 1) for k, p in enumerate(parts)])


def masked_write(h: Tensor) -> Tensor:
    h = h * 2
    h[h[:, 0] > 0] = 1.0
    return h


def unbacked(h: Tensor, k: Tensor) -> Tensor:
    count = k.item()
    torch._check(count >= 0)
    torch._check(count < 100)
    return h + torch.arange(count, device=h.device).sum()


#: Name -> (function, second argument made of the size, the operation that must be eager, its reason).
KINDS: dict[str, tuple[Middle, Callable[[int], Tensor] | None, str, str]] = {
    "item": (lambda h: h * h[0, 0].item(), None, "aten.item", "data-dependent"),
    "float of it": (lambda h: h + float(h[0, 0]), None, "aten.item", "data-dependent"),
    "nonzero": (lambda h: h + h[:, 0].nonzero().sum(), None, "aten.nonzero", "data-dependent"),
    "where without values": (lambda h: h + torch.where(h[:, 0] > 0)[0].sum(), None, "aten.where", "data-dependent"),
    "a boolean index": (lambda h: h + h[h[:, 0] > 0].sum(0), None, "aten.index.Tensor", "data-dependent"),
    "a write by a mask": (masked_write, None, "aten.index_put_", "data-dependent"),
    "masked_select": (lambda h: h + h.masked_select(h > 0).sum(), None, "aten.masked_select", "data-dependent"),
    "unique": (lambda h: h + torch.unique(h[:, 0] > 0).sum(), None, "aten._unique2", "data-dependent"),
    "a size from data": (unbacked, lambda n: torch.tensor([n]), "aten.item", "data-dependent"),
    "narrow by data": (
        lambda h, k: h + h.narrow(0, 1, int(k)).sum(0), lambda n: torch.tensor([n - 1]), "aten.item", "data-dependent"),
    "sizes from data": (in_parts, lambda n: torch.tensor([1, n - 1]), "aten.split_with_sizes", "data-dependent"),
    "repeats from data": (
        lambda h, k: h + h.repeat_interleave(k, 0).sum(0), lambda n: torch.arange(n) % 3,
        "aten.repeat_interleave.self_Tensor", "data-dependent"),
    "bincount": (
        lambda h: h + torch.bincount((h[:, 0] > 0).long(), minlength=H)[:H], None, "aten.bincount", "data-dependent"),
    "histc": (lambda h: h + h.histc(H), None, "aten.histc", "data-dependent"),
    "an order that is checked": (
        lambda h: h + torch.searchsorted(square(h)[0], h[:, 0].contiguous(), sorter=square(h)[0].argsort()).sum(),
        None, "aten.searchsorted.Tensor", "data-dependent"),
    "linspace between tensors": (
        lambda h: h + torch.linspace(h[0, 0], h[0, 1], H), None, "aten.linspace.Tensor_Tensor", "data-dependent"),
    "solve": (lambda h: h + torch.linalg.solve(square(h), square(h))[0], None, "aten.linalg_solve", "data-dependent"),
    "cholesky": (lambda h: h + torch.linalg.cholesky(square(h))[0], None, "aten.linalg_cholesky", "data-dependent"),
    "inverse": (lambda h: h + torch.linalg.inv(square(h))[0], None, "aten.linalg_inv", "data-dependent"),
    "eigenvalues": (lambda h: h + torch.linalg.eigvalsh(square(h)), None, "aten.linalg_eigvalsh", "data-dependent"),
    "matrix_exp": (lambda h: h + torch.matrix_exp(square(h) / 99)[0], None, "aten.matrix_exp", "data-dependent"),
    "one hot": (lambda h: h + F.one_hot((h[:, 0] > 0).long(), H), None, "aten.one_hot", "data-dependent"),
}  # fmt: skip


def calls(extra: Callable[[int], Tensor] | None) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, H, generator=g), *([extra(n)] if extra else [])) for n in SIZES]


@pytest.mark.parametrize("name", KINDS)
def test_eager_with_a_reason(name: str) -> None:
    """Would catch: a value that is frozen, a recording that reads the host, a reason of another kind, no segments."""
    middle, extra, op, code = KINDS[name]
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        report = check_calls(Around(middle).eval(), calls(extra), compiled_kwargs=LADDER, tolerance=1e-4)
    (plan,) = report.plans
    found = {o.op: o.reason for region in plan.regions for o in region.ops if o.reason}
    assert op in found, plan
    assert found[op].code == code, plan
    rows_from_data = name == "sizes from data"  # the second linear has as many rows as the data says
    assert plan.captured_ops()["aten.linear"] == 2 - rows_from_data, plan


BROKEN: dict[str, tuple[Middle, Callable[[int], Tensor] | None]] = {
    **{n: KINDS[n][:2] for n in ("item", "nonzero", "a boolean index", "sizes from data", "repeats from data")},
    "equal": (lambda h: h * float(torch.equal(h, h + 0)), None),
    "allclose": (lambda h: h * float(torch.allclose(h, h + 1)), None),
    "a branch on data": (lambda h: h * 2 if h.sum() > 0 else h - 1, None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_with_graph_breaks(name: str) -> None:
    """What Dynamo does by default: several graphs, and code of the user's between them."""
    middle, extra = BROKEN[name]
    model, nothing = Around(middle).eval(), {"nothing-to-capture"}
    kwargs: dict[str, Any] = {"compiled_kwargs": LADDER, "tolerance": 1e-4, "padded": False}
    report = check_calls(model, calls(extra), tolerate=nothing, **kwargs)
    assert len(report.plans) >= 2
    assert sum(p.captured_ops()["aten.linear"] for p in report.plans) >= 2


# -- captured all the same ---------------------------------------------------------------------------------------------


def dead_item(h: Tensor) -> Tensor:
    h[0, 0].item()
    return h * 2


CAPTURED: dict[str, Middle] = {
    "an item that nobody uses": dead_item,
    "a constant staged on the host": lambda h: h * torch.tensor([1.0, 2.0], device=h.device).repeat(H // 2),
    "a number staged on the host": lambda h: h * torch.tensor(3.0) + torch.tensor(7, device=h.device),
    "a size staged on the host": lambda h: h * torch.tensor(h.shape[0], device=h.device),
    "repeats that are a number": lambda h: h + h.repeat_interleave(2, 0)[: h.shape[0]],
    "chunks": lambda h: torch.cat([c * (k + 1) for k, c in enumerate(h.chunk(2, 1))], 1),
    "a mask as data": lambda h: torch.where(h > 0, h, -h).masked_fill(h > 1, 0.5),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = check_calls(Around(CAPTURED[name]).eval(), calls(None), compiled_kwargs=LADDER, tolerance=1e-4)
    (plan,) = report.plans
    assert len(plan.steps) == 1, plan


# -- random numbers ----------------------------------------------------------------------------------------------------


RANDOM: dict[str, tuple[Middle, str]] = {
    "dropout": (lambda h: F.dropout(h, 0.5, True), "aten.dropout"),
    "rand_like": (lambda h: h + torch.rand_like(h), "aten.rand_like"),
    "randn": (lambda h: h + torch.randn(h.shape[0], 1, device=h.device), "aten.randn"),
    "bernoulli": (lambda h: h * torch.bernoulli(h.sigmoid()), "aten.bernoulli"),
    "multinomial": (lambda h: h + torch.multinomial(h.softmax(-1), 1), "aten.multinomial"),
    "in place": (lambda h: h + torch.empty_like(h).uniform_(), "aten.uniform_"),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers(device: str, name: str) -> None:
    """From one seed, the numbers that eager draws: of the real shape, and new ones at every call."""
    middle, op = RANDOM[name]
    model = Around(middle).eval().to(device)
    compiled = torch.compile(model, backend="bcg", **LADDER)
    outputs = []
    with torch.no_grad(), poisoned():
        for k, n in enumerate(SIZES):
            x = torch.ones(n, H, device=device)
            torch.manual_seed(k)
            want = model(x)
            torch.manual_seed(k)
            got = compiled(x)
            compare(got, want, f"call {k}", tolerance=1e-4)
            outputs.append(got)
    (plan,) = tgb.plans(model)
    assert plan.reasons()["random"] >= 1, plan
    assert op in plan.eager_ops(), plan
    assert plan.captured_ops()["aten.linear"] == 2, plan
    same = [i for i, n in enumerate(SIZES) if n == 5]
    assert not torch.equal(outputs[same[0]], outputs[same[1]])
    assert tgb.stats(model).replays > 0


# -- other tensors -----------------------------------------------------------------------------------------------------


def with_meta(h: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.empty(h.shape[0], 3, device="meta") * 2
    return h * shape.shape[1], shape.sum(0)


def test_meta_tensors(device: str) -> None:
    """Tensors without data are on another device than any segment, and cost nothing eagerly."""

    class Two(Around):
        def forward(self, x: Tensor) -> Any:
            h, shape = self.middle(self.first(x))  # type: ignore[misc]
            return self.second(h), shape

    model = Two(with_meta).eval().to(device)  # type: ignore[arg-type]
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, H, device=device)
            (got, shape), (want, theirs) = compiled(x), model(x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert shape.device == theirs.device
            assert shape.shape == theirs.shape
    (plan,) = tgb.plans(model)
    assert plan.reasons()["other-device"] >= 1, plan
    assert len(plan.segments) == 1, plan
    assert tgb.stats(model).replays > 0


def test_tables_that_stay_on_the_host(device: str) -> None:
    """A pageable copy to the device runs eagerly, at every call; on a CPU it is none."""
    model = Around(lambda h, table: h + table.to(h.device)[: h.shape[0]]).eval().to(device)
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for k, n in enumerate(SIZES):
            x, table = torch.randn(n, H, device=device), torch.full((16, H), float(k))
            torch.testing.assert_close(compiled(x, table), model(x, table), rtol=1e-4, atol=1e-4)
    (plan,) = tgb.plans(model)
    assert bool(plan.reasons()["device-copy"]) == (device != "cpu"), plan
    assert plan.captured_ops()["aten.linear"] == 2, plan
    assert tgb.stats(model).replays > 0


def test_work_that_stays_on_the_host(device: str) -> None:
    """Operations on CPU tensors in a graph for a GPU; what they give is copied over at every call."""

    def middle(h: Tensor, lengths: Tensor) -> Tensor:
        share = (lengths.float() / lengths.sum()).cumsum(0)
        return h * share.to(h.device)

    model = Around(middle).eval().to(device)
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for k, n in enumerate(SIZES):
            x, lengths = torch.randn(n, H, device=device), torch.arange(1, H + 1) + k
            torch.testing.assert_close(compiled(x, lengths), model(x, lengths), rtol=1e-4, atol=1e-4)
    (plan,) = tgb.plans(model)
    assert bool(plan.reasons()["other-device"]) == (device != "cpu"), plan
    assert plan.captured_ops()["aten.linear"] == 2, plan
    assert tgb.stats(model).replays > 0


def test_sparse_weights() -> None:
    """Not strided: eager, with what is dense around it captured."""

    class Sparse(Around):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.register_buffer("links", torch.eye(H).roll(1, 0).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return self.second((self.links @ self.first(x).t()).t().relu())  # type: ignore[operator]

    model = Sparse().eval()
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, H)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    for plan in tgb.plans(model):
        assert "aten.matmul" not in plan.captured_ops() or not plan.reasons()["not-strided"], plan
