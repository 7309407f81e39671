"""Rows that nobody reads: writes that add up are captured, all other memory is eager's, and an audit finds a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equality import POISONS, poisoned
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend.config import Config
from torch_graph_backend.errors import BadOption, DeclarationError
from torch_graph_backend.passes.padding_rules_declared import TRASH_ROWS
from torch_graph_backend.passes.repair_rules import TRASHED

pytestmark = pytest.mark.usefixtures("no_grad")

W, ROOM, TRASH = 8, 11, 4
Write = Callable[[Tensor, Tensor, Tensor], object]

#: Writes that add up, along dimension 0.
WRITES: dict[str, Write] = {
    "index_add_": lambda c, i, h: c.index_add_(0, i, h),
    "index_add_ scaled": lambda c, i, h: c.index_add_(0, i, h, alpha=0.5),
    "index_put_": lambda c, i, h: c.index_put_((i,), h, accumulate=True),
    "index_put_ of entries": lambda c, i, h: c.index_put_((i, i % W), h[:, 0], accumulate=True),
    "index_reduce_": lambda c, i, h: c.index_reduce_(0, i, h, "amax"),
    "scatter_add_": lambda c, i, h: c.scatter_add_(0, i[:, None].expand(-1, W), h),
    "scatter_reduce_": lambda c, i, h: c.scatter_reduce_(0, i[:, None].expand(-1, W), h, "amin"),
}


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    TRASH_ROWS.clear()


class Net(nn.Module):
    """Writes to a buffer between dense operations; ``read`` uses the buffer."""

    def __init__(self, write: Write, read: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.write, self.read = write, read
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("cache", torch.randn(ROOM, W))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        h = torch.relu(self.up(x)) + 0.1 * i[:, None]  # one size
        self.write(self.cache, i, h)
        return self.down(h) if self.read is None else self.read(self.down(h), self.cache)


def pair(device: str, *args: Any) -> tuple[Net, Net]:
    torch.manual_seed(0)
    net, other = Net(*args).to(device), Net(*args).to(device)
    other.load_state_dict(net.state_dict())
    return net, other


def given(n: int, device: str) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([r for r in range(ROOM) if r != TRASH])
    x, i = torch.randn(n, W).to(device), rows[torch.randint(0, ROOM - 1, (n,))].to(device)
    for t in (x, i):
        torch._dynamo.mark_dynamic(t, 0)
    return x, i


def run(fast: Any, net: Net, other: Net, n: int, device: str, whole: bool = False) -> None:
    x, i = given(n, device)
    torch.testing.assert_close(fast(x, i), other(x, i), rtol=1e-4, atol=1e-5)
    kept = [r for r in range(ROOM) if whole or r != TRASH]
    torch.testing.assert_close(net.cache[kept], other.cache[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_add_up_are_captured(device: str, name: str) -> None:
    """Whatever padded rows hold, every row but the one that nobody reads is eager's, call after call."""
    net, other = pair(device, WRITES[name])
    options = {"buckets": [8, 16], "trash_rows": {"cache": TRASH}}
    fast = torch.compile(net, backend="bcg", options=options)
    with poisoned() as poison:
        for k, n in enumerate((5, 7, 11, 6, 13, 8, 5)):
            poison.value = POISONS[k % len(POISONS)]
            run(fast, net, other, n, device)
    (plan,) = tgb.plans(net)
    assert len(plan.steps) == 1, plan
    assert plan.repairs()[TRASHED] == 1, plan
    assert plan.declared == (f"nobody reads row {TRASH} of L['self']._buffers['cache']",)
    stats = tgb.stats(net)
    assert stats.replays >= 4
    assert stats.audits >= 2, "declared, therefore audited"
    assert not stats.eager, stats


def test_without_the_declaration_it_runs_eagerly(device: str) -> None:
    net, other = pair(device, WRITES["index_add_"])
    fast = torch.compile(net, backend="bcg", options={"buckets": [8]})
    for n in (5, 7, 6):
        run(fast, net, other, n, device, whole=True)
    (plan,) = tgb.plans(net)
    assert "aten.index_add_" in plan.eager_ops()
    assert tgb.stats(net).audits == 0


def test_declared_for_the_process_and_undone(device: str) -> None:
    tgb.declare_trash_row("cache", TRASH)
    net, other = pair(device, WRITES["index_add_"])
    fast = torch.compile(net, backend="bcg", options={"buckets": [8]})
    for n in (5, 7, 6):
        run(fast, net, other, n, device)
    assert tgb.plans(net)[-1].repairs()[TRASHED] == 1
    tgb.undeclare_trash_row("cache")
    torch._dynamo.reset()
    run(fast, net, other, 5, device)
    assert not tgb.plans(net)[-1].repairs()
    with pytest.raises(DeclarationError, match="not declared"):
        tgb.undeclare_trash_row("cache")


def attends(y: Tensor, cache: Tensor) -> Tensor:
    return y @ cache.T


@pytest.mark.parametrize("cut", [False, True], ids=["in the segment", "in a later segment"])
def test_a_row_that_is_read_after_all(device: str, cut: bool) -> None:
    """The declaration is wrong: found at the first call, answers and the whole memory stay eager's."""
    read = (lambda y, c: attends(y.softmax(0), c) * 2) if cut else attends
    net, other = pair(device, WRITES["index_add_"], read)
    options = {"buckets": [8], "trash_rows": {"cache": TRASH}}
    fast = torch.compile(net, backend="bcg", options=options)
    if cut:
        tgb.register_break_op("aten::softmax")
    for n in (5, 7, 6, 5):
        run(fast, net, other, n, device, whole=True)
    stats = tgb.stats(net)
    (failure,) = stats.audit_failures
    assert "aten.index_add_" in failure.text
    assert "reads it" in failure.text
    assert "return y @ cache.T" in failure.text
    assert "c.index_add_" in failure.where
    assert "aten.index_add_" in tgb.plans(net)[-1].eager_ops()


def test_an_argument_in_a_list(device: str) -> None:
    def f(x: Tensor, i: Tensor, caches: list[Tensor]) -> Tensor:
        h = torch.relu(x @ x.new_ones(W, W)) + 0.1 * i[:, None]
        for c in caches:
            c.index_add_(0, i, h)
        return h * 2

    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "trash_rows": {"caches": 0}})
    mine, theirs = ([torch.zeros(ROOM, W).to(device) for _ in range(2)] for _ in range(2))
    for n in (5, 7, 6):
        x, i = given(n, device)
        i = i.clamp(min=1)
        torch._dynamo.mark_dynamic(i, 0)
        torch.testing.assert_close(fast(x, i, mine), f(x, i, theirs))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a[1:], b[1:])
    assert tgb.plans(fast)[-1].repairs()[TRASHED] == 2


def test_a_copy_has_no_trash_row(device: str) -> None:
    """The caller sees every row of what an operation returns anew."""
    net, _ = pair(device, WRITES["index_add_"])

    def f(x: Tensor, i: Tensor, cache: Tensor) -> Tensor:
        return cache.index_add(0, i, net.up(x) + 0.1 * i[:, None])

    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "trash_rows": {"cache": TRASH}})
    cache = torch.randn(ROOM, W).to(device)
    for n in (5, 7, 6):
        x, i = given(n, device)
        torch.testing.assert_close(fast(x, i, cache), f(x, i, cache))
    assert "aten.index_add" in tgb.plans(fast)[-1].eager_ops()


def test_a_row_that_does_not_exist(device: str, caplog: pytest.LogCaptureFixture) -> None:
    net, other = pair(device, WRITES["index_add_"])
    fast = torch.compile(net, backend="bcg", options={"buckets": [8], "trash_rows": {"cache": ROOM}})
    for n in (5, 7):
        run(fast, net, other, n, device, whole=True)
    assert f"has no trash row {ROOM}" in caplog.text


@pytest.mark.parametrize("value", [{"cache": -1}, {"cache": True}, {"cache": "0"}, {"": 0}, {3: 0}, ["cache"], "cache"])
def test_bad_options(value: Any) -> None:
    with pytest.raises(BadOption, match="trash_rows"):
        Config.parse({"trash_rows": value})


@pytest.mark.parametrize(("name", "row"), [("a b", 0), (3, 0), ("cache", -1), ("cache", True), ("cache", 1.0)])
def test_bad_declarations(name: Any, row: Any) -> None:
    with pytest.raises(DeclarationError):
        tgb.declare_trash_row(name, row)


def test_memory_of_changing_size_needs_the_row(device: str) -> None:
    """A cache whose number of rows is dynamic: a call with one that lacks the row is answered eagerly."""

    def f(x: Tensor, i: Tensor, cache: Tensor) -> Tensor:
        h = torch.relu(x @ x.new_ones(W, W)) + 0.1 * i[:, None]
        cache.index_add_(0, i, h)
        return h * 2

    fast = torch.compile(f, backend="bcg", options={"buckets": [8], "trash_rows": {"cache": 9}})
    for n, room in ((5, 11), (7, 11), (6, 11), (5, 4), (6, 4)):
        x, i = torch.randn(n, W).to(device), torch.randint(0, 4, (n,)).to(device)
        mine, theirs = (torch.zeros(room, W).to(device) for _ in range(2))
        for t in (x, i, mine):
            torch._dynamo.mark_dynamic(t, 0)
        torch.testing.assert_close(fast(x, i, mine), f(x, i, theirs))
        kept = [r for r in range(room) if r != 9]
        torch.testing.assert_close(mine[kept], theirs[kept])
    stats = tgb.stats(fast)
    assert tgb.plans(fast)[-1].repairs()[TRASHED] == 1
    assert stats.eager == {"bucket-invalid": 2}, stats
