"""``explain``, ``stats``, logging and options, as a user meets them through ``torch.compile``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import compiled
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import torch_graph_backend as tgb
from torch_graph_backend.errors import BadBuckets, BadOption, StrictModeError, UnknownOption
from torch_graph_backend.ledger import Ledger
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.shape_key import ShapeKey

W = torch.randn(4, 4)


def rows(n: int, *rest: int) -> torch.Tensor:
    """A tensor whose first dimension is dynamic."""
    x = torch.randn(n, *(rest or (4,)))
    torch._dynamo.mark_dynamic(x, 0)
    return x


def function(x: torch.Tensor) -> torch.Tensor:
    """A segment, a break for a reason, a segment."""
    return F.linear(x, W).sort(0).values @ W


class Model(nn.Module):
    """Two linear layers with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sort(0).values)


def check_counts(stats: tgb.Stats) -> None:
    """What every ``Stats`` must satisfy."""
    assert stats.calls == stats.replays + stats.first_calls + sum(stats.eager.values())
    assert set(stats.eager) == set(stats.reasons)
    assert all(reason.code == code for code, reason in stats.reasons.items())
    keys = [c for keys in stats.keys.values() for c in keys.values()]
    assert sum(c.replays for c in keys) == stats.replays
    assert sum(c.first_calls for c in keys) == stats.first_calls
    assert 0 <= stats.padding_waste < 1
    assert set(stats.seconds) == {"normalise", "plan", "record", "audit", "inductor"}
    assert f"{stats.calls} calls" in str(stats)


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_of_a_function_runs_it_once_and_says_so() -> None:
    """Side effects of the run are the user's: the text must not hide that there was one."""
    calls: list[int] = []

    @torch.library.custom_op("tgb_explain_test::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    @count.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def f(x: torch.Tensor) -> torch.Tensor:
        return count(x @ W) @ W

    text = tgb.explain(f, torch.randn(3, 4))
    assert len(calls) == 1
    assert text.startswith("The model was compiled and called once to find this out. 1 graph.")
    assert "2 captured segments (2 kernels), 1 eager regions (1 kernels)" in text
    assert "unknown-op: tgb_explain_test.count belongs to library 'tgb_explain_test'" in text
    assert "test_explain.py:" in text
    assert "return count(x @ W) @ W" in text


def test_explain_of_a_module_and_of_a_compiled_module() -> None:
    """A module that was not compiled is run; one that was is described without running anything."""
    model = Model()
    assert tgb.explain(model, torch.randn(3, 4)).startswith("The model was compiled and called once")
    torch._dynamo.reset()
    tgb.reset()
    model = Model()
    compiled_model = torch.compile(model, backend="bcg")
    with torch.no_grad():
        compiled_model(rows(5))
    before = tgb.stats(model).calls
    for target in (compiled_model, model):
        text = tgb.explain(target, torch.randn(3, 4))
        assert text.startswith("From the graphs compiled so far. 1 graph.")
        assert "padding: aten.sort" in text
        assert "return self.down(self.up(x).sort(0).values)" in text
    assert tgb.stats(model).calls == before


def test_explain_of_an_uncompiled_wrapper_compiles_what_is_inside() -> None:
    """``torch.compile(model)`` that was never called has no graph yet."""
    assert "1 graph." in tgb.explain(torch.compile(Model(), backend="bcg"), torch.randn(3, 4))


def test_explain_of_several_graphs() -> None:
    """A graph break of Dynamo's is two graphs, both described."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, W).relu()
        torch._dynamo.graph_break()
        return F.linear(y, W).tanh()

    text = tgb.explain(f, torch.randn(3, 4))
    assert "2 graphs." in text
    assert "Graph 0: Plan" in text
    assert "Graph 1: Plan" in text


def test_explain_does_not_mix_models() -> None:
    """Two models of one class: each has its own graphs."""
    one, two = Model(), Model()
    with torch.no_grad():
        torch.compile(one, backend="bcg")(torch.randn(3, 4))
    assert len(tgb.plans(one)) == 1
    assert tgb.plans(two) == []
    assert tgb.stats(two).calls == 0
    assert tgb.explain(two, torch.randn(3, 4)).startswith("The model was compiled")


def test_explain_of_a_graph_that_runs_as_it_came() -> None:
    """No plan, but a reason."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.unsqueeze_(0)
        return y @ W

    text = tgb.explain(f, torch.randn(3, 4))
    assert "runs as Dynamo made it: metadata-mutation: " in text


def test_explain_of_a_closed_graph() -> None:
    """A plan that is no longer in use must not read as if it were."""
    with compiled(function, enabled=False) as g:
        g(rows(5))
    assert "runs eagerly: disabled: the option enabled is False" in tgb.explain(function)


def test_explain_under_gradients_gives_the_plan() -> None:
    """Parameters require grad: explain must still show what inference would do."""
    assert "captured segments" in tgb.explain(Model(), torch.randn(3, 4))


# --- stats ------------------------------------------------------------------------------------------------------------


def test_counts_of_first_calls_replays_and_recordings() -> None:
    """One first call a key, then replays; one recording a key; waste from the rows that were padding."""
    with compiled(function, buckets=[4, 8]) as g:
        for n in (3, 4, 3, 6, 7, 8):
            g(rows(n))
        stats = tgb.stats(g)
    check_counts(stats)
    assert (stats.calls, stats.replays, stats.first_calls, stats.recordings) == (6, 4, 2, 2)
    assert stats.padding_waste == pytest.approx(1 - 31 / 36)
    (keys,) = stats.keys.values()
    assert {k: (c.first_calls, c.replays) for k, c in keys.items()} == {ShapeKey(4): (1, 2), ShapeKey(8): (1, 2)}
    assert all(c.record_seconds > 0 for c in keys.values())
    assert stats.seconds["record"] == pytest.approx(sum(c.record_seconds for c in keys.values()))


def test_counts_of_eager_calls() -> None:
    """Each eager call has one reason code, and the first reason of a code is kept."""
    with compiled(function, buckets=[4, 8]) as g:
        for n in (3, 9, 3, 10):
            g(rows(n))
        with torch.enable_grad():
            g(rows(3).requires_grad_())
        stats = tgb.stats(g)
    check_counts(stats)
    assert stats.eager["beyond-largest-bucket"] == 2
    assert "is 9, the largest bucket is 8" in stats.reasons["beyond-largest-bucket"].text
    assert stats.calls >= 4
    assert stats.replays + stats.first_calls == 2
    assert "eager     2 x beyond-largest-bucket" in str(stats)


@pytest.mark.parametrize("options", [{"enabled": False}, {"record": "never"}], ids=str)
def test_counts_when_turned_off(options: dict[str, Any]) -> None:
    """Nothing is recorded, every call is counted."""
    with compiled(function, **options) as g:
        for _ in range(3):
            g(rows(5))
        stats = tgb.stats(g)
    check_counts(stats)
    assert dict(stats.eager) == {"disabled": 3}
    assert stats.padding_waste == 0.0


def test_stats_of_everything_and_of_one() -> None:
    """Without a model all graphs are summed."""
    with compiled(function) as g:
        g(rows(5))
        torch.compile(Model(), backend="bcg")(torch.randn(3, 4))
    assert tgb.stats(function).graphs == 1
    assert tgb.stats(g).graphs == 1


def test_stats_of_a_model_with_several_graphs() -> None:
    """Sums over graphs; two calls of compiled graphs for one call of the model."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, W).relu()
        torch._dynamo.graph_break()
        return F.linear(y, W).tanh()

    with compiled(f) as g:
        for _ in range(3):
            g(torch.randn(3, 4))
    stats = tgb.stats()
    check_counts(stats)
    assert (stats.graphs, stats.calls, stats.first_calls, stats.replays) == (2, 6, 2, 4)


def test_the_ledger_alone() -> None:
    """Counts add up, whatever the order of events."""
    ledger = Ledger("g")
    key = ShapeKey(8)
    ledger.count_run(key, False, 5, 8)
    ledger.count_recording(key, 0.25)
    ledger.count_run(key, True, 6, 8)
    ledger.count_eager(Reason("zero-size", "n is 0"))
    ledger.count_eager(Reason("zero-size", "n is 0 again"))
    assert ledger.calls == 4
    assert (ledger.first_calls, ledger.replays, ledger.recordings) == (1, 1, 1)
    assert (ledger.rows_real, ledger.rows_computed) == (11, 16)
    assert ledger.eager_texts["zero-size"].text == "n is 0"
    assert (ledger.keys[key].first_calls, ledger.keys[key].replays, ledger.keys[key].record_seconds) == (1, 1, 0.25)


def test_plans_come_in_order_and_outlive_nothing() -> None:
    """``plans`` is weak: a model that is gone has none."""
    with compiled(function) as g:
        g(rows(5))
    assert len(tgb.plans(function)) == 1
    tgb.reset()
    assert tgb.plans(function) == []
    assert tgb.plans() == []


# --- logging ----------------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if r.name == "torch_graph_backend" and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in found]


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Silence hides a slow model; a line at every call floods a server's log."""
    with caplog.at_level(logging.WARNING, "torch_graph_backend"), compiled(function, buckets=[8]) as g:
        for n in (9, 10, 5, 11, 12):
            g(rows(n))
    (line,) = warnings_of(caplog)
    assert "function (test_explain.py:" in line
    assert "beyond-largest-bucket: " in line
    assert "fix: " in line


def test_other_reasons_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    """Once per code, not once per graph."""

    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return F.linear(x, W)

    with caplog.at_level(logging.WARNING, "torch_graph_backend"), compiled(f, buckets=[8]) as g:
        cache = torch.zeros(4, 4)
        for n in (5, 9, 9):
            g(rows(n), cache)
        for _ in range(2):
            both = torch.randn(5, 4)
            torch._dynamo.mark_dynamic(x := both[1:], 0)
            g(x, both[:4])
    codes = [line.split(": ")[2] for line in warnings_of(caplog)]
    assert codes == ["beyond-largest-bucket", "aliased-inputs"]


def test_nothing_is_logged_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    """A warning without a cause teaches users to ignore warnings."""
    with caplog.at_level(logging.WARNING, "torch_graph_backend"), compiled(function, buckets=[8]) as g:
        for n in (5, 6, 7):
            g(rows(n))
    assert warnings_of(caplog) == []


def test_a_bucket_name_that_matches_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A typo in ``buckets`` must not silently leave the default ladder."""
    with caplog.at_level(logging.WARNING, "torch_graph_backend"), compiled(function, buckets={"y:0": [8]}) as g:
        g(rows(5))
    (line,) = warnings_of(caplog)
    assert "options['buckets']['y:0'] matches no bucketed size" in line


# --- strict -----------------------------------------------------------------------------------------------------------


def test_strict_raises_on_a_call_that_would_run_eagerly() -> None:
    """The user asked to be told; a refused call leaves the graph usable."""
    with compiled(function, buckets=[8], strict=True) as g:
        want = function(x := rows(5))
        g(x)
        with pytest.raises(StrictModeError, match="beyond-largest-bucket"):
            g(rows(9))
        torch.testing.assert_close(g(x), want)
        stats = tgb.stats(g)
    check_counts(stats)
    assert stats.replays == 1


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0).values


def unshaped(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.unsqueeze_(0)
    return y @ W


@pytest.mark.parametrize(("model", "code"), [(nothing, "nothing-to-capture"), (unshaped, "metadata-mutation")])
def test_strict_raises_when_nothing_can_be_captured(model: Callable[..., Any], code: str) -> None:
    """At compile time, with the reason, inside Dynamo's own wrapper."""
    with compiled(model, strict=True) as g, pytest.raises(BackendCompilerFailed) as raised:
        g(rows(5))
    inner = raised.value.inner_exception
    assert isinstance(inner, StrictModeError)
    assert inner.reason.code == code
    assert inner.code in str(inner)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bukets": [8]}, UnknownOption, ["'bukets'", "did you mean 'buckets'?"]),
        ({"Strict": True}, UnknownOption, ["did you mean 'strict'?"]),
        ({"decode": {"max_b": 8}}, UnknownOption, ["'decode.max_b'", "did you mean 'decode.max_bs'?"]),
        ({"zzz": 1}, UnknownOption, ["'zzz'", "remove it"]),
        ({"strict": 1}, BadOption, ["'strict' is 1", "True or False"]),
        ({"buckets": []}, BadBuckets, ["buckets", "no size"]),
        ({"buckets": [8, 0]}, BadBuckets, ["0", "not positive"]),
        ({"buckets": [8, "16"]}, BadBuckets, ["'16'", "not an integer"]),
        ({"buckets": [8, True]}, BadBuckets, ["True"]),
        ({"buckets": "8"}, BadBuckets, ["'8'"]),
        ({"buckets": {"x:0": [-1]}}, BadBuckets, ["x:0", "-1"]),
        ({"buckets": {"x:-1": [8]}}, BadOption, ["counted from the front"]),
    ],
    ids=str,
)
def test_wrong_options_through_torch_compile(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    """The user sees the option, what is wrong and what to write, at the first call and not as a silent fallback."""
    with compiled(function, **options) as g, pytest.raises(BackendCompilerFailed) as raised:
        g(rows(5))
    inner = raised.value.inner_exception
    assert type(inner) is error
    assert all(word in str(inner) for word in words), str(inner)
    assert str(inner) in str(raised.value)


def test_a_mode_is_refused() -> None:
    """``mode="max-autotune"`` is Inductor's: taking it without doing anything would be a lie."""
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(function, backend="bcg", mode="max-autotune")(rows(5))
    assert isinstance(raised.value.inner_exception, BadOption)


def test_progress_is_shown_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Recording a large model takes a while; silence looks like a hang, and a library that prints unasked is noise."""
    for wanted in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(lambda x: (x @ x.t()).relu() + 1, backend="bcg", options={"progress": wanted})
        with torch.no_grad():
            for _ in range(3):
                fast(torch.ones(4, 4))
        assert ("recording static: 1 segments" in capsys.readouterr().err) is wanted
