"""Small functions by name, each with what the padding proof must refuse of it. Data for the tests and the mutation tool.

``CASES``: name -> (function, argument specs, refused packets with their reason codes). Nothing else may be refused, and
everything that is not refused must agree with the unpadded run (``padding_harness.check``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rotate(q, positions):
    angles = positions[:, None].float() * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    half = torch.cat([-q[..., 4:], q[..., :4]], -1)
    return q * cos + half * sin


def moe(x, router, experts):
    weights, index = torch.topk(torch.softmax(x @ router, -1), 2)
    gate = (F.one_hot(index, 4).to(x.dtype) * weights[..., None]).sum(1)
    return torch.einsum("te,teh->th", gate, torch.einsum("th,ehk->tek", x, experts))


def attend(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def block(x, w1, w2):
    return x + F.linear(F.silu(F.linear(F.rms_norm(x, (8,)), w1)) * 2, w2)


def causal_scores(x):
    size = x.shape[0]
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    return (x @ x.t()).masked_fill(~mask, float("-inf"))


#: name -> (function, argument specs, refused packets with their codes). Nothing else may be refused.
P, D, U = "padding", "derived-size", "unknown-op"
CASES = {
    # element by element
    "add": (lambda a, b: a + b * 2, ["T,8", "T,8"], {}),
    "broadcast": (lambda a, b: a * b, ["B,T,8", "T,1"], {}),
    "size as data": (lambda a: a * a.shape[0], ["T,8"], {"mul": P}),
    "size as data, root": (lambda a: a / a.shape[0] ** 0.5, ["T,8"], {"div": P}),
    "size as data, fill": (lambda a: a + torch.full((8,), a.shape[0]), ["T,8"], {"full": P}),
    "size as tensor": (lambda a: a + torch.scalar_tensor(a.shape[0]), ["T,8"], {"scalar_tensor": P}),
    "counter plus size": (lambda a, c: (c.add_(a.shape[0]), a + 1), ["T,8", ""], {"add_": P}),
    "activations": (lambda a: F.gelu(F.relu6(F.hardswish(F.leaky_relu(F.mish(a))))), ["T,8"], {}),
    "where": (lambda a, m: torch.where(m, a, 0.0).masked_fill(~m, 2.0), ["T,8", "b:T,1"], {}),
    "clamp, lerp": (lambda a, b: torch.lerp(a.clamp(-1, 1), b, 0.3), ["T,8", "T,8"], {}),
    "prelu": (lambda a, w: F.prelu(a, w), ["T,8", "8"], {}),
    "to, type_as": (lambda a, b: a.to(torch.float64).type_as(b).contiguous(), ["T,8", "4"], {}),
    "dropout off": (lambda a: F.dropout(a, 0.5, training=False), ["T,8"], {}),
    "dropout on": (lambda a: F.dropout(a, 0.5), ["T,8"], {"dropout": P}),
    "rand": (lambda a: a * 0 + torch.rand_like(a) * 0, ["T,8"], {"rand_like": P}),
    "glu": (lambda a: F.glu(a, -1), ["T,8"], {}),
    "glu over rows": (lambda a: F.glu(torch.cat([a, a], 1).t().reshape(16, -1), 0), ["T,8"], {}),
    # reductions and lines
    "mean over tokens": (lambda a: a - a.mean(0, keepdim=True), ["T,8"], {"mean": P}),
    "sum of all": (lambda a: a / a.sum(), ["T,8"], {"sum": P}),
    "mean over features": (lambda a: a - a.mean(-1, keepdim=True), ["T,8"], {}),
    "amax row": (lambda a: (a / a.abs().amax(-1, keepdim=True) * 127).round(), ["T,8"], {}),
    "amax tensor": (lambda a: a / a.abs().amax(), ["T,8"], {"amax": P}),
    "max.dim, argmax": (lambda a: (a.max(1).values + a.argmax(1), a.min(0)), ["T,8"], {"min": P}),
    "std, var_mean": (lambda a: (a.std(-1), torch.var_mean(a, dim=[1], keepdim=True)), ["T,8"], {}),
    "std over tokens": (lambda a: a.std(0), ["T,8"], {"std": P}),
    "vector norm": (lambda a: torch.linalg.vector_norm(a, dim=-1) + a.norm(dim=1), ["T,8"], {}),
    "vector norm of all": (lambda a: torch.linalg.vector_norm(a), ["T,8"], {"linalg_vector_norm": P}),
    "logsumexp": (lambda a: (a.logsumexp(1), a.logsumexp(0)), ["T,8"], {"logsumexp": P}),
    "any, all": (lambda a, m: (m.any(1), m.all(0)), ["T,8", "b:T,8"], {"all": P}),
    "sum of ones": (lambda a: a * torch.ones(a.shape[0]).sum(), ["T,8"], {"sum": P}),
    "softmax over features": (lambda a: a.softmax(-1) + a.log_softmax(-1), ["T,8"], {}),
    "softmax over tokens": (lambda a: a.softmax(0), ["T,8"], {"softmax": P}),
    "cumsum": (lambda a: a.cumsum(0) + a.cumsum(1), ["T,8"], {}),
    "cumsum, padding inside": (lambda a: a.reshape(-1, 8).cumsum(0), ["3,T,8"], {"cumsum": P}),
    "cummax": (lambda a: a.cummax(0).values, ["T,8"], {}),
    "flip": (lambda a: a.flip(1) + a.flip(0), ["T,8"], {"flip": P}),
    "roll": (lambda a: a.roll(1, 1) + a.roll(1, 0), ["T,8"], {"roll": P}),
    "roll flat": (lambda a: a.roll(1), ["T,8"], {"roll": P}),
    "sort": (lambda a: (a.sort(-1).values, a.sort(0).values), ["T,8"], {"sort": P}),
    "topk": (lambda a: (a.topk(2, -1).values, a.topk(2, 0).values), ["T,8"], {"topk": P}),
    "cosine similarity": (lambda a, b: F.cosine_similarity(a, b, dim=-1), ["T,8", "T,8"], {}),
    "cosine similarity, tokens": (lambda a, b: F.cosine_similarity(a, b, dim=0), ["T,8", "T,8"],
                                  {"cosine_similarity": P}),
    # norms and local operations
    "layer norm": (lambda a, w: F.layer_norm(a, (8,), w, w), ["T,8", "8"], {}),
    "layer norm over tokens": (lambda a: F.layer_norm(a.t(), (a.shape[0],)), ["T,8"], {"layer_norm": P}),
    "rms norm": (lambda a, w: F.rms_norm(a, (8,), w), ["B,T,8", "8"], {}),
    "group norm batch": (lambda a: F.group_norm(a, 2), ["B,4,6"], {}),
    "group norm tokens": (lambda a: F.group_norm(a, 2), ["2,4,T"], {"group_norm": P}),
    "batch norm eval": (lambda a, m: F.batch_norm(a, m, m.abs() + 1), ["T,8", "8"], {}),
    "batch norm train": (lambda a: F.batch_norm(a, None, None, training=True), ["T,8"], {"batch_norm": P}),
    "conv batch": (lambda a, w: F.conv1d(a, w, padding=1), ["B,4,6", "4,4,3"], {}),
    "conv tokens": (lambda a, w: F.conv1d(F.pad(a, (2, 0)), w), ["1,4,T", "4,4,3"], {}),
    "conv2d, pool": (lambda a, w: F.avg_pool2d(F.max_pool2d(F.conv2d(a, w), 2), 2), ["B,3,8,8", "4,3,1,1"], {}),
    "upsample": (lambda a: F.interpolate(a, scale_factor=2.0), ["B,3,4,4"], {}),
    "pool over tokens": (lambda a: F.avg_pool1d(a, 2, 1) + 1, ["2,4,T"], {}),
    "adaptive pool": (lambda a: F.adaptive_avg_pool2d(a, (1, 1)).flatten(1), ["B,3,4,4"], {}),
    "instance norm": (lambda a: F.instance_norm(a), ["B,4,6"], {}),
    "instance norm tokens": (lambda a: F.instance_norm(a), ["2,4,T"], {"instance_norm": P}),
    "bucketize": (lambda a, t: torch.bucketize(a, t.sort().values), ["T,8", "6"], {}),
    "bucketize by padded rows": (lambda a, t: torch.bucketize(a, t), ["8", "T"], {"bucketize": P}),
    # contractions
    "matmul": (lambda a, w: a @ w, ["B,T,8", "8,4"], {}),
    "matmul over tokens": (lambda a: a.t() @ a, ["T,8"], {"matmul": P}),
    "scores": (lambda a: a @ a.t(), ["T,8"], {}),
    "scores times values": (lambda a: torch.softmax(a @ a.t(), -1) @ a, ["T,8"], {"softmax": P, "matmul": P}),
    "bmm, baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b) + torch.bmm(a, b), ["B,3,4", "B,4,5", "3,5"], {}),
    "linear, addmm": (lambda a, w, b: F.linear(a, w, b) + torch.addmm(b, a, w), ["T,8", "8,8", "8"], {}),
    "mv, dot": (lambda a, v: (torch.mv(a, v), torch.dot(a[:, 0], a[:, 1])), ["T,8", "8"], {"dot": P}),
    "outer": (lambda a, b: torch.outer(a, b), ["T", "4"], {}),
    "einsum": (lambda a, b: torch.einsum("bth,hk->btk", a, b), ["B,T,8", "8,4"], {}),
    "einsum ellipsis": (lambda a, b: torch.einsum("...h,hk", a, b), ["B,T,8", "8,4"], {}),
    "einsum over tokens": (lambda a, b: torch.einsum("th,tk->hk", a, b), ["T,8", "T,4"], {"einsum": P}),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([2], [0])), ["B,T,8", "8,4"], {}),
    "attention, batch": (lambda q, k: attend(q, k, k, is_causal=True), ["B,2,4,8", "B,2,4,8"], {}),
    "attention, queries": (lambda q, k: attend(q, k, k), ["1,2,T,8", "1,2,6,8"], {}),
    "attention, queries and mask": (lambda q, k, m: attend(q, k, k, attn_mask=m), ["B,2,T,8", "B,2,6,8", "T,6"], {}),
    "attention, causal queries": (lambda q, k: attend(q, k, k, is_causal=True), ["1,2,T,8", "1,2,6,8"],
                                  {"scaled_dot_product_attention": P}),
    "attention, keys": (lambda q: attend(q, q, q), ["1,2,T,8"], {"scaled_dot_product_attention": P}),
    "attention, grouped": (lambda q, k: attend(q, k, k, enable_gqa=True), ["B,4,T,8", "B,2,6,8"], {}),
    # views
    "flatten tokens": (lambda a, w: (a.reshape(-1, 8) @ w).view(a.shape), ["B,T,8", "8,8"], {}),
    "heads": (lambda a: a.view(a.shape[0], a.shape[1], 2, 4).transpose(1, 2), ["B,T,8"], {}),
    "merge heads": (lambda a: a.transpose(1, 2).reshape(a.shape[0], a.shape[2], -1), ["B,2,T,4"], {}),
    "rows to heads": (lambda a: F.rms_norm(a.view(-1, 4), (4,)).view(a.shape[0], 8), ["T,8"], {}),
    "scramble": (lambda a: a.view(8, -1) + 1, ["T,8"], {"view": P}),
    "split the tokens": (lambda a: a.t().reshape(2, -1), ["T,8"], {}),
    "transposed": (lambda a: a.permute(2, 0, 1).movedim(0, -1).swapaxes(0, 1).mT + 1, ["B,T,8"], {}),
    "squeeze": (lambda a: a.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(), ["T,8"], {}),
    "expand": (lambda a, v: v.expand(a.shape[0], 8) + a, ["T,8", "8"], {}),
    "expand derived": (lambda a, v: v.expand(a.shape[0] + 1, 8), ["T,8", "8"], {}),
    "repeat": (lambda a: a.repeat(2, 1), ["T,8"], {}),
    "repeat by size": (lambda a, v: v.repeat(a.shape[0], 1), ["T,8", "3,8"], {}),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 0), ["T,8"], {}),
    "chunk features": (lambda a: a.chunk(2, -1)[0] * a.split(4, -1)[1], ["T,8"], {}),
    "unbind": (lambda a: a.unbind(1)[0] + a.unbind(1)[1], ["T,2,4"], {}),
    "view dtype": (lambda a: a.view(torch.int32) + 0, ["T,8"], {}),
    "view complex": (lambda a: torch.view_as_real(torch.view_as_complex(a) * 1j).flatten(1), ["T,4,2"], {}),
    # cutting and joining
    "last row": (lambda a, w: a[-1] @ w, ["T,8", "8,8"], {"select": P}),
    "first row": (lambda a: a + a[0], ["T,8"], {}),
    "first three": (lambda a: a[:3] * 2, ["T,8"], {}),
    "without last": (lambda a: a[:-1] + 1, ["T,8"], {}),
    "without first": (lambda a: a[1:] + 1, ["T,8"], {}),
    "last features": (lambda a: a[..., -4:] + a[..., :4], ["T,8"], {}),
    "table prefix": (lambda a, t: a + t[: a.shape[0]], ["T,8", "64,8"], {}),
    "table suffix": (lambda a, t: a + t[64 - a.shape[0] :], ["T,8", "64,8"], {"slice": P}),
    "narrow": (lambda a, t: a + t.narrow(0, 2, a.shape[0]), ["T,8", "64,8"], {}),
    "cat features": (lambda a: torch.cat([a, a], -1), ["T,8"], {}),
    "cat tokens": (lambda a, b: torch.cat([a, b], 0), ["T,8", "3,8"], {"cat": P}),
    "cat cache": (lambda a, b: torch.cat([b, a], 0), ["T,8", "3,8"], {}),
    "cat empty": (lambda a, b: torch.cat([b, a], 0) + a, ["T,8", "0,8"], {}),
    "stack": (lambda a: torch.stack([a, a * 2], 1), ["T,8"], {}),
    "pad features": (lambda a: F.pad(a, (1, 2)), ["T,8"], {}),
    "pad tokens": (lambda a: F.pad(a, (0, 0, 0, 3)), ["T,8"], {"pad": P}),
    "pad tokens left": (lambda a: F.pad(a, (0, 0, 3, 0)), ["T,8"], {}),
    "tril": (causal_scores, ["T,8"], {}),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="xy"), ["T", "4"], {}),
    # factories
    "arange": (lambda a: a + torch.arange(a.shape[0])[:, None], ["T,8"], {}),
    "arange down": (lambda a: a + torch.arange(a.shape[0] - 1, -1, -1)[:, None], ["T,8"], {"arange": P}),
    "reversed positions": (lambda a: a + (a.shape[0] - 1 - torch.arange(a.shape[0]))[:, None], ["T,8"], {"rsub": P}),
    "arange of rows": (lambda a: a.view(-1) + torch.arange(a.shape[0] * 8), ["T,8"], {}),
    "zeros of any layout": (lambda a: a.reshape(-1, 8) + torch.zeros(a.shape[0] * a.shape[1], 8), ["B,T,8"], {}),
    "zeros derived": (lambda a: torch.zeros(a.shape[0] + 1, 8) + 1, ["T,8"], {}),
    "like": (lambda a: torch.zeros_like(a) + torch.full_like(a, 2.0) + a.new_ones(a.shape), ["T,8"], {}),
    # indices
    "embedding": (lambda i, w: F.rms_norm(F.embedding(i, w), (8,)), ["i:B,T", "10,8"], {}),
    "embedding of padded table": (lambda i, a: F.embedding(i, a), ["i:3", "T,8"], {"embedding": P}),
    "positions": (lambda i, w: w[torch.arange(i.shape[1]) + 2] + F.embedding(i, w), ["i:B,T", "64,8"], {}),
    "positions beyond the table": (lambda i, w: F.embedding(i.cumsum(0), w), ["i:T", "64,8"], {"embedding": P}),
    "position buffer": (lambda i, p, w: F.embedding(p[:, : i.shape[1]], w), ["i:B,T", "i:1,64", "64,8"],
                        {"embedding": P}),
    "index_select": (lambda a, i, w: w.index_select(0, i), ["T,8", "i:T", "10,8"], {}),
    "gather features": (lambda a, i: a.gather(1, i), ["T,8", "i:T,2"], {}),
    "gather tokens": (lambda a, i: a.gather(0, i), ["T,8", "i:2,8"], {"gather": P}),
    "index padded rows": (lambda a, i: a[i], ["T,8", "i:3"], {"index": P}),
    "index features": (lambda a, i: a[:, i] + 1, ["T,8", "i:3"], {}),
    "index two dims": (lambda a, i: a[:, i, i], ["T,8,8", "i:3"], {}),
    "index apart": (lambda a, i: a[i, :, i], ["8,T,8", "i:3"], {}),
    "one_hot": (lambda i: F.one_hot(i, 4) * 2, ["i:T"], {}),
    "one_hot count": (lambda i: F.one_hot(i, 4).sum(0), ["i:T"], {"sum": P}),
    "scatter row-local": (lambda a, i: torch.zeros_like(a).scatter(1, i, a[:, :2]), ["T,8", "i:T,2"], {}),
    "scatter rows": (lambda a, i, c: c.scatter(0, i, a), ["T,8", "i:T,8", "16,8"], {"scatter": P}),
    "index_copy_ rows": (lambda a, i, c: (c.index_copy_(0, i, a), a + 1), ["T,8", "i:T", "16,8"], {"index_copy_": P}),
    "index_copy_ per batch": (lambda a, i, c: (c.index_copy_(1, i, a), c + 1), ["B,1,8", "i:1", "B,16,8"], {}),
    "index_put_ per batch": (lambda a, i, c: c.index_put_((torch.arange(2), i), a[0, 0, 0]), ["B,1,8", "i:2", "4,4"],
                             {}),
    "index_add_ rows": (lambda a, i, c: c.index_add_(0, i, a), ["T,8", "i:T", "16,8"], {"index_add_": P}),
    # memory
    "in place": (lambda a, b: a.add_(F.silu(b)).mul_(2).relu_(), ["T,8", "T,8"], {}),
    "copy_": (lambda a, b: (a.copy_(b), a * 2), ["T,8", "8"], {}),
    "fill_, zero_": (lambda a: (a[:, :2].zero_(), a[0].fill_(3.0), a * 2), ["T,8"], {}),
    "write through table prefix": (lambda a, c: (c[: a.shape[0]].copy_(a), a + 1), ["T,8", "16,8"], {"copy_": P}),
    "zero a table prefix": (lambda a, c: (c[: a.shape[0]].zero_(), a + 1), ["T,8", "16,8"], {"zero_": P}),
    "write through a view of a prefix": (lambda a, c: (c[: a.shape[0]].t().add_(1), a + 1), ["T,8", "16,8"],
                                         {"add_": P}),
    "write scores into new memory": (lambda a: torch.zeros(a.shape[0], 8).copy_(a), ["T,8"], {}),
    "flat write in other order": (lambda a: torch.zeros(a.shape[0] * a.shape[1]).copy_(a.reshape(-1)), ["B,T"],
                                  {"zeros": D, "copy_": D}),
    # models
    "rotary": (lambda a: rotate(a, torch.arange(a.shape[-2])), ["B,2,T,8"], {}),
    "MoE": (moe, ["T,8", "8,4", "4,8,8"], {}),
    "block": (block, ["B,T,8", "8,8", "8,8"], {}),
    "size is gone": (lambda a: a.unsqueeze(0).nonzero(), ["T,8"], {"nonzero": U}),
}  # fmt: skip
