"""Repairs: equal to eager under every poison, in one segment; refused where they would be wrong or would not pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import check_calls
from torch import Tensor, nn

import torch_graph_backend as tgb

H, ROOM = 8, 24
SIZES = (5, 4, 5, 7, 6, 7, 3, 5)
LADDER = {"options": {"buckets": [8]}, "dynamic": True}


class Between(nn.Module):
    """An operation between two linears, with a cache and a counter that it may change."""

    def __init__(self, op: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.op = op
        self.first, self.proj, self.second = (nn.Linear(H, H, dtype=dtype) for _ in range(3))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))
        self.register_buffer("narrow", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.relu(self.op(self, h, *rest)) + h)


def attention(m: Between, h: Tensor) -> Tensor:
    scores = h @ h.transpose(-1, -2)
    return torch.softmax(scores, -1) @ m.proj(h)


MASKED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda m, h: h + m.proj(h.sum(0)),
    "sum in double": lambda m, h: h + m.proj(h.sum(0, dtype=torch.float64).float()),
    "sum, kept": lambda m, h: h + m.proj(h.sum(0, keepdim=True)),
    "sum of all": lambda m, h: m.proj(h) * h.sum(),
    "sum of bools": lambda m, h: m.proj(h) * (h > 0).sum(0),
    "mean": lambda m, h: h + m.proj(h.mean(0)),
    "mean in double": lambda m, h: h + m.proj(h.mean(0, dtype=torch.float64).float()),
    "nanmean": lambda m, h: h + m.proj(h.nanmean(0)),
    "mean of all": lambda m, h: m.proj(h) - h.mean(),
    "mean, kept": lambda m, h: h - m.proj(h.mean(-2, keepdim=True)),
    "prod": lambda m, h: h + m.proj(h.prod(0)),
    "amax": lambda m, h: h + m.proj(h.amax(0)),
    "amin": lambda m, h: h + m.proj(h.amin(0)),
    "max": lambda m, h: h + m.proj(h.max(0).values),
    "which max": lambda m, h: h + m.proj(h.max(0).indices.float()),
    "min": lambda m, h: h + m.proj(h.min(0)[0]),
    "max of all": lambda m, h: m.proj(h) / h.abs().max(),
    "max of columns": lambda m, h: m.proj(h) / h.t().max(),
    "max of ints": lambda m, h: m.proj(h) * (h * 10).long().amax(0),
    "min of ints": lambda m, h: m.proj(h) * (h * 10).int().amin(0),
    "argmax": lambda m, h: h + m.proj(h.argmax(0).float()),
    "argmin": lambda m, h: h + m.proj(h.argmin(0).float()),
    "which of all": lambda m, h: h + m.proj(h) * h.argmax(),
    "which of all, transposed": lambda m, h: h + m.proj(h) * h.t().argmin(),
    "both ends": lambda m, h: h + m.proj(torch.sub(*h.aminmax(dim=0))),
    "logsumexp": lambda m, h: h + m.proj(h.logsumexp(0)),
    "norm": lambda m, h: m.proj(h) / h.norm(dim=0),
    "smallest norm": lambda m, h: m.proj(h) + torch.linalg.vector_norm(h, -float("inf"), dim=0),
    "variance": lambda m, h: m.proj(h) / (1 + h.var(0)),
    "deviation from the mean": lambda m, h: m.proj(h - torch.std_mean(h, 0)[1]) / (1 + torch.std_mean(h, 0)[0]),
    "batch norm": lambda m, h: m.proj(nn.functional.batch_norm(h, None, None, training=True)),
    "merged": lambda m, h: m.proj(h) + h.view(-1, 2, 4).flatten(0, 1).mean(0).repeat(2),
    "any": lambda m, h: h + m.proj((h > 0.5).any(0).float()),
    "all": lambda m, h: h + m.proj((h > -0.9).all(0).float()),
    "softmax": lambda m, h: m.proj(torch.softmax(h, 0)),
    "log_softmax": lambda m, h: m.proj(h.log_softmax(0)),
    "gram": lambda m, h: m.proj(h) @ (h.t() @ h),
    "attention": attention,
    "flip": lambda m, h: m.proj(h.flip(0)),
    "flip of both": lambda m, h: m.proj(h.flip(0, 1)),
}


def bump(m: Between, h: Tensor) -> Tensor:
    """Two counters, of which the one as narrow as ``int32`` stays so."""
    m.length.add_(h.shape[0])
    m.narrow += 2 * h.shape[0] - 1
    return h * m.length + m.narrow


COUNTED: dict[str, Callable[..., Tensor]] = {
    "division": lambda m, h: h / h.shape[0],
    "product": lambda m, h: h * (2 * h.shape[0] - 1),
    "difference": lambda m, h: h.shape[0] - h,
    "scaled": lambda m, h: torch.add(h, h, alpha=3) + h.shape[0] // 2,
    "comparison": lambda m, h: h.where(h * 9 > h.shape[0], -h),
    "clamp": lambda m, h: (h * 9).clamp(max=h.shape[0]),
    "both clamped": lambda m, h: (h * 9).clamp(-1.5, h.shape[0]),
    "masked fill": lambda m, h: h.masked_fill(h > 0.3, h.shape[0]),
    "fill": lambda m, h: h + torch.full((H,), h.shape[0]),
    "scalar": lambda m, h: h + torch.scalar_tensor(h.shape[0]),
    "constant": lambda m, h: h + torch.arange(H) * h.shape[0],
    "counters": bump,
}

LAST: dict[str, Callable[..., Tensor]] = {
    "last": lambda m, h: h + m.proj(h[-1]),
    "last but one": lambda m, h: h + m.proj(h[-2]),
    "last by size": lambda m, h: h + m.proj(h[h.shape[0] - 1]),
    "last, kept": lambda m, h: h + m.proj(h[-1:]),
    "last three": lambda m, h: h + m.proj(h[-3:]).amax(0),
}


class Positions(Between):
    """With a table of as many positions as the largest bucket has no room for, and ids of them in a buffer."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__(op)
        self.table = nn.Embedding(7, H)
        self.register_buffer("ids", torch.arange(40) % 7)
        self.register_buffer("wild", torch.cat([torch.arange(7), torch.full((40,), 1 << 40)]))
        self.register_buffer("types", torch.arange(14).view(2, 7).float())


def buckets_of(n: int) -> Tensor:
    """How far two tokens are apart, in classes (a position bias)."""
    apart = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    return apart.abs().clamp(max=3) + (apart > 0) * 3


LOOKED_UP: dict[str, Callable[..., Tensor]] = {
    "embedding of a buffer": lambda m, h: h + m.table(m.ids[: h.shape[0]]),
    "embedding of what is no index behind": lambda m, h: h + m.table(m.wild[: h.shape[0]]),
    "embedding, kept": lambda m, h: h + m.table(m.wild[None, : h.shape[0]])[0],
    "indexed": lambda m, h: h + m.table.weight[m.wild[: h.shape[0]]],
    "indexed from the end": lambda m, h: h + m.table.weight[m.wild[: h.shape[0]] - 7],
    "two indices": lambda m, h: h + m.types[m.wild[: h.shape[0]] % 2, m.wild[: h.shape[0]]][:, None],
    "selected": lambda m, h: h + m.table.weight.index_select(0, m.wild[: h.shape[0]]),
    "gathered": lambda m, h: h + m.types.gather(1, m.wild[None, : h.shape[0]].expand(2, -1)).sum(0)[:, None],
    "taken along": lambda m, h: h + torch.take_along_dim(m.types[0], m.wild[: h.shape[0]], 0)[:, None],
    "both dimensions": lambda m, h: h + (m.table(buckets_of(h.shape[0])) * h[:, None]).sum(-1)[:, :1],
}


def calls(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, H, generator=g).to(dtype),) for n in sizes]


def run(op: Callable[..., Tensor], args: list[Any], **kwargs: Any) -> Any:
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)
    return check_calls(Between(op).eval(), args, compiled_kwargs=LADDER, **kwargs)


def one_segment(report: Any) -> Any:
    (plan,) = report.plans
    assert len(plan.steps) == 1, plan
    assert plan.repairs(), plan
    assert "repaired: " in str(plan)
    return plan


@pytest.mark.parametrize("name", [*MASKED, *COUNTED, *LAST])
def test_equal_to_eager_in_one_segment(name: str) -> None:
    """Would catch: padding that reaches a real row through the rewritten operation, a wrong neutral element, a count
    that is frozen or not filled, another dtype, an island left behind."""
    one_segment(run((MASKED | COUNTED | LAST)[name], calls()))


@pytest.mark.parametrize("name", LOOKED_UP)
def test_look_ups_by_indices_that_are_none_in_padded_rows(name: str) -> None:
    """Would catch: a padded row that reads beyond the table, real rows that read something else, an island."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)
    plan = one_segment(check_calls(Positions(LOOKED_UP[name]).eval(), calls(), compiled_kwargs=LADDER))
    assert "padded rows look up what the last real row looks up" in plan.repairs(), plan


def diagonals(m: Between, h: Tensor) -> Tensor:
    """Row ``t`` writes places ``t + j``: padded rows would write beyond the last place, whatever ``j`` is."""
    n = h.shape[0]
    places = torch.arange(n)[:, None] + torch.arange(n)[None, :]
    return h + torch.zeros(n, 13).scatter(1, places, h @ h.t())[:, :H]


def test_a_write_that_leaves_its_memory_in_padded_rows() -> None:
    """Would catch indices that are repeated along one of two padded dimensions and taken for valid in both."""
    run(diagonals, calls((7, 6, 7, 6, 5, 7)), tolerance=1e-4)


def test_a_look_up_that_eager_refuses_is_refused() -> None:
    """Would catch a repair that hides an invalid index of a real row."""
    model = Positions(LOOKED_UP["embedding of a buffer"]).eval()
    model.ids[5] = 7
    compiled = torch.compile(model, backend="bcg", **LADDER)
    with torch.no_grad():
        for (x,) in calls((5, 4, 5, 3, 5)):
            torch.testing.assert_close(compiled(x), model(x))
        for run_it in (model, compiled):
            with pytest.raises(IndexError):
                run_it(*calls((6,))[0])
        for (x,) in calls((5, 4)):
            torch.testing.assert_close(compiled(x), model(x))
    assert tgb.stats(model).replays >= 3


# -- writes ------------------------------------------------------------------------------------------------------------


def index_copy(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.index_copy_(0, at, m.proj(h))
    return h + cache.sum(0)


def index_put(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[at] = m.proj(h)
    return h + cache.sum(0)


def two_indices(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[at, at % H] = m.proj(h)[:, 0]
    return h + cache.sum(0)


def index_fill(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.index_fill_(0, at, 3.0)
    return m.proj(h) + cache.sum(0)


def put_constant(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[at] = 2.0
    return m.proj(h) + cache.sum(0)


def scatter(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.scatter_(0, at[:, None].expand(-1, H), m.proj(h))
    return h + cache.sum(0)


def slice_write(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[: h.shape[0]] = m.proj(h)
    return h + cache.sum(0)


def shifted_slice(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[2 : h.shape[0] + 2] = m.proj(h)
    return h + cache.sum(0)


def slice_of_one(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[: h.shape[0]] = m.length + 1
    return m.proj(h) + cache.sum(0)


def slice_of_none(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[: h.shape[0]] = 0
    cache[1 : h.shape[0] + 1].zero_()
    return m.proj(h) + cache.sum(0)


WRITES = (
    slice_of_none,
    index_copy,
    index_put,
    two_indices,
    index_fill,
    put_constant,
    scatter,
    slice_write,
    shifted_slice,
    slice_of_one,
)


def cached(sizes: tuple[int, ...] = SIZES, twice: bool = False) -> list[Any]:
    """Calls on one cache that lives as long as the side; ``twice``: real rows hit one place several times."""

    def call(i: int, n: int) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
        def make(memory: dict[str, Any]) -> tuple[Any, ...]:
            g = torch.Generator().manual_seed(i)
            if "cache" not in memory:
                memory["cache"] = torch.randn(ROOM, H, generator=torch.Generator().manual_seed(99))
            at = torch.randint(0, 3, (n,), generator=g) if twice else torch.randperm(ROOM, generator=g)[:n]
            torch._dynamo.mark_static(memory["cache"])
            return torch.randn(n, H, generator=g), memory["cache"], at

        return make

    return [call(i, n) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("op", WRITES, ids=lambda f: f.__name__)
def test_writes_change_real_rows_alone(op: Callable[..., Tensor]) -> None:
    """Would catch: a padded row that writes to the caller's cache, at a place or a value of its own."""
    plan = one_segment(run(op, cached(), tolerance=1e-4))
    assert plan.mutated


@pytest.mark.parametrize("op", [index_copy, scatter])
def test_the_last_of_two_writes_to_one_place_stays(op: Callable[..., Tensor]) -> None:
    """On a CPU the last row that writes a place wins. A padded row that repeated row 0 would win over it."""
    one_segment(run(op, cached(twice=True), tolerance=1e-4))
