"""Memory that runs out: while recording, in a call, in an eager call beside recordings; and the cap on bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failure_harness import W, check, fail, only_graph, tokens, twins
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import backend, registry
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.shortage import FIRST_REST

pytestmark = pytest.mark.usefixtures("no_grad")


def test_out_of_memory_while_recording_drops_old_recordings_and_answers_eagerly(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, fast, other = twins(device)
    for n in (9, 9, 40, 40, 100, 100, 200):
        check(fast, net, other, tokens(device, n))
    graph = only_graph(net)
    assert [e.recorded for e in graph.entries.values()] == [True, True, True, False]
    fail(monkeypatch, net, lambda i: i == 2, lambda: torch.OutOfMemoryError("injected"))
    check(fast, net, other, tokens(device, 200))
    kept = graph.recorder.frees_parts  # else the eager call, which cannot be tried twice, would get no memory
    assert [e.recorded for e in graph.entries.values()] == [False, False, kept, False]
    for _ in range(FIRST_REST):
        check(fast, net, other, tokens(device, 200))
    stats = tgb.stats(net)
    assert stats.eager == {"out-of-memory": 1 + FIRST_REST}
    monkeypatch.undo()
    for n in (200, 200, 200, 100, 9, 9):
        check(fast, net, other, tokens(device, n))
    assert [e.recorded for e in graph.entries.values()] == [True, False, kept, True]
    assert tgb.stats(net).eager == stats.eager


class Pure(nn.Module):
    """Changes nothing of the caller's: a call that failed half-way may be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).softmax(0))


@pytest.mark.parametrize("first", [True, False])
def test_out_of_memory_in_a_call_that_changed_nothing_is_answered_eagerly(
    device: str, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    torch.manual_seed(0)
    net = Pure().to(device)
    fast = torch.compile(net, backend="bcg")
    for _ in range(0 if first else 3):
        torch.testing.assert_close(fast(tokens(device, 9)), fast(tokens(device, 9)), atol=100, rtol=100)
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("injected")))
    x = tokens(device, 9)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert tgb.stats(net).eager["out-of-memory"] == 1
    monkeypatch.setattr(torch, "_foreach_copy_", real)
    for _ in range(FIRST_REST + 3):
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert tgb.stats(net).eager["out-of-memory"] == 1 + FIRST_REST
    assert tgb.stats(net).replays >= 2


@pytest.mark.parametrize("reason", [True, False])
def test_an_eager_call_that_runs_out_of_memory_gets_that_of_the_recordings(
    device: str, monkeypatch: pytest.MonkeyPatch, reason: bool
) -> None:
    """Eager code alone would have had it. Without recordings to drop, the exception is the caller's, raised once."""
    torch.manual_seed(0)
    net = Pure().to(device)
    fast = torch.compile(net, backend="bcg")
    for n in (9, 9, 40, 40, 100, 100):
        fast(tokens(device, n))
    graph = only_graph(net)
    assert [e.recorded for e in graph.entries.values()] == [True, True, True]
    real, tried = graph.gm, []

    def forward(*args: Any) -> Any:
        tried.append(len(args))
        if graph.recorder.nbytes:
            raise torch.OutOfMemoryError("injected")
        return real(*args)

    monkeypatch.setattr(graph, "gm", SimpleNamespace(forward=forward))
    if reason:
        monkeypatch.setattr(graph, "reason", Reason("disabled", "for this test"))
    else:
        for entry in graph.entries.values():
            entry.rest_for(1)
    x = tokens(device, 40)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert len(tried) == 2
    assert not any(e.recorded for e in graph.entries.values())

    def never(*args: Any) -> Any:
        tried.append(len(args))
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(graph, "gm", SimpleNamespace(forward=never))
    monkeypatch.setattr(graph, "reason", Reason("disabled", "for this test"))
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        fast(x)
    assert len(tried) == 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_first_run_without_room_in_the_pool_takes_ordinary_memory(
    device: str, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """There torch's allocator gives back what it keeps before it is out of memory, which it does not for a pool; a
    first run that changes a tensor could not be answered otherwise."""
    net, fast, other = twins(device)
    check(fast, net, other, tokens(device, 9))
    graph = only_graph(net)
    asked: list[int] = []
    pools: list[bool] = []
    real = graph.recorder.capture_session
    monkeypatch.setattr(graph.recorder, "has_room", lambda nbytes: bool(asked.append(nbytes)))

    def session(inference: bool = False, pool: bool = True) -> Any:
        pools.append(pool)
        return real(inference, pool)

    monkeypatch.setattr(graph.recorder, "capture_session", session)
    if ahead:
        tgb.capture(fast, tokens(device, 9), sizes=[40])
        other.load_state_dict(net.state_dict())
    else:
        check(fast, net, other, tokens(device, 40))
    assert graph.plan is not None
    assert pools.count(False) == len(graph.plan.segments)
    for n in (40, 40, 9, 9):
        check(fast, net, other, tokens(device, n))
    small, large = min(asked), max(asked)
    # at least the four results of each size, and not more than all results together a few times over
    assert 4 * 40 * W * 4 <= large <= 40 * 40 * W * 4
    assert small * 2 < large
    assert tgb.stats(net).eager == {}
    assert tgb.stats(net).replays >= 2


def test_an_eager_call_that_changed_something_is_not_tried_twice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, fast, other = twins(device)
    for _ in range(3):
        check(fast, net, other, tokens(device, 9))
    graph = only_graph(net)
    real, tried = graph.gm, []

    def forward(*args: Any) -> Any:
        tried.append(real(*args))
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(graph, "gm", SimpleNamespace(forward=forward))
    monkeypatch.setattr(graph, "reason", Reason("disabled", "for this test"))
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        fast(tokens(device, 9))
    assert len(tried) == 1


def test_an_eager_call_of_a_graph_without_a_plan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known whether it may run twice, nor on what device."""

    def f(x: Tensor) -> Tensor:
        return x.to(torch.float64).sin()

    fast = torch.compile(f, backend="bcg")
    monkeypatch.setattr(backend, "normalise", lambda *_: (_ for _ in ()).throw(RuntimeError("no plan")))
    x = tokens(device, 9)
    torch.testing.assert_close(fast(x), f(x))
    (graph,) = registry.graphs_of(f)
    assert graph.plan is None
    monkeypatch.setattr(graph, "gm", SimpleNamespace(forward=lambda *_: (_ for _ in ()).throw(MemoryError("injected"))))
    with pytest.raises(MemoryError, match="injected"):
        fast(x)


def test_out_of_memory_after_a_side_effect_is_the_callers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter was changed already: running the call again would change it twice."""
    net, fast, other = twins(device)
    for _ in range(3):
        check(fast, net, other, tokens(device, 9))
    graph = only_graph(net)
    real = graph.recorder.replay
    count = [0]

    def replay(recording: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise torch.OutOfMemoryError("injected")
        real(recording)

    monkeypatch.setattr(graph.recorder, "replay", replay)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        fast(tokens(device, 9))
    monkeypatch.undo()
    assert net[0].seen.tolist() == [4.0] * W, "changed once, before the failure"
    other.load_state_dict(net.state_dict())
    check(fast, net, other, tokens(device, 40))


def test_the_cap_on_bytes(device: str) -> None:
    net, fast, other = twins(device, max_bytes=1)
    for n in (9, 9, 9, 40, 40):
        check(fast, net, other, tokens(device, n))
    stats = tgb.stats(net)
    assert stats.replays >= 2, "the first key is always allowed"
    assert stats.eager == {"recording-cap": 2}
    assert "max_bytes" in stats.reasons["recording-cap"].fix
