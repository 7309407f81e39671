"""Plans of a small zoo, as text: a change of any pass shows here as a diff that a reviewer can judge.

``TGB_ACCEPT=1`` writes the files anew. What a plan must have whatever its text is asserted beside it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import GOLDEN, Seen, assert_golden, stable, take_one
from torch import nn

from torch_graph_backend.plan import Plan
from torch_graph_backend.plan_text import flow_text


def dynamic(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """A tensor with these dimensions dynamic."""
    for d in dims:
        torch._dynamo.mark_dynamic(x, d)
    return x


class MLP(nn.Module):
    """Three residual layers of equal structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attention(nn.Module):
    """Attention over a growing cache, twice: projections are captured, attention and ``cat`` are not."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])
        self.out = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, ...]:
        grown = []
        for qkv, out, (k0, v0) in zip(self.qkv, self.out, caches, strict=True):
            q, k, v = qkv(x).view(x.shape[0], x.shape[1], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            k, v = torch.cat([k0, k], -2), torch.cat([v0, v], -2)
            y = F.scaled_dot_product_attention(q, k, v)
            x = x + out(y.transpose(1, 2).flatten(2))
            grown.append((k, v))
        return x, grown


class StaticCache(nn.Module):
    """Writes one position of a cache that the caller owns, and attends over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, at, self.kv(x))
        weights = (self.q(x) @ cache.transpose(1, 2)).softmax(-1)
        return weights @ cache + x


class Experts(nn.Module):
    """Two experts chosen by data: the routing has sizes that only the device knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i).squeeze(-1)
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, i, None])
        return x + y


class Branch(nn.Module):
    """A branch on data between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        z = torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,))
        return self.down(z)


class Views(nn.Module):
    """The caller gets a tensor, a view of it and a view of its own argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.up(x).relu()
        return y, y[:, 0], x.transpose(0, 1)


def cache() -> torch.Tensor:
    return dynamic(torch.randn(3, 2, 7, 4), 0, 2)


ZOO: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "mlp": lambda: (MLP(), (dynamic(torch.randn(5, 8), 0),)),
    "attention_growing_cache": lambda: (
        Attention(),
        (dynamic(torch.randn(3, 5, 8), 0, 1), [(cache(), cache()) for _ in range(2)]),
    ),
    "static_cache": lambda: (
        StaticCache(),
        (dynamic(torch.randn(3, 1, 8), 0), dynamic(torch.zeros(3, 16, 8), 0), torch.tensor([4])),
    ),
    "experts": lambda: (Experts(), (dynamic(torch.randn(6, 8), 0),)),
    "cond": lambda: (Branch(), (dynamic(torch.randn(5, 8), 0),)),
    "aliasing_outputs": lambda: (Views(), (dynamic(torch.randn(5, 8), 0),)),
}


def taken(name: str) -> Seen:
    model, args = ZOO[name]()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return take_one(model, *args)


def plan_of(name: str) -> Plan:
    return taken(name).plan(min_kernels=2)


@pytest.mark.parametrize("name", ZOO)
def test_golden(name: str) -> None:
    """The text of the plan, and the flow of values."""
    plan = plan_of(name)
    assert_golden(name, f"{plan}\n\n{flow_text(plan)}")


@pytest.mark.parametrize("name", ["attention_growing_cache", "aliasing_outputs"])
def test_a_plan_is_plain_data(name: str) -> None:
    """No tensor and no node inside: it hashes, compares, and survives a pickle."""
    plan, again = plan_of(name), plan_of(name)
    assert plan == again
    assert hash(plan) == hash(again)
    assert str(pickle.loads(pickle.dumps(plan))) == str(plan)


def test_the_text_does_not_depend_on_hash_seeds_or_folders(tmp_path: Path) -> None:
    """Another process, another hash seed and another working directory give the same text."""
    here = Path(__file__).resolve().parent
    code = (
        f"import sys; sys.path.insert(0, {str(here)!r})\nfrom test_plan_golden import *\nprint(plan_of('static_cache'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONHASHSEED": "123", "PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    golden = (GOLDEN / "static_cache.txt").read_text(encoding="utf-8")
    assert golden.startswith(stable(run.stdout))
    assert str(here.parent) not in golden


def test_every_golden_file_belongs_to_a_model() -> None:
    """A file whose test is gone is checked by nobody."""
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {*ZOO, "codegen_small"}


# --- what must hold whatever the text ---------------------------------------------------------------------------------


def test_layers_fold() -> None:
    """One captured segment for an MLP: nothing in it mixes rows."""
    plan = plan_of("mlp")
    assert (len(plan.segments), len(plan.regions)) == (1, 0)


def test_a_growing_cache_is_cut_at_attention() -> None:
    """All projections are captured, all attention and cache growth is eager, and no size of the cache is in the key."""
    plan = plan_of("attention_growing_cache")
    assert plan.captured_ops()["aten.linear"] == 4
    assert plan.eager_ops()["aten.scaled_dot_product_attention"] == 2
    assert plan.eager_ops()["aten.cat"] == 4
    assert "aten.linear" not in plan.eager_ops()
    assert len(plan.segments) == 3
    assert {s.kind for s in plan.symbols if "caches" in s.source} == {"exact"}


def test_a_static_cache_is_one_segment() -> None:
    """The cache is pinned and written in place, and the batch it is shaped by is exact in the key."""
    plan = plan_of("static_cache")
    assert (len(plan.segments), len(plan.regions)) == (1, 0)
    assert [plan.placeholders[i] for i in plan.mutated] == ["L['cache']"]
    assert set(plan.mutated) <= set(plan.pinned)
    assert [s.kind for s in plan.symbols] == ["pinned"]


def test_every_output_that_shares_memory_is_made_from_a_copy_of_its_own() -> None:
    """A tensor and a view of it must share memory with each other and with nothing of ours."""
    plan = plan_of("aliasing_outputs")
    assert all(c.private for c in plan.cuts)
    assert plan.reasons()["output-alias"] >= 1
    assert [o.ref.kind for o in plan.outputs if o.ref is not None] == ["cut", "eager", "eager"]


def test_routing_by_data_keeps_the_gate_captured() -> None:
    """The gate is dense and safe; what follows ``nonzero`` is not, each with a reason."""
    plan = plan_of("experts")
    assert plan.captured_ops()["aten.linear"] >= 1
    assert plan.reasons()["data-dependent"] >= 2
    assert all(op.reason is not None for r in plan.regions for op in r.ops)
    assert all(op.reason is None for s in plan.segments for op in s.ops)
