"""Operations whose C++ code from Inductor is not eager's: a fused kernel calls eager's kernel for them instead.

Contract. ``EagerKernels`` runs as Inductor's last pass on a functional graph (``post_grad_custom_post_pass``), below
all decompositions, so an operation is seen whatever the user called it (``F.elu`` is ``expm1`` by then, ``nll_loss`` a
``gather``). It marks nodes and changes nothing else. CPU code alone: Triton's asserts an index on the device as eager
CUDA does, and has the exact functions. Inductor's ``graph.py`` reads the mark, which is private (torch 2.11, 2.13).
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from .inductor_sums import exact_sums
from .torch_api import CustomGraphPass

aten = torch.ops.aten

#: An index out of range is an exception in eager code. Inductor throws it too, but out of a parallel loop, where C++
#: ends the process; and not as an ``IndexError``.
INDEXED = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
    aten.index_reduce.default,
    aten.index_select.default,
    aten.put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.take.default,
}

#: Divisions: of integers, where zero is an exception as above; and of floats rounded down, for which Inductor computes
#: ``a - floor(a / b) * b``: 0 for 1e10 % 3, where eager code gives 1.
DIVISIONS = {
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    aten.fmod.Tensor,
    aten.fmod.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
}

#: Functions that Inductor computes by a formula that loses all digits of small numbers (``exp(x) - 1``), or overflows.
LOSSY = {aten.acosh.default, aten.asinh.default, aten.atanh.default, aten.erf.default, aten.expm1.default}

EAGER = INDEXED | DIVISIONS | LOSSY


class EagerKernels(CustomGraphPass):
    """Marks the operations of ``EAGER`` that run on a CPU."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and node.target in EAGER and _on_cpu(node.meta.get("val")):
                node.meta["should_fallback"] = True
        exact_sums(graph, has_halves(graph))
        for node in graph.nodes:
            if any(_is_half(n) for n in (node, *node.all_input_nodes)):
                node.meta["low_precision_pointwise_barrier"] = True  # it rounds, as if it were alone in its kernel

    def uuid(self) -> Any:
        """Inductor's cache on disk keys code by it."""
        return "torch_graph_backend.EagerKernels", _source()


@functools.cache
def _source() -> str:
    """Of the passes that code depends on: what another version of them made is none of ours."""
    here = Path(__file__).parent
    names = ("inductor_exact.py", "inductor_sums.py", "inductor_twins.py")
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in names)).hexdigest()


def has_halves(graph: torch.fx.Graph) -> bool:
    """Whether some value on a CPU has a dtype that Inductor computes in float32."""
    return any(_is_half(node) for node in graph.nodes)


def on_cpu(graph: torch.fx.Graph) -> bool:
    """Whether some value lies on a CPU."""
    return any(_on_cpu(node.meta.get("val")) for node in graph.nodes)


def _is_half(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and _on_cpu(value) and value.dtype in (torch.float16, torch.bfloat16)


def rounds_on_purpose(graph: torch.fx.Graph) -> bool:
    """Whether a value is cast to a float dtype that does not hold it, and what reads it, maybe through views, computes
    in another one. Inductor takes such casts for what autocast left behind and drops them, so that
    ``x - x.half().float()`` is zero and ``x.half().bfloat16()`` is not infinite."""
    return any(_rounds(node) and any(_converts(user, node) for user in _users(node)) for node in graph.nodes)


def _rounds(node: torch.fx.Node) -> bool:
    if node.target not in _CASTS:
        return False
    source = node.args[-1 if node.target is aten.copy_.default else 0]
    if not isinstance(source, torch.fx.Node):
        return False
    have, into = _dtype(source), _dtype(node)
    return have is not None and into is not None and into.is_floating_point and not _holds(into, have)


_CASTS = (aten._to_copy.default, aten.copy_.default, torch.ops.prims.convert_element_type.default)


def _holds(into: torch.dtype, have: torch.dtype) -> bool:
    """Whether every value of ``have`` is one of the float dtype ``into``."""
    room = torch.finfo(into)
    if have is torch.bool:
        return True
    if not (have.is_floating_point or have.is_complex):
        return torch.iinfo(have).max <= 2 / room.eps
    value = torch.finfo(have)
    return value.eps >= room.eps and value.max <= room.max and value.smallest_normal >= room.smallest_normal


def _converts(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Another float dtype takes part: of a cast, of an operand beside it (they are promoted), of the result."""
    dtypes = {_dtype(n) for n in (*user.all_input_nodes, user)}
    return any(d is not None and d.is_floating_point and d is not _dtype(node) for d in dtypes)


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _users(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Who reads the value, directly or through views of it."""
    found = list(node.users)
    for user in found:
        if getattr(user.target, "is_view", False):
            found += user.users
    return found


def _on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
