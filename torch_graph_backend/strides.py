"""Do results lie in memory as the plan says? Some operations lay theirs out otherwise than their fake implementation.

Contract. Plans are made from fake tensors, and what the caller gets is laid out as planned. Where a kernel of PyTorch
disagrees (``max_pool1d`` or ``batch_norm`` of a transposed tensor, ``a // b`` of one that is broadcast, in torch 2.13;
``interpolate`` of one that is channels-last, on CUDA in torch 2.11) eager code gives other strides. A first run of a
segment shows it: the graph is eager from then on, that call included if it changes nothing that outlives it. If it
does, it cannot be run again, so the operations that are known for it make the graph eager beforehand (``doubtful``).
Strides of dimensions of size 1 lead nowhere and are not compared.

On a GPU the kernel of attention, and so its layout, is chosen when it runs, and what follows mostly makes nothing of
it: there the results that the caller gets from a segment are compared, and of eager operations those that are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_graph_backend.passes.alias import arguments
from torch_graph_backend.passes.capturable import tensors_of
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.torch_api import OpOverload
from torch_graph_backend.plan import Plan

_NAMES = """
    binary_cross_entropy channel_shuffle copysign cross_entropy_loss div floor_divide heaviside instance_norm lcm ldexp
    log_sigmoid log_sigmoid_forward logaddexp logical_and logical_or logical_xor max_pool1d max_unpool2d max_unpool3d
    native_channel_shuffle native_dropout_backward nll_loss2d nll_loss2d_forward nll_loss_nd normal one_hot pad
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d roll
    special_xlog1py upsample_bilinear2d upsample_trilinear3d xlogy
"""
_ON_A_CPU = "_batch_norm_with_update _native_batch_norm_legit batch_norm native_batch_norm"

#: Operations seen to lay out results of tensors that are not contiguous otherwise than their fake implementations, by
#: the type of the device. (All of PyTorch's own table of samples with inputs in other orders, with torch 2.13 on a CPU;
#: a third of it, and ``tests/test_strides.py``, with torch 2.11 on an H200.)
DOUBTFUL = {"cpu": frozenset((_NAMES + _ON_A_CPU).split()), "cuda": frozenset(_NAMES.split())}


def compared(plan: Plan, graph: Graph) -> tuple[set[str], set[str]]:
    """The captured values whose layout is compared, and the eager ones: those by PyTorch's own kernels. (What another
    library lays out is for its fake implementation to say.)"""
    own = {n.name: _name(n) for n in graph.nodes if getattr(n.target, "namespace", "") == "aten"}
    if plan.device.type != "cpu":
        known = DOUBTFUL.get(plan.device.type, ())
        return {cut.value for cut in plan.cuts if cut.private}, {n for n, op in own.items() if op in known}
    return {name for step in plan.segments for name in step.outputs}, set(own)


def apart(shape: Sequence[int], got: Sequence[int], want: Sequence[int]) -> bool:
    """Whether two strides reach other places."""
    return 0 not in shape and any(n > 1 and a != b for n, a, b in zip(shape, got, want, strict=True))


def mislaid(made: Iterable[tuple[str, Any]], planned: Iterable[list[Any]]) -> Reason | None:
    """Why the plan's strides are not eager's, if a value (with its name) shows it; ``planned``: shape, stride, ..."""
    for (name, value), expected in zip(made, planned, strict=True):
        for tensor, (shape, stride, *_) in zip(tensors_of(value), expected, strict=False):
            if tuple(tensor.shape) == tuple(shape) and apart(shape, tensor.stride(), stride):
                return different(name, tensor.stride(), stride)
    return None


def different(name: str, got: Sequence[int], want: Sequence[int]) -> Reason:
    return Reason("other-strides", f"{name} has strides {tuple(got)}, its fake implementation promised {tuple(want)}")


def doubtful(graph: Graph) -> Reason | None:
    """An operation whose strides cannot be told, in a graph whose calls cannot be run again."""
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        name, named = _name(node), arguments(node)
        if named.get("mode") == "constant" or (name == "div" and named.get("rounding_mode") is None):
            continue  # padding with one value and plain quotients are as promised
        given = [t for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))]
        made = any(t.dim() > 1 for t in tensors_of(node.meta.get("val")))
        if made and any(name in DOUBTFUL.get(t.device.type, ()) and _is_laid_out(t) for t in given):
            return Reason("other-strides", f"aten.{name} of a tensor that is not contiguous, beside what it changes")
    return None


def _is_laid_out(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.dim() > 1 and not value.is_contiguous()


def _name(node: Node) -> str:
    """The operation without its overload, and whether it changes an argument."""
    assert isinstance(node.target, OpOverload)
    return node.target.overloadpacket.__name__.removesuffix("_")
