"""A model and its compiled twin, called with equal arguments and compared bit for bit; on every device there is.

Bitwise equality holds at padded sizes too because all values are small whole numbers: a matrix product of them is exact
in any order of summation, whichever kernel a padded shape gets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from equality import compare, poisoned
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_graph_backend as tgb

H = 4
OPTIONS: dict[str, Any] = {"buckets": [8, 16]}
#: Two buckets, up and down, so that every bucket is a first call, recorded and replayed, in between the other.
SIZES = (5, 6, 11, 5, 7, 12, 13, 6, 11, 5)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])


def whole(*shape: int, device: str = "cpu", seed: int = 0, dynamic: bool = True) -> Tensor:
    """Whole numbers from -2 to 2 as float32; the first dimension is marked dynamic."""
    generator = torch.Generator().manual_seed(seed + 100 * shape[0])
    x = torch.randint(-2, 3, shape, generator=generator, device="cpu").to(device, torch.float32)
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def linear(inside: int = H, outside: int = H, seed: int = 1) -> nn.Linear:
    """A linear layer of whole numbers."""
    layer = nn.Linear(inside, outside)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randint(-1, 2, p.shape, generator=generator))
    return layer


class Net(nn.Module):
    """Two captured segments around a sum over rows that stays eager, and a counter in a buffer."""

    count: Tensor

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.up, self.down = linear(H, 6, seed), linear(6, H, seed + 1)
        self.register_buffer("count", torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.count.add_(1.0)
        return self.down(h + h.cumsum(0)) + self.count


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend="bcg", options=OPTIONS, **kwargs)


class Both:
    """``both(*args)`` calls a model and its twin and compares; ``finish`` compares what must have stayed."""

    def __init__(self, model: Any, compile: Callable[[Any], Any] = compiled, grad: bool = False) -> None:
        self.model, self.plain = model, copy.deepcopy(model)
        self.fast, self.grad = compile(model), grad
        self.kept: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        theirs = copy.deepcopy((args, kwargs))
        with torch.set_grad_enabled(self.grad), poisoned():
            want, got = self.plain(*theirs[0], **theirs[1]), self.fast(*args, **kwargs)
        what = f"call {len(self.kept)}"
        compare(got, want, what, exact=True)
        compare((args, kwargs), theirs, f"{what}, arguments", exact=True)
        self.kept.append((got, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), want)))
        return got

    def sizes(self, *sizes: int, device: str = "cpu", seed: int = 0) -> None:
        for n in sizes:
            self(whole(n, H, device=device, seed=seed + len(self.kept)))

    def each(self, change: Callable[[Any], Any]) -> None:
        """The same change of both models."""
        change(self.plain)
        change(self.model)

    @property
    def stats(self) -> tgb.Stats:
        return tgb.stats(self.model)

    def finish(self, replays: int, eager: tuple[str, ...] = ()) -> None:
        """At least so many replays, no other eager calls than those named, earlier outputs and state as they were."""
        for i, (got, want) in enumerate(self.kept):
            got = pytree.tree_map_only(Tensor, lambda t: t.detach(), got)
            for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
                if isinstance(b, Tensor):
                    assert torch.equal(a, b), f"output of call {i} changed later"
        if isinstance(self.model, nn.Module):
            compare(state(self.model), state(self.plain), "state", exact=True)
        stats = self.stats
        assert stats.replays >= replays, stats
        assert set(stats.eager) <= set(eager), stats


def state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
