"""Compiles that are interrupted, that other threads meet, that Inductor cannot save; and tensors without entries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import inductor, inductor_segment, registry
from torch_graph_backend.passes.torch_api import cpp_rounds_halves

pytestmark = pytest.mark.inductor


@pytest.fixture(autouse=True)
def forget() -> None:
    """Nothing compiled by an earlier test is reused."""
    inductor._known.clear()


class Cut(nn.Module):
    """Three segments of different widths: sorting along the rows cuts the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((4, 5), (5, 6), (6, 7)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sort(torch.relu(layer(x)) * 2 + 1, 0).values
        return x * 2


def rows(n: int) -> Tensor:
    x = torch.randn(n, 4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="bcg", options={"buckets": [4, 8], "inductor_seconds": 3600, **options})


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_compile_begins_anew(at: int, monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """Would catch a key that stays half prepared: some segments compiled, others plain without a reason."""
    real = inductor_segment.compile_with_inductor
    tries = []

    def interrupted(*args: Any) -> Any:
        tries.append(1)
        if len(tries) == at:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(inductor_segment, "compile_with_inductor", interrupted)
    model = Cut()
    fast = compiled(model)
    with pytest.raises(KeyboardInterrupt):
        fast(rows(3))
    for n in (3, 4, 3):
        x = rows(n)
        torch.testing.assert_close(fast(x), model(x))
    (graph,) = registry.all_graphs()
    (entry,) = graph.entries.values()
    assert len(entry.compiled) == len(graph.plan.segments)
    assert not entry.plain
    assert len(tries) == 1 + len(graph.plan.segments), "what was compiled before is compiled once"
    tgb.stats(fast).expect(eager=0)


def test_an_interrupt_inside_of_inductor(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """Inductor's own state is whole again as well: the next compile in this process works."""
    from torch._inductor.graph import GraphLowering

    real, interrupts = GraphLowering.run, [1]

    def run(self: GraphLowering, *args: Any) -> Any:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(GraphLowering, "run", run)
    with torch._inductor.config.patch(force_disable_caches=True):
        fast = compiled(lambda x: (x.relu() * 2 + 1).neg())
        with pytest.raises(KeyboardInterrupt):
            fast(rows(3))
        for n in (3, 4, 3):
            x = rows(n)
            assert torch.equal(fast(x), (x.relu() * 2 + 1).neg())
    (graph,) = registry.all_graphs()
    assert [len(e.compiled) for e in graph.entries.values()] == [1]


@pytest.mark.slow
def test_threads_that_compile_and_call_at_once(no_grad: None) -> None:
    """One thread calls a recorded model all the time, two others compile theirs."""

    def other(x: Tensor) -> Tensor:
        return (x.tanh() * 3 + 1).relu()

    models: list[Callable[..., Any]] = [nn.Linear(4, 4), Cut(), other]
    fast = [compiled(m) for m in models]
    for n in (3, 4, 3):
        fast[0](rows(n))
    errors: list[BaseException] = []
    done = threading.Event()

    def calls(i: int, sizes: tuple[int, ...]) -> None:
        try:
            with torch.no_grad():
                for n in sizes:
                    x = rows(n)
                    torch.testing.assert_close(fast[i](x), models[i](x))
        except BaseException as error:
            errors.append(error)

    def again() -> None:
        while not done.is_set():
            calls(0, (3, 4))

    first = threading.Thread(target=again)
    rest = [threading.Thread(target=calls, args=(i, (3, 7, 3, 8))) for i in (1, 2)]
    for thread in (first, *rest):
        thread.start()
    for thread in rest:
        thread.join(300)
    done.set()
    first.join(300)
    assert not any(t.is_alive() for t in (first, *rest))
    assert not errors, errors
    counts = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    assert not [r for c in counts for r in c.plain if r.code == "inductor-failed"]
    assert sum(c.compiled for c in counts) >= 6


def test_no_warning_that_code_cannot_be_saved(no_grad: None) -> None:
    """Nobody asked for a file. Torch's loggers have handlers of their own, so this one is asked too."""
    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    logger, handler = logging.getLogger("torch._inductor.standalone_compile"), Handler()
    logger.addHandler(handler)
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            fast = compiled(lambda x: (x.relu() * 5 + 1).neg())
            fast(rows(3))
        (graph,) = registry.all_graphs()
        assert sum(c.compiled for c in graph.ledger.keys.values()) == 1
        assert not [r.getMessage() for r in seen if r.levelno >= logging.WARNING]
        logger.warning("another: artifact generation failed")
        assert len(seen) == 1
    finally:
        logger.removeHandler(handler)


def first_cache(e: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """The first step of a growing cache puts keys behind a tensor of shape [0]."""
    return torch.cat([e, k.relu() * 2], -2) * 2, torch.cat([k, e], -2).neg()


ODD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "first cache": (first_cache, (torch.empty(0), torch.randn(1, 4, 3, 8))),
    "first cache of halves": (first_cache, (torch.empty(0).bfloat16(), torch.randn(1, 4, 3, 8).bfloat16())),
    "first cache of another dtype": (first_cache, (torch.empty(0), torch.randn(1, 4, 3, 8).half())),
    "no rows": (lambda x, w: (x @ w).relu() * 2 + 1, (torch.randn(0, 4), torch.randn(4, 4))),
    "no columns": (lambda x, w: (x @ w).relu() * 2 + 1, (torch.randn(3, 0), torch.randn(0, 4))),
    "sums of nothing": (lambda x: [(x * 2).sum(-1), (x * 2).mean(-1), x.neg().softmax(-1)], (torch.randn(3, 0),)),
    "logic of nothing": (lambda x: (x > 0).any(-1) | (x < 1).all(-1), (torch.randn(3, 0),)),
    "parts of nothing": (lambda x: [t * 2 for t in (x * 3).split([0, 4], -1)], (torch.randn(3, 4),)),
    "a number": (lambda x: (x.neg() * 2).sum() + x, (torch.randn(()),)),
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_without_entries(name: str, no_grad: None) -> None:
    function, args = ODD[name]
    fast = torch.compile(function, backend="bcg", dynamic=False, options={"inductor_max_size": 4096})
    for _ in range(3):
        torch.testing.assert_close(fast(*args), function(*args), rtol=0, atol=0, equal_nan=True)
    counts = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    halves = any(t.dtype in (torch.float16, torch.bfloat16) for t in args)
    assert [c.compiled for c in counts] == [not halves or cpp_rounds_halves()], [c.plain for c in counts]
    tgb.stats(fast).expect(eager=0)


def test_halves_that_cannot_be_rounded(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """Torch 2.11: its C++ would keep ``x / 3`` in float32, and the integer is another one."""

    def model(x: Tensor) -> Tensor:
        return (x / 3 * 3 > x) | (x.exp() > 2)

    monkeypatch.setattr(inductor_segment, "cpp_rounds_halves", lambda: False)
    fast = torch.compile(model, backend="bcg", dynamic=False)
    x = torch.randn(16, 16).bfloat16()
    for _ in range(3):
        assert torch.equal(fast(x), model(x))
    (count,) = (c for graph in registry.all_graphs() for c in graph.ledger.keys.values())
    assert [(r.code, "half precision" in r.text) for r in count.plain] == [("inductor-unsuitable", True)]
    tgb.stats(fast).expect(replays=2, eager=0)
