"""47 labelled segments: what a person says of each, to hold the proof against.

``SEGMENTS``: name -> (function, argument specs, label). ``T`` is padded. Labels: *safe*: real rows do not depend on the
padding, nor on the size. *mixes*: they do. *promise*: safe if index arguments (kind ``x``) are what they claim to be.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SAFE, MIXES, PROMISE = "safe", "mixes", "promise"


def rotate(x):
    angle = torch.arange(x.shape[0])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


def routed(x, router, experts):
    weight, index = (x @ router).softmax(-1).topk(2)
    gates = torch.zeros(x.shape[0], 4).scatter(1, index, weight)
    return torch.einsum("te,teh->th", gates, torch.einsum("th,ehk->tek", x, experts))


def sorted_by_expert(x, router, w):
    order = (x @ router).argmax(-1).argsort(stable=True)
    return torch.zeros_like(x).index_copy(0, order, x[order] @ w)


def masked_attention(x):
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
    return (x @ x.t()).masked_fill(~mask, float("-inf")).softmax(-1) @ x


def branch(x):
    return x * 2 if x.shape[0] > 3 else x * 3


X, W = "T,8", "8,8"
SEGMENTS = {
    "gated block with residual": (
        lambda x, w: x + F.linear(F.silu(F.linear(F.rms_norm(x, (8,)), w)), w), [X, W], SAFE),
    "norm, then softmax over features": (lambda x: F.layer_norm(x, (8,)).softmax(-1), [X], SAFE),
    "softmax over tokens": (lambda x: x.softmax(0), [X], MIXES),
    "centred over tokens": (lambda x: x - x.mean(0, keepdim=True), [X], MIXES),
    "running sum": (lambda x: x.cumsum(0), [X], SAFE),
    "running sum from the end": (lambda x: x.flip(0).cumsum(0).flip(0), [X], MIXES),
    "head on the last token": (lambda x, w: x[-1] @ w, [X, W], MIXES),
    "first token added to the third and on": (lambda x: x[2:] + x[0], [X], SAFE),
    "norm of heads": (lambda x: F.rms_norm(x.view(-1, 4), (4,)).view(x.shape[0], 8), [X], SAFE),
    "flattened and back": (lambda x, w: (x.reshape(-1, 8) @ w).view(x.shape), ["3,T,8", W], SAFE),
    "flattened": (lambda x, w: x.reshape(-1, 8) @ w, ["3,T,8", W], SAFE),
    "rows read as columns": (lambda x: x.view(8, -1) + 1, [X], MIXES),
    "times the size": (lambda x: x * x.shape[0], [X], MIXES),
    "rotary": (rotate, [X], SAFE),
    "table of positions": (lambda x, t: x + t[: x.shape[0]], [X, "64,8"], SAFE),
    "positions from the end": (lambda x: x + (x.shape[0] - 1 - torch.arange(x.shape[0]))[:, None], [X], MIXES),
    "experts, dense": (routed, [X, "8,4", "4,8,8"], SAFE),
    "tokens of each expert": (lambda x, r: F.one_hot((x @ r).argmax(-1), 4).sum(0), [X, "8,4"], MIXES),
    "experts, sorted": (sorted_by_expert, [X, "8,4", W], SAFE),
    "cache write by slots": (lambda x, c, i: (c.index_copy_(0, i, x), x + 1), [X, "16,8", "i:T"], MIXES),
    "embedding": (lambda i, w: F.rms_norm(F.embedding(i, w), (8,)), ["i:T", "32,8"], SAFE),
    "rows by padded indices": (lambda x, i: x.repeat_interleave(2, 0)[i], [X, "x:T"], PROMISE),
    "rows by given indices": (lambda x, i, w: x.repeat_interleave(2, 0)[i] @ w, [X, "x:2", W], PROMISE),
    "batch norm, training": (lambda x: F.batch_norm(x, None, None, training=True), [X], MIXES),
    "batch norm, inference": (lambda x, m: F.batch_norm(x, m, m.abs() + 1), [X, "8"], SAFE),
    "attention": (lambda x: (x @ x.t()).softmax(-1) @ x, [X], MIXES),
    "scores": (lambda x: x @ x.t(), [X], SAFE),
    "causal convolution": (
        lambda x, w: F.conv1d(F.pad(x.t()[None], (2, 0)), w, groups=8)[0].t(), [X, "8,1,3"], SAFE),
    "token shift": (lambda x, p: x - torch.cat([p, x[:-1]]), [X, "1,8"], SAFE),
    "dropout": (lambda x: F.dropout(x, 0.5), [X], MIXES),
    "boolean mask": (lambda x: x[x[:, 0] > 0], [X], MIXES),
    "quantised by tensor": (lambda x: (x / x.abs().amax() * 127).round(), [X], MIXES),
    "quantised by row": (lambda x: (x / x.abs().amax(-1, keepdim=True) * 127).round(), [X], SAFE),
    "attention within a batch": (lambda x: (x @ x.mT).softmax(-1) @ x, ["T,4,8"], SAFE),
    "cache write apart from the rows": (
        lambda x, c, i, k: (c.index_copy_(0, i, k), x + c.sum()), [X, "16,8", "i:3", "3,8"], SAFE),
    "counter": (lambda x, n: (n.add_(x.shape[0]), x + 1), [X, ""], MIXES),
    "residual in place": (lambda x, y: x.add_(F.silu(y)) * 2, [X, X], SAFE),
    "cache write by a slice": (lambda x, c: (c[: x.shape[0]].copy_(x), x + 1), [X, "16,8"], MIXES),
    "branch on the size": (branch, [X], SAFE),
    "halves of the features": (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].sigmoid(), [X], SAFE),
    "halves of the tokens": (lambda x: x.repeat(2, 1).chunk(2, 0)[0] + x.flip(0), [X], MIXES),
    "over the root of the size": (lambda x: x / x.shape[0] ** 0.5, [X], MIXES),
    "rows added at the end": (lambda x: F.pad(x, (0, 0, 0, 3)), [X], MIXES),
    "masked attention": (masked_attention, [X], SAFE),
    "pooled tokens": (lambda x: F.avg_pool1d(x.t()[None], 2, 2)[0].t(), [X], SAFE),
    "every token twice": (lambda x: x.repeat_interleave(2, 0), [X], SAFE),
    "all tokens twice": (lambda x: x.repeat(2, 1), [X], SAFE),
}  # fmt: skip

#: Labelled safe, and refused all the same, with the reason why that is right or must do.
CAUTIOUS = {
    "experts, sorted": "a permutation and its inverse are not known as such",
    "masked attention": "a weight of zero times a padded value is zero unless that is NaN or infinite",
}
