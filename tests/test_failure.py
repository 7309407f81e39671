"""Whatever fails while recording or running, the answer is eager's and the next call is right (C7).

Failures are injected into the recorder. Every test runs on the CPU, and on a CUDA device where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from failure_harness import LAYERS, SEGMENTS, Injected, W, check, fail, only_graph, tokens, twins
from torch import Tensor, nn

import torch_graph_backend as tgb

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("k", range(SEGMENTS))
def test_a_failing_segment_is_demoted_and_all_others_stay_captured(
    device: str, monkeypatch: pytest.MonkeyPatch, k: int, inside: bool
) -> None:
    net, fast, other = twins(device)
    check(fast, net, other, tokens(device, 9))
    fail(monkeypatch, net, lambda i: i == k, lambda: Injected("injected"), inside)
    for n in (9, 10, 9, 12):
        check(fast, net, other, tokens(device, n))
    graph = only_graph(net)
    (entry,) = [e for e in graph.entries.values() if e.recorded]
    assert len(entry.recordings) == SEGMENTS - 1
    (demoted,) = entry.demoted.values()
    assert demoted.reason.code == "capture-failed"
    stats = tgb.stats(net)
    assert (stats.first_calls, sum(stats.eager.values())) == (2, 0) or stats.replays >= 2
    (count,) = [c for keys in stats.keys.values() for c in keys.values() if c.demoted]
    assert count.demoted == (demoted.reason,)
    monkeypatch.undo()
    for n in (40, 40, 40):
        check(fast, net, other, tokens(device, n))
    assert sum(len(e.recordings) for e in graph.entries.values()) >= 2 * SEGMENTS - 1


def test_the_operation_that_cannot_be_recorded_is_named_with_its_line(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that refuses to be recorded, as a library kernel that synchronises would."""
    net, fast, other = twins(device)
    check(fast, net, other, tokens(device, 9))
    graph = only_graph(net)
    name = next(k for k in graph.program.steps[0].__globals__ if "relu" in k)
    real = graph.program.steps[0].__globals__[name]

    def refusing(*args: Any) -> Any:
        recording = graph.recorder._capturing if device == "cpu" else torch.cuda.is_current_stream_capturing()  # type: ignore[attr-defined]
        if recording:
            raise Injected("not while recording")
        return real(*args)

    monkeypatch.setitem(graph.program.steps[0].__globals__, name, refusing)
    for n in (9, 9, 10):
        check(fast, net, other, tokens(device, n))
    (entry,) = graph.entries.values()
    assert len(entry.demoted) == LAYERS
    assert len(entry.recordings) == 1
    reason = entry.demoted[min(entry.demoted)].reason
    assert "aten.relu" in reason.text
    assert "torch.relu(self.up(x))" in reason.where


def test_if_every_segment_fails_the_key_runs_uncaptured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, fast, other = twins(device)
    check(fast, net, other, tokens(device, 9))
    fail(monkeypatch, net, lambda i: True, lambda: Injected("injected"))
    for _ in range(3):
        check(fast, net, other, tokens(device, 9))
    stats = tgb.stats(net)
    assert stats.eager == {"capture-failed": 3}
    assert "injected" in stats.reasons["capture-failed"].text
    monkeypatch.undo()
    for _ in range(3):
        check(fast, net, other, tokens(device, 40))
    assert tgb.stats(net).replays == 2


#: What recording a key does, besides running the segments' Python.
STEPS = ["session begins", "session ends", "inputs", "alias", "bytes", "pin", "demotion"]


@pytest.mark.parametrize("kind", [Injected, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("k", [0, SEGMENTS - 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_in_any_step_of_recording(
    device: str, monkeypatch: pytest.MonkeyPatch, step: str, k: int, kind: type[BaseException]
) -> None:
    """The key is answered uncaptured (or eagerly, without memory), nothing of the recording is kept, the other key goes
    on replaying, and what the model counts is what eager counts."""
    net, fast, other = twins(device)
    for n in (40, 40, 40, 9):
        check(fast, net, other, tokens(device, n))
    graph = only_graph(net)
    small = min(graph.entries.values(), key=lambda e: e.size_args)
    before, recorder = tgb.stats(net), graph.recorder
    count = [0]

    def breaks(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] - 1 == k:
                raise kind("injected")
            return real(*args, **kwargs)

        return call

    @contextmanager
    def session(*args: Any) -> Iterator[None]:
        if step == "session begins":
            raise kind("injected")
        with real_session(*args):
            yield
            raise kind("injected")

    real_session = recorder.record_session
    if step.startswith("session"):
        monkeypatch.setattr(recorder, "record_session", session)
    elif step == "bytes":
        monkeypatch.setattr(type(recorder), "nbytes", property(lambda self: breaks(lambda: 0)()))
        k = 1
    elif step == "demotion":
        fail(monkeypatch, net, lambda i: i == k, lambda: Injected("first"))
        monkeypatch.setattr("torch_graph_backend.entry.demote", breaks(None))
        k = 0
    else:
        owner, name = {"inputs": (small, "inputs"), "alias": (recorder, "alias"), "pin": (small, "_pin")}[step]
        monkeypatch.setattr(owner, name, breaks(getattr(owner, name)))
        k = 0 if step == "pin" else k
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            fast(tokens(device, 9))  # before anything has run: the state is compared below
    else:
        check(fast, net, other, tokens(device, 9))
    monkeypatch.undo()
    assert step.startswith("session") or count[0] > k, "nothing was injected"
    assert not small.recorded
    assert not any((small.recordings, small.static, small.held, small.demoted))
    for n in (40, 9, 12, 40, 9):
        check(fast, net, other, tokens(device, n))
    found = tgb.stats(net) - before
    code = {Injected: {"capture-failed": 4}, torch.OutOfMemoryError: {"out-of-memory": 4}}.get(kind, {})
    assert found.eager == code
    if kind is KeyboardInterrupt:
        assert small.recorded
    elif kind is Injected:
        assert found.replays == 2


def test_the_traceback_of_a_demoted_segment_is_in_the_log(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At level debug, and nowhere else: an exception that is kept would keep the tensors of its frames."""
    net, fast, other = twins(device)
    check(fast, net, other, tokens(device, 9))
    fail(monkeypatch, net, lambda i: i == 1, lambda: Injected("injected"))
    with caplog.at_level("DEBUG", "torch_graph_backend"):
        check(fast, net, other, tokens(device, 9))
    (error,) = [r.exc_info[1] for r in caplog.records if r.exc_info]
    assert isinstance(error, Injected)
    assert error.__traceback__ is not None
    (entry,) = only_graph(net).entries.values()
    assert not any(isinstance(v, BaseException) for v in vars(entry).values())


def test_a_demoted_segment_that_returns_views_of_its_inputs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later segment writes through a view that the demoted one returns: it must reach the caller's cache."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, W))

        def forward(self, x: Tensor) -> Tensor:
            row = self.cache[1:3]
            y = (x * 2).relu() + row.sum()
            mixed = torch.sort(y, 0).values
            row.add_(1.0)
            return mixed * 2 + row.mean() + y.exp()

    net, other = Views().to(device), Views().to(device)
    fast = torch.compile(net, backend="bcg")
    check(fast, net, other, tokens(device, 9))
    fail(monkeypatch, net, lambda i: i == 0, lambda: Injected("injected"))
    for n in (9, 10, 9, 11):
        check(fast, net, other, tokens(device, n))
    assert tgb.stats(net).replays == 4


def test_an_interrupt_while_recording_leaves_the_model_usable(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, fast, other = twins(device)
    check(fast, net, other, tokens(device, 9))
    fail(monkeypatch, net, lambda i: i == 2, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fast(tokens(device, 9))
    monkeypatch.undo()
    for n in (9, 9, 10):
        check(fast, net, other, tokens(device, n))
    assert tgb.stats(net).replays >= 1


# -- breaks ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tgb_failure::moody", mutates_args=())
def moody(x: Tensor) -> Tensor:
    if MOOD["angry"]:
        raise Injected("the break raised")
    if MOOD["call"] is not None:
        return MOOD["call"](x).clone()
    return x.softmax(0)


@moody.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


MOOD: dict[str, Any] = {"angry": False, "call": None}


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(moody(torch.relu(self.up(x)))).relu()


@pytest.mark.parametrize("calls_before", [0, 1, 3])
def test_an_exception_in_a_break_then_a_retry(device: str, calls_before: int) -> None:
    """On a first call, on the call that records, and on a replay."""
    torch.manual_seed(0)
    net = Moody().to(device)
    fast = torch.compile(net, backend="bcg")
    x = tokens(device, 9)
    for _ in range(calls_before):
        fast(x)
    MOOD["angry"] = True
    try:
        for _ in range(2):
            with pytest.raises(Injected, match="the break raised"):
                fast(x)
    finally:
        MOOD["angry"] = False
    for n in (9, 10, 40, 9):
        x = tokens(device, n)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert tgb.stats(net).replays >= 2


def test_compiled_functions_called_inside_breaks_of_each_other(device: str) -> None:
    """Each level has a pool and an arena of its own; too deep a call runs eagerly, with a reason."""
    torch.manual_seed(0)
    models = [Moody().to(device) for _ in range(6)]
    fasts = [torch.compile(m, backend="bcg") for m in models]
    level = [0]

    def deeper(calls: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            level[0] += 1
            try:
                return calls[level[0]](x) if level[0] < len(calls) else x.softmax(0)
            finally:
                level[0] -= 1

        return call

    try:
        for n in (9, 9, 10, 9, 30, 30, 9):
            x = tokens(device, n)
            MOOD["call"] = deeper(models)
            want = models[0](x)
            MOOD["call"] = deeper(fasts)
            torch.testing.assert_close(fasts[0](x), want, rtol=1e-4, atol=1e-5)
    finally:
        MOOD["call"] = None
    stats = tgb.stats()
    assert stats.replays >= 15
    assert set(stats.eager) == {"busy"}
