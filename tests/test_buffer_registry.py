"""Declared slots from the outside: names, values from elsewhere, memory of their own, launches, and what is refused."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from graph_harness import Ops, compiled

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.config import argument_name
from torch_graph_backend.entry import Entry
from torch_graph_backend.errors import SlotError
from torch_graph_backend.plan import Plan
from torch_graph_backend.policies import GraphSlot, PaddingPolicy

P = PaddingPolicy
SIZES = (5, 6, 3, 7, 5, 7)


def padded_plan(function: Any) -> Plan:
    return next(p for p in tgb.plans(function) if p.bucketed)


def entries(function: Any) -> list[Entry]:
    return [e for g in registry.graphs_of(function) for e in g.entries.values()]


def buffer(function: Any, name: str) -> torch.Tensor:
    """The static buffer of an argument, in the only key."""
    (entry,) = entries(function)
    (at,) = [i for i, s in enumerate(entry.plan.slots) if argument_name(s.name) == name]
    return entry.slots[at]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['x']", "x"),
        ("L['batch']['ids']", "batch.ids"),
        ("L['batch'].ids", "batch.ids"),
        ("L['xs'][0]", "xs.0"),
        ("L['batch'].parts[1]['ids']", "batch.parts.1.ids"),
        ("L['self']._buffers['table']", "self._buffers.table"),
        ("G['TABLE']", "G['TABLE']"),
        ("L['x'].size()[1]", "L['x'].size()[1]"),
    ],
)
def test_names_of_arguments(source: str, name: str) -> None:
    assert argument_name(source) == name


def nested(batch: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.relu(batch["x"] @ batch["x"].new_ones(4, 4)) + batch["more"]["y"] + xs[0]


def test_nested_names_reach_their_slots() -> None:
    slots = {
        "batch.x": {"padding": "ZERO"},
        "batch.more.y": {"padding": "FOREACH_COPY"},
        "L['xs'][0]": {"padding": "ZERO"},
    }
    with compiled(nested, dynamic=True, buckets=[8], slots=slots) as g:
        for n in SIZES:
            parts = [torch.randn(n, 4) for _ in range(3)]
            args = {"x": parts[0], "more": {"y": parts[1]}}, [parts[2]]
            torch.testing.assert_close(g(*args), nested(*args))
        found = {s.name: s.policy.value for s in padded_plan(g).slots}
    assert found == {"L['batch']['x']": "ZERO", "L['batch']['more']['y']": "FOREACH_COPY", "L['xs'][0]": "ZERO"}


def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x.new_ones(4, 4)) + y


def two(n: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 4, device=device), torch.randn(n, 4, device=device)


def test_a_name_that_matches_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), compiled(one, dynamic=True, slots={"positions": {"padding": "ZERO"}}) as g:
        g(*two(5))
    text = "options['slots']['positions'] names no argument of this graph"
    assert any(text in r.getMessage() for r in caplog.records)


def test_a_disabled_slot_is_as_if_not_declared() -> None:
    with compiled(one, dynamic=True, buckets=[8], slots={"y": {"padding": "ZERO", "enabled": False}}) as g:
        for n in SIZES:
            args = two(n)
            torch.testing.assert_close(g(*args), one(*args))
        assert {s.policy for s in padded_plan(g).slots} == {P.REPEAT_ROW}


# -- policies, through everything --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(P))
def test_a_policy_through_the_backend(policy: P, device: str) -> None:
    """Real rows and tail of the product's own buffer, call after call, while the answers are eager's."""
    value = 7 if policy.takes_value else 0
    with compiled(one, dynamic=True, buckets=[8], slots=[GraphSlot("y", padding_policy=policy, pad_value=value)]) as g:
        model = torch.full((8, 4), float(value), device=device)
        for k, n in enumerate(SIZES):
            x, y = two(n, device)
            torch.testing.assert_close(g(x, y), one(x, y))
            kept = buffer(g, "y").clone()
            if k == 0 and policy is P.KEEP_PAD:
                model = kept.clone()  # whatever the memory held
            model[:n] = y
            if policy is P.REPEAT_ROW:
                model[n:] = y[0]
            elif policy in (P.ZERO, P.FILL_SENTINEL):
                model[n:] = value
            assert torch.equal(kept, model)
        tgb.stats(g).expect(first_calls=1, replays=len(SIZES) - 1)


@pytest.mark.parametrize("policy", list(P))
def test_only_what_survives_has_memory_of_its_own(policy: P) -> None:
    """Two keys that are called in turn: a tail that is kept must not lie under the other key's buffers."""
    value = 7 if policy.takes_value else 0
    slots = [GraphSlot("y", padding_policy=policy, pad_value=value)]
    with compiled(one, dynamic=True, buckets=[8, 16], slots=slots) as g:
        tails = []
        for n in (5, 12, 5, 13, 5, 12):
            args = two(n)
            torch.testing.assert_close(g(*args), one(*args))
            small = next(e for e in entries(g) if e.size_args[0] == 8)
            at = next(i for i, s in enumerate(small.plan.slots) if s.name == "L['y']")
            tails.append(small.slots[at][5:].clone())
        if policy.survives:
            assert all(torch.equal(t, tails[0]) for t in tails)
        both = [e.slots[at].untyped_storage().data_ptr() for e in entries(g)]
        assert (len(set(both)) == 2) is policy.survives
        assert all((e.own.nbytes > 0) is policy.survives for e in entries(g))
        assert sum(e.nbytes for e in entries(g)) == tgb.stats(g).nbytes or not policy.survives


def test_own_memory_counts_against_the_cap_and_goes_with_its_key() -> None:
    with compiled(one, dynamic=True, buckets=[8], slots={"y": {"padding": "KEEP_PAD"}}) as g:
        for n in SIZES:
            g(*two(n))
        (entry,) = entries(g)
        arena, before = entry.state.arena, entry.state.arena.nbytes
        own = entry.own.nbytes
        assert own >= 8 * 4 * 4
        assert before == own + sum(c.numel() for c in entry.lease.chunks)
        del entry
        tgb.close(g)
        gc.collect()
        assert arena.nbytes == 0


def test_verify_memory_leaves_kept_tails_alone() -> None:
    options = {"slots": {"y": {"padding": "FILL_ONCE", "pad_value": 7}}, "verify_memory": True}
    with compiled(one, dynamic=True, buckets=[8], **options) as g:
        for n in SIZES[:3]:
            args = two(n)
            torch.testing.assert_close(g(*args), one(*args))
        assert torch.equal(buffer(g, "y")[6:], torch.full((2, 4), 7.0))


def test_recording_ahead_leaves_kept_tails_alone(device: str) -> None:
    """The warm-up runs on zeros, and on declared values where zero is no good: ``100 // 0`` would raise."""

    def f(x: torch.Tensor, length: torch.Tensor, once: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x @ x.new_ones(4, 4)) + once, 100 // length

    slots = {"length": {"padding": "FILL_SENTINEL", "pad_value": 1}, "once": {"padding": "FILL_ONCE", "pad_value": 7}}

    def args(n: int) -> tuple[torch.Tensor, ...]:
        return (*two(n, device)[:1], torch.full((n,), 9, device=device), torch.randn(n, 4, device=device))

    with compiled(f, dynamic=True, buckets=[8, 16], slots=slots) as g:
        assert tgb.capture(g, *args(5), sizes=[8, 16]) == 2
        for n in (12, 13, 5):
            given = args(n)
            torch.testing.assert_close(g(*given), f(*given))
        large = next(e for e in entries(g) if e.size_args[0] == 16)
        at = next(i for i, s in enumerate(large.plan.slots) if s.name == "L['once']")
        assert torch.equal(large.slots[at][13:], torch.full((3, 4), 7.0, device=device))


def test_recording_ahead_keeps_what_an_earlier_call_left() -> None:
    """A key that had a call is recorded ahead: its warm-up must not change the tail that the next call finds."""
    with compiled(one, dynamic=True, buckets=[8, 16], slots={"y": {"padding": "FOREACH_COPY"}}) as g:
        x, y = two(14)
        g(x, y)
        tgb.capture(g, *two(5), sizes=[16])
        large = next(e for e in entries(g) if e.size_args[0] == 16)
        assert large.recorded
        at = next(i for i, s in enumerate(large.plan.slots) if s.name == "L['y']")
        g(*two(12))
        assert torch.equal(large.slots[at][12:14], y[12:])


# -- launches ----------------------------------------------------------------------------------------------------------


def many(*xs: torch.Tensor) -> torch.Tensor:
    total = xs[0] @ xs[0].new_ones(4, 4)
    for x in xs[1:]:
        total = total + x
    return total


@pytest.mark.parametrize("policy", ["REPEAT_ROW", "ZERO", "FILL_SENTINEL", "KEEP_PAD"])
def test_launches_do_not_grow_with_the_slots(policy: str) -> None:
    """Two and twelve slots of one dtype: the same count a call, and it is small."""
    counts = []
    for k in (2, 12):
        slots = {f"xs.{i}": {"padding": policy} for i in range(k)}
        with compiled(many, dynamic=True, buckets=[8], slots=slots) as g:
            for n in SIZES:
                args = [torch.randn(n, 4) for _ in range(k)]
                torch.testing.assert_close(g(*args), many(*args))
            assert [s.policy.value for s in padded_plan(g).slots] == [policy] * k
            found = tgb.stats(g)
        counts.append(found.fill_launches)
        assert found.expect(fill_launches=counts[0])
        assert found.to_dict()["fill_launches"] == found.by_graph[0].to_dict()["fill_launches"] == counts[0]
    assert counts[0] == counts[1] == len(SIZES) * (1 if policy == "KEEP_PAD" else 2)


def test_a_real_size_seen_before_makes_no_tensor() -> None:
    """Constants, counts, copies and repeated rows: all of it is grouped copies between tensors that exist."""

    def f(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        z = torch.relu(x @ x.new_ones(4, 4)) + y
        return z * x.shape[0] + i.unsqueeze(-1)

    slots = {"x": {"padding": "ZERO"}, "i": {"padding": "FILL_SENTINEL", "pad_value": 1}}
    with compiled(f, dynamic=True, buckets=[8], slots=slots) as g:
        for n in SIZES:
            args = (*two(n), torch.ones(n, dtype=torch.long))
            torch.testing.assert_close(g(*args), f(*args))
        (graph,) = [x for x in registry.graphs_of(g) if x.plan.bucketed]
        (entry,) = graph.entries.values()
        assert entry.counts
        args = [
            torch.randn(5, 4) if p.endswith(("x']", "y']")) else torch.ones(5, dtype=torch.long)
            for p in graph.plan.placeholders
        ]
        sizes = tuple(5 for _ in graph.plan.symbols)
        frame = entry.frame(sizes, args)
        assert entry.frame(sizes, args) is frame
        with Ops() as ops:
            frame.fill(args)
        assert set(ops.seen) == {"aten._foreach_copy_.default"}
        assert len(ops.seen) == frame.launches == 5  # constants of two dtypes, copies of two dtypes, one row 0


# -- values from elsewhere ---------------------------------------------------------------------------------------------


def test_source_fn_takes_the_arguments_place_everywhere(device: str) -> None:
    """Replayed, first and eager calls answer as the function does on what ``source_fn`` gives, not on the argument."""

    def source(given: Mapping[str, Any]) -> torch.Tensor:
        assert set(given) >= {"x", "y"}
        return given["x"] * 2

    with compiled(one, dynamic=True, buckets=[8], slots={"y": {"source_fn": source}}) as g:
        for n in (*SIZES, 9, 11):  # the last two exceed the largest bucket
            x, y = two(n, device)
            torch.testing.assert_close(g(x, y), one(x, x * 2))
        found = tgb.stats(g)
    assert found.replays == len(SIZES) - 1
    assert found.eager == {"beyond-largest-bucket": 2}


def test_source_fn_may_be_narrower() -> None:
    """int32 for an int64 argument is widened; a wider or another kind of dtype is an error."""

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.new_ones(4, 4)) + i.unsqueeze(-1)

    dtype = torch.int32
    slots = {"i": {"source_fn": lambda given: torch.arange(given["x"].shape[0], dtype=dtype)}}
    with compiled(f, dynamic=True, buckets=[8], slots=slots) as g:
        for n in SIZES:
            x, i = torch.randn(n, 4), torch.zeros(n, dtype=torch.long)
            torch.testing.assert_close(g(x, i), f(x, torch.arange(n)))
        dtype = torch.float32
        with pytest.raises(SlotError, match=r"source_fn returned torch\.float32, the argument is torch\.int64"):
            g(x, i)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (3, "source_fn returned int, not a tensor"),
        (torch.zeros(5, 3), r"source_fn returned \[5, 3\] on cpu, the argument is \[5, 4\] on cpu"),
    ],
)
def test_what_source_fn_must_not_return(result: Any, text: str) -> None:
    with compiled(one, dynamic=True, slots={"y": {"source_fn": lambda _: result}}) as g:
        with pytest.raises(SlotError, match=text) as caught:
            g(*two(5))
        assert caught.value.code == "BCG312"


def test_a_slot_that_is_not_supplied_holds_its_policys_value(device: str) -> None:
    """Never what an earlier call left there: with a value the whole slot holds it, without one the call is an error."""
    there = True

    def source(given: Mapping[str, Any]) -> torch.Tensor | None:
        return given["y"] if there else None

    for declared, value in (
        ({"padding": "ZERO"}, 0.0),
        ({"padding": "FILL_SENTINEL", "pad_value": 3}, 3.0),
        ({"padding": "FILL_ONCE", "pad_value": 3}, 3.0),
        ({"padding": "REPEAT_ROW"}, None),
        ({"padding": "KEEP_PAD"}, None),
        ({"padding": "FOREACH_COPY"}, None),
    ):
        with compiled(one, dynamic=True, buckets=[8], slots={"y": {**declared, "source_fn": source}}) as g:
            for n, there in zip((*SIZES, 9), itertools.cycle([True, False])):
                x, y = two(n, device)
                if there:
                    torch.testing.assert_close(g(x, y), one(x, y))
                elif value is None:
                    with pytest.raises(SlotError, match="the call does not supply it"):
                        g(x, y)
                else:
                    torch.testing.assert_close(g(x, y), one(x, torch.full_like(y, value)))


def test_a_computed_slot_is_written_in_place(device: str) -> None:
    """``post_fill`` gets the buffer's own real rows; an eager call gets memory of its own, and the same answer."""
    seen: list[int] = []

    def positions(rows: torch.Tensor, given: Mapping[str, Any]) -> None:
        seen.append(rows.data_ptr())
        torch.add(given["x"], 1, out=rows)

    slots = {"y": {"copy_from_fb": False, "post_fill": positions}}
    with compiled(one, dynamic=True, buckets=[8], slots=slots) as g:
        for n in (*SIZES, 9):
            x, y = two(n, device)
            torch.testing.assert_close(g(x, y), one(x, x + 1))
        own = buffer(g, "y")
        assert seen[:-1] == [own.data_ptr()] * len(SIZES)
        assert seen[-1] != own.data_ptr()
        assert torch.equal(own[7:], own[:1])  # row 0, as undeclared: written after post_fill


def test_a_computed_slot_that_eager_code_reads_too() -> None:
    """It sees the computed value as well, as memory of its own."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.relu(x @ x.new_ones(4, 4)) + y
        return z, torch.sort(y, 0).values

    slots = {"y": {"copy_from_fb": False, "post_fill": lambda rows, given: rows.copy_(given["x"] + 1)}}
    with compiled(f, dynamic=True, buckets=[8], slots=slots) as g:
        for n in SIZES:
            x, y = two(n)
            torch.testing.assert_close(g(x, y), f(x, x + 1))
        assert tgb.stats(g).replays
        assert padded_plan(g).regions


def test_a_computed_slot_without_post_fill_is_a_constant() -> None:
    slots = {"y": {"copy_from_fb": False, "padding": "FILL_SENTINEL", "pad_value": 2}}
    with compiled(one, dynamic=True, buckets=[8], slots=slots) as g:
        for n in SIZES:
            x, y = two(n)
            torch.testing.assert_close(g(x, y), one(x, torch.full_like(y, 2.0)))


# -- checked functions -------------------------------------------------------------------------------------------------


def wide(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``positions`` is ``[3, T]``: padded on its last dimension."""
    return torch.relu(x @ x.new_ones(4, 4)) + positions.sum(0).unsqueeze(-1)


def test_shape_fn_and_slice_fn_for_a_layout_that_is_not_padded_in_front(device: str) -> None:
    asked: list[tuple[int, int]] = []

    def rows(memory: torch.Tensor, bs: int, tokens: int) -> torch.Tensor:
        asked.append((bs, tokens))
        return memory[:, :tokens]

    declared = {
        "axis": "tokens",
        "padding": "FILL_SENTINEL",
        "pad_value": 1,
        "shape_fn": lambda bs, tokens: (3, tokens),
        "slice_fn": rows,
    }
    with compiled(wide, dynamic=True, buckets=[8], slots={"positions": declared}) as g:
        for n in SIZES:
            x, positions = torch.randn(n, 4, device=device), torch.ones(3, n, device=device, dtype=torch.long)
            torch._dynamo.mark_static(positions, 0)
            torch.testing.assert_close(g(x, positions), wide(x, positions))
        assert tgb.stats(g).replays == len(SIZES) - 1
    assert {t for _, t in asked} == set(SIZES)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda memory, bs, tokens: memory[:tokens], "slice_fn gives rows of shape"),
        (lambda memory, bs, tokens: memory[:, 8 - tokens :], "slice_fn gives other rows"),
    ],
)
def test_a_slice_that_is_not_the_real_rows(function: Any, text: str) -> None:
    with compiled(wide, dynamic=True, buckets=[8], slots={"positions": {"slice_fn": function}}) as g:
        positions = torch.ones(3, 5, dtype=torch.long)
        torch._dynamo.mark_static(positions, 0)
        with pytest.raises(SlotError, match=text):
            g(torch.randn(5, 4), positions)


def test_a_shape_that_the_buffer_has_not() -> None:
    """Each call of the key is eager, and says why."""
    declared = {"y": {"shape_fn": lambda bs, tokens: (tokens, 5)}}
    with compiled(one, dynamic=True, buckets=[8], slots=declared) as g:
        for n in SIZES:
            args = two(n)
            torch.testing.assert_close(g(*args), one(*args))
        found = tgb.stats(g)
    assert found.eager == {"slot-mismatch": len(SIZES)}
    assert "slot 'y' has shape (8, 4), its shape_fn says (8, 5)" in found.reasons["slot-mismatch"].text


@pytest.mark.parametrize(("axes", "wanted"), [(("bs", "tokens"), (8, 16)), (("tokens", "bs"), (16, 8))])
def test_bs_and_tokens_of_two_padded_sizes(axes: tuple[str, str], wanted: tuple[int, int]) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(a @ a.new_ones(4, 4)), torch.relu(b @ b.new_ones(4, 4))

    seen: list[tuple[int, int]] = []

    def shape(bs: int, tokens: int) -> tuple[int, ...]:
        seen.append((bs, tokens))
        return 8, 4

    slots = {"a": {"axis": axes[0], "shape_fn": shape}, "b": {"axis": axes[1]}}
    with compiled(f, dynamic=True, buckets={"a": [8], "b": [16]}, slots=slots) as g:
        for n, m in ((5, 12), (6, 11), (7, 13)):
            a, b = torch.randn(n, 4), torch.randn(m, 4)
            torch.testing.assert_close(g(a, b), f(a, b))
        assert tgb.stats(g).replays
    assert set(seen) == {wanted}
