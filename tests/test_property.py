"""The heart of the suite: for random decoder-like modules, padded replay == eager, under poisoned padding.

A ``Spec`` is a module, a ladder and a list of calls, as plain data: a failing example prints as something to paste.
``TGB_EXAMPLES`` raises the number of examples (and turns the fixed seed off).
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from equality import Report, check_calls
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_graph_backend as tgb

T = TypeVar("T")
Op = Callable[["Decoder", Tensor], Tensor]

HEADS, HEAD, VOCAB, ROOM = 2, 4, 17, 64
H = HEADS * HEAD

# -- what a module is made of ------------------------------------------------------------------------------------------

#: Operations on hidden states ``(..., T, H)`` that mix rows or use the size as data: padding must not reach a real row.
MIXERS: dict[str, Op] = {
    "softmax_tokens": lambda m, h: h + torch.softmax(h, -2),
    "cumsum": lambda m, h: torch.tanh(h.cumsum(-2)),
    "flip": lambda m, h: h + h.flip(-2),
    "mean_tokens": lambda m, h: h - h.mean(-2, keepdim=True),
    "last_row": lambda m, h: h + h[..., -1:, :],
    "times_size": lambda m, h: torch.tanh(h * h.shape[-2]),
    "over_size": lambda m, h: h.sum(-2, keepdim=True) / h.shape[-2] + h,
    "sort": lambda m, h: h + h.sort(-2).values,
    "topk": lambda m, h: h + h.topk(2, dim=-2).values.mean(-2, keepdim=True),
    "roll": lambda m, h: h + h.roll(1, -2),
    "shift": lambda m, h: h + F.pad(h, (0, 0, 1, 0))[..., :-1, :],
    "whole_mean": lambda m, h: h - h.mean(),
    "first_dim_mean": lambda m, h: h + h.mean(0, keepdim=True),
    "first_dim_flip": lambda m, h: h + h.flip(0),
    "std": lambda m, h: h / (1 + h.std(-2, keepdim=True)),
    "amax": lambda m, h: h - h.amax(-2, keepdim=True),
    "norm": lambda m, h: h / (1 + torch.linalg.vector_norm(h)),
    "every_second": lambda m, h: h + h[..., ::2, :].mean(-2, keepdim=True),
    "merge_rows": lambda m, h: m.proj(h.reshape(-1, H)).view(h.shape),
    "merge_features": lambda m, h: (
        torch.tanh(h.transpose(-1, -2).reshape(-1, h.shape[-2]) * 2).view_as(h.transpose(-1, -2)).transpose(-1, -2)
    ),
    "cat_rows": lambda m, h: torch.cat([h, m.proj(h)], -2)[..., : h.shape[-2], :],
    "cat_rows_end": lambda m, h: torch.cat([h, m.proj(h)], -2)[..., h.shape[-2] :, :],
    "repeat_interleave": lambda m, h: h.repeat_interleave(2, -2)[..., ::2, :],
    "repeat": lambda m, h: h.repeat(*[1] * (h.dim() - 1), 2)[..., :H],
    "gram": lambda m, h: torch.tanh(h @ h.transpose(-1, -2)) @ h,
    "covariance": lambda m, h: h @ torch.tanh(h.transpose(-1, -2) @ h),
    "tril": lambda m, h: torch.tril(h) + h,
    "arange_scale": lambda m, h: h * torch.arange(h.shape[-2], dtype=h.dtype)[:, None].cos(),
    "arange_reversed": lambda m, h: h * torch.arange(h.shape[-2] - 1, -1, -1, dtype=h.dtype)[:, None].cos(),
    "gather_reversed": lambda m, h: h + h.index_select(-2, torch.arange(h.shape[-2] - 1, -1, -1)),
    "linspace": lambda m, h: h * torch.linspace(0, 1, h.shape[-2])[:, None],
    "conv": lambda m, h: h + m.conv(F.pad(h.transpose(-1, -2), (2, 0))).transpose(-1, -2),
    "where_first": lambda m, h: torch.where(torch.arange(h.shape[-2])[:, None] == 0, h * 2, h),
    "where_last": lambda m, h: torch.where(torch.arange(h.shape[-2])[:, None] == h.shape[-2] - 1, h * 2, h),
    "masked_fill": lambda m, h: h.masked_fill(h > 0.5, 0.5),
    "split": lambda m, h: torch.cat([p * (i + 1) for i, p in enumerate(h.split(3, -1))], -1),
    "einsum": lambda m, h: torch.einsum("...th,hk->...tk", h, m.square) + h,
    "einsum_rows": lambda m, h: torch.tanh(torch.einsum("...th,...sh->...ts", h, h)).mean(-1, keepdim=True) + h,
    "unbind_stack": lambda m, h: torch.stack([p * 2 for p in h.unbind(-1)], -1),
    "half_size": lambda m, h: h + h[..., : h.shape[-2] // 2 + 1, :].mean(-2, keepdim=True),
    "from_second": lambda m, h: F.pad(m.proj(h[..., 1:, :]), (0, 0, 1, 0)) + h,
    "float_size": lambda m, h: h * float(h.shape[-2]) ** -0.5,
    "full_size": lambda m, h: h + torch.full((1,), h.shape[-2], dtype=h.dtype).log(),
    "numel": lambda m, h: h * (8 / h.numel()),
    "distance_bias": lambda m, h: _distances(h.shape[-2]).mul(-0.1).exp() @ h / h.shape[-2],
    "shifted_zeros": lambda m, h: torch.cat([h.new_zeros(*h.shape[:-2], 1, H), h], -2)[..., :-1, :] + h,
    "expand_row": lambda m, h: m.last.expand(h.shape[-2], H) + h,
    "swap_rows": lambda m, h: torch.cat([h[..., -1:, :], h[..., 1:, :]], -2),
    "gather_rows": lambda m, h: h.gather(-2, torch.zeros_like(h, dtype=torch.long)) + h,
    "one_hot": lambda m, h: h + F.one_hot(torch.arange(h.shape[-2]) % H, H).to(h.dtype),
    "cdist": lambda m, h: torch.tanh(torch.cdist(h, h)) @ h / h.shape[-2],
    "swap_dims": lambda m, h: m.proj(h.transpose(0, -2)).transpose(0, -2),
    "unfold": lambda m, h: F.pad(h, (0, 0, 1, 0)).unfold(-2, 2, 1).sum(-1),
    "flatten_rows": lambda m, h: torch.tanh(h.flatten(0, -2)).cumsum(0).view(h.shape) * 0.1,
    "rms_of_heads": lambda m, h: F.rms_norm(h.unflatten(-1, (HEADS, HEAD)), (HEAD,)).flatten(-2),
    "cross_batch": lambda m, h: h + torch.softmax(h, 0),
    "negative_step": lambda m, h: h + h[..., :1, :] * h[..., -2:-1, :],
    "count_rows": lambda m, h: h * (h > -9.0).sum(-2, keepdim=True).to(h.dtype).rsqrt(),
    "bool_any": lambda m, h: torch.where((h > 0).any(-2, keepdim=True), h, h * 0.5),
}

#: Operations in place, on the hidden state (which may be the caller's tensor), its views, or the module's own buffers.
INPLACE: dict[str, Op] = {
    "add_": lambda m, h: h.add_(0.5),
    "relu_": lambda m, h: h.relu_(),
    "iadd": lambda m, h: h.__iadd__(h.flip(-2)),
    "mul_slice": lambda m, h: (h[..., :4].mul_(2.0), h)[1],
    "mul_last_row": lambda m, h: (h[..., -1:, :].mul_(0.5), h)[1],
    "zero_first_row": lambda m, h: (h[..., 0, :].zero_(), h)[1],
    "flat_view": lambda m, h: (h.reshape(-1).mul_(0.5), h)[1],
    "transposed_view": lambda m, h: (h.transpose(-1, -2).add_(0.25), h)[1],
    "copy_into_zeros": lambda m, h: torch.zeros_like(h).copy_(h),
    "fill_part": lambda m, h: (h[..., 1::2, :].fill_(0.125), h)[1],
    "chunk": lambda m, h: _chunk(h),
    "first_is_last": lambda m, h: (h[..., 0, :].copy_(h[..., -1, :].clone()), h)[1],
    "index_put": lambda m, h: h.index_put_((torch.tensor([0, 1]),), torch.tensor(0.5)),
    "index_add": lambda m, h: h.index_add_(-2, torch.tensor([1, 0]), h[..., :2, :].clone()),
    "masked_fill_": lambda m, h: h.masked_fill_(h > 0.5, 0.5),
    "clone_then_add": lambda m, h: h.clone().add_(h).relu_(),
    "view_of_view": lambda m, h: (h.transpose(-1, -2)[..., 1:].transpose(-1, -2).mul_(1.5), h)[1],
    "out_of_size": lambda m, h: h.mul_(h.shape[-2]).tanh_(),
    "count": lambda m, h: (m.count.add_(1), h + m.count)[1],
    "remember_last": lambda m, h: (m.last.copy_(h[..., -1, :].reshape(-1, H)[0]), h + m.last)[1],
    "running_mean": lambda m, h: (m.last.mul_(0.9).add_(h.detach().reshape(-1, H).mean(0) * 0.1), h * (1 + m.last))[1],
    "buffer_rows": lambda m, h: (m.rows[: h.shape[-2]].copy_(h.reshape(-1, h.shape[-2], H)[0]), h)[1],
    "buffer_read": lambda m, h: h + m.rows[: h.shape[-2]],
    "read_then_write": lambda m, h: _read_then_write(h),
    "write_new": lambda m, h: _write_new(m, h),
}

#: Extra outputs, of the last hidden state, the input and an earlier hidden state.
OUTPUTS: dict[str, Callable[[Decoder, Tensor, Tensor, Tensor], Any]] = {
    "last_row": lambda m, h, x, mid: h[..., -1:, :],
    "transposed": lambda m, h, x, mid: h.transpose(-1, -2),
    "flat": lambda m, h, x, mid: h.reshape(-1, H),
    "features": lambda m, h, x, mid: h[..., 2:5],
    "input": lambda m, h, x, mid: x,
    "input_view": lambda m, h, x, mid: x[..., 1:],
    "input_rows": lambda m, h, x, mid: x.flatten(),
    "none": lambda m, h, x, mid: None,
    "int": lambda m, h, x, mid: 3,
    "size": lambda m, h, x, mid: h.shape[-2],
    "size_made": lambda m, h, x, mid: h.shape[-2] * 2 + 1,
    "shape": lambda m, h, x, mid: h.shape,
    "twice": lambda m, h, x, mid: (h, h),
    "nested": lambda m, h, x, mid: {"a": h.sum(-1), "b": (h[..., 0], None), "c": []},
    "arange": lambda m, h, x, mid: torch.arange(h.shape[-2]),
    "mean": lambda m, h, x, mid: h.mean(),
    "bool": lambda m, h, x, mid: x > 0,
    "weight": lambda m, h, x, mid: m.proj.weight,
    "weight_view": lambda m, h, x, mid: m.proj.weight[:2],
    "buffer": lambda m, h, x, mid: m.count,
    "constant": lambda m, h, x, mid: torch.tensor(1.5),
    "zeros": lambda m, h, x, mid: torch.zeros(h.shape[-2], 3),
    "middle": lambda m, h, x, mid: mid,
    "middle_view": lambda m, h, x, mid: mid[..., 1:, :],
    "expanded": lambda m, h, x, mid: h[..., :1].expand(*h.shape),
    "row_sums": lambda m, h, x, mid: h.sum(-1, keepdim=True),
    "detached": lambda m, h, x, mid: h.detach(),
    "pair": lambda m, h, x, mid: h.chunk(2, -1),
}

#: A linear here reads one row less than the size: such rows have no bucket, and the linear runs eagerly with a reason.
CUT_BEFORE_LINEAR = {"from_second"}

NORMS = ("none", "rms", "layer", "manual")
ATTENTIONS = ("none", "sdpa", "causal", "eager", "mask", "growing", "static", "slice")
MLPS = ("none", "swiglu", "gelu", "relu")
POSITIONS = ("none", "learned", "rotary", "arange")


def _read_then_write(h: Tensor) -> Tensor:
    before = h * 2
    h.mul_(0.5)
    after = h + before
    h.add_(1.0)
    return after + h


def _distances(n: int) -> Tensor:
    at = torch.arange(n)
    return (at[:, None] - at[None]).abs().float()


def _chunk(h: Tensor) -> Tensor:
    left, right = h.chunk(2, -1)
    left.mul_(2.0)
    right.copy_(left)
    return torch.cat([right, left + right], -1)


def _write_new(m: Decoder, h: Tensor) -> Tensor:
    new = m.proj(h)
    new[..., :3].add_(h[..., :3])
    new[..., -1:, :].mul_(2.0)
    return torch.tanh(new) + h


@dataclass(frozen=True)
class LayerSpec:
    attention: str = "none"
    mlp: str = "none"
    norm: str = "none"
    residual: bool = True
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallSpec:
    """Sizes of one call; ``chain`` reuses the caches that the side's last call at this batch left behind."""

    batch: int
    tokens: int
    chain: bool = False


@dataclass(frozen=True)
class Spec:
    """``dynamic``: which sizes are marked (``t``, ``b`` or both); without ``batched`` there is no batch dimension."""

    batched: bool
    dynamic: str
    ids: bool
    position: str
    layers: tuple[LayerSpec, ...]
    outputs: tuple[str, ...]
    nesting: str
    ladder: tuple[int, ...]
    calls: tuple[CallSpec, ...]
    seed: int = 0

    @property
    def attentions(self) -> list[str]:
        return [layer.attention for layer in self.layers]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H))

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.norm = {
            "none": nn.Identity,
            "rms": lambda: nn.RMSNorm(H),
            "layer": lambda: nn.LayerNorm(H),
            "manual": Norm,
        }[spec.norm]()
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H)
        self.up, self.gate, self.down = nn.Linear(H, 12), nn.Linear(H, 12, bias=False), nn.Linear(12, H)

    def attention(
        self, h: Tensor, pos: Tensor, start: int, rotary: bool, cache: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, k, v = (p.unflatten(-1, (HEADS, HEAD)).transpose(-2, -3) for p in self.qkv(h).chunk(3, -1))
        if rotary:
            angle = pos[..., None] * torch.tensor([1.0, 0.1])
            cos, sin = (torch.cat([f, f], -1).unsqueeze(-3) for f in (angle.cos(), angle.sin()))
            q, k = (p * cos + torch.cat([-p[..., 2:], p[..., :2]], -1) * sin for p in (q, k))
        kind, new = self.spec.attention, []
        if kind == "growing":
            k, v = torch.cat([cache[0], k], -2), torch.cat([cache[1], v], -2)
            new = [k, v]
        if kind == "static":
            at = pos.reshape(-1, pos.shape[-1])[0]
            cache[0].index_copy_(-2, at, k)
            cache[1].index_copy_(-2, at, v)
            k, v = cache
            mask = torch.arange(ROOM) <= at[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif kind == "slice":
            end = start + k.shape[-2]
            cache[0][..., start:end, :] = k
            cache[1][..., start:end, :] = v
            y = F.scaled_dot_product_attention(q, cache[0][..., :end, :], cache[1][..., :end, :])
        elif kind == "eager":
            scores = q @ k.transpose(-1, -2) * HEAD**-0.5
            n = scores.shape[-1]
            scores = scores + torch.full((n, n), float("-inf")).triu(1)
            y = torch.softmax(scores, -1) @ v
        elif kind == "mask":
            mask = (pos[..., :, None] >= pos[..., None, :]).unsqueeze(-3)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=kind == "causal")
        return self.out(y.transpose(-2, -3).flatten(-2)), new

    def mlp(self, h: Tensor) -> Tensor:
        if self.spec.mlp == "swiglu":
            return self.down(F.silu(self.gate(h)) * self.up(h))
        return self.down(F.gelu(self.up(h)) if self.spec.mlp == "gelu" else F.relu(self.up(h)))

    def forward(
        self, root: Decoder, h: Tensor, pos: Tensor, start: int, rotary: bool, cache: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        new: list[Tensor] = []
        if self.spec.attention != "none":
            y, new = self.attention(self.norm(h), pos, start, rotary, cache)
            h = h + y if self.spec.residual else y
        if self.spec.mlp != "none":
            y = self.mlp(self.norm(h))
            h = h + y if self.spec.residual else y
        for name in self.spec.ops:
            h = (MIXERS.get(name) or INPLACE[name])(root, h)
        return h, new


class Decoder(nn.Module):
    """A module made from a ``Spec``. Every module has every weight; unused ones do no harm."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding, self.places = nn.Embedding(VOCAB, H), nn.Embedding(ROOM, H)
        self.proj, self.conv, self.head = nn.Linear(H, H), nn.Conv1d(H, H, 3), nn.Linear(H, VOCAB, bias=False)
        self.square = nn.Parameter(torch.randn(H, H) * 0.3)
        self.layers = nn.ModuleList([Layer(layer) for layer in spec.layers])
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(H))
        self.register_buffer("rows", torch.zeros(ROOM, H))

    def forward(self, x: Tensor, pos: Tensor, start: int, caches: list[list[Tensor]]) -> Any:
        spec = self.spec
        h = self.embedding(x) if spec.ids else x
        if spec.position == "arange":
            h = h + self.places(torch.arange(h.shape[-2]))
        if spec.position == "learned":
            h = h + self.places(pos)
        made, mid = [], h
        for layer, cache in zip(self.layers, caches, strict=True):
            h, new = layer(self, h, pos, start, spec.position == "rotary", cache)
            made.append(new)
        outputs = [self.head(h), *(OUTPUTS[name](self, h, x, mid) for name in spec.outputs)]
        if spec.nesting == "dict":
            return {"logits": outputs[0], "rest": outputs[1:], "caches": made}
        return (outputs, made) if spec.nesting == "list" else (*outputs, (made,))


# -- calls -------------------------------------------------------------------------------------------------------------


def call_of(spec: Spec, index: int) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """The arguments of one call, equal on both sides, with the sizes marked dynamic."""
    call = spec.calls[index]
    lead = (call.batch,) if spec.batched else ()

    def make(memory: dict[str, Any]) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(1000 * spec.seed + index)
        shape = (*lead, call.tokens)
        x = torch.randint(0, VOCAB, shape, generator=g) if spec.ids else torch.randn(*shape, H, generator=g)
        start = int(torch.randint(0, ROOM - call.tokens + 1, (), generator=g))
        pos = torch.arange(start, start + call.tokens).expand(shape).contiguous()
        past = int(torch.randint(2, 9, (), generator=g))
        caches = memory.get(("caches", lead)) if call.chain else None
        if caches is None:
            rooms = {"growing": past, "static": ROOM, "slice": ROOM}
            caches = [
                [torch.randn(*lead, HEADS, rooms[a], HEAD, generator=g) for _ in "kv"] if a in rooms else []
                for a in spec.attentions
            ]
        memory["caches", lead] = caches
        for t in (x, pos, *(c for pair in caches for c in pair)):
            if spec.batched and "b" in spec.dynamic:
                torch._dynamo.maybe_mark_dynamic(t, 0)
        if "t" in spec.dynamic:
            for t in (x, pos):
                torch._dynamo.maybe_mark_dynamic(t, len(lead))
        for kind, pair in zip(spec.attentions, caches, strict=True):
            for c in pair if kind == "growing" else []:
                torch._dynamo.maybe_mark_dynamic(c, c.dim() - 2)
        return x, pos, start, caches

    return make


def after_call(spec: Spec, index: int, memory: dict[str, Any]) -> None:
    """Growing caches of the next chained call are those that this one returned."""
    lead = (spec.calls[index].batch,) if spec.batched else ()
    out = memory["out"]
    made = out["caches"] if spec.nesting == "dict" else out[1] if spec.nesting == "list" else out[-1][0]
    old = memory["caches", lead]
    kinds = zip(spec.attentions, made, old, strict=True)
    memory["caches", lead] = [list(new) if kind == "growing" else kept for kind, new, kept in kinds]


def calls_of(spec: Spec) -> list[Any]:
    def chained(index: int) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
        make = call_of(spec, index)

        def call(memory: dict[str, Any]) -> tuple[Any, ...]:
            if index:
                after_call(spec, index - 1, memory)
            return make(memory)

        return call

    return [chained(i) for i in range(len(spec.calls))]


def run_spec(spec: Spec) -> Report:
    """Build, run both ways, compare; every linear must have been captured in every graph."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(spec.seed)
    model = Decoder(spec).eval()
    options = {"buckets": list(spec.ladder)}
    changes_input = bool({"static", "slice"} & set(spec.attentions)) or any(
        op in INPLACE for layer in spec.layers for op in layer.ops
    )
    report = check_calls(
        model,
        calls_of(spec),
        compiled_kwargs={"options": options},
        floor=1,
        padded=False,
        tolerate={"bucket-invalid"},  # a guard of Dynamo that the bucket breaks
        moves=changes_input,
        seed=spec.seed,
    )
    cut = any(op in CUT_BEFORE_LINEAR for layer in spec.layers for op in layer.ops)
    for plan in report.plans if not cut else []:
        assert "aten.linear" not in str(plan.eager_ops()), f"a linear runs eagerly\n{plan}"
    return report


# -- generation --------------------------------------------------------------------------------------------------------


def make_spec(pick: Callable[[Sequence[T]], T], number: Callable[[int, int], int]) -> Spec:
    """One spec; ``pick`` chooses from a sequence, ``number(low, high)`` an int, both ends included."""

    def some(names: Sequence[str], most: int) -> tuple[str, ...]:
        return tuple(pick(names) for _ in range(number(0, most)))

    batched = pick([False, True])
    dynamic = pick(["t", "b", "tb"]) if batched else "t"
    layers = tuple(
        LayerSpec(
            pick(ATTENTIONS), pick(MLPS), pick(NORMS), pick([True, True, False]), some((*MIXERS, *MIXERS, *INPLACE), 2)
        )
        for _ in range(number(1, 2))
    )
    sizes = [number(2, 13) for _ in range(3)]
    batches = [number(2, 6) for _ in range(2)]
    ladder = tuple(sorted({*(number(2, 18) for _ in range(number(0, 2))), 19}))
    calls = tuple(
        CallSpec(
            pick(batches) if "b" in dynamic else batches[0],
            pick(sizes) if "t" in dynamic else sizes[0],
            pick([False, True]),
        )
        for _ in range(number(5, 8))
    )
    return Spec(
        batched,
        dynamic,
        pick([True, True, False]),
        pick(POSITIONS),
        layers,
        some(tuple(OUTPUTS), 3),
        pick(["tuple", "list", "dict"]),
        ladder,
        calls,
        number(0, 9999),
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    return make_spec(lambda items: draw(st.sampled_from(items)), lambda low, high: draw(st.integers(low, high)))


EXAMPLES = int(os.environ.get("TGB_EXAMPLES", "40"))
LONG = "TGB_EXAMPLES" in os.environ
# A shrink compiles hundreds of models: only at length. In CI the printed Spec is enough to start from.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate] + ([Phase.shrink] if LONG else [])


@pytest.mark.slow
def test_padded_replay_is_eager() -> None:
    """Would catch: padding that reaches a real row, a slot or bridge that is not filled, a frozen size or scalar,
    memory reused too early, an output that a later call overwrites, a lost or repeated side effect, a wrong stride,
    and a backend that is right only because nothing is captured."""
    totals: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not LONG,
        database=None,
        phases=PHASES,
        print_blob=LONG,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def prop(spec: Spec) -> None:
        report = run_spec(spec)
        totals.update(calls=report.stats.calls, replays=report.stats.replays, padded=report.padded, models=report.calls)

    prop()
    assert totals["padded"] * 2 > totals["models"], f"most calls must have padded rows: {totals}"
    assert totals["replays"] * 3 > totals["calls"], f"too few calls were replays: {totals}"
    assert totals["eager"] * 50 < totals["calls"], f"too many calls were eager: {totals}"


@pytest.mark.parametrize("name", sorted({*MIXERS, *INPLACE}))
def test_each_operation_alone(name: str) -> None:
    """Every operation of the vocabulary between two linears: says at once which one a random example stumbled over."""
    calls = tuple(CallSpec(3, n) for n in (5, 4, 5, 7, 4, 8))
    layers = (LayerSpec(mlp="gelu", norm="rms", ops=(name,)), LayerSpec(mlp="relu"))
    run_spec(Spec(False, "t", True, "learned", layers, (), "tuple", (6, 8), calls))


@pytest.mark.parametrize("attention", [a for a in ATTENTIONS if a != "none"])
@pytest.mark.parametrize("dynamic", ["t", "b", "tb"])
def test_each_attention_alone(attention: str, dynamic: str) -> None:
    """Every attention, padded in tokens, in batch, and in both."""
    sizes = ((3, 5), (3, 5), (5, 5), (3, 7), (5, 7), (3, 5))
    calls = tuple(
        CallSpec(b if "b" in dynamic else 3, t if "t" in dynamic else 5, i % 2 == 1) for i, (b, t) in enumerate(sizes)
    )
    layers = (LayerSpec(attention, "swiglu", "rms"), LayerSpec(attention, "gelu", "layer"))
    run_spec(Spec(True, dynamic, True, "rotary", layers, (), "tuple", (6, 8), calls))


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_each_output_alone(name: str) -> None:
    """Every kind of extra output: its value, strides, and what memory it shares."""
    calls = tuple(CallSpec(3, n) for n in (5, 4, 5, 7, 8))
    layers = (LayerSpec(mlp="gelu", norm="rms"),)
    run_spec(Spec(False, "t", False, "none", layers, (name,), "dict", (6, 8), calls))


def simpler(spec: Spec) -> list[Spec]:
    """Specs with one thing less, for shrinking a failure by hand."""
    found = [dataclasses.replace(spec, calls=spec.calls[:i] + spec.calls[i + 1 :]) for i in range(len(spec.calls))]
    for i, layer in enumerate(spec.layers):
        rest = [dataclasses.replace(layer, ops=layer.ops[:k] + layer.ops[k + 1 :]) for k in range(len(layer.ops))]
        used = [name for name in ("attention", "mlp", "norm") if getattr(layer, name) != "none"]
        rest += [dataclasses.replace(layer, **{name: "none"}) for name in used]
        found += [dataclasses.replace(spec, layers=(*spec.layers[:i], r, *spec.layers[i + 1 :])) for r in rest]
        if len(spec.layers) > 1:
            found.append(dataclasses.replace(spec, layers=spec.layers[:i] + spec.layers[i + 1 :]))
    found += [
        dataclasses.replace(spec, outputs=spec.outputs[:i] + spec.outputs[i + 1 :]) for i in range(len(spec.outputs))
    ]
    if spec.position != "none":
        found.append(dataclasses.replace(spec, position="none"))
    if any(c.chain for c in spec.calls):
        found.append(dataclasses.replace(spec, calls=tuple(dataclasses.replace(c, chain=False) for c in spec.calls)))
    if spec.batched and spec.dynamic == "t":
        found.append(dataclasses.replace(spec, batched=False))
    return found
