"""Small functions by name, each with what the padding proof must refuse of it. Data for the tests and the mutation tool.

``CASES``: name -> (function, argument specs, refused packets with their reason codes). Nothing else may be refused, and
everything that is not refused must agree with the unpadded run (``padding_harness.check``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_graph_backend.passes.padding_rules_declared import DECLARED, RowLocal


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


def put_in_another_order(x):
    target = torch.zeros(2 * x.shape[0], 8)
    target[:, torch.tensor([0, 1])] = x.repeat(2, 1)[:, :2]
    return target * 1


def _declare(schema, function, dims, rows):
    """A custom operation that is declared row-local in its first ``dims`` dimensions (which its body does keep)."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    DECLARED[f"padding_cases::{name}"] = RowLocal(dims, rows)


LIBRARY = torch.library.Library("padding_cases", "DEF")
_declare("shifted(Tensor x, Tensor table) -> Tensor", lambda x, table: x + table.sum(0), 1, ("x",))
_declare("softened(Tensor x) -> Tensor", lambda x: x.softmax(-1), 1, None)
_declare("mixed(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y.sum(1), 2, None)

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
    # one case for each refusal that the ones above do not reach
    "ragged, cut too little": (lambda a, w: F.pad(F.conv1d(a, w, padding=2), (0, -1)), ["1,4,T", "4,4,3"],
                              {"conv1d": P, "pad": D}),
    "ragged, returned": (lambda a, w: F.conv1d(a, w, padding=2), ["1,4,T", "4,4,3"], {"conv1d": P}),
    "ragged, cut": (lambda a, w: F.silu(F.conv1d(a, w, padding=2)[..., : a.shape[-1]]), ["1,4,T", "4,4,3"], {}),
    "ragged, cut by one": (lambda a, w: F.conv1d(a, w, padding=2)[..., :-1], ["1,4,T", "4,4,3"],
                          {"conv1d": P, "slice": D}),
    "ragged, written": (lambda a, w: torch.zeros(1, 4, a.shape[2] + 2).copy_(F.conv1d(a, w, padding=2)),
                        ["1,4,T", "4,4,3"], {"conv1d": P, "copy_": D}),
    "ragged, changed in place": (lambda a, w: F.conv1d(a, w, padding=2).relu_()[..., : a.shape[-1]],
                                 ["1,4,T", "4,4,3"], {}),
    "same convolution": (lambda a, w: F.conv1d(a, w, padding="same"), ["1,4,T", "4,4,3"], {"conv1d": P}),
    "strided convolution": (lambda a, w: F.conv1d(a, w, stride=2), ["1,4,T", "4,4,3"], {}),
    "strided convolution, padded": (lambda a, w: F.conv1d(a, w, stride=2, padding=2), ["1,4,T", "4,4,3"],
                                    {"conv1d": P}),
    "dilated convolution": (lambda a, w: F.conv1d(F.pad(a, (4, 0)), w, dilation=2), ["1,4,T", "4,4,3"], {}),
    "convolution over channels": (lambda a, w: F.conv1d(a[None].transpose(1, 2)[:, :3], w), ["6,T", "4,3,3"], {}),
    "convolution of padded channels": (lambda a, w: F.conv1d(a[None], w, groups=1), ["T,6", "4,T,3"], {"conv1d": P}),
    "convolution with padded filters": (lambda a, w: F.conv1d(a, w), ["1,4,6", "T,4,3"], {"conv1d": P}),
    "convolution in two dims": (lambda a, w: F.conv2d(a, w), ["1,3,T,8", "4,3,3,3"], {"conv2d": P}),
    "convolution behind padding": (lambda a, w: F.conv1d(a.repeat(1, 1, 2), w), ["1,4,T", "4,4,3"], {"conv1d": P}),
    "transposed convolution": (lambda a, w: F.conv_transpose1d(a, w), ["B,4,6", "4,4,3"], {}),
    "transposed convolution over tokens": (lambda a, w: F.conv_transpose1d(a, w, padding=1), ["1,4,T", "4,4,3"],
                                           {"conv_transpose1d": P}),
    "transposed convolution, padded filters": (lambda a, w: F.conv_transpose1d(a, w), ["1,4,6", "4,T,3"],
                                               {"conv_transpose1d": P}),
    "attention with dropout": (lambda q, k: attend(q, k, k, dropout_p=0.5), ["B,2,4,8", "B,2,4,8"],
                               {"scaled_dot_product_attention": P}),
    "attention, padded features": (lambda q, v: attend(q, q, v), ["1,2,4,T", "1,2,4,8"],
                                   {"scaled_dot_product_attention": P}),
    "attention, padded mask": (lambda q, m: attend(q.mT, q.mT, q.mT, attn_mask=m), ["1,2,8,T", "T,T"],
                               {"scaled_dot_product_attention": P}),
    "attention, padded groups": (lambda q, k: attend(q, k, k, enable_gqa=True), ["1,T,4,8", "1,T,4,8"],
                                 {"scaled_dot_product_attention": P}),
    "tensordot over tokens": (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), ["4,T", "T,8"], {"tensordot": P}),
    "inner": (lambda a, b: torch.inner(a, b), ["T,8", "4,8"], {}),
    "inner over tokens": (lambda a, b: torch.inner(a, b), ["4,T", "8,T"], {"inner": P}),
    "linear over tokens": (lambda a, w: F.linear(a, w), ["4,T", "8,T"], {"linear": P}),
    "linear of padded filters": (lambda a, w: F.linear(a, w), ["4,8", "T,8"], {}),
    "diagonal of two orders": (lambda a: torch.einsum("tt->t", a.repeat(2, 1) @ a.repeat_interleave(2, 0).t()),
                               ["T,8"], {"einsum": P}),
    "two orders": (lambda a: a.repeat(2, 1) + a.repeat_interleave(2, 0), ["T,8"], {"add": P}),
    "shuffle": (lambda a: torch.channel_shuffle(a, 2), ["B,4,3,3"], {}),
    "shuffle padded channels": (lambda a: torch.channel_shuffle(a.repeat(1, 2, 1, 1), 2), ["1,T,3,3"],
                                {"channel_shuffle": P}),
    "arange of the square": (lambda a: torch.arange(a.shape[0] * a.shape[0]), ["T,8"], {"arange": D}),
    "arange by a size": (lambda a: torch.arange(0, a.shape[0] * a.shape[0], a.shape[0]), ["T,8"], {"arange": P}),
    "arange from the size": (lambda a: torch.arange(a.shape[0], a.shape[0] + 4), ["T,8"], {"arange": P}),
    "gather from other rows": (lambda a, i: a.gather(1, i), ["T,8", "i:3,2"], {"gather": P}),
    "gather by constant": (lambda a: a.t().gather(1, torch.zeros(8, a.shape[0], dtype=torch.long)), ["T,8"], {}),
    "gather by constant of other rows": (
        lambda a: a.gather(1, torch.zeros(3, 2, dtype=torch.long)), ["T,8"], {"gather": P}),
    "gather, scaled rows": (
        lambda a, i: a.repeat(2, 1).gather(1, i.repeat_interleave(2, 0)), ["T,8", "i:T,2"], {"gather": P}),
    "boolean mask": (lambda a, m: a[m], ["T,8", "b:T"], {"index": P}),
    "one_hot of positions": (lambda a: F.one_hot(torch.arange(a.shape[0]), 9), ["T,8"], {}),
    "look up padded rows": (lambda a: a[torch.arange(a.shape[0])] + a.index_select(0, torch.zeros(1, dtype=torch.long)),
                            ["T,8"], {}),
    "look up more rows than there may be": (lambda a: a.index_select(0, torch.arange(3)), ["T,8"], {"index_select": P}),
    "look up by unknown": (lambda a, i: a[i - 1], ["T,8", "i:3"], {"index": P}),
    "look up behind padding": (lambda a: a.repeat(2, 1)[torch.arange(6)], ["T,8"], {"index": P}),
    "look up what only the bucket has": (
        lambda a: a[:-2][(torch.arange(a.shape[0]) + 1).clamp(0, a.shape[0] - 3)], ["T,8"], {"clamp": P, "index": P}),
    "look up a rotated table": (lambda i, t: t[: i.shape[0]][i], ["i:T", "64,8"], {"index": P}),
    "look up a table by positions": (lambda i, t: t[: i.shape[0]][torch.arange(i.shape[0])], ["i:T", "64,8"], {}),
    "look up beyond the table": (lambda a, t: t[torch.arange(a.shape[0])], ["T,8", "8,8"], {}),
    "select beyond the table": (lambda a, t: t.index_select(0, torch.arange(a.shape[0])), ["T,8", "8,8"], {}),
    "embed beyond the table": (lambda a, t: F.embedding(torch.arange(a.shape[0]), t), ["T,8", "8,8"], {}),
    "gather beyond the row": (lambda a, t: t.expand(a.shape[0], 8).gather(1, torch.arange(a.shape[0])[:, None]),
                              ["T,4", "8"], {}),
    "scatter beyond the row": (lambda a: torch.zeros(a.shape[0], 8).scatter(1, torch.arange(a.shape[0])[:, None], a),
                               ["T,4"], {}),
    "table too short": (lambda a, t: a + t[: a.shape[0]], ["T,8", "8,8"], {}),
    "select padded rows": (lambda a, i: a.index_select(0, i), ["T,8", "i:3"], {"index_select": P}),
    "scatter over tokens": (lambda a, i: a.scatter(0, i, a[:1]), ["T,8", "i:1,8"], {"scatter": P}),
    "scatter other rows": (lambda a, i: torch.zeros(8, 8).scatter(1, i, a), ["T,2", "i:T,2"], {"scatter": P}),
    "scatter another order": (lambda a, i: torch.zeros(i.shape[0] * 2, 8).scatter(
        1, i.repeat_interleave(2, 0), a.repeat(2, 1)), ["T,2", "i:T,2"], {"scatter": P}),
    "index_fill rows": (lambda a, i: a.index_fill(0, i, 1.0), ["T,8", "i:2"], {"index_fill": P}),
    "index_copy padded source": (lambda a, c: c.index_copy(1, torch.tensor([0, 1]), a), ["T,2", "T,8"], {}),
    "index_copy other rows": (
        lambda a: torch.zeros(a.shape[0] * 2, 8).fill_(1.0).index_copy(1, torch.tensor([0]), a.repeat(2, 1)[:, :1]) +
        a.repeat_interleave(2, 0), ["T,8"], {"index_copy": P, "add": D}),
    "index_add padded positions": (lambda a, i: torch.zeros(4, 8).index_add(0, i, a), ["T,8", "i:T"],
                                   {"index_add": P}),
    "index_put padded positions": (lambda a, i: torch.zeros(4, 8).index_put((i,), a, accumulate=True),
                                   ["T,8", "i:T"], {"index_put": P}),
    "index_put padded rows": (lambda a: a.index_put((torch.tensor([-1]),), torch.tensor(1.0)), ["T,8"],
                              {"index_put": P}),
    "index_put per row": (lambda a, b: a.index_put((torch.arange(a.shape[0]), torch.tensor(1)), b),
                          ["T,8", "T"], {"index_put": P}),
    "integer division by positions": (lambda i: i // (torch.arange(i.shape[0]) - 8), ["i:T"], {"floor_divide": P}),
    "prelu of padded weights": (lambda a, w: F.prelu(a, w), ["3,T", "T"], {"prelu": P}),
    "copy another order": (lambda a: a.repeat(2, 1).copy_(a.repeat_interleave(2, 0)), ["T,8"], {"copy_": P}),
    "native dropout": (lambda a: torch.native_dropout(a, 0.5, True)[0], ["T,8"], {"native_dropout": P}),
    "glu over tokens": (lambda a: F.glu(a.repeat(2, 1), 0), ["T,8"], {"glu": P}),
    "padded norm weights": (lambda a, w: F.layer_norm(a, a.shape[1:], w, w), ["4,T", "T"], {"layer_norm": P}),
    "norm over tokens": (lambda a: torch.native_layer_norm(a, [a.shape[1]], None, None, 1e-5)[0], ["4,T"],
                         {"native_layer_norm": P}),
    "group norm of padded channels": (lambda a, w: F.group_norm(a, 1, w), ["2,T,6", "T"], {"group_norm": P}),
    "instance norm of padded channels": (lambda a, w: F.instance_norm(a, weight=w), ["2,T,6", "T"],
                                         {"instance_norm": P}),
    "instance norm with statistics": (lambda a, m: F.instance_norm(a, m, m.abs() + 1), ["B,4,6", "4"],
                                      {"instance_norm": P}),
    "batch norm of padded channels": (lambda a, m: F.batch_norm(a, m, m.abs() + 1), ["3,T", "T"], {"batch_norm": P}),
    "pool, look past the end": (lambda a: F.avg_pool1d(a, 3, 1, padding=1), ["2,4,T"], {"avg_pool1d": P}),
    "pool, a last short window": (lambda a: F.avg_pool1d(a, 2, 2, ceil_mode=True), ["2,4,T"], {"avg_pool1d": P}),
    "pool in two dims": (lambda a: F.max_pool2d(a, 2), ["2,4,T,8"], {}),
    "upsample tokens": (lambda a: F.interpolate(a, scale_factor=2.0, mode="linear"), ["2,4,T"],
                        {"upsample_linear1d": P}),
    "pixel shuffle over tokens": (lambda a: F.pixel_unshuffle(a.repeat(1, 1, 2, 1), 2), ["1,1,T,8"],
                                  {"pixel_unshuffle": P}),
    "fft over features": (lambda a: torch.view_as_real(torch.fft.fft(a)), ["T,8"], {}),
    "fft over tokens": (lambda a: torch.view_as_real(torch.fft.fft(a, dim=0)), ["T,8"], {"fft_fft": P}),
    "expand by a falling size": (lambda a, v: v.expand(64 - a.shape[0], 8), ["T,8", "8"], {"expand": D}),
    "fill a falling size": (lambda a: torch.zeros(64 - a.shape[0], 8).cumsum(0), ["T,8"], {"zeros": D, "cumsum": D}),
    "count a falling size": (lambda a: torch.arange(64 - a.shape[0]), ["T,8"], {"arange": D}),
    "bits of padded rows": (lambda a: a.t().contiguous().view(torch.int16), ["T,8"], {"view": P}),
    "repeat flattened": (lambda a: a.repeat_interleave(2), ["8,T"], {"repeat_interleave": P}),
    "split tokens": (lambda a: a.repeat(2, 1).chunk(2, 0)[1] + 1, ["T,8"], {"chunk": P}),
    "unbind tokens": (lambda a: a.repeat(2, 1).unflatten(0, (2, -1)).unbind(0)[1], ["T,8"], {}),
    "select behind padding": (lambda a: a.repeat(2, 1)[7], ["T,8"], {"select": P}),
    "slice from a size": (lambda a, t: t[a.shape[0] : a.shape[0] + 2], ["T,8", "64,8"], {"slice": P}),
    "slice across the padding": (lambda a: a.repeat(2, 1)[2:], ["T,8"], {"slice": P}),
    "slice by steps": (lambda a: a[1::2], ["T,8"], {}),
    "slice by a size": (lambda a, t: t[:: a.shape[0]], ["T,8", "60,8"], {"slice": P}),
    "slice half": (lambda a: a[: a.shape[0] // 2], ["T,8"], {}),
    "circular pad": (lambda a: F.pad(a, (1, 0), mode="circular"), ["1,4,T"], {"pad": P}),
    "reflect in front": (lambda a: F.pad(a, (2, 0), mode="reflect"), ["1,4,T"], {}),
    "pad behind other padding": (lambda a: F.pad(a.repeat(2, 1), (0, 0, 1, -1)), ["T,8"], {"pad": P}),
    "tril across padding": (lambda a: a.repeat(2, 1).tril(), ["T,8"], {"tril": P}),
    "diagonal matrices": (lambda a: torch.diag_embed(a), ["T,8"], {}),
    "diagonal matrices of tokens": (lambda a: torch.diag_embed(a), ["4,T"], {"diag_embed": P}),
    "diagonal matrices in front": (lambda a: torch.diag_embed(a, dim1=0, dim2=1), ["T,8"], {"diag_embed": P}),
    "diagonal": (lambda a: a.diagonal(dim1=1, dim2=2), ["T,8,8"], {}),
    "diagonal over tokens": (lambda a: a.diagonal(dim1=0, dim2=1), ["T,4,8"], {"diagonal": P}),
    "embed beyond the table, moved": (lambda a, t: F.embedding(torch.arange(a.shape[0]) + 2, t), ["T,8", "9,8"], {}),
    "look up from the end": (lambda a: a[torch.arange(-2, 0)], ["T,8"], {"index": P}),
    "diagonal across padding": (lambda a: a.repeat(2, 1).diagonal(), ["T,8"], {"diagonal": P}),
    "windows": (lambda a: a.unfold(0, 3, 1).sum(-1), ["T,8"], {}),
    "windows across the padding": (lambda a: a.repeat(2, 1).unfold(0, 3, 1), ["T,8"], {"unfold": P}),
    "fill with a padded value": (lambda a: torch.zeros(8).fill_(a.sum()), ["T,8"], {"sum": P}),
    "token shift": (lambda a, p: a - torch.cat([p, a[:-1]]), ["T,8", "1,8"], {}),
    "cat behind other padding": (lambda a, b: torch.cat([b, a.repeat(2, 1)], 0), ["T,8", "3,8"], {"cat": P}),
    "cat and cut": (lambda a, b: torch.cat([b, a], 0)[: a.shape[0]], ["T,8", "3,8"], {}),
    "positions written to indices": (lambda i, w: (i.add_(torch.arange(i.shape[0])), F.embedding(i, w))[1],
                                     ["i:T", "8,8"], {"add_": P}),
    "count beyond the table": (lambda i, w: F.embedding(torch.ones_like(i).cumsum(0), w), ["i:T", "6,8"],
                               {"embedding": P}),
    "look up by promise": (lambda a, i: a.repeat_interleave(2, 0)[i], ["T,8", "x:3"], {}),
    "look up by promise, behind padding": (lambda a, i: a.repeat(2, 1)[i], ["T,8", "x:3"], {"index": P}),
    "convolution in two dims, same size": (lambda a, w: F.conv2d(a, w, padding=1), ["1,3,T,8", "4,3,3,3"],
                                           {"conv2d": P}),
    "attention, groups of a padded size": (
        lambda q, k: attend(q.repeat_interleave(4, 1), k, k, enable_gqa=True), ["1,T,4,8", "1,4,4,8"],
        {"scaled_dot_product_attention": P}),
    "gather a table by constant": (lambda a, t: t.gather(1, torch.zeros(a.shape[0], 2, dtype=torch.long)),
                                   ["T,8", "8,8"], {"gather": P}),
    "scatter a value by positions": (lambda a: torch.zeros(16, 1).scatter(0, torch.arange(a.shape[0])[:, None], 1.0),
                                     ["T,8"], {"scatter": P}),
    "scatter a value in another order": (lambda i: torch.zeros(i.shape[0] * 2, 8).scatter(1, i.repeat(2, 1), 1.0),
                                         ["i:T,2"], {"scatter": P}),
    "index_fill by positions": (lambda a: torch.zeros(16, 8).index_fill(0, torch.arange(a.shape[0]), 1.0), ["T,8"],
                                {"index_fill": P}),
    "index_fill the last row": (lambda a: a.index_fill(0, torch.tensor([-1]), 1.0), ["T,8"], {"index_fill": P}),
    "index_put in another order": (put_in_another_order, ["T,8"], {"index_put_": P}),
    "prelu in another order": (lambda a, w: F.prelu(a.repeat(1, 2), w.repeat_interleave(2)), ["3,T", "T"],
                               {"prelu": P}),
    "batch norm in another order": (
        lambda a, m: F.batch_norm(a.repeat(1, 2), m.repeat_interleave(2), m.repeat_interleave(2).abs() + 1),
        ["3,T", "T"], {"batch_norm": P}),
    "pool with positions": (lambda a: F.max_pool2d(a, 3, 1, 1, return_indices=True), ["2,4,T,8"],
                            {"max_pool2d_with_indices": P}),
    "same bits": (lambda a: a.t().contiguous().view(torch.int32), ["T,8"], {}),
    "count down": (lambda a: a + torch.arange(0, -a.shape[0], -1)[:, None], ["T,8"], {}),
    "declared": (lambda a, w: torch.ops.padding_cases.shifted(a, w), ["T,8", "3,8"], {}),
    "declared, whole argument padded": (lambda a, w: torch.ops.padding_cases.shifted(a, w), ["T,8", "T,8"],
                                        {"shifted": P}),
    "declared, inner dim padded": (lambda a: torch.ops.padding_cases.softened(a), ["4,T"], {"softened": P}),
    "declared, arguments padded differently": (lambda a, b: torch.ops.padding_cases.mixed(a, b), ["T,4", "4,T"],
                                               {"mixed": P}),
    # models
    "rotary": (lambda a: rotate(a, torch.arange(a.shape[-2])), ["B,2,T,8"], {}),
    "MoE": (moe, ["T,8", "8,4", "4,8,8"], {}),
    "block": (block, ["B,T,8", "8,8", "8,8"], {}),
    "size is gone": (lambda a: a.unsqueeze(0).nonzero(), ["T,8"], {"nonzero": U}),
}  # fmt: skip
