"""``tgb.capture``: keys are recorded before a call needs them, and nothing of the user's runs for it but one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.errors import BadOption, NothingToRecord

W = 16


pytestmark = pytest.mark.usefixtures("no_grad")


CALLS: list[tuple[int, ...]] = []


@torch.library.custom_op("tgb_ahead::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    CALLS.append(tuple(x.shape))
    return x.softmax(0)


@mix.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Net(nn.Module):
    """A break between two segments, and a cache that a segment changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("cache", torch.arange(float(W)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.cache.mul_(0.5).add_(1.0)
        return self.down(mix(h)) + self.cache


def tokens(device: str, *shape: int, dims: tuple[int, ...] = (0,)) -> Tensor:
    x = torch.randn(*shape, W).to(device)
    for d in dims:
        torch._dynamo.maybe_mark_dynamic(x, d)
    return x


def pair(device: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net, other = Net().to(device), Net().to(device)
    other.load_state_dict(net.state_dict())
    return net, other


def check(fast: Any, net: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [None, [3, 20, 7, 40, 17]])
def test_recorded_ahead_every_call_is_a_replay_from_the_first(device: str, sizes: Any) -> None:
    net, other = pair(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8, 16, 24, 32, 48]})
    CALLS.clear()
    x = tokens(device, 40)
    assert tgb.capture(fast, x, sizes=sizes) == (5 if sizes is None else 3)
    assert CALLS == [(40, W)], "a break ran for a recording"
    other(x)
    torch.testing.assert_close(net.cache, other.cache, rtol=0, atol=0)
    recorded = [e.key.size for e in registry.graphs_of(net)[0].entries.values()]
    assert sorted(recorded) == ([8, 16, 24, 32, 48] if sizes is None else [8, 24, 48])
    for n in (3, 20, 7, 40, 17, 8):
        check(fast, net, other, tokens(device, n))
    stats = tgb.stats(net)
    assert (stats.first_calls, stats.replays, sum(stats.eager.values())) == (1, 6, 0)


def test_the_largest_is_recorded_first(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_graph_backend.entry import Entry

    order: list[Any] = []
    real = Entry.record
    monkeypatch.setattr(Entry, "record", lambda self, *a: (order.append(self.key.size), real(self, *a))[1])
    net, _ = pair(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8, 16, 24]})
    tgb.capture(fast, tokens(device, 10), sizes=[5, 20, 10])
    assert order == [24, 16, 8]


def test_two_bucketed_sizes(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W)).to(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [4, 8]})
    assert tgb.capture(fast, tokens(device, 3, 5, dims=(0, 1)), sizes=[(3, 3), (3, 8), (8, 3)]) == 3
    with pytest.raises(BadOption, match="a tuple of 2 ints"):
        tgb.capture(fast, tokens(device, 3, 5, dims=(0, 1)), sizes=[(3,)])
    for shape in ((3, 2), (2, 7), (7, 4)):
        x = tokens(device, *shape, dims=(0, 1))
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert tgb.stats(net).replays >= 3


def test_nothing_to_record_says_why(device: str) -> None:
    with pytest.raises(NothingToRecord, match="reached no compiled graph"):
        tgb.capture(lambda x: x + 1, tokens(device, 3))
    fast = torch.compile(lambda x: x.softmax(0), backend="bcg")
    with pytest.raises(NothingToRecord, match="nothing-to-capture"):
        tgb.capture(fast, tokens(device, 3))
    net, _ = pair(device)
    fast = torch.compile(net, backend="bcg", options={"buckets": [8]})
    assert tgb.capture(fast, tokens(device, 3), sizes=[3, 100]) == 1, "100 has no bucket, 3 has"


@pytest.mark.parametrize("sizes", [5, "5", [], ["a"], [0], [True], [(4, 0)], [()], [2.0]])
def test_other_sizes_are_refused_before_anything_runs(sizes: Any) -> None:
    """A wrong argument is named; it is not the model's fault that nothing can be recorded."""
    called = []
    with pytest.raises(tgb.TorchGraphBackendError, match=r"BCG102.*sizes"):
        tgb.capture(lambda: called.append(1), sizes=sizes)
    assert not called


def test_a_static_model_is_recorded_at_its_only_size(device: str, caplog: pytest.LogCaptureFixture) -> None:
    net, other = pair(device)
    fast = torch.compile(net, backend="bcg", dynamic=False)
    x = tokens(device, 5, dims=())
    assert tgb.capture(fast, x, sizes=[3, 9]) == 1
    assert "no size is dynamic" in caplog.text
    other(x)
    check(fast, net, other, tokens(device, 5, dims=()))
    assert tgb.stats(net).replays == 1
