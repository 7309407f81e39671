"""One graph, several sets of weights: modules that share code, weights that move, and weights that are gone.

Every test runs on the CPU, and on a CUDA device where there is one.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend import instances, registry

W = 8


pytestmark = pytest.mark.usefixtures("no_grad")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(W, 16), nn.Linear(16, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


def rows(device: str, n: int) -> Tensor:
    x = torch.randn(n, W).to(device)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def shared(device: str, count: int = 4) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Layers compiled one by one, and equal plain ones."""
    layers = nn.ModuleList(Layer() for _ in range(count)).to(device)
    plain = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(backend="bcg")
    return layers, plain


def run(layers: Any, plain: Any, x: Tensor) -> None:
    y = x
    for layer, other in zip(layers, plain, strict=True):
        x, y = layer(x), other(y)
    close(x, y)


def test_modules_that_share_a_graph_do_not_drop_each_others_recordings(device: str) -> None:
    layers, plain = shared(device)
    for n in (5, 6, 7, 5, 6, 7, 5, 6):
        run(layers, plain, rows(device, n))
    stats = tgb.stats()
    assert stats.graphs == 1
    assert (stats.first_calls, stats.recordings) == (8, 8), "one first call a layer and key"
    assert stats.replays == 24
    assert tgb.stats(layers[3]).graphs == 1, "the graph was compiled for the first layer, and is the fourth's too"


def test_weights_of_a_module_that_is_gone_are_forgotten(device: str) -> None:
    layers, plain = shared(device, 2)
    for _ in range(3):
        run(layers, plain, rows(device, 5))
    (graph,) = registry.all_graphs()
    assert len(graph.entries) == 2
    del layers[0], plain[0]
    gc.collect()
    layers.append(Layer().to(device))
    plain.append(copy.deepcopy(layers[1]))
    layers[1].compile(backend="bcg")
    for _ in range(3):
        run(layers, plain, rows(device, 5))
    assert len(graph.entries) == 2
    assert len(graph.instances.known) == 2


def test_weights_that_swap_between_two_places_keep_both_recordings(device: str) -> None:
    layers, plain = shared(device, 1)
    first, second = layers[0].a.weight.data, torch.randn_like(layers[0].a.weight)
    for i in range(8):
        layers[0].a.weight.data = plain[0].a.weight.data = (first, second)[i % 2]
        run(layers, plain, rows(device, 5))
    stats = tgb.stats()
    assert (stats.first_calls, stats.recordings, stats.replays) == (2, 2, 6)


@pytest.mark.parametrize("keep", [True, False])
def test_a_buffer_assigned_anew_in_every_call_is_copied_in(device: str, keep: bool) -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(W, W)
            self.register_buffer("total", torch.zeros(W))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total * 0.5 + 1.0
            return torch.relu(self.l(x)) @ self.l.weight + self.total

    net = Total().to(device)
    other = copy.deepcopy(net)
    fast = torch.compile(net, backend="bcg")
    kept = []
    for i in range(20):
        x = rows(device, 5 + i % 3)
        close(fast(x), other(x))
        close(net.total, other.total)
        if keep:
            kept.append(net.total)
    stats = tgb.stats(net)
    assert stats.recordings <= instances.MAX_MOVES + 2
    assert stats.replays >= 12


def test_all_weights_brought_by_a_hook_at_every_call(device: str) -> None:
    """What offloading does: the weights are other tensors at each call, and the last ones are gone."""
    layers, plain = shared(device, 1)
    # All of them at once: no address comes twice, whatever the allocator does with the memory of those that are gone.
    brought = [{k: v.clone() for k, v in layers[0].state_dict().items()} for _ in range(20)]
    for i in range(20):
        for name, p in layers[0].named_parameters():
            p.data = brought[i].pop(name)
        run(layers, plain, rows(device, 5 + i % 3))
    stats = tgb.stats()
    assert stats.recordings <= instances.MAX_MOVES + 2
    assert stats.replays >= 12


def test_too_much_to_copy_is_said(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_graph_backend import runner

    monkeypatch.setattr(runner, "MAX_COPIED", 100)
    layers, plain = shared(device, 1)
    kept = []
    for _ in range(10):
        kept.append(layers[0].a.weight.data)
        layers[0].a.weight.data = layers[0].a.weight.data.clone()
        run(layers, plain, rows(device, 5))
    stats = tgb.stats()
    assert stats.eager["moving-input"] >= 5
    assert "lie elsewhere" in stats.reasons["moving-input"].text


def test_more_sets_of_weights_than_are_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_graph_backend import runner

    monkeypatch.setattr(runner, "MAX_INSTANCES", 2)
    layers, plain = shared(device, 3)
    for _ in range(4):
        run(layers, plain, rows(device, 5))
    stats = tgb.stats()
    assert stats.eager == {"recording-cap": 4}
    assert stats.replays == 6


def test_closing_one_of_the_modules_that_share_a_graph(device: str) -> None:
    layers, plain = shared(device, 2)
    for _ in range(3):
        run(layers, plain, rows(device, 5))
    tgb.close(layers[0])
    (graph,) = registry.all_graphs()
    assert len(graph.entries) == 1
    for _ in range(2):
        run(layers, plain, rows(device, 5))
    assert tgb.stats().replays == 4 + 3
