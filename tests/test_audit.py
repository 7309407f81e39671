"""The option ``audit``: a wrong declaration is found and named, answers stay eager's, right programs pass untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import audit_compare, registry
from torch_graph_backend.audit_trial import Trial
from torch_graph_backend.config import Config
from torch_graph_backend.errors import BadOption
from torch_graph_backend.passes.padding_rules_declared import DECLARED, PROMISED

pytestmark = pytest.mark.usefixtures("no_grad")

W = 16


@torch.library.custom_op("tgb_audit::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Mixes its rows: not row-local, whatever anybody declares."""
    return x - x.mean(0)


@torch.library.custom_op("tgb_audit::shared", mutates_args=())
def shared(x: Tensor) -> Tensor:
    """What a row gets depends on how many there are."""
    return x / x.shape[0]


@torch.library.custom_op("tgb_audit::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """Row-local."""
    return x / x.norm(dim=-1, keepdim=True)


@torch.library.custom_op("tgb_audit::scribbles", mutates_args=())
def scribbles(x: Tensor, cache: Tensor) -> Tensor:
    """Adds every row to a cache, which it does not say."""
    cache.add_(x.sum(0))
    return x.clone()


for op in (centred, shared, scaled):
    op.register_fake(torch.empty_like)
scribbles.register_fake(lambda x, cache: torch.empty_like(x))


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    declared, promised = dict(DECLARED), dict(PROMISED)
    yield
    for table, before in ((DECLARED, declared), (PROMISED, promised)):
        table.clear()
        table.update(before)


class Net(nn.Module):
    """A custom operation among dense ones, a break, and a cache that a segment changes."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("cache", torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.cache.mul_(0.5).add_(1.0)
        h = self.op(h)
        return self.down(h.cumsum(0).softmax(0)) + self.cache


def tokens(n: int, device: str = "cpu") -> Tensor:
    x = torch.randn(n, W).to(device)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def pair(op: Callable[[Tensor], Tensor], device: str) -> tuple[Net, Net]:
    torch.manual_seed(0)
    net, other = Net(op).to(device), Net(op).to(device)
    other.load_state_dict(net.state_dict())
    return net, other


def check(fast: Any, net: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", [centred, shared], ids=["mixes rows", "reads the number of rows"])
def test_a_wrong_declaration_is_found_at_the_first_call(device: str, op: Any, caplog: Any) -> None:
    """Every answer is eager's from the first call on; the operation and its line are named; the rest is captured."""
    tgb.declare_row_local(op)
    net, other = pair(op, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8, 16]})
    for n in (5, 7, 5, 11, 13, 6, 8, 7):
        check(fast, net, other, tokens(n, device))
    stats = tgb.stats(net)
    (failure,) = stats.audit_failures
    assert failure.code == "audit-failed"
    assert f"tgb_audit.{op._name}" in failure.text
    assert failure.where.startswith("test_audit.py")
    assert "self.op(h)" in failure.where
    assert stats.eager == {"audit-failed": 1}, stats
    assert stats.replays >= 4
    assert caplog.text.count("an audit failed") == 1
    assert failure.advice.startswith("take back")
    plan = tgb.plans(net)[-1]
    assert plan.reasons()["audit-failed"] == 1
    assert "aten.linear" in plan.captured_ops()


def test_a_fault_that_only_a_replay_shows(device: str) -> None:
    """The first call fills its bucket: nothing can be audited then; the replay is."""
    tgb.declare_row_local(centred)
    net, other = pair(centred, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8]})
    check(fast, net, other, tokens(8, device))
    check(fast, net, other, tokens(8, device))
    assert tgb.stats(net).audits == 0
    check(fast, net, other, tokens(5, device))
    stats = tgb.stats(net)
    assert (stats.audits, stats.eager["audit-failed"]) == (1, 1)
    check(fast, net, other, tokens(5, device))


def test_a_fault_after_recording_ahead(device: str) -> None:
    tgb.declare_row_local(centred)
    net, other = pair(centred, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8, 16]})
    x = tokens(7, device)
    assert tgb.capture(fast, x, sizes=[7, 13]) == 2, "recorded with the plan that was made anew"
    other(x)
    for n in (7, 5, 13):
        check(fast, net, other, tokens(n, device))
    assert tgb.stats(net).eager == {"audit-failed": 1}


def test_off_is_off_and_wrong(device: str) -> None:
    """The test's own sharpness: without an audit the wrong declaration gives wrong answers."""
    tgb.declare_row_local(centred)
    net, other = pair(centred, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": "off"})
    fast(tokens(7, device))
    x = tokens(5, device)
    with pytest.raises(AssertionError):
        check(fast, net, other, x)
    assert tgb.stats(net).audits == 0


@pytest.mark.parametrize(("option", "audits"), [(None, 2), ("capture", 2), ("every:3", 4), ("every:1", 9), ("off", 0)])
def test_a_right_declaration_passes(device: str, option: Any, audits: int) -> None:
    """One key: its first call, its first replay, and as many replays as were asked for."""
    tgb.declare_row_local(scaled)
    net, other = pair(scaled, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": option}, dynamic=True)
    random = torch.get_rng_state()
    xs = [tokens(n, device) for n in (5, 7, 6, 5, 7, 3, 4, 2, 6)]
    torch.set_rng_state(random)
    for x in xs:
        check(fast, net, other, x)
    assert torch.equal(torch.get_rng_state(), random), "an audit draws nothing"
    stats = tgb.stats(net)
    assert (stats.audits, stats.replays, len(stats.audit_failures)) == (audits, 8, 0), stats
    assert (stats.seconds["audit"] > 0) == bool(audits)
    assert stats.expect(audits=audits, eager=0)


@pytest.mark.parametrize("op", [scaled, centred], ids=["right", "wrong"])
def test_segments_of_inductor_are_audited_too(device: str, op: Any) -> None:
    """Its rounding is no leak, and a leak in what it compiled is found."""
    tgb.declare_row_local(op)
    net, other = pair(op, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": "every:1", "inductor_max_size": 8})
    for n in (5, 7, 6, 5, 7):
        check(fast, net, other, tokens(n, device))
    stats = tgb.stats(net)
    assert len(stats.audit_failures) == (op is centred), stats
    assert stats.audits >= 3
    reasons = {r.code for graph in stats.by_graph for k in graph.keys.values() for r in k.plain}
    if "inductor-unavailable" not in reasons:
        assert any(k.compiled for graph in stats.by_graph for k in graph.keys.values()), stats


def test_what_nobody_declared_is_not_audited_unless_asked(device: str) -> None:
    for option, audits in ((None, 0), ("capture", 2)):
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(W, W), nn.ReLU()).to(device)
        fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": option}, dynamic=True)
        for n in (5, 6, 7):
            torch.testing.assert_close(fast(x := tokens(n, device)), net(x))
        assert tgb.stats(net).audits == audits


def test_indices_in_padded_rows_stay_valid(device: str) -> None:
    """A table that is looked up by an argument, by a computed index, and by rounded floats: no fill leaves it."""
    table = torch.randn(6, W).to(device)

    def f(x: Tensor, i: Tensor) -> Tensor:
        y = table[i] + table[(i * 2) % 6] + table[(x[:, 0].sigmoid() * 5).round().long()]
        return y * table[x.argmax(-1) % 6] + table[x.topk(2, -1).indices[:, 0] % 6]

    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "audit": "every:1"})
    tgb.declare_indices("i")
    for n in (5, 7, 6, 5):
        x, i = tokens(n, device), torch.randint(0, 6, (n,)).to(device)
        torch._dynamo.maybe_mark_dynamic(i, 0)
        torch.testing.assert_close(fast(x, i), f(x, i))
    stats = tgb.stats(fast)
    assert stats.audits == 4, stats
    assert not stats.eager, stats
    assert tgb.plans(fast)[-1].captured_ops()["aten.index.Tensor"] == 5


def test_a_fault_of_the_proof_itself(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is wrong, for an operation in the middle of a segment, which changes memory: found all the same."""
    from torch_graph_backend.passes import padding_rules_table as table
    from torch_graph_backend.passes.layout import Layout
    from torch_graph_backend.passes.padding_rules_base import Entry

    wrong = Entry(lambda call: Layout(call.tensor("self").layout.axes), frozenset())
    monkeypatch.setitem(table._ENTRIES, torch.ops.aten.index_add_.default, wrong)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(W, W)
            self.register_buffer("counts", torch.zeros(9, W))

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            h = self.proj(x)
            self.counts.mul_(0.5)
            self.counts.index_add_(0, i, h)
            return torch.relu(h) @ self.counts.T

    torch.manual_seed(0)
    net, other = Counts().to(device), Counts().to(device)
    other.load_state_dict(net.state_dict())
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": "capture"}, dynamic=True)
    for n in (5, 7, 6, 5, 4):
        x, i = tokens(n, device), torch.randint(0, 9, (n,)).to(device)
        torch.testing.assert_close(fast(x, i), other(x, i), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net.counts, other.counts, rtol=1e-4, atol=1e-5)
    (failure,) = tgb.stats(net).audit_failures
    assert "aten.index_add_" in failure.text
    assert "self.counts.index_add_" in failure.where


def test_what_is_not_deterministic_is_no_leak(device: str) -> None:
    """An operation that gives other bits at every run, as atomics do."""
    noise = torch.Generator().manual_seed(0)

    @torch.library.custom_op("tgb_audit::jittery", mutates_args=())
    def jittery(x: Tensor) -> Tensor:
        return x * (1 + 1e-7 * torch.rand((), generator=noise).item())

    jittery.register_fake(torch.empty_like)
    if device == "cuda":
        pytest.skip("it reads a number on the host, which no recording can")
    tgb.declare_row_local(jittery)
    net, other = pair(jittery, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "record": "second"}, dynamic=True)
    for n in (5, 7, 6):
        check(fast, net, other, tokens(n, device))
    assert tgb.stats(net).audits == 2
    assert not tgb.stats(net).audit_failures


@pytest.mark.parametrize("leaks", [False, True])
def test_sums_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch, leaks: bool) -> None:
    """Atomics may give the same bits whenever one fill is tried, and others with another: last digits are no leak."""

    @torch.library.custom_op("tgb_audit::atomic", mutates_args=())
    def atomic(x: Tensor) -> Tensor:
        other = x.isnan().any() | (x.abs() > 1e10).any()
        return x * torch.where(other, 1 + (0.1 if leaks else 2e-7), 1)

    atomic.register_fake(torch.empty_like)
    tgb.declare_row_local(atomic)
    monkeypatch.setattr(audit_compare, "ATOMIC", {"tgb_audit.atomic"})
    monkeypatch.setattr(audit_compare, "ATOMIC_DEVICES", {device})
    net, other = pair(atomic, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "record": "second"}, dynamic=True)
    for n in (5, 7, 6):
        check(fast, net, other, tokens(n, device))
    assert tgb.stats(net).audits == (1 if leaks else 2)
    assert bool(tgb.stats(net).audit_failures) == leaks
    assert all("atomic" in failure.text for failure in tgb.stats(net).audit_failures)


@pytest.mark.parametrize("where", ["before", "in the middle", "unknown place", "no fill runs"])
def test_segments_that_could_not_be_tried_are_no_audits(
    device: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted apart, with the reason; the call's answer and its effects are those of one call."""
    tgb.declare_row_local(scaled)
    net, other = pair(scaled, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": "every:1"}, dynamic=True)
    real, made = Trial.__init__, Trial.attempt
    first: set[int] = set()

    def start(self: Trial, *args: Any) -> None:
        real(self, *args)
        first.add(self.step.index)
        if where == "unknown place" and self.step.index == min(first):
            self.possible = False
        if where == "before" and self.step.index == min(first):
            raise torch.OutOfMemoryError("injected")

    def attempt(self: Trial, how: str = "") -> Any:
        found = made(self, how)
        if self.step.index == min(first) and how:
            if where == "in the middle":
                raise torch.OutOfMemoryError("injected")
            if where == "no fill runs" and how != "real size":
                raise ValueError("injected")
        return found

    monkeypatch.setattr(Trial, "__init__", start)
    monkeypatch.setattr(Trial, "attempt", attempt)
    if where == "no fill runs":
        monkeypatch.setattr("torch_graph_backend.audit.jumps", lambda step, _: step.index == min(first))
    for n in (5, 7, 6):
        check(fast, net, other, tokens(n, device))
    stats = tgb.stats(fast)
    segments = len(next(p for p in tgb.plans(fast) if p.bucketed).segments)
    stats.expect(audits=3 if segments > 1 else 0, unaudited=3, eager=0, replays=2)
    (reason,) = stats.unaudited_reasons
    assert reason.code == "not-audited"
    words = {"unknown place": "the place of some padding", "no fill runs": "cannot run with other contents"}
    assert words.get(where, "there was no memory for it") in reason.text
    assert reason.where.startswith("test_audit.py")
    assert f"audit     3 x {reason}" in str(stats)
    assert stats.to_dict()["unaudited_reasons"] == {str(reason): 3}
    assert stats.to_dict()["by_graph"][0]["unaudited"] == {str(reason): 3}
    assert caplog.text.count("could not be tried") + caplog.text.count("not-audited") == 1
    before = tgb.stats(fast)
    check(fast, net, other, tokens(4, device))
    assert (tgb.stats(fast) - before).unaudited == 1


def test_a_call_of_which_nothing_could_be_tried(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no audit at all."""
    net = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W)).to(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "audit": "every:1"}, dynamic=True)

    def start(*_: Any) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(Trial, "__init__", start)
    for n in (5, 7, 6):
        x = tokens(n, device)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    tgb.stats(net).expect(audits=0, unaudited=3, eager=0, replays=2)


def test_two_padded_sizes_are_audited_each(device: str) -> None:
    net = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W)).to(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [4, 8], "audit": "capture"})
    for shape, audits in (((8, 8), 0), ((8, 7), 1), ((8, 5), 1), ((6, 8), 2), ((7, 7), 3), ((5, 6), 3)):
        x = torch.randn(*shape, W).to(device)
        for d in (0, 1):
            torch._dynamo.mark_dynamic(x, d)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
        assert tgb.stats(net).audits == audits, shape


def test_strict_ops_says_no_after_a_failed_audit(device: str) -> None:
    tgb.declare_row_local(centred)
    fast = torch.compile(lambda x: centred(x * 2) + 1, backend="bcg", options={"buckets": [8], "strict": "ops"})
    x = tokens(5, device)
    torch.testing.assert_close(fast(x), centred(x * 2) + 1)
    with pytest.raises(tgb.TorchGraphBackendError, match="audit-failed"):
        fast(x)


@pytest.mark.parametrize("value", ["always", "every:0", "every:x", "every:", 3, True])
def test_bad_options(value: Any) -> None:
    with pytest.raises(BadOption, match="audit"):
        Config.parse({"audit": value})


def test_the_entry_is_dropped_with_its_plan(device: str) -> None:
    """Would catch memory of a plan that is no longer used."""
    tgb.declare_row_local(centred)
    net, _ = pair(centred, device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8]})
    fast(tokens(5, device))
    assert not registry.graphs_of(net)[0].entries


def test_a_computed_slot_whose_argument_is_expanded(device: str) -> None:
    """Its rows are computed, each by itself; at the real size too they lie side by side, unlike the argument's."""
    w = torch.randn(W, W).to(device)

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu((x + y) @ w) @ w, x.sum(0)

    def twice(rows: Tensor, given: Any) -> None:
        rows.copy_(given["y"] * 2)

    slots = {"x": {"padding": "ZERO", "copy_from_fb": False, "post_fill": twice}}
    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "slots": slots, "audit": "capture"})
    with torch.no_grad():
        for n in (5, 6, 7):
            x, y = torch.randn(1, W).to(device).expand(n, W), torch.randn(n, W).to(device)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(y, 0)
            torch.testing.assert_close(fast(x, y), f(y * 2, y))
    stats = tgb.stats(fast).expect(eager=0, replays=2, min_audits=2)
    assert not stats.audit_failures


@pytest.mark.parametrize("write", ["index_add_", "index_copy_"])
def test_a_constant_tail_that_names_a_trash_row(device: str, write: str) -> None:
    """Either alone, and both: what padded rows write to the row that nobody reads is not compared."""
    w = torch.randn(W, W).to(device)

    def f(x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        getattr(cache, write)(0, at, torch.relu(x @ w))
        return torch.relu(x @ w) @ w

    slot, trash = {"slots": {"at": {"padding": "ZERO"}}}, {"trash_rows": {"cache": 0}}
    for options in (slot, trash, slot | trash):
        torch._dynamo.reset()
        fast = torch.compile(f, backend="bcg", options={"buckets": [8], **options})
        cache, other = (torch.zeros(16, W).to(device) for _ in range(2))
        torch._dynamo.mark_static(cache)
        with torch.no_grad():
            for n in (5, 6, 7):
                x, at = torch.randn(n, W).to(device), torch.randperm(15)[:n].to(device) + 1
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(at, 0)
                torch.testing.assert_close(fast(x, at, cache), f(x, at, other))
                torch.testing.assert_close(cache[1:], other[1:])
        stats = tgb.stats(fast).expect(eager=0, replays=2)
        assert not stats.audit_failures
