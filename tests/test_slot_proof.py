"""Declared tails against the proof: what they let be captured, what is refused and why, and the answers either way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_harness import compiled, take_one

import torch_graph_backend as tgb
from torch_graph_backend.passes.padding import analyse
from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.plan import Plan

SIZES = (5, 6, 3, 7, 5, 2, 7)
ROWS = 12

Make = Callable[[int], tuple[Any, ...]]


def plan_of(function: Callable[..., Any]) -> Plan:
    """The plan of the graph that is padded."""
    plans = tgb.plans(function)
    return next((p for p in plans if p.bucketed), plans[-1])


def check(
    function: Callable[..., Any],
    make: Make,
    slots: dict[str, Any],
    device: str = "cpu",
    sizes: Sequence[int] = SIZES,
    memory: Callable[[], torch.Tensor] | None = None,
    rows: slice = slice(None),
    dynamic: bool | None = True,
) -> Plan:
    """Every call answers as eager code; of the memory that it changes, ``rows`` are compared. ``dynamic=None``: numbers
    of the function's closure are constants."""
    ours, theirs = (memory().to(device), memory().to(device)) if memory else (None, None)
    with compiled(function, dynamic=dynamic, buckets=[8], slots=slots) as g:
        for n in sizes:
            args = [a.to(device) for a in make(n)]
            copies = [a.clone() for a in args]
            for a in (*args, *(() if ours is None else (ours,))):
                if a.shape[0] >= ROWS:
                    torch._dynamo.mark_static(a)
            got = g(*args, *(() if ours is None else (ours,)))
            want = function(*copies, *(() if theirs is None else (theirs,)))
            torch.testing.assert_close(got, want)
            if ours is not None:
                torch.testing.assert_close(ours[rows], theirs[rows])
        tgb.stats(g).expect(min_replays=2)
        return plan_of(g)


def captured(plan: Plan, op: str) -> bool:
    """Whether every operation of this name is captured."""
    lines = [(o, o in s.ops) for s in plan.steps for o in s.ops if o.op.startswith(op)]
    assert lines, plan
    return all(o.reason is None for o, _ in lines)


def slot(plan: Plan, name: str) -> str:
    return next(s.policy.value for s in plan.slots if s.name == f"L['{name}']")


# -- reads through an index --------------------------------------------------------------------------------------------


def look_up(x: torch.Tensor, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x.new_ones(4, 4)) + table[index]


def look_up_args(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4), torch.randint(0, ROWS, (n,)), torch.randn(ROWS, 4)


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"padding": "ZERO"}, ""),
        ({"padding": "FILL_SENTINEL", "pad_value": ROWS - 1}, ""),
        ({"padding": "FILL_SENTINEL", "pad_value": ROWS}, "would have to be rewritten"),
        ({"padding": "FILL_SENTINEL", "pad_value": -1}, "would have to be rewritten"),
        ({"padding": "KEEP_PAD"}, "would have to be rewritten"),
        ({"padding": "FOREACH_COPY"}, "would have to be rewritten"),
        ({"padding": "FILL_ONCE", "pad_value": 1}, "would have to be rewritten"),
    ],
    ids=str,
)
def test_an_index_that_is_read(declared: dict, why: str, device: str) -> None:
    plan = check(look_up, look_up_args, {"index": declared}, device)
    assert captured(plan, "aten.index.Tensor"), plan
    if not why:
        assert (slot(plan, "index"), plan.refused) == (declared["padding"], ())
        return
    ((name, reason),) = plan.refused
    assert (name, reason.code, slot(plan, "index")) == ("index", "slot-refused", "REPEAT_ROW")
    assert why in reason.text
    assert "look_up" in reason.where
    assert "not applied: slot-refused: slot 'index'" in str(plan)


def test_a_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(look_up, look_up_args, {"index": {"padding": "KEEP_PAD"}})
    assert any("not applied: slot-refused: slot 'index' keeps old entries" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("policy", ["KEEP_PAD", "FOREACH_COPY", "FILL_ONCE"])
def test_a_stale_index_that_is_clamped_is_fine(policy: str) -> None:
    def f(x: torch.Tensor, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.new_ones(4, 4)) + table[index.clamp(0, ROWS - 1)]

    plan = check(f, look_up_args, {"index": {"padding": policy}})
    assert (slot(plan, "index"), plan.refused) == (policy, ())


@pytest.mark.parametrize(("shift", "good"), [(0, True), (ROWS - 1, True), (ROWS, False), (-1, False)])
def test_arithmetic_on_an_index_is_followed(shift: int, good: bool) -> None:
    """``0 + shift`` is where padded rows look: an index computed from a ZERO slot must not leave the table either."""

    def f(x: torch.Tensor, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.new_ones(4, 4)) + table.gather(0, (index + shift).unsqueeze(-1).expand(-1, 4))

    def args(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 4), torch.randint(0, ROWS, (n,)) - shift, torch.randn(ROWS, 4)

    plan = check(f, args, {"index": {"padding": "ZERO"}}, dynamic=None)
    assert (slot(plan, "index") == "ZERO") is good
    assert (plan.refused == ()) is good


def test_one_refusal_takes_no_other_with_it() -> None:
    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.new_ones(4, 4)) + table[a] + table[b]

    def args(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 4), torch.randint(0, ROWS, (n,)), torch.randint(0, ROWS, (n,)), torch.randn(ROWS, 4)

    plan = check(f, args, {"a": {"padding": "KEEP_PAD"}, "b": {"padding": "ZERO"}, "x": {"padding": "KEEP_PAD"}})
    assert [name for name, _ in plan.refused] == ["a"]
    assert [slot(plan, n) for n in ("a", "b", "x")] == ["REPEAT_ROW", "ZERO", "KEEP_PAD"]


# -- divisors and sums -------------------------------------------------------------------------------------------------


def divided(x: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(x @ x.new_ones(4, 4)), 100 // length


def divided_args(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4), torch.randint(1, 9, (n,))


@pytest.mark.parametrize(
    ("declared", "good"),
    [
        ({"padding": "FILL_SENTINEL", "pad_value": 1}, True),
        ({"padding": "FILL_SENTINEL", "pad_value": 0}, False),
        ({"padding": "ZERO"}, False),
        ({"padding": "FOREACH_COPY"}, False),
        ({"padding": "FILL_ONCE", "pad_value": 1}, False),
    ],
    ids=str,
)
def test_a_length_that_divides(declared: dict, good: bool) -> None:
    """A padded length of zero would raise, for whole rows that nobody sees."""
    plan = check(divided, divided_args, {"length": declared})
    assert captured(plan, "aten.floor_divide")
    assert (slot(plan, "length") == declared["padding"]) is good
    assert (plan.refused == ()) is good


def summed(x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x.new_ones(4, 4))
    return y * (extra * 2 + extra).sum()


def summed_args(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4), torch.randn(n)


@pytest.mark.parametrize(
    ("declared", "repaired"),
    [
        (None, True),
        ({"padding": "ZERO"}, False),
        ({"padding": "FILL_SENTINEL", "pad_value": 1}, True),
        ({"padding": "FILL_ONCE"}, True),
        ({"padding": "KEEP_PAD"}, True),
    ],
    ids=str,
)
def test_a_zero_tail_adds_nothing(declared: dict | None, repaired: bool, device: str) -> None:
    """Followed through ``extra * 2 + extra``. Under any other tail the sum has to be masked, and still is right."""
    plan = check(summed, summed_args, {} if declared is None else {"extra": declared}, device)
    assert plan.refused == ()
    line = next(o for s in plan.steps for o in s.ops if o.op == "aten.sum")
    assert bool(line.repaired or line.reason) is repaired
    assert line.declared == ("" if repaired else "relies on the tail of extra = 0")
    assert [o.op for o in plan.declared_ops()] == ([] if repaired else ["aten.sum"])


@pytest.mark.parametrize(("shift", "neutral"), [(0.0, True), (1.0, False)])
def test_a_tail_that_is_no_longer_zero_is_masked(shift: float, neutral: bool) -> None:
    def f(x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ x.new_ones(4, 4)) + extra.unsqueeze(-1)) * (extra + shift).sum()

    plan = check(f, summed_args, {"extra": {"padding": "ZERO"}}, dynamic=None)
    assert bool(plan.declared_ops()) is neutral


def test_a_product_with_another_tensor_is_no_constant() -> None:
    """``0 * w`` is zero only where ``w`` is finite: not assumed."""

    def f(x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ x.new_ones(4, 4))
        return y * (extra * y[:, 0]).sum()

    assert not check(f, summed_args, {"extra": {"padding": "ZERO"}}).declared_ops()


# -- writes through an index -------------------------------------------------------------------------------------------


def added(x: torch.Tensor, loc: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x.new_ones(4, 4))
    cache.index_add_(0, loc, y)
    return y + 1


def added_args(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4), torch.randint(1, ROWS, (n,))


def cache() -> torch.Tensor:
    return torch.zeros(ROWS + 1, 4)


def test_an_accumulating_write_is_eager_without_a_declaration() -> None:
    assert not captured(check(added, added_args, {}, memory=cache), "aten.index_add_")


@pytest.mark.parametrize(
    ("declared", "row"),
    [({"padding": "ZERO"}, 0), ({"padding": "FILL_SENTINEL", "pad_value": ROWS}, ROWS)],
    ids=str,
)
def test_an_accumulating_write_to_a_reserved_row(declared: dict, row: int, device: str) -> None:
    """Accepted, and marked: every other row is eager's; the reserved one is written."""
    rows = slice(1, None) if row == 0 else slice(0, row)
    plan = check(added, added_args, {"loc": declared}, device, memory=cache, rows=rows)
    assert captured(plan, "aten.index_add_")
    (line,) = plan.declared_ops()
    assert line.declared == f"padded rows write the reserved row of loc = {row}"
    assert f"declared: aten.index_add_ {line.declared}" in str(plan)


def test_what_relies_on_a_declared_tail_is_audited(device: str) -> None:
    """By default, as everything that is the user's word; a reserved row may hold what it likes, as long as nobody reads
    it. A tail that the runtime writes is left as it is: the proof takes it as given."""

    def reads(x: torch.Tensor, loc: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = added(x, loc, cache)
        return y + cache.sum(0)

    cases = (
        (added, added_args, {"loc": {"padding": "ZERO"}}, cache, True),
        (summed, summed_args, {"extra": {"padding": "ZERO"}}, None, True),
        (reads, added_args, {"loc": {"padding": "ZERO"}}, cache, False),
    )
    for function, make, slots, memory, good in cases:
        torch._dynamo.reset()
        ours = memory().to(device) if memory is not None else None
        with compiled(function, dynamic=True, buckets=[8], slots=slots) as g:
            for n in (5, 6, 5, 7, 6):
                args = [a.to(device) for a in make(n)] + ([] if ours is None else [ours])
                if ours is not None:
                    torch._dynamo.mark_static(ours)
                want = function(*[a.clone() for a in args])
                got = g(*args)
                if good:
                    torch.testing.assert_close(got, want)
            found = tgb.stats(g)
        assert found.audits >= (2 if good else 1), found
        assert bool(found.audit_failures) is not good, found


@pytest.mark.parametrize("value", [ROWS + 1, -1, ROWS + 7])
def test_a_reserved_row_that_does_not_exist(value: int) -> None:
    plan = check(added, added_args, {"loc": {"padding": "FILL_SENTINEL", "pad_value": value}}, memory=cache)
    assert not captured(plan, "aten.index_add_")
    assert not plan.declared_ops()


def test_a_reserved_row_of_memory_whose_size_is_in_the_key() -> None:
    """Whether it exists is asked at each key: calls on memory without such a row are eager, and eager's to the byte."""
    with compiled(added, dynamic=True, buckets=[8], slots={"loc": {"padding": "FILL_SENTINEL", "pad_value": 15}}) as g:
        both = {rows: (torch.zeros(rows, 4), torch.zeros(rows, 4)) for rows in (13, 16)}
        for rows, n in ((13, 5), (13, 6), (16, 5), (16, 6), (16, 7)):
            (x, loc), (ours, theirs) = added_args(n), both[rows]
            torch.testing.assert_close(g(x, loc, ours), added(x, loc, theirs))
            torch.testing.assert_close(ours[:15], theirs[:15])
        found = tgb.stats(g)
    assert found.eager == {"bucket-invalid": 2}
    assert found.replays + found.first_calls == 3


def test_index_put_and_scatter_add_to_a_reserved_row() -> None:
    def f(x: torch.Tensor, loc: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ x.new_ones(4, 4))
        memory.index_put_((loc,), y, accumulate=True)
        memory.scatter_add_(0, loc.unsqueeze(-1).expand(-1, 4), y)
        return y + 1

    plan = check(f, added_args, {"loc": {"padding": "ZERO"}}, memory=cache, rows=slice(1, None))
    assert [o.op for o in plan.declared_ops()] == ["aten.index_put_", "aten.scatter_add_"]


def written(x: torch.Tensor, loc: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x.new_ones(4, 4))
    cache.index_copy_(0, loc, y)
    return y + 1


def written_args(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4), torch.randperm(ROWS)[:n]


@pytest.mark.parametrize("declared", [None, {"padding": "ZERO"}, {"padding": "FILL_SENTINEL", "pad_value": 3}], ids=str)
def test_a_write_that_can_be_repaired_leaves_no_trace(declared: dict | None, device: str) -> None:
    """Every row is eager's, row 0 too: a repair is preferred to a reserved row."""
    plan = check(written, written_args, {} if declared is None else {"loc": declared}, device, memory=cache)
    assert captured(plan, "aten.index_copy_")
    assert not plan.declared_ops()
    assert plan.repairs()


@pytest.mark.parametrize("policy", ["KEEP_PAD", "FOREACH_COPY", "FILL_ONCE"])
def test_old_entries_on_the_index_of_a_captured_write_are_refused(policy: str) -> None:
    """The one mistake that destroys somebody's memory: refused whatever a repair would make of it."""
    plan = check(written, written_args, {"loc": {"padding": policy}}, memory=cache)
    ((name, reason),) = plan.refused
    assert (name, slot(plan, "loc")) == ("loc", "REPEAT_ROW")
    assert "keeps old entries in its tail, and aten.index_copy_ writes where it says" in reason.text
    assert "written" in reason.where
    assert "declare ZERO" in reason.fix


def test_also_behind_arithmetic() -> None:
    def f(x: torch.Tensor, loc: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ x.new_ones(4, 4))
        memory.index_copy_(0, loc * 1 + 0, y)
        return y + 1

    plan = check(f, written_args, {"loc": {"padding": "KEEP_PAD"}}, memory=cache)
    assert [name for name, _ in plan.refused] == ["loc"]


def test_an_argument_that_the_graph_changes_has_no_declared_tail() -> None:
    """Its later state comes through a bridge, which is padded with copies of row 0."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.relu(x @ x.new_ones(4, 4)) + y
        y.add_(1)
        return z * y

    def args(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 4), torch.randn(n, 4)

    ((name, reason),) = check(f, args, {"y": {"padding": "ZERO"}}).refused
    assert name == "y"
    assert "the graph changes this argument" in reason.text


def test_the_proof_takes_no_tail_of_what_is_changed_for_a_fact() -> None:
    """Also where nobody refused it before: a later read of the argument itself finds other entries."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    seen = take_one(f, torch.randn(5), dynamic=True)
    value, total = (
        next(p for p in seen.normal.placeholders if isinstance(p.meta["val"], torch.Tensor)),
        seen.one("aten.sum"),
    )
    symbol = value.meta["val"].shape[0].node.expr
    value.meta["tail"] = Tail(0)
    for mutated in ((), (value,)):
        found = analyse(seen.graph, [symbol], eager={}, mutated=frozenset(mutated))
        assert (total in found.reasons) is bool(mutated)


# -- mismatches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"dtype": torch.int32}, "is declared torch.int32, the argument is torch.int64"),
        ({"device": "cuda"}, "is declared on cuda, the argument is on cpu"),
        ({"axis": "none"}, "is declared without a padded size, but has s"),
        ({"padding": "FILL_SENTINEL", "pad_value": 0.5}, "has pad_value 0.5, which is no torch.int64"),
        ({"padding": "FILL_SENTINEL", "pad_value": 2**70}, "which is no torch.int64"),
    ],
    ids=str,
)
def test_a_declaration_that_the_graph_contradicts(declared: dict, text: str) -> None:
    plan = check(look_up, look_up_args, {"index": {"padding": "ZERO", **declared}})
    ((name, reason),) = plan.refused
    assert (name, slot(plan, "index")) == ("index", "REPEAT_ROW")
    assert text in reason.text


@pytest.mark.parametrize(
    ("slots", "refused"),
    [
        ({"x": {"axis": "bs"}, "index": {"axis": "bs", "padding": "ZERO"}}, []),
        ({"x": {"axis": "tokens"}, "index": {"axis": "tokens", "padding": "ZERO"}}, []),
        ({"x": {"axis": "tokens"}, "index": {"axis": "bs", "padding": "ZERO"}}, ["index"]),
        ({"table": {"axis": "none"}}, []),
        ({"table": {"axis": "bs"}}, ["table"]),
    ],
    ids=str,
)
def test_axes(slots: dict, refused: list[str]) -> None:
    """One size has one name, and a slot along a size has to have one."""
    assert [name for name, _ in check(look_up, look_up_args, slots).refused] == refused


def test_two_sizes_are_not_both_requests() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(a @ a.new_ones(4, 4)), torch.relu(b @ b.new_ones(4, 4))

    with compiled(f, dynamic=True, buckets=[8], slots={n: {"axis": "bs", "padding": "ZERO"} for n in "ab"}) as g:
        for n, m in ((5, 3), (6, 2), (7, 4)):
            a, b = torch.randn(n, 4), torch.randn(m, 4)
            torch.testing.assert_close(g(a, b), f(a, b))
        ((name, reason),) = plan_of(g).refused
    assert name == "b"
    assert "along 'bs', which is another size" in reason.text
