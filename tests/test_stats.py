"""``stats`` as numbers: what a test may expect of them, differences, JSON, and life after ``reset``."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import compiled
from torch import nn

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.errors import StatsMismatch
from torch_graph_backend.recorders.host import HostRecorder
from torch_graph_backend.shape_key import ShapeKey

W = torch.randn(4, 4)


def rows(n: int) -> torch.Tensor:
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def function(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, W).sort(0).values @ W


def broken(x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, W).relu()
    torch._dynamo.graph_break()
    return F.linear(y, W).tanh()


# --- expect -----------------------------------------------------------------------------------------------------------


def test_expect_passes_and_gives_the_stats_back() -> None:
    """Exact numbers and bounds, the bounds included."""
    with compiled(function, buckets=[4, 8]) as g:
        for n in (3, 3, 4, 9):
            g(rows(n))
        found = tgb.stats(g)
    assert found.expect(graphs=1, calls=4, replays=2, first_calls=1, recordings=1, eager=1) is found
    found.expect(min_replays=2, max_replays=2, max_padding_waste=found.padding_waste, min_eager=1, max_nbytes=1 << 40)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"replays": 3}, "replays: expected 3, got 2"),
        ({"min_replays": 3}, "replays: expected at least 3, got 2"),
        ({"max_replays": 1}, "replays: expected at most 1, got 2"),
        ({"eager": 0}, "eager: expected 0, got 1"),
        ({"graphs": 2}, "graphs: expected 2, got 1"),
        ({"max_padding_waste": 0.05}, "padding_waste: expected at most 0.05, got 0.1667"),
    ],
)
def test_expect_names_every_count_that_differs(wanted: dict[str, Any], problem: str) -> None:
    """The message has the number wanted and the number found; below it the reasons, which say why."""
    with compiled(function, buckets=[4]) as g:
        for n in (3, 3, 4, 9):
            g(rows(n))
    with pytest.raises(StatsMismatch) as raised:
        tgb.stats(g).expect(calls=4, **wanted)
    assert isinstance(raised.value, AssertionError)
    assert raised.value.problems == (problem,)
    assert problem in str(raised.value).splitlines()[0]
    assert "beyond-largest-bucket: L['x'].size()[0] is 9" in str(raised.value)


def test_expect_names_all_of_them() -> None:
    with pytest.raises(StatsMismatch) as raised:
        tgb.stats().expect(graphs=1, min_replays=1, eager=0)
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize("name", ["replay", "min_", "min_replay", "maxreplays", "keys"])
def test_expect_refuses_a_name_that_counts_nothing(name: str) -> None:
    """A typo that always passes would be a test that cannot fail."""
    with pytest.raises(TypeError, match=f"no '{name}'; there are graphs, calls, replays"):
        tgb.stats().expect(**{name: 0})


# --- differences ------------------------------------------------------------------------------------------------------


def test_a_difference_counts_what_happened_in_between() -> None:
    """Totals, reasons, keys, waste and seconds of that part alone."""
    with compiled(function, buckets=[4, 8]) as g:
        for n in (3, 3, 9):
            g(rows(n))
        before = tgb.stats(g)
        for n in (3, 4, 6, 6, 8):
            g(rows(n))
        part = tgb.stats(g) - before
        assert (before.calls, tgb.stats(g).calls) == (3, 8)
    part.expect(graphs=0, calls=5, replays=4, first_calls=1, recordings=1, eager=0)
    assert part.reasons == {}
    assert part.padding_waste == pytest.approx(1 - 27 / 32)
    (keys,) = part.keys.values()
    assert {k: (c.first_calls, c.replays) for k, c in keys.items()} == {ShapeKey(4): (0, 2), ShapeKey(8): (1, 2)}
    assert part.seconds["normalise"] == part.seconds["plan"] == 0
    assert part.seconds["record"] > 0
    assert "4 replayed, 1 first calls, 0 eager" in str(part)


def test_a_difference_of_nothing_is_nothing() -> None:
    with compiled(function) as g:
        g(rows(3))
        part = tgb.stats(g) - tgb.stats(g)
    part.expect(graphs=0, calls=0, recordings=0, padding_waste=0.0)
    assert list(part.keys.values()) == [{}]


def test_a_difference_keeps_models_apart_and_counts_new_graphs() -> None:
    """Graphs are told apart by more than their place in the list: an older one may be gone by then."""
    other = torch.compile(nn.Linear(4, 4), backend="bcg")
    with compiled(function, buckets=[4]) as g:
        other(torch.randn(2, 4))
        g(rows(3))
        before = tgb.stats()
        for _ in range(2):
            g(rows(3))
        registry._graphs.pop(0)  # as if Dynamo had dropped it
        g(rows(4))
        part = tgb.stats() - before
    part.expect(graphs=0, replays=3, first_calls=0)


def test_measure_counts_inside_and_stops_there() -> None:
    with compiled(function, buckets=[4]) as g:
        g(rows(3))
        with tgb.measure(g) as part:
            g(rows(3))
            part.stats.expect(calls=1)
            g(rows(4))
        g(rows(2))
    part.stats.expect(replays=2, first_calls=0, eager=0, graphs=0)
    with pytest.raises(RuntimeError, match="inside of a with"):
        _ = tgb.measure().stats


def test_measure_of_everything_counts_new_graphs() -> None:
    with tgb.measure() as part, compiled(broken) as g:
        g(torch.randn(3, 4))
    part.stats.expect(graphs=2, first_calls=2)


def test_an_exception_inside_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), tgb.measure() as part:
        _ = 1 // 0
    part.stats.expect(calls=0)


# --- plain data -------------------------------------------------------------------------------------------------------


def test_stats_as_json() -> None:
    """The same numbers as the object, with the reason, its line and what changes it."""
    with compiled(function, buckets=[4]) as g:
        for n in (3, 3, 9):
            g(rows(n))
        found = tgb.stats(g)
    data = json.loads(found.to_json())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert (data["graphs"], data["calls"], data["replays"], data["first_calls"]) == (1, 3, 1, 1)
    assert data["padding_waste"] == found.padding_waste == pytest.approx(0.25)
    eager = data["eager"]["beyond-largest-bucket"]
    assert (eager["count"], eager["soft"]) == (1, True)
    assert eager["fix"] == "list a larger size in options['buckets']"
    (graph,) = data["by_graph"]
    assert graph["name"].startswith("function (test_stats.py:")
    assert graph["keys"]["4"]["replays"] == 1
    assert graph["keys"]["4"]["padding_waste"] == pytest.approx(0.25)
    assert graph["keys"]["4"]["record_seconds"] > 0


def test_a_snapshot_does_not_change() -> None:
    with compiled(function) as g:
        g(rows(3))
        before = tgb.stats(g)
        text = str(before)
        for _ in range(3):
            g(rows(3))
    assert str(before) == text


def test_bytes_come_from_the_graph() -> None:
    """What its keys had to allocate is shown, summed over graphs, and gone when they are closed."""
    with compiled(broken) as g:
        for _ in range(2):
            g(torch.randn(300, 4))
        found = tgb.stats()
        held = [e.nbytes for graph in registry.all_graphs() for e in graph.entries.values()]
        assert found.nbytes == sum(held) >= 300 * 4 * 4
        assert f"memory of keys: {sum(held) / 2**20:.2f} MiB" in str(found)
        assert found.to_dict()["nbytes"] == sum(held)
        tgb.reset()
        assert tgb.stats().nbytes == 0
        assert (tgb.stats() - found).nbytes == -sum(held)


def test_segments_that_could_not_be_recorded_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that replays in part has the reason of the part that does not."""
    real = HostRecorder.capture_one
    count = iter(range(9))

    def first_fails(self: HostRecorder, *args: Any) -> Any:
        if next(count) == 0:
            raise RuntimeError("not while recording")
        return real(self, *args)

    monkeypatch.setattr(HostRecorder, "capture_one", first_fails)
    with compiled(function, buckets=[4]) as g:
        for _ in range(3):
            g(rows(3))
        found = tgb.stats(g).expect(replays=2, eager=0)
    assert "    key 4: capture-failed: segment 0 of key 4 could not be recorded: not while recording" in str(found)
    (demoted,) = found.to_dict()["by_graph"][0]["keys"]["4"]["demoted"]
    assert demoted.startswith("capture-failed: segment 0")


# --- after reset ------------------------------------------------------------------------------------------------------


def test_counts_survive_tgb_reset_and_go_on() -> None:
    """The model lives on and answers eagerly: to lose its counts would hide exactly that."""
    with compiled(function, buckets=[4]) as g:
        for _ in range(3):
            g(rows(3))
        tgb.reset()
        tgb.stats(g).expect(graphs=1, replays=2, first_calls=1, eager=0)
        g(rows(3))
        found = tgb.stats(g).expect(replays=2, eager=1)
        assert found.reasons["disabled"].text == "the graph was closed"
        assert tgb.stats().calls == 4
        assert "runs eagerly: disabled: the graph was closed" in tgb.explain(g, rows(3))
        assert tgb.plans(g) == []


def test_counts_do_not_survive_dynamos_reset() -> None:
    """Then nothing of it is compiled any more."""
    with compiled(function) as g:
        g(rows(3))
        torch._dynamo.reset()
        tgb.stats().expect(graphs=0, calls=0)
        g(rows(3))
        tgb.stats(g).expect(graphs=1, first_calls=1)


def test_a_function_has_its_graphs_behind_graph_breaks_too() -> None:
    """Dynamo gives the rest of a function a code object of its own."""

    def other(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, W).relu()
        torch._dynamo.graph_break()
        return F.linear(y, W).tanh()

    with torch.no_grad():
        torch.compile(broken, backend="bcg")(torch.randn(3, 4))
        torch.compile(other, backend="bcg")(torch.randn(3, 4))
    tgb.stats(broken).expect(graphs=2, first_calls=2)
    tgb.stats(other).expect(graphs=2, first_calls=2)
    tgb.stats().expect(graphs=4)


def test_weights_that_are_in_the_graph() -> None:
    """Under Inductor's freezing a graph is given no weights, it holds them: each module still has its own graphs."""
    from torch._inductor import config as inductor_config

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 8)
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(x)) + self.shift

    first, second, method = Net().eval(), Net().eval(), Net().eval()

    def around(x: torch.Tensor) -> torch.Tensor:
        return method(x) * 2

    with inductor_config.patch(freezing=True), torch.no_grad():
        calls = {}
        for k, model in enumerate((first, second, around)):
            fast = torch.compile(model, backend="bcg", dynamic=True)
            for _ in range(k + 2):
                x = torch.randn(5, 4)
                torch.testing.assert_close(fast(x), model(x))
            calls[model] = fast
        for k, (model, fast) in enumerate(calls.items()):
            for name in (model, fast):
                tgb.stats(name).expect(graphs=1, calls=k + 2, first_calls=1, replays=k + 1)
                assert len(tgb.explain(name).graphs) == 1
                assert not tgb.explain(name).ran
        tgb.stats(method).expect(graphs=1, calls=4)
        tgb.stats().expect(graphs=3, calls=9)
        tgb.close(first)
        for model, fast in calls.items():
            before = tgb.stats(model)
            fast(torch.randn(5, 4))
            assert ((tgb.stats(model) - before).replays == 0) == (model is first)
    gone = weakref.ref(second.up.weight)
    del calls, model, fast, name, second
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_a_graph_goes_when_dynamo_drops_it() -> None:
    """Without waiting for the garbage collector: its memory and its counts would linger. Dynamo calls our reset only
    for backends that it has seen since its own last one."""
    gc.collect()
    gc.disable()
    try:
        with compiled(function) as g:
            g(rows(3))
            torch._dynamo.reset()
            g(rows(3))
            torch._dynamo.reset()
        tgb.stats().expect(graphs=0)
    finally:
        gc.enable()


class Apart(torch.nn.Module):
    def __init__(self, parameter: bool, width: int = 4) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.register_parameter("w", torch.nn.Parameter(weight)) if parameter else self.register_buffer("w", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w) @ self.w


@pytest.mark.parametrize("parameter", [True, False])
def test_graphs_of_another_instance_are_not_a_modules(parameter: bool) -> None:
    """Also where all weights of that one were replaced until they are copied in, and those that it had first are gone.
    (Told by code, ``close`` of a module that was never called would close another's graphs.)"""
    used, other = Apart(parameter), Apart(parameter, 6)
    fast = torch.compile(used, backend="bcg", options={"buckets": [8]})
    with torch.no_grad():
        for _ in range(8):
            used.load_state_dict({"w": torch.randn(4, 4)}, assign=True)
            for n in (5, 6):
                fast(torch.randn(n, 4))
        tgb.stats(other).expect(graphs=0)
        # (All but the graph of the one call before sizes changed, whose weights are nobody's now.)
        assert tgb.stats(used).calls == tgb.stats().calls - 1 == 15
        assert tgb.stats(used).replays >= 6
        tgb.close(other)
        assert tgb.would_replay(fast, torch.randn(5, 4)) is None


def test_a_parameter_of_the_callers_does_not_hide_a_module() -> None:
    class Times(Apart):
        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ z

    used, z = Times(True), torch.nn.Parameter(torch.randn(4, 4))
    fast = torch.compile(used, backend="bcg", options={"buckets": [8]})
    with torch.no_grad():
        for k in range(10):
            used.w = torch.nn.Parameter(torch.randn(4, 4))
            fast(torch.randn(5 + k % 2, 4), z)
    assert tgb.stats(used).replays >= 3


def test_a_function_inside_that_has_the_same_name() -> None:
    def outer() -> Any:
        def outer(y: torch.Tensor) -> torch.Tensor:
            y = F.linear(y, W).relu()
            torch._dynamo.graph_break()
            return F.linear(y, W).tanh()

        return outer

    inner = outer()
    with torch.no_grad():
        torch.compile(inner, backend="bcg")(torch.randn(3, 4))
    tgb.stats(inner).expect(graphs=2)
    tgb.stats(outer).expect(graphs=0)


class Broken(torch.nn.Module):
    """Graphs without weights before, between and behind graph breaks, and one of a submodule."""

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner = torch.nn.Linear(4, 4), Broken.Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 + 1
        torch._dynamo.graph_break()
        x = self.inner(self.a(x))
        torch._dynamo.graph_break()
        return x @ x.T


class Weightless(torch.nn.Module):
    """It has a weight, but does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) @ x.T


@pytest.mark.parametrize("kind", [Broken, Weightless])
def test_graphs_without_weights_are_a_modules_too(kind: type[torch.nn.Module]) -> None:
    """Would catch graphs that are absent from ``stats``, ``explain`` and ``close`` since no weight goes into them."""
    model, other = kind(), Apart(True)
    fast, apart = torch.compile(model, backend="bcg"), torch.compile(other, backend="bcg")
    x = torch.randn(5, 4)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
            found = tgb.stats(model)
            apart(x)
        assert found.graphs == tgb.stats().graphs - 1
        assert found.calls == tgb.stats().calls - 3 > 0
        assert len(tgb.explain(fast).to_dict()["graphs"]) == found.graphs
        tgb.stats(other).expect(graphs=1)
        tgb.close(fast)
        fast(x)
        assert tgb.stats(model).eager["disabled"] == found.graphs
        assert not tgb.stats(other).eager
