"""Models and helpers of the tests about failures: layers with state around eager attention; recordings that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_graph_backend import registry
from torch_graph_backend.runner import CompiledGraph

W = 16


class Layer(nn.Module):
    """A segment that changes a counter in place, around eager attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("seen", torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.seen.add_(1.0)
        a = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], is_causal=True)[0, 0]
        return x + self.down(a) * self.seen


LAYERS = 3
SEGMENTS = LAYERS + 1


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device).eval()


def tokens(device: str, n: int) -> Tensor:
    x = torch.randn(n, W).to(device)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def twins(device: str, **options: Any) -> tuple[nn.Module, Callable[..., Any], nn.Module]:
    """A model, the same compiled, and an equal one for eager answers (both have state)."""
    net, other = model(device), model(device)
    return net, torch.compile(net, backend="bcg", options=options or None), other


def check(fast: Callable[..., Any], net: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def only_graph(net: nn.Module) -> CompiledGraph:
    (graph,) = registry.graphs_of(net)
    return graph


class Injected(RuntimeError):  # noqa: N818 (no error of ours)
    pass


def fail(
    monkeypatch: pytest.MonkeyPatch,
    net: nn.Module,
    when: Callable[[int], bool],
    error: Callable[[], BaseException],
    inside: bool = True,
) -> list[int]:
    """Make recordings number ``when`` raise, from inside the segment's Python or before it; returns the count."""
    recorder = only_graph(net).recorder
    real = recorder.capture_one
    count = [0]

    def capture_one(segment: Any, args: Any, weak: Any = ()) -> Any:
        count[0] += 1
        if not when(count[0] - 1):
            return real(segment, args, weak)
        if not inside:
            raise error()

        def broken(*tensors: Any) -> Any:
            segment(*tensors)
            raise error()

        return real(broken, args, weak)

    monkeypatch.setattr(recorder, "capture_one", capture_one)
    return count
