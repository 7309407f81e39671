"""Dynamo makes so many graphs of one code object and no more: the log says once that they are used up, as do stats."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from modes_harness import H, Net, whole
from torch import Tensor

import torch_graph_backend as tgb

LIMIT = 3


@pytest.fixture(autouse=True)
def low_limit() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=LIMIT), torch.no_grad():
        yield


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "Dynamo's limit" in r.getMessage()]


def test_a_function_at_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.relu(x * 2) + 1

    fast = torch.compile(f, backend="bcg", dynamic=False)
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        for n in range(3, 2 + LIMIT):
            assert torch.equal(fast(whole(n, H, dynamic=False)), f(whole(n, H, dynamic=False)))
        assert not warnings(caplog)
        assert not tgb.stats(fast).limits
        for n in range(2 + LIMIT, 12):
            assert torch.equal(fast(whole(n, H, dynamic=False)), f(whole(n, H, dynamic=False)))
    (text,) = warnings(caplog)
    assert "f (test_recompile_limit.py:" in text
    assert "torch._dynamo.config.recompile_limit" in text
    stats = tgb.stats(fast)
    assert stats.graphs == LIMIT, "the test's premise: Dynamo stops there"
    assert stats.calls == LIMIT
    assert stats.limits == (text,)
    assert text in str(stats)
    assert text in str(tgb.stats())


def test_instances_of_a_class_share_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """A second model gets no graph of its own; its stats say why."""
    first, second = Net(), Net(seed=3)
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        for model in (first, second):
            fast = torch.compile(model, backend="bcg", dynamic=False)
            for n in range(3, 4 + LIMIT):
                fast(whole(n, H, dynamic=False))
    assert len(warnings(caplog)) == 1
    assert tgb.stats(second).graphs == tgb.stats(first).graphs == LIMIT, "they share the graphs that there are"
    assert "recompile limit: forward (" in str(tgb.stats(second))


def test_code_below_the_limit_and_a_reset(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.relu(x * 2) + 1

    def g(x: Tensor) -> Tensor:
        return torch.relu(x * 3) + 1

    many, one = (torch.compile(h, backend="bcg", dynamic=False) for h in (f, g))
    for n in range(3, 4 + LIMIT):
        many(whole(n, H, dynamic=False))
    one(whole(5, H, dynamic=False))
    assert tgb.stats(many).limits
    assert not tgb.stats(one).limits
    torch._dynamo.reset()
    torch._dynamo.reset()
    caplog.clear()
    assert not tgb.stats().limits
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        many(whole(5, H, dynamic=False))
    assert not warnings(caplog)
