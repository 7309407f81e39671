"""Models with what a tracer likes least: recurrence, branches on data, attention with a score function, kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from .case import PAIRS, SIZES, Case, random_everywhere
from .language import WIDTH

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds have none
    triton = None

if triton is not None:

    @triton.jit
    def scale_shift(x, scale, shift, out, n, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        column = i % width
        value = tl.load(x + i, mask=inside) * tl.load(scale + column, mask=inside)
        tl.store(out + i, value + tl.load(shift + column, mask=inside), mask=inside)


class Recurrent(nn.Module):
    """A recurrent layer between linear ones, as speech and tagging models have it."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 16)
        self.recurrent = kind(16, 12, num_layers=2, batch_first=True, bidirectional=kind is nn.LSTM)
        self.outside = nn.Sequential(nn.Linear(24 if kind is nn.LSTM else 12, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(torch.relu(self.inside(x)))
        return self.outside(hidden)


class Branching(nn.Module):
    """A branch on data between two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.up(x)
        h = torch.cond(h.sum() > 0, self.large, self.small, (h,))
        return h + self.down(h)


class FlexAttention(nn.Module):
    """Attention with relative positions in a score function, between linear layers."""

    slope: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("slope", torch.tensor([0.5, 0.25]))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)

        def score(s: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(j < lengths[row], s - self.slope[head] * (i - j).abs(), -1e4)

        h = flex_attention(q.contiguous(), k.contiguous(), v.contiguous(), score_mod=score)
        x = x + self.out(h.transpose(1, 2).reshape(b, n, -1))
        return x + self.mlp(x)


class OwnKernel(nn.Module):
    """An MLP around a Triton kernel of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        out = torch.empty_like(h)
        n = h.numel()
        scale_shift[(triton.cdiv(n, 64),)](h, self.scale, self.shift, out, n, width=WIDTH, BLOCK=64)
        return self.down(F.gelu(out))


def traced_rnn() -> AbstractContextManager[Any]:
    """Dynamo traces recurrent layers; by default it breaks the graph at them."""
    return torch._dynamo.config.patch(allow_rnn=True)


def rows() -> list[tuple[Any, ...]]:
    return [(torch.randn(n, 8),) for n in SIZES]


def sequences() -> list[tuple[Any, ...]]:
    return [(torch.randn(b, n, 6),) for b, n in PAIRS]


def chunks() -> list[tuple[Any, ...]]:
    return [(torch.randn(n, 6, 6),) for n in SIZES]


def with_lengths() -> list[tuple[Any, ...]]:
    return [(torch.randn(b, n, WIDTH), torch.randint(1, n + 1, (b,))) for b, n in PAIRS]


def _eval(model: nn.Module) -> nn.Module:
    return random_everywhere(model).eval()


BOTH = {0: (0, 1)}
CASES = (
    Case(
        "gru",
        "GRU, traced (allow_rnn); Dynamo makes a graph for each length",
        lambda: _eval(Recurrent(nn.GRU)),
        chunks,
        {0: (0,)},
        around=traced_rnn,
        kernels=5,
        flops=0.2,
    ),
    Case(
        "lstm",
        "LSTM, two directions, traced (allow_rnn)",
        lambda: _eval(Recurrent(nn.LSTM)),
        sequences,
        BOTH,
        around=traced_rnn,
        kernels=6,
        flops=0.1,
        static_on_cuda=True,
    ),
    Case(
        "lstm_broken",
        "LSTM as Dynamo takes it by default: a graph break",
        lambda: _eval(Recurrent(nn.LSTM)),
        sequences,
        BOTH,
        kernels=0,
        flops=0.0,
        replays=0,
        padded=False,
    ),
    Case("cond", "torch.cond between MLPs", lambda: _eval(Branching()), rows, {0: (0,)}, kernels=7),
    Case(
        "flex_attention",
        "flex_attention with a score function",
        lambda: _eval(FlexAttention()),
        with_lengths,
        {0: (0, 1), 1: (0,)},
        kernels=22,
    ),
    Case(
        "triton", "a Triton kernel of the user's", lambda: _eval(OwnKernel()), rows, {0: (0,)}, needs="cuda", kernels=4
    ),
)
