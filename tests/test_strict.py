"""Strict mode: whatever would run eagerly raises, with the code, the user's line and what changes it.

Every call code and graph code has its case here; a code that is added without one fails the last test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import compiled
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.flop_counter import FlopCounterMode

import torch_graph_backend as tgb
from torch_graph_backend import device_state, registry, strides
from torch_graph_backend.errors import StrictModeError
from torch_graph_backend.passes.reasons import CODES, FIXES, SOFT, Reason
from torch_graph_backend.recorders.host import HostRecorder
from torch_graph_backend.runner import CompiledGraph

W = torch.randn(4, 4)


def rows(n: int) -> torch.Tensor:
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def function(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, W).relu() @ W


def twice(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.add_(1)
    return F.linear(x, W) + cache.sum()


@contextmanager
def strict(model: Callable[..., Any] = function, *args: Any, **options: Any) -> Iterator[tuple[Any, CompiledGraph]]:
    """A compiled function after one call that was captured, and its graph."""
    with compiled(model, strict=True, **{"buckets": [4, 8], **options}) as g:
        g(*(args or (rows(3),)))
        (graph,) = registry.graphs_of(g)
        yield g, graph


def refused(code: str, call: Callable[[], Any]) -> StrictModeError:
    """The error of a call; nothing of the call ran and nothing was counted."""
    before = tgb.stats().calls
    with pytest.raises(StrictModeError) as raised:
        call()
    assert tgb.stats().calls == before
    return check(code, raised.value)


def check(code: str, error: StrictModeError) -> StrictModeError:
    assert error.reason.code == code
    assert error.code == "BCG201"
    assert f"was not captured: {code}: " in str(error)
    assert error.reason.advice in error.fix
    assert "or set strict=False" in error.fix
    assert error.where.startswith("test_strict.py:"), error.where
    return error


SEEN: set[str] = set()


def case(code: str) -> Any:
    """Marks the test of a code."""
    SEEN.add(code)
    return pytest.mark.parametrize("code", [code])


# --- call codes -------------------------------------------------------------------------------------------------------


@case("grad")
def test_grad(code: str) -> None:
    with strict() as (g, _), torch.enable_grad():
        refused(code, lambda: g(rows(3).requires_grad_()))


@case("beyond-largest-bucket")
def test_beyond_the_largest_bucket(code: str) -> None:
    """And the line is that of the call, since no line of the model is at fault."""
    with strict() as (g, _):
        error = refused(code, lambda: g(rows(9)))
        assert "g(rows(9))" in error.where
        torch.testing.assert_close(g(x := rows(3)), function(x))


@case("size-not-listed")
def test_size_not_listed(code: str) -> None:
    with strict(function, rows(4), padding="exact") as (g, _):
        refused(code, lambda: g(rows(5)))


@case("zero-size")
def test_zero_size(code: str) -> None:
    """Dynamo makes a graph of its own of size 0, so the graph is asked directly."""
    with strict() as (_, graph):
        refused(code, lambda: graph(*with_input(graph, torch.empty(0, 4))))


@case("bucket-invalid")
def test_bucket_invalid(code: str) -> None:
    """No rung and not the exact size fulfils what the traced code assumes; a graph of its own would in Dynamo."""
    with strict() as (_, graph):
        graph.keys.bounds = type(graph.keys.bounds)((), ((graph.plan.symbols[0].symbol, 2, 4),))
        graph.keys.cache.clear()
        refused(code, lambda: graph(*with_input(graph, torch.randn(6, 4))))


@case("slot-mismatch")
def test_slot_mismatch(code: str) -> None:
    """A declared slot whose ``shape_fn`` is wrong at one bucket."""
    slots = {"x": {"shape_fn": lambda bs, tokens: (tokens if tokens < 8 else 9, 4)}}
    with strict(slots=slots) as (g, _):
        refused(code, lambda: g(rows(7)))


@case("recording-cap")
def test_recording_cap(code: str) -> None:
    with strict(max_recordings=1) as (g, _):
        refused(code, lambda: g(rows(7)))


@case("out-of-memory")
def test_out_of_memory(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise MemoryError("no more")

    with strict(buckets=[4, 4096]) as (g, _):
        monkeypatch.setattr(HostRecorder, "allocate", full)
        refused(code, lambda: g(rows(4000)))


def with_input(graph: CompiledGraph, tensor: torch.Tensor) -> list[Any]:
    """Arguments of the graph of ``function``, with ``tensor`` for ``x`` (Dynamo would guard some of these itself)."""
    values = {"L['x'].size()[0]": tensor.shape[0], "L['x']": tensor, "G['W']": W}
    assert graph.plan is not None
    return [values[name] for name in graph.plan.placeholders]


INPUTS = {
    "input-dtype": lambda: torch.randn(3, 4, dtype=torch.float64),
    "input-device": lambda: torch.empty(3, 4, device="meta"),
    "input-layout": lambda: torch.randn(3, 4).to_sparse(),
    "input-strides": lambda: torch.randn(4, 3).t(),
    "input-shape": lambda: torch.randn(3, 5),
}
SEEN |= set(INPUTS)


@pytest.mark.parametrize("code", INPUTS)
def test_inputs_that_dynamo_does_not_guard(code: str) -> None:
    """Asked of the graph directly: which of these Dynamo guards differs by version."""
    with strict() as (_, graph):
        refused(code, lambda: graph(*with_input(graph, INPUTS[code]())))


@case("other-strides")
def test_other_strides(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the first call: its answer is thrown away, and refused."""
    monkeypatch.setattr(strides, "apart", lambda *_: True)
    with compiled(function, strict=True, buckets=[4, 8]) as g, pytest.raises(StrictModeError) as raised:
        g(rows(3))
    check(code, raised.value)


@case("aliased-inputs")
def test_aliased_inputs(code: str) -> None:
    both = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x := both[1:], 0)
    with strict(twice, rows(4), torch.zeros(4, 4)) as (g, _):
        refused(code, lambda: g(x, both[:4]))


@case("already-capturing")
def test_already_capturing(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recorder says when the caller records a graph of his own."""
    with strict() as (g, _):
        monkeypatch.setattr(HostRecorder, "can_run", lambda _: Reason("already-capturing"))
        refused(code, lambda: g(rows(3)))


@case("dispatch-mode")
def test_dispatch_mode(code: str) -> None:
    """Dynamo does not enter compiled code under a mode of most kinds, so the graph is asked directly."""
    with strict() as (_, graph), FlopCounterMode(display=False):
        refused(code, lambda: graph(*with_input(graph, torch.randn(3, 4))))


@case("busy")
def test_busy(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph called from inside one of its own breaks, deeper than there is memory for."""
    monkeypatch.setattr(device_state, "MAX_DEPTH", 1)
    graphs: list[CompiledGraph] = []
    errors: list[StrictModeError] = []

    @torch.library.custom_op("tgb_strict_test::again", mutates_args=())
    def again(x: torch.Tensor) -> torch.Tensor:
        if graphs:
            errors.append(refused(code, lambda: graphs[0](*with_input(graphs[0], torch.randn(3, 4)))))
        return x + 1

    again.register_fake(torch.empty_like)

    def f(x: torch.Tensor) -> torch.Tensor:
        return again(F.linear(x, W)) @ W

    with strict(f) as (g, graph):
        graphs.append(graph)
        g(rows(3))
    assert len(errors) == 1


@case("capture-failed")
def test_capture_failed(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording fails before anything of the call runs; later calls are refused too."""
    with strict() as (g, _):

        def fail(*_: Any) -> Any:
            raise RuntimeError("not permitted while recording")

        monkeypatch.setattr(HostRecorder, "capture_one", fail)
        for _ in range(2):
            error = refused(code, lambda: g(rows(3)))
            assert "not permitted while recording" in str(error)


@case("disabled")
def test_closed(code: str) -> None:
    with strict() as (g, _):
        tgb.reset()
        refused(code, lambda: g(rows(3)))


def test_a_key_that_is_captured_in_part_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One segment that runs uncaptured at every call is something that is not captured."""
    real = HostRecorder.capture_one
    count = iter(range(9))

    def first_fails(self: HostRecorder, *args: Any) -> Any:
        if next(count) == 0:
            raise RuntimeError("not while recording")
        return real(self, *args)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, W).softmax(0) @ W

    monkeypatch.setattr(HostRecorder, "capture_one", first_fails)
    with strict(f) as (g, _):
        for _ in range(2):
            assert "segment 0" in str(refused("capture-failed", lambda: g(rows(3))))


def test_another_thread_is_refused_for_its_own_call() -> None:
    """The line is that of the thread that called."""
    errors: list[StrictModeError] = []

    def work(g: Any) -> None:
        with torch.no_grad():
            errors.append(refused("beyond-largest-bucket", lambda: g(rows(9))))

    with strict() as (g, _):
        thread = threading.Thread(target=work, args=(g,))
        thread.start()
        thread.join()
    assert "g(rows(9))" in errors[0].where


# --- graph codes ------------------------------------------------------------------------------------------------------


def at_compile(code: str, model: Callable[..., Any], *args: Any, **options: Any) -> StrictModeError:
    """The error that compiling raises, inside Dynamo's own."""
    with compiled(model, **{"strict": True, **options}) as g, pytest.raises(BackendCompilerFailed) as raised:
        g(*args)
    error = raised.value.inner_exception
    assert isinstance(error, StrictModeError)
    return check(code, error)


def unshaped(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.unsqueeze_(0)
    return y @ W


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x @ W


@case("metadata-mutation")
def test_metadata_mutation(code: str) -> None:
    assert "y.unsqueeze_(0)" in at_compile(code, unshaped, rows(5)).where


@case("nothing-to-capture")
def test_nothing_to_capture(code: str) -> None:
    """The first operation stands for all: its line, its reason and what would change it."""
    error = at_compile(code, lambda x: x.sort(0).values, rows(5))
    assert "padding first: aten.sort" in str(error)
    assert "x.sort(0).values" in error.where
    assert FIXES["padding"] in error.fix


@case("normalise-failed")
def test_normalise_failed(code: str) -> None:
    assert at_compile(code, inference, rows(5)).where.endswith(" in inference")


@case("no-recorder")
def test_no_recorder(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is neither a CPU nor CUDA."""
    monkeypatch.setattr("torch_graph_backend.backend.state_of", lambda _: Reason("no-recorder"))
    assert at_compile(code, function, rows(5)).where.endswith(" in function")


@case("symbol-unreadable")
def test_symbol_unreadable(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo always shows a size by itself today; the check is asked as the backend asks it."""
    monkeypatch.setattr("torch_graph_backend.backend.unreadable", lambda _: Reason("symbol-unreadable"))
    at_compile(code, function, rows(5))


@pytest.mark.parametrize("options", [{"enabled": False}, {"record": "never"}], ids=str)
def test_turned_off(options: dict[str, Any]) -> None:
    at_compile("disabled", function, rows(5), **options)


# --- strict="ops" -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        return self.out(F.scaled_dot_product_attention(q, q, q))


def padded_length() -> torch.Tensor:
    x = torch.randn(1, 2, 5, 4)
    torch._dynamo.mark_dynamic(x, 2)
    return x


def test_ops_raises_for_one_eager_operation() -> None:
    """The operation, its line, and what would change it."""
    error = at_compile("padding", Attention(), padded_length(), strict="ops")
    assert "all of forward (test_strict.py:" in str(error)
    assert "F.scaled_dot_product_attention(q, q, q)" in error.where


def test_ops_permits_what_was_asked_for() -> None:
    """A break op is no surprise; a graph without eager operations passes; strict=True permits regions."""
    with compiled(Attention(), strict="ops", break_ops=[F.scaled_dot_product_attention]) as g:
        g(padded_length())
    with compiled(function, strict="ops") as g:
        g(rows(5))
    with compiled(Attention(), strict=True) as g:
        g(padded_length())


def test_ops_raises_for_calls_too() -> None:
    with compiled(function, strict="ops", buckets=[4]) as g:
        g(rows(3))
        refused("beyond-largest-bucket", lambda: g(rows(5)))


def test_ops_raises_when_an_operation_becomes_eager_later() -> None:
    """An input that keeps moving is planned again; from then on every call is refused, and none ran before it was."""
    with compiled(twice, strict="ops", buckets=[4]) as g:
        keep: list[torch.Tensor] = []

        def until_refused() -> None:
            for _ in range(20):
                keep.append(torch.zeros(4, 4))
                g(rows(3), keep[-1])

        with pytest.raises(StrictModeError, match="moving-input"):
            until_refused()
        assert torch.equal(keep[-1], torch.zeros(4, 4))
        with pytest.raises(StrictModeError, match="moving-input"):
            g(rows(3), keep[0])


# --- the vocabulary ---------------------------------------------------------------------------------------------------

#: Codes of single operations: they make an operation eager, and ``strict="ops"`` raises with them.
NODE_CODES = {
    "break-op",
    "unknown-op",
    "data-dependent",
    "random",
    "collective",
    "higher-order-op",
    "other-device",
    "device-copy",
    "not-strided",
    "not-normalised",
    "python-value",
    "exact-symbol",
    "padding",
    "derived-size",
    "mutation",
    "output-alias",
    "returned-copy",
    "small-segment",
    "moving-input",
    "audit-failed",
}


def test_every_call_and_graph_code_has_a_case() -> None:
    """``not-recorded`` and ``unknown`` are answers of ``would_replay``: no call is refused with them; nor with
    ``slot-refused``, for then the slot has the default padding; nor with ``not-audited``."""
    kernels = {code for code in CODES if code.startswith("inductor-")}  # of segments that are captured all the same
    assert set(CODES) - NODE_CODES - kernels - {"not-recorded", "unknown", "slot-refused", "not-audited"} <= SEEN


def test_every_code_says_what_would_change_it() -> None:
    assert set(FIXES) == set(CODES)
    assert set(SOFT) <= set(CODES)
    assert all(Reason(code).advice == FIXES[code] for code in CODES)
    assert Reason("grad", fix="do this").advice == "do this"
    assert Reason("recording-cap").soft
    assert not Reason("padding").soft
