"""Guards on a bucketed size that exclude the rungs of its ladder: a neighbour serves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from equality import check_calls
from torch import nn

import torch_graph_backend as tgb
from torch_graph_backend.admission import Bounds

H = 8


class Branches(nn.Module):
    """Each branch is a graph of its own, with a guard that no multiple of 8 fulfils, or none but they do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 8:
            return self.down(self.up(x).relu())
        return self.down(self.up(x).sigmoid())


class Both(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2 and x.shape[1] % 8:
            return self.down(self.up(x).relu())
        return self.up(x)


def calls(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(n, H),) for n in sizes]


def buckets() -> set[int]:
    return {key.size for graph in tgb.stats().keys.values() for key in graph}


def test_a_guard_that_excludes_every_rung() -> None:
    """Would catch a graph that records each exact size by itself, or that runs at a size of the other branch."""
    sizes = (13, 9, 11, 10, 20, 18, 23, 21, 13, 12, 19, 22)
    report = check_calls(
        Branches().eval(), calls(*sizes), compiled_kwargs={"dynamic": True, "options": {"buckets": [16, 24]}}
    )
    assert buckets() == {15, 23}
    assert report.stats.recordings == 2


def test_both_branches_by_turns() -> None:
    sizes = (13, 16, 9, 24, 20, 16, 11, 8, 23, 24, 15, 8)
    options = {"dynamic": True, "options": {"buckets": [8, 16, 24]}}
    check_calls(Branches().eval(), calls(*sizes), compiled_kwargs=options, padded=False)
    assert buckets() == {15, 23, 8, 16, 24}


def test_two_sizes_each_with_a_guard() -> None:
    shapes = ((3, 13), (5, 9), (5, 11), (3, 10), (3, 12), (5, 13))
    args = [(torch.randn(b, n, H),) for b, n in shapes]
    check_calls(Both().eval(), args, compiled_kwargs={"dynamic": True, "options": {"buckets": [8, 16]}})
    assert buckets() == {(7, 15)}


def test_recording_ahead_takes_the_sizes_that_calls_will_take() -> None:
    """Would catch rungs that are recorded ahead at sizes that no call is rounded up to."""
    model = Branches().eval()
    compiled = torch.compile(model, backend="bcg", dynamic=True, options={"buckets": [16, 24]})
    with torch.no_grad():
        tgb.capture(compiled, torch.randn(22, H))
        assert buckets() == {15, 23}
        for n in (13, 22, 9):
            x = torch.randn(n, H)
            torch.testing.assert_close(compiled(x), model(x))
    assert buckets() == {15, 23}
    assert tgb.stats().replays == 3


class Scattered(nn.Module):
    """Of two rows: ``scatter`` takes no more indices than ``y`` has rows, and ``x[1:]`` and ``x + y`` fix these."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.function(y, i)
        return x[1:], found, x + y


def scattered(y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y).scatter_(0, i[:, None].expand(-1, H), y)


def scattered_by_size(y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y).scatter_(0, (i % y.shape[0])[:, None].expand(-1, H), y) * i.shape[0]


@pytest.mark.parametrize("function", [scattered, scattered_by_size])
@pytest.mark.parametrize("sizes", [(2, 2, 3, 3, 4, 2, 2), (9, 2, 9, 2, 3, 2)])
def test_a_size_that_planning_itself_finds_fixed(function: Callable[..., torch.Tensor], sizes: tuple[int, ...]) -> None:
    """Would catch a plan that counts on a size (a repair reads it on the device) which PyTorch found to be fixed while
    the plan was made: such calls raised ``KeyError``."""
    model = Scattered(function)
    compiled = torch.compile(model, backend="bcg", options={"buckets": [4, 8, 16]})
    for n in sizes:
        args = torch.randn(n, H), torch.randn(n, H), torch.randint(0, n, (n,))
        for t in args:
            torch._dynamo.maybe_mark_dynamic(t, 0)
        for got, wanted in zip(compiled(*args), model(*args), strict=True):
            assert torch.equal(got, wanted)
    tgb.stats().expect(calls=len(sizes), min_replays=2)


S = sympy.Symbol("s", positive=True, integer=True)


@pytest.mark.parametrize(("guard", "rung", "least", "found"), [
    (sympy.Ne(sympy.Mod(S, 8), 0), 16, 9, 15),
    (sympy.Ne(sympy.Mod(S, 8), 0), 16, 16, None),  # never below the real rows
    (sympy.Eq(sympy.Mod(S, 2), 0), 15, 3, 14),
    (sympy.Eq(sympy.Mod(S, 32), 1), 64, 3, None),  # too far away
    (sympy.Le(S, 60), 64, 3, 60),
])  # fmt: skip
def test_near(guard: sympy.Basic, rung: int, least: int, found: int | None) -> None:
    bounds = Bounds((guard,), ((S, sympy.Integer(2), sympy.Integer(1000)),))
    assert bounds.near(S, rung, least) == found
    assert not bounds.allows(S, 1)
    assert not bounds.allows(S, 1001)
