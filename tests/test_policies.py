"""Padding policies on buffers of their own: real rows, tails, and not one byte beside them, over any calls.

Each policy is held against a model of what it promises, written in the simplest way that is. A policy whose test would
pass with another one in its place is tested in name alone; so every pair is tried.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import sympy
import torch
from graph_harness import Ops
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_graph_backend as tgb
from torch_graph_backend import slots as slots_room
from torch_graph_backend.config import Config
from torch_graph_backend.errors import BadOption, UnknownOption
from torch_graph_backend.passes.padding_tails import STALE, Tail
from torch_graph_backend.policies import GraphSlot, PaddingPolicy, parse_slots
from torch_graph_backend.slots import Filler, Window

P = PaddingPolicy
B, T = sympy.symbols("B T", integer=True, positive=True)
ONE = sympy.Integer(1)
BUCKET = {B: 4, T: 6}
VALUE = 7
MARKER = 99  # what freshly allocated memory holds
FOREIGN = -77
GUARD = 3

#: Axis -> sizes of a slot, and its padded dimensions.
SHAPES = {
    "bs": ((B, 3), {0: B}),
    "tokens": ((3, T), {1: T}),
    "bs and tokens": ((B, T, 2), {0: B, 1: T}),
    "none": ((5, 2), {}),
}
DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool, torch.bfloat16)


class Slot:
    """One buffer inside foreign memory, filled by the product, beside a model of what it has to hold."""

    def __init__(self, axis: str, applied: P, promised: P, dtype: torch.dtype) -> None:
        self.dims, self.padded = SHAPES[axis]
        self.applied, self.promised, self.dtype = applied, promised, dtype
        shape = self.shape(BUCKET)
        numel = torch.Size(shape).numel()
        self.memory = torch.full((numel + 2 * GUARD,), FOREIGN).to(dtype)
        self.before = self.memory.clone()
        self.buffer = self.memory[GUARD : GUARD + numel].view(shape)
        self.buffer.fill_(MARKER)
        applied.start(self.buffer, value_of(applied))
        self.window = Window(tuple((d, (_factor(s),)) for d, s in self.padded.items()))
        start = {P.FILL_ONCE: VALUE, P.FOREACH_COPY: 0}.get(promised, MARKER)
        self.model = torch.full(shape, start).to(dtype)

    def shape(self, sizes: dict) -> tuple[int, ...]:
        return tuple(sizes.get(d, d) for d in self.dims)

    def call(self, real: dict, seed: int) -> torch.Tensor:
        """A source for these sizes, filled in, and what the buffer has to hold then."""
        shape = self.shape(real)
        source = torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        self.promise(source, real)
        return source

    def promise(self, source: torch.Tensor, real: dict) -> None:
        """Entry by entry."""
        for at in itertools.product(*map(range, self.model.shape)):
            inside = all(i < real[self.padded[d]] for d, i in enumerate(at) if d in self.padded)
            row = tuple(i if d not in self.padded or i < real[self.padded[d]] else 0 for d, i in enumerate(at))
            if inside or self.promised is P.REPEAT_ROW:
                self.model[at] = source[row]
            elif self.promised in (P.ZERO, P.FILL_SENTINEL):
                self.model[at] = 0 if self.promised is P.ZERO else VALUE

    def check(self) -> None:
        assert torch.equal(self.buffer, self.model), f"{self.buffer}\n{self.model}"
        assert torch.equal(self.memory[:GUARD], self.before[:GUARD])
        assert torch.equal(self.memory[-GUARD:], self.before[-GUARD:])


def _factor(symbol: sympy.Symbol):
    from torch_graph_backend.slots import Factor

    return Factor(BUCKET[symbol], symbol)


def value_of(policy: P) -> int:
    return VALUE if policy.takes_value else 0


def fill(slots: list[Slot], real: dict, seed: int) -> Filler:
    """One call: all slots at once, as a frame fills them."""
    tails = [s.applied.tail(value_of(s.applied)) for s in slots]
    filler = Filler([s.buffer for s in slots], [s.window for s in slots], real, tails=tails)
    filler.fill([s.call(real, seed + i) for i, s in enumerate(slots)])
    return filler


calls = st.lists(st.tuples(st.integers(1, BUCKET[B]), st.integers(1, BUCKET[T])), min_size=1, max_size=6)
kinds = st.tuples(st.sampled_from(list(SHAPES)), st.sampled_from(list(P)), st.sampled_from(DTYPES))


@settings(max_examples=250, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=5), calls)
def test_every_policy_and_axis_over_any_calls(chosen: list, sizes: list) -> None:
    """Real part equals the source, the tail is what the policy promises, nothing outside the slot changes."""
    slots = [Slot(axis, policy, policy, dtype) for axis, policy, dtype in chosen]
    for k, (b, t) in enumerate(sizes):
        fill(slots, {B: b, T: t}, 10 * k)
        for slot in slots:
            slot.check()


def run(applied: P, promised: P, axis: str) -> None:
    """A large call, a small one, one in between: what a tail keeps shows up."""
    slot = Slot(axis, applied, promised, torch.int64)
    for k, (b, t) in enumerate([(3, 5), (1, 2), (2, 4)]):
        fill([slot], {B: b, T: t}, k)
        slot.check()


@pytest.mark.parametrize("axis", ["bs", "tokens", "bs and tokens"])
@pytest.mark.parametrize("policy", list(P))
def test_no_policy_can_stand_for_another(policy: P, axis: str) -> None:
    """The test of a policy passes with it, and fails with any other in its place."""
    run(policy, policy, axis)
    for other in P:
        if other is not policy:
            with pytest.raises(AssertionError):
                run(other, policy, axis)


@pytest.mark.parametrize("policy", list(P))
def test_a_slot_without_a_padded_size_is_all_real(policy: P) -> None:
    slot = Slot("none", policy, policy, torch.float32)
    fill([slot], {B: 1, T: 1}, 0)
    slot.check()


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one by one", "one kernel"])
def grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of grouping, on a CPU: that of a CPU, and that of a device on which dense groups are one kernel."""
    monkeypatch.setattr(slots_room, "GROUPED", {"cpu"} if request.param == "one kernel" else set())
    return request.param


@pytest.mark.parametrize("policy", list(P))
@pytest.mark.parametrize("axis", ["bs", "tokens", "bs and tokens"])
def test_operations_do_not_grow_with_the_slots_of_a_dtype(policy: P, axis: str, grouping: str) -> None:
    """Six and twelve slots take the same operations, all grouped; nothing but copies runs, so no tensor is made."""
    seen = []
    for count in (6, 12):
        slots = [Slot(axis, policy, policy, torch.float32) for _ in range(count)]
        tails = [s.applied.tail(value_of(s.applied)) for s in slots]
        filler = Filler([s.buffer for s in slots], [s.window for s in slots], {B: 2, T: 3}, tails=tails)
        sources = [s.call({B: 2, T: 3}, i) for i, s in enumerate(slots)]
        with Ops() as ops:
            filler.fill(sources)
        for slot in slots:
            slot.check()
        assert len(ops.seen) == filler.launches
        assert set(ops.seen) == {"aten._foreach_copy_.default"}
        seen.append(ops.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("policy", [P.REPEAT_ROW, P.ZERO, P.FILL_SENTINEL])
@pytest.mark.parametrize("axis", ["bs", "bs and tokens"])
def test_groups_that_can_be_one_kernel_are(policy: P, axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of a group is dense and laid out alike, where its slot is padded in front: a group that holds one
    expanded row is a kernel a tensor on CUDA."""
    monkeypatch.setattr(slots_room, "GROUPED", {"cpu"})
    for n in range(1, BUCKET[B]):
        slots = [Slot("bs", policy, policy, torch.float32) for _ in range(9)]
        slots += [Slot(axis, policy, policy, torch.float32) for _ in range(3)]
        filler = fill(slots, {B: n, T: 3}, n)
        for slot in slots:
            slot.check()
        groups = [*filler.constants, *filler.tails]
        dense = [all(t.is_contiguous() and t.stride() == r.stride() for t, r in zip(*g, strict=True)) for g in groups]
        front = {s.memory.data_ptr() for s in slots if list(s.padded) == [0]}
        for good, (targets, _) in zip(dense, groups, strict=True):
            assert good or not any(t.untyped_storage().data_ptr() in front for t in targets)
        assert filler.launches <= 8


@settings(max_examples=150, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=9), calls)
def test_every_policy_where_dense_groups_are_one_kernel(chosen: list, sizes: list) -> None:
    """The same promises, with tails that are doubled."""
    before, slots_room.GROUPED = slots_room.GROUPED, {"cpu"}
    try:
        test_every_policy_and_axis_over_any_calls.hypothesis.inner_test(chosen, sizes)
    finally:
        slots_room.GROUPED = before


def test_groups_are_pairs_of_dtypes() -> None:
    """A source of another dtype than its buffer's is a group of its own, and is converted."""
    buffers = [torch.zeros(4, dtype=d) for d in (torch.int64, torch.int64, torch.float32)]
    windows = [Window(((0, (_factor(B),)),))] * 3
    sources = [torch.tensor([1, 2], dtype=d) for d in (torch.int32, torch.int64, torch.float32)]
    filler = Filler(buffers, windows, {B: 2}, dtypes=[s.dtype for s in sources])
    filler.fill(sources)
    assert [b.tolist() for b in buffers] == [[1, 2, 1, 1]] * 3
    assert (len(filler.groups), len(filler.tails)) == (3, 2)


def test_numbers_share_the_operation_of_constant_tails() -> None:
    """Real sizes on the device are int64, as most constant tails are: they cost nothing more."""
    buffer, count = torch.zeros(4, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    filler = Filler([buffer], [Window(((0, (_factor(B),)),))], {B: 2}, tails=[Tail(5)], numbers=[(count, 2)])
    filler.fill([torch.tensor([1, 2])])
    assert (buffer.tolist(), count.item(), filler.launches) == ([1, 2, 5, 5], 2, 2)


# -- what is declared --------------------------------------------------------------------------------------------------

FIELDS = [
    "name", "shape_fn", "dtype", "axis", "device", "padding_policy", "pad_value", "enabled", "copy_from_fb",
    "post_fill", "slice_fn", "source_fn",
]  # fmt: skip


def test_the_public_names_are_those_of_the_field() -> None:
    assert [f.name for f in dataclasses.fields(tgb.GraphSlot)] == FIELDS
    field = {"KEEP_PAD", "FILL_SENTINEL", "ZERO", "FOREACH_COPY", "FILL_ONCE"}
    assert set(tgb.PaddingPolicy.__members__) == field | {"REPEAT_ROW"}
    slot = tgb.GraphSlot("x")
    assert (slot.padding_policy, slot.axis, slot.enabled, slot.copy_from_fb) == (P.REPEAT_ROW, None, True, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        slot.name = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("policy", "tail"),
    [(P.REPEAT_ROW, None), (P.ZERO, Tail(0)), (P.FILL_SENTINEL, Tail(VALUE))]
    + [(p, STALE) for p in (P.KEEP_PAD, P.FOREACH_COPY, P.FILL_ONCE)],
)
def test_what_the_proof_is_told(policy: P, tail: Tail | None) -> None:
    assert policy.tail(value_of(policy)) == tail


def test_the_option_in_all_its_forms() -> None:
    as_dicts = parse_slots("slots", {"x": {"padding": "FILL_SENTINEL", "pad_value": 1, "axis": "bs"}, "y": {}})
    assert as_dicts == (GraphSlot("x", padding_policy=P.FILL_SENTINEL, pad_value=1, axis="bs"), GraphSlot("y"))
    assert parse_slots("slots", list(as_dicts)) == as_dicts
    assert parse_slots("slots", {"x": as_dicts[0], "y": {"padding_policy": P.REPEAT_ROW}}) == as_dicts
    assert parse_slots("slots", {}) == ()


def f(*_: object) -> None: ...


BAD = [
    ({"x": {"padding": "SENTINEL"}}, "slots['x'].padding"),
    ({"x": {"padding": "zero"}}, "slots['x'].padding"),
    ({"x": {"padding": None}}, "slots['x'].padding"),
    ({"x": {"padding": "ZERO", "padding_policy": P.ZERO}}, "slots['x'].padding"),
    ({"x": {"padding": "ZERO", "pad_value": 3}}, "slots['x'].pad_value"),
    ({"x": {"padding": "FILL_SENTINEL", "pad_value": "1"}}, "slots['x'].pad_value"),
    ({"x": {"axis": "batch"}}, "slots['x'].axis"),
    ({"x": {"dtype": "int64"}}, "slots['x'].dtype"),
    ({"x": {"device": "nowhere"}}, "slots['x'].device"),
    ({"x": {"enabled": 1}}, "slots['x'].enabled"),
    ({"x": {"slice_fn": 3}}, "slots['x'].slice_fn"),
    ({"x": {"post_fill": f}}, "slots['x'].post_fill"),
    ({"x": {"copy_from_fb": False}}, "slots['x'].copy_from_fb"),
    ({"x": {"copy_from_fb": False, "post_fill": f, "source_fn": f}}, "slots['x'].source_fn"),
    ({"x": 3}, "slots['x']"),
    ({"x": GraphSlot("y")}, "slots['x']"),
    ({"": {}}, "slots"),
    ({3: {}}, "slots"),
    ([{"name": "x"}], "slots"),
    ([GraphSlot("x"), GraphSlot("x")], "slots"),
    ("x", "slots"),
]


@pytest.mark.parametrize(("value", "option"), BAD, ids=[f"{i}-{option}" for i, (_, option) in enumerate(BAD)])
def test_a_bad_declaration_is_refused_by_name(value: object, option: str) -> None:
    with pytest.raises(BadOption) as caught:
        Config.parse({"slots": value})
    assert caught.value.option == option


def test_a_wrong_policy_names_the_right_ones() -> None:
    with pytest.raises(BadOption, match="'REPEAT_ROW' or 'ZERO' or 'FILL_SENTINEL'"):
        Config.parse({"slots": {"x": {"padding": "SENTINEL"}}})


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UnknownOption) as caught:
        Config.parse({"slots": {"x": {"pad_valu": 3}}})
    assert (caught.value.option, caught.value.nearest) == ("slots['x'].pad_valu", "slots['x'].pad_value")


def test_the_option_makes_a_round_trip() -> None:
    given_ = {"positions": {"padding": "ZERO"}, "lens": {"padding": "FILL_SENTINEL", "pad_value": 1, "axis": "bs"}}
    config = Config.parse({"slots": given_})
    assert config.to_dict() == {"slots": given_}
    assert hash(config) == hash(Config.parse(config.to_dict()))
    full = Config.parse({"slots": [GraphSlot("x", source_fn=f, dtype=torch.int64, device="cpu", enabled=False)]})
    assert Config.parse(full.to_dict()) == full
