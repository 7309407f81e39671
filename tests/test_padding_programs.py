"""Random programs over the operations of the table: what the proof allows agrees with the unpadded run, node by node.

Views, in-place operations on views, reductions, sizes used as values, sizes moved by a constant, and two padded sizes
at once. ``PADDING_EXAMPLES`` sets the number of examples: 200 unless given, 2000 at night.
"""

from __future__ import annotations

import os
from collections import Counter

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from padding_harness import EagerFailsError, check_all, prove

#: Steps of random programs: each takes two tensors of the pool and the input (for its sizes).
STEPS = [
    lambda x, y, a: x + y, lambda x, y, a: x * y, lambda x, y, a: torch.where(x > 0, x, y),
    lambda x, y, a: x.softmax(-1), lambda x, y, a: x.softmax(0), lambda x, y, a: x.cumsum(0),
    lambda x, y, a: x.cumsum(-1), lambda x, y, a: x.flip(-1), lambda x, y, a: x.mean(-1, keepdim=True),
    lambda x, y, a: x.sum(1), lambda x, y, a: x.amax(0), lambda x, y, a: x @ y,
    lambda x, y, a: x @ y.transpose(-1, -2), lambda x, y, a: x.transpose(0, 1), lambda x, y, a: x.transpose(-1, -2),
    lambda x, y, a: x.reshape(-1, x.shape[-1]), lambda x, y, a: x.flatten(0, 1), lambda x, y, a: x.flatten(1),
    lambda x, y, a: x.reshape(a.shape), lambda x, y, a: x.unflatten(-1, (2, -1)), lambda x, y, a: x.reshape(4, -1),
    lambda x, y, a: x.unsqueeze(0), lambda x, y, a: x.squeeze(0), lambda x, y, a: x[0], lambda x, y, a: x[:, 1],
    lambda x, y, a: x[-1], lambda x, y, a: x[:2], lambda x, y, a: x[..., :2], lambda x, y, a: torch.cat([x, y], -1),
    lambda x, y, a: torch.cat([x, y], 0), lambda x, y, a: torch.stack([x, y], 1),
    lambda x, y, a: x.repeat_interleave(2, 0), lambda x, y, a: x.repeat(*[2] * x.dim()),
    lambda x, y, a: x.expand(a.shape), lambda x, y, a: x.tril(),
    lambda x, y, a: torch.zeros(a.shape[0] * a.shape[1], 8), lambda x, y, a: torch.ones(a.shape[1], a.shape[0]),
    lambda x, y, a: torch.arange(a.shape[0] * a.shape[1]).float(),
    lambda x, y, a: torch.arange(a.shape[1])[:, None] + 0.5, lambda x, y, a: x * a.shape[1],
    lambda x, y, a: F.layer_norm(x, (x.shape[-1],)), lambda x, y, a: F.pad(x, (1, 0)),
    lambda x, y, a: x.clone().add_(y), lambda x, y, a: x.clone().copy_(y),
    lambda x, y, a: torch.zeros_like(x).add_(y), lambda x, y, a: x.gather(-1, y.argmax(-1, keepdim=True)),
    lambda x, y, a: x[y.argmax(-1)], lambda x, y, a: F.scaled_dot_product_attention(x, y, y),
    lambda x, y, a: F.linear(x, y), lambda x, y, a: x.chunk(2, -1)[1], lambda x, y, a: x.topk(1, -1).indices,
    lambda x, y, a: torch.zeros_like(x).scatter(-1, y.argmax(-1, keepdim=True), x), lambda x, y, a: x.sort(-1).values,
    lambda x, y, a: x[:, None] * y, lambda x, y, a: torch.einsum("...i,ij->...j", x, y),
    # sizes moved by a constant, windows, convolutions
    lambda x, y, a: x[1:], lambda x, y, a: x[:-1], lambda x, y, a: x[:, 1:], lambda x, y, a: x[::2],
    lambda x, y, a: torch.cat([y[:1], x[:-1]], 0), lambda x, y, a: torch.cat([x[:, :1], x[:, :-1]], 1),
    lambda x, y, a: F.pad(x, (0, 0, 2, 0)), lambda x, y, a: F.pad(x, (0, 0, 0, 1)), lambda x, y, a: F.pad(x, (2, -2)),
    lambda x, y, a: F.pad(x, (0, 0, 1, -1)), lambda x, y, a: x.unfold(0, 2, 1), lambda x, y, a: x.unfold(1, 2, 2),
    lambda x, y, a: F.conv1d(x, torch.ones(x.shape[1], 1, 2), groups=x.shape[1]),
    lambda x, y, a: F.conv1d(x, torch.ones(x.shape[1], 1, 3), padding=2, groups=x.shape[1])[..., : x.shape[-1]],
    lambda x, y, a: F.conv1d(x, torch.ones(x.shape[1], 1, 3), padding=1, groups=x.shape[1]),
    lambda x, y, a: F.avg_pool1d(x, 2), lambda x, y, a: F.max_pool1d(x, 3, 1, 1),
    lambda x, y, a: torch.zeros(a.shape[1] + 1, 8), lambda x, y, a: torch.arange(a.shape[1] - 1).float(),
    lambda x, y, a: x.narrow(0, 1, 2), lambda x, y, a: x[: a.shape[1]], lambda x, y, a: x[a.shape[0] :],
    # indices, values of sizes, memory
    lambda x, y, a: x[torch.arange(x.shape[0])], lambda x, y, a: x.index_select(0, torch.arange(a.shape[1])),
    lambda x, y, a: x[torch.arange(-1, 1)], lambda x, y, a: x[torch.arange(x.shape[0]) % 2],
    lambda x, y, a: x[:, torch.arange(2)], lambda x, y, a: F.one_hot(x.argmax(-1), 8).float(),
    lambda x, y, a: x + a.shape[0] / a.shape[1], lambda x, y, a: x.new_full((a.shape[0], 8), 2.0),
    lambda x, y, a: x.new_full((8,), a.shape[0]), lambda x, y, a: x / x.numel(),
    lambda x, y, a: (x[0].zero_(), x * 1)[1], lambda x, y, a: (x[..., :2].mul_(2.0), x * 1)[1],
    lambda x, y, a: (x.transpose(0, 1).add_(1.0), x * 1)[1], lambda x, y, a: (x[-1:].zero_(), x * 1)[1],
    lambda x, y, a: x.clone().index_copy_(0, torch.arange(2), y[:2]), lambda x, y, a: x.cumprod(-1).tanh(),
    lambda x, y, a: x.index_fill(0, torch.zeros(1, dtype=torch.long), 1.0), lambda x, y, a: x.std(0, keepdim=True),
    lambda x, y, a: F.rms_norm(x, (x.shape[-1],)), lambda x, y, a: x.logsumexp(-1), lambda x, y, a: x.any(-1),
    lambda x, y, a: F.glu(x, -1), lambda x, y, a: x.diagonal(dim1=-1, dim2=-2), lambda x, y, a: torch.cdist(x, y),
    lambda x, y, a: torch.outer(x.flatten(), y.flatten()), lambda x, y, a: x.movedim(0, -1), lambda x, y, a: x.mT,
    lambda x, y, a: (x[:-1].mul_(2.0), x * 1)[1], lambda x, y, a: (x[::2].add_(1.0), x * 1)[1],
    lambda x, y, a: (x[: x.shape[0] // 2].zero_(), x * 1)[1], lambda x, y, a: (x[1:].sub_(x[:-1].clone()), x * 1)[1],
]  # fmt: skip
STEP = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9))
EXAMPLES = int(os.environ.get("PADDING_EXAMPLES", "200"))


def test_random_programs() -> None:
    """Whatever the proof allows in a random program agrees with the unpadded run, under every fill."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="PADDING_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(STEP, min_size=2, max_size=8))
    def prop(program: list[tuple[int, int, int]]) -> None:
        def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            pool = [a, b, w]
            for step, i, j in program:
                try:
                    made = STEPS[step](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)], a)
                except (RuntimeError, IndexError, ValueError, TypeError):
                    continue  # the step does not fit these shapes
                if made.dim() <= 4:
                    pool.append(made)
            return pool[-1]

        specs = ["B,T,8", "T,8", "8,8"]
        try:
            traced = prove(function, specs)
        except AssertionError:
            assume(False)
        try:
            checked = sum(check_all(traced, specs))
        except EagerFailsError:
            assume(False)
        seen.update(programs=1, compared=checked, refused=len(traced.result.reasons))

    prop()
    assert seen["programs"] * 2 > EXAMPLES, seen
    assert seen["compared"] > 3 * seen["programs"], f"too little was allowed, so little was compared: {seen}"
    assert seen["refused"] > seen["programs"] // 4, f"too little was refused: {seen}"
