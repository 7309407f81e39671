"""Collectives run between segments, in program order, on real rows; an asynchronous one stays with its wait."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from torch._dynamo.testing import CompileCounter

import torch_graph_backend as tgb
from torch_graph_backend.plan import Plan

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs a PyTorch built with torch.distributed")

H = 8
LADDER = {"buckets": [4, 8, 12], "min_segment_kernels": 1}
PATIENCE = datetime.timedelta(seconds=60)
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def functional(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    total = funcol.all_reduce(y, "sum", dist.group.WORLD)
    return (total + (y @ w).relu()) @ w


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    dist.all_reduce(y)
    return (y @ w).relu()


def gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = funcol.all_gather_tensor(x @ w, 0, dist.group.WORLD)
    y = torch.cat(y.chunk(dist.get_world_size()), 1)
    return (y @ y.t() @ (x @ w)).relu()


def gathered_columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = funcol.all_gather_tensor(x @ w, 1, dist.group.WORLD)
    return (y @ y.t() @ (x @ w)).relu()


def asynchronous(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Between the two halves: work that is captured, work that is not, and another collective that needs both."""
    y = x @ w
    name = dist.group.WORLD.group_name
    begun = torch.ops._c10d_functional.all_reduce(y, "sum", name)
    z = (torch.sort(y @ w, 0).values @ w).relu()
    dist.all_reduce(z)
    total = torch.ops._c10d_functional.wait_tensor(begun)
    return (total + z) @ w


FUNCTIONS = (functional, in_place, gathered, asynchronous)


def call(function: Function, rank: int, **how: Any) -> Function:
    """Calls of changing size, eager and compiled; sizes agree among ranks, values do not."""
    torch._dynamo.reset()
    tgb.reset()
    generator = torch.Generator().manual_seed(rank)
    w = torch.randn(H, H, generator=torch.Generator().manual_seed(99))
    compiled = torch.compile(function, **how)
    with torch.no_grad():
        for n in (5, 7, 5, 6, 9, 7, 3, 5):
            x = torch.randn(n, H, generator=generator)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x, w), function(x, w), rtol=1e-4, atol=1e-4)
    return compiled


def compare(function: Function, rank: int) -> Plan:
    """Those calls are captured; the last plan."""
    compiled = call(function, rank, backend="bcg", options=LADDER)
    stats = tgb.stats(compiled)
    assert stats.replays > 0, stats
    assert not stats.eager, stats
    return tgb.plans(compiled)[-1]


def check_plan(plan: Plan) -> None:
    """Every collective is eager, and is waited for in its own region."""
    assert plan.segments, plan
    assert plan.reasons()["collective"] >= 2, plan
    assert not any("c10d" in name for name in plan.captured_ops()), plan
    for region in plan.regions:
        names = [op.op for op in region.ops if "c10d" in op.op]
        assert sum("wait" in name for name in names) == sum("wait" not in name for name in names), plan


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=PATIENCE)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_one_rank(function: Function) -> None:
    """Would catch: a collective in a recording, on padded rows, or waited for after other work reused its memory."""
    check_plan(compare(function, 0))


@pytest.mark.usefixtures("alone")
def test_gathered_columns() -> None:
    """Torch 2.11 cannot compile what follows an ``all_gather_tensor`` of columns: with any backend it calls none."""
    graphs = CompileCounter()
    call(gathered_columns, 0, backend=graphs)
    if graphs.frame_count:
        check_plan(compare(gathered_columns, 0))
    else:
        assert torch.__version__ < "2.13"
        assert tgb.stats(call(gathered_columns, 0, backend="bcg", options=LADDER)).graphs == 0


def _rank(rank: int, world: int, store: str, plans: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE)
    try:
        for function in FUNCTIONS:
            plan = compare(function, rank)
            check_plan(plan)
            order = [op.op for region in plan.regions for op in region.ops if "c10d" in op.op]
            plans.put((rank, function.__name__, order))
    finally:
        dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    """Would catch ranks that call collectives in different orders (which never ends), or with each other's padding."""
    plans = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (2, str(tmp_path / "store"), plans), nprocs=2)
    seen: dict[str, list[list[str]]] = {}
    for _ in range(2 * len(FUNCTIONS)):
        _, name, order = plans.get()
        seen.setdefault(name, []).append(order)
    assert all(a == b for a, b in seen.values())
