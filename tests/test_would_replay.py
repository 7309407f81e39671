"""``would_replay`` says what a call does, and does nothing: every answer here is compared with the call itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import compiled
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_graph_backend as tgb
from torch_graph_backend import registry

W = torch.randn(4, 4)


def rows(n: int) -> torch.Tensor:
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def function(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return F.softmax(F.linear(x, W), 0) @ W * scale


class Model(nn.Module):
    """A parameter, a buffer, a keyword, a star argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, negate: bool = False) -> torch.Tensor:
        y = self.up(x) + self.shift + sum(r.sum() for r in rest)
        return -y if negate else y


def state(model: Any) -> str:
    """Everything that a question must not change."""
    entries = [(k, sorted(map(str, g.entries)), g.state.running) for k, g in enumerate(registry.all_graphs())]
    counted = {k: v for k, v in tgb.stats(model).to_dict().items() if k not in ("seconds", "by_graph")}
    frames = dict(torch._dynamo.utils.counters["frames"])
    return f"{entries} {counted} {frames}"


def agrees(g: Any, *args: Any, **kwargs: Any) -> str:
    """Ask, call, compare; the code of the answer (empty: it said that it would replay)."""
    before = state(g)
    answer = tgb.would_replay(g, *args, **kwargs)
    assert state(g) == before
    with tgb.measure() as part:
        g(*args, **kwargs)
    found = part.stats
    if answer is None:
        assert (found.calls, found.replays, found.recordings) == (1, 1, 0)
        return ""
    if answer.code == "not-recorded":
        assert found.first_calls or found.recordings
    else:
        assert dict(found.eager) == {answer.code: 1}
    return answer.code


def test_a_function_over_its_life() -> None:
    """Compile, first call, record, replay; another bucket; too large; static and dynamic graphs of one function."""
    with compiled(function, buckets=[4, 8]) as g:
        codes = [agrees(g, torch.randn(n, 4)) for n in (3, 3, 3, 5, 5, 5, 6, 4, 4, 4, 9, 3)]
    new = "not-recorded"
    assert codes[:3] == [new, new, ""]
    assert codes[3:7] == [new, new, "", ""]
    assert codes[7:10] == [new, new, ""]
    assert codes[10] == "beyond-largest-bucket"


def test_defaults_keywords_and_guards_on_values() -> None:
    """Another value of a Python argument is another graph."""
    with compiled(function) as g:
        for _ in range(2):
            g(rows(3))
        assert agrees(g, rows(3), scale=1.0) == ""
        assert agrees(g, rows(3), 1.0) == ""
        assert agrees(g, rows(3), 2.0) == "not-recorded"


def test_a_module_its_wrapper_and_compile_in_place() -> None:
    """All three name the same model."""
    model, in_place = Model(), Model()
    wrapper = torch.compile(model, backend="bcg")
    in_place.compile(backend="bcg")
    with torch.no_grad():
        for g in (wrapper, in_place):
            rest = torch.ones(2)
            for _ in range(2):
                g(rows(3), rest)
            assert agrees(g, rows(3), rest) == ""
            assert tgb.would_replay(registry.unwrap(g), rows(3), rest) is None
            assert agrees(g, rows(3), rest, negate=True) == "not-recorded"
        assert agrees(wrapper, rows(3), rest) == ""  # Dynamo shares the code of a class: recordings are by weights
        third = torch.compile(Model(), backend="bcg")
        answer = tgb.would_replay(third, rows(3), rest)
        assert answer is not None
        assert "had no call yet with these weights" in answer.text
        assert [agrees(third, rows(3), rest) for _ in range(3)] == ["not-recorded", "not-recorded", ""]


def test_a_moved_buffer() -> None:
    """The recording is of the old one."""
    model = Model()
    g = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(2):
            g(rows(3))
        assert tgb.would_replay(g, rows(3)) is None
        model.shift = torch.zeros(8)
        answer = tgb.would_replay(g, rows(3))
        assert answer is not None
        assert answer.code == "not-recorded"
        assert "had no call yet with these weights" in answer.text
        assert agrees(g, rows(3)) == "not-recorded"


def test_a_cache_of_the_callers_that_moved() -> None:
    """A tensor that segments change is read in place: a recording is of one address."""

    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return F.linear(x, W) + cache

    with compiled(f) as g:
        cache = torch.zeros(3, 4)
        assert [agrees(g, torch.ones(3, 4), cache) for _ in range(3)] == ["not-recorded", "not-recorded", ""]
        answer = tgb.would_replay(g, torch.ones(3, 4), torch.zeros(3, 4))
        assert answer is not None
        assert answer.text == "L['cache'] moved since the recording"
        assert torch.equal(cache, torch.full((3, 4), 3.0))


def test_inside_of_a_break() -> None:
    """Calls from inside of a break have recordings of their own; asking makes no memory for them."""
    answers: list[Any] = []

    @torch.library.custom_op("tgb_would_replay_test::ask", mutates_args=())
    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.append(tgb.would_replay(inner, rows(3)))
        return x + 1

    ask.register_fake(torch.empty_like)
    inner = torch.compile(function, backend="bcg")
    with torch.no_grad():
        for _ in range(2):
            inner(rows(3))
        assert tgb.would_replay(inner, rows(3)) is None
        torch.compile(lambda x: ask(F.linear(x, W)) @ W, backend="bcg")(rows(3))
    (answer,) = answers
    assert answer.code == "not-recorded"
    assert registry.all_graphs()[0].state.inner is None


def test_a_closure() -> None:
    """Tensors in cells are arguments of the graph too."""
    v = torch.randn(4, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, v)

    with compiled(f) as g:
        assert [agrees(g, rows(3)) for _ in range(3)] == ["not-recorded", "not-recorded", ""]


def test_the_state_of_the_process_counts() -> None:
    """Gradients and modes as they are now."""
    with compiled(function) as g:
        x = rows(3)
        for _ in range(2):
            g(x)
        assert tgb.would_replay(g, x) is None
        with FlopCounterMode(display=False):
            assert tgb.would_replay(g, x) is not None
        with torch.enable_grad():
            assert tgb.would_replay(g, x) is not None  # Dynamo guards it
        tgb.reset()
        answer = tgb.would_replay(g, x)
        assert answer is not None
        assert answer.code == "disabled"


def slotted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x.new_ones(4, 4)) + y


def never(*_: Any) -> Any:
    raise AssertionError("a function of the user's was called")


def test_a_source_fn_leaves_a_doubt() -> None:
    """It is not called: what is against a replay in any case is told, the rest is unknown, and the call says why."""
    answers: list[Any] = []

    def source(given: Any) -> Any:
        return never() if asking else answers[-1](given)

    asking = False
    with compiled(slotted, dynamic=True, buckets=[8], slots={"y": {"source_fn": source}}) as g:
        answers.append(lambda given: given["x"] * 2)
        told = []
        for n in (5, 5, 6, 6, 9):
            asking = True
            before = state(g)
            told.append(tgb.would_replay(g, torch.randn(n, 4), torch.randn(n, 4)))
            assert state(g) == before
            asking = False
            g(torch.randn(n, 4), torch.randn(n, 4))
        assert [a.code for a in told] == ["not-recorded"] * 2 + ["unknown"] * 2 + ["beyond-largest-bucket"]
        assert "slot 'y': source_fn" in told[2].text
        answers.append(lambda _: None)  # why it is a doubt
        asking = True
        answer = tgb.would_replay(g, torch.randn(5, 4), torch.randn(5, 4))
        asking = False
        assert answer is not None
        assert answer.code == "unknown"
        with pytest.raises(tgb.errors.SlotError):
            g(torch.randn(5, 4), torch.randn(5, 4))


def test_computed_slots_leave_no_doubt() -> None:
    """Neither those written in place nor those that eager code reads too; the argument itself does not matter."""

    def sorts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return slotted(x, y) + torch.sort(y, 0).values

    for f in (slotted, sorts):
        asking = False

        def post_fill(rows: torch.Tensor, given: Any) -> None:
            if asking:  # noqa: B023 (called inside of this round)
                never()
            rows.copy_(given["x"] + 1)

        slots = {"y": {"copy_from_fb": False, "post_fill": post_fill}}
        with compiled(f, dynamic=True, buckets=[8], slots=slots) as g:
            for k, n in enumerate((5, 5, 6, 3)):
                args = torch.randn(n, 4), torch.randn(n, 4)
                asking = True
                answer = tgb.would_replay(g, *args)
                asking = False
                before = tgb.stats(g)
                torch.testing.assert_close(g(*args), f(args[0], args[0] + 1))
                assert ((tgb.stats(g) - before).recordings == 0) == (answer is None or k == 0)
                assert (answer is None) == (k > 1)


def test_gradients_of_an_argument_that_is_replaced() -> None:
    """A call does not see them: ``post_fill`` writes into a tensor of its own."""

    def sorts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return slotted(x, y) + torch.sort(y, 0).values

    slots = {"y": {"copy_from_fb": False, "post_fill": lambda rows, given: rows.copy_(given["x"] + 1)}}
    with compiled(sorts, dynamic=True, buckets=[8], slots=slots) as g, torch.enable_grad():
        told = []
        for needs in (False, False, False, True, True, True):
            args = torch.randn(5, 4), torch.randn(5, 4, requires_grad=needs)
            told.append(tgb.would_replay(g, *args))
            before = tgb.stats(g)
            g(*args)
            found = tgb.stats(g) - before
            assert (found.replays == 1 and found.recordings == 0) == (told[-1] is None)
        assert told[-1] is None


def test_a_changed_argument_that_overlaps_one_that_is_replaced() -> None:
    """Where the argument of a replaced slot lies does not matter: the call has it elsewhere."""

    def f(x: torch.Tensor, y: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return slotted(x, y) + torch.sort(y, 0).values

    slots = {"y": {"copy_from_fb": False, "post_fill": lambda rows, given: rows.copy_(given["x"] + 1)}}
    memory = torch.zeros(8, 4)
    with compiled(f, dynamic=True, buckets=[8], slots=slots) as g:
        for _ in range(3):
            g(torch.randn(5, 4), torch.randn(5, 4), memory)
        for other in (torch.randn(5, 4), memory[:5]):
            assert agrees(g, torch.randn(5, 4), other, memory) == ""
        assert agrees(g, memory[:5], torch.randn(5, 4), memory) == "aliased-inputs"


def test_a_slice_fn_that_was_not_asked_at_this_size() -> None:
    """It is called once for each real size: until then it may refuse the call."""
    asking = False

    def rows_of(buffer: torch.Tensor, bs: int, tokens: int) -> torch.Tensor:
        return never() if asking else buffer[:bs] if bs != 7 else buffer[1 : bs + 1]

    with compiled(slotted, dynamic=True, buckets=[8], slots={"y": {"slice_fn": rows_of}}) as g:
        told = []
        for n in (5, 5, 5, 5, 6, 6):
            asking = True
            answer = tgb.would_replay(g, torch.randn(n, 4), torch.randn(n, 4))
            asking = False
            told.append("" if answer is None else answer.code)
            g(torch.randn(n, 4), torch.randn(n, 4))
        assert told == ["not-recorded", "not-recorded", "", "", "unknown", ""]
        answer = tgb.would_replay(g, torch.randn(7, 4), torch.randn(7, 4))
        assert answer is not None
        assert "slice_fn has not been asked" in answer.text
        with pytest.raises(tgb.errors.SlotError):
            g(torch.randn(7, 4), torch.randn(7, 4))


def test_gradients() -> None:
    g = torch.compile(Model(), backend="bcg")
    g(rows(3))
    assert agrees(g, rows(3)) == "grad"


def test_options_are_those_of_the_wrapper() -> None:
    """Two wrappers of one function: each has its own recordings; the bare function could mean either."""
    with torch.no_grad():
        one = torch.compile(function, backend="bcg", options={"buckets": [4]})
        two = torch.compile(function, backend="bcg", options={"buckets": [8]})
        for _ in range(2):
            one(rows(3))
        assert tgb.would_replay(one, rows(3)) is None
        assert tgb.would_replay(function, rows(3)) is None
        answer = tgb.would_replay(two, rows(3))
        assert answer is not None
        assert answer.code == "not-recorded"
        two(rows(3))
        answer = tgb.would_replay(function, rows(3))
        assert answer is not None
        assert answer.code == "unknown"
        assert "different options" in answer.text


def test_another_backend_is_not_ours() -> None:
    with torch.no_grad():
        for _ in range(2):
            torch.compile(function, backend="eager")(rows(3))
        answer = tgb.would_replay(torch.compile(function, backend="bcg"), rows(3))
    assert answer is not None
    assert answer.code == "not-recorded"


def broken(x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, W).relu()
    torch._dynamo.graph_break()
    return F.linear(y, W).tanh()


class Hooked(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


class OwnCall(Model):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def around(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(function, backend="bcg")(x)


@functools.lru_cache(None)
def not_a_function(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, W)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (broken, "graph break"),
        (Hooked(), "the module has hooks"),
        (OwnCall(), "a __call__ of its own"),
        (nn.Linear(4, 4), "code around it"),
    ],
)
def test_what_cannot_be_told_is_unknown(model: Callable[..., Any], text: str) -> None:
    """Several graphs, or code around the graph."""
    g = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            g(torch.ones(3, 4))
        answer = tgb.would_replay(g, torch.ones(3, 4))
    assert answer is not None
    assert answer.code == "unknown"
    assert text in answer.text


def test_code_around_the_compiled_function() -> None:
    """Nothing was compiled under that name: a call of it is not looked into."""
    with torch.no_grad():
        for _ in range(3):
            around(torch.ones(3, 4))
        answer = tgb.would_replay(around, torch.ones(3, 4))
    assert answer is not None


@pytest.mark.parametrize("args", [(), (torch.ones(3, 4), 1.0, 2.0, 3.0)])
def test_wrong_arguments_are_an_answer_too(args: tuple[Any, ...]) -> None:
    with compiled(function) as g:
        g(rows(3))
        answer = tgb.would_replay(g, *args)
    assert answer is not None
    assert answer.code == "unknown"


def test_a_callable_without_code() -> None:
    answer = tgb.would_replay(not_a_function, torch.ones(3, 4))
    assert answer is not None
    assert "neither a function nor a module" in answer.text


def test_the_model_does_not_run() -> None:
    """Not a line of it, and no property either that a call would not read."""
    ran: list[int] = []

    @torch.library.custom_op("tgb_would_replay_test::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x + 1

    count.register_fake(torch.empty_like)
    with compiled(lambda x: count(F.linear(x, W)) @ W) as g:
        for _ in range(2):
            g(rows(3))
        before = len(ran)
        assert tgb.would_replay(g, rows(3)) is None
        assert len(ran) == before == 2


def test_a_changed_argument_with_a_source_fn_may_lie_anywhere() -> None:
    """It is the tensor of ``source_fn`` that is recorded, not the caller's."""

    def changes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return slotted(x, y)

    mine = torch.zeros(5, 4)
    kept = []
    with compiled(changes, slots={"x": {"source_fn": lambda _: mine}}) as g:
        for k in range(5):
            kept.append(torch.randn(5, 4))
            answer = tgb.would_replay(g, kept[-1], torch.ones(5, 4))
            before = tgb.stats(g)
            g(kept[-1], torch.ones(5, 4))
            assert answer is not None
            assert answer.code == ("not-recorded" if k < 2 else "unknown")
            assert ((tgb.stats(g) - before).recordings == 1) == (k == 1)


@pytest.mark.parametrize("option", [None, "every:2"])
def test_an_audit_that_is_due_leaves_a_doubt(option: str | None) -> None:
    """A call that fails it is answered eagerly."""
    with compiled(slotted, dynamic=True, buckets=[8], audit=option or "capture") as g:
        told = []
        for n in (5, 8, 5, 5, 5, 5):
            answer = tgb.would_replay(g, torch.randn(n, 4), torch.randn(n, 4))
            before = tgb.stats(g)
            g(torch.randn(n, 4), torch.randn(n, 4))
            part = tgb.stats(g) - before
            told.append("" if answer is None else answer.code)
            assert part.audits == (answer is not None and (answer.code == "unknown" or not before.calls))
    assert "unknown" in told
    assert "" in told
