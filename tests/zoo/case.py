"""What a model of the zoo is: how it is made, how it is called, and what must be captured of it.

Contract. ``make`` and ``calls`` build on the CPU in float32 from fixed seeds, so that a plan depends on versions alone;
``model`` and ``arguments`` move and cast. Sizes go up and down and come back, and most are no bucket. A case knows
nothing of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils import _pytree as pytree

#: Few rungs, so that most sizes are padded and many calls come back to a key that is recorded.
BUCKETS = (2, 4, 8, 16, 32, 64)

#: (batch, length) of models that take both, in an order that goes up and down and comes back to most buckets.
PAIRS = ((2, 7), (3, 13), (4, 5), (5, 9), (3, 27), (3, 14), (2, 6), (5, 11), (3, 15), (2, 5), (6, 10), (3, 25))
#: Sizes of models with one dynamic size.
SIZES = (5, 3, 11, 7, 2, 13, 6, 3, 12, 5)


@dataclass(frozen=True)
class Case:
    """One model.

    * ``dims``: by argument position, the dimensions marked dynamic (of each tensor in it).
    * ``kernels``, ``flops``: the floor of what is captured: kernels in the largest plan, a share of the FLOPs of all
      graphs. ``replays``: the least number of calls of graphs that replay.
    * ``eager``: reason codes of calls that may run eagerly. ``padded``: whether most calls have padded rows.
    * ``needs``: "cuda", or a distribution without which the case is skipped.
    * ``around``: a context for the compiled run. ``options``: of the backend.
    * ``cuda_dtype``: bfloat16, except where a last digit decides which weights are used. ``exact_on_cuda``: False where
      CUDA adds in any order, or Dynamo's graph alone (``backend="eager"``) differs from the model.
    * ``static_on_cuda``: CUDA's kernels make Dynamo compile every length anew, so that nothing is called twice.
    """

    name: str
    about: str
    make: Callable[[], nn.Module]
    calls: Callable[[], list[tuple[Any, ...]]]
    dims: Mapping[int, tuple[int, ...]]
    kernels: int = 1
    flops: float = 0.9
    replays: int = 5
    eager: tuple[str, ...] = ()
    padded: bool = True
    needs: str | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    options: Mapping[str, Any] = field(default_factory=lambda: {"buckets": list(BUCKETS)})
    cuda_dtype: torch.dtype = torch.bfloat16
    exact_on_cuda: bool = True
    static_on_cuda: bool = False

    def missing(self, device: str = "cpu") -> str | None:
        """Why the case cannot run here, if so."""
        if self.needs is None or self.needs == device:
            return None
        if self.needs == "cuda":
            return "needs a CUDA device"
        try:
            metadata.version(self.needs)
        except metadata.PackageNotFoundError:
            return f"needs the package {self.needs}"
        return None

    def dtype(self, device: str) -> torch.dtype:
        return self.cuda_dtype if device == "cuda" else torch.float32

    def model(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with its weights, always the same ones."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(device, dtype)

    def arguments(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
        """The arguments of each call, marked dynamic."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            calls = placed(self.calls(), device, dtype)
        for call in calls:
            for position, dims in self.dims.items():
                for t in pytree.tree_leaves(call[position]):
                    for d in dims:
                        torch._dynamo.maybe_mark_dynamic(t, d)
        return calls


def placed(tree: Any, device: str, dtype: torch.dtype) -> Any:
    """Tensors on ``device``, floating-point ones as ``dtype``."""

    def move(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(device, dtype if t.is_floating_point() else t.dtype)

    return pytree.tree_map(move, tree)


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Random token ids from 1 on (0 pads)."""
    return torch.randint(1, vocabulary, (batch, length))


def lengths_mask(batch: int, length: int) -> Tensor:
    """An attention mask, int64 of shape ``(batch, length)``: ones in front in each row, all of them in the first."""
    lengths = torch.randint(1, length + 1, (batch,))
    lengths[0] = length
    return (torch.arange(length) < lengths[:, None]).long()


def random_everywhere(model: nn.Module) -> nn.Module:
    """All weights random: biases and norms start as zeros and ones, which would hide faults."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for b in model.buffers():
            if b.is_floating_point():
                b.add_(0.1 * torch.rand_like(b))
    return model
