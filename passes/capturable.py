"""Capture-safety: may this node be recorded at all, whatever its sizes? ``capture_reason(node) -> Reason | None``.

An allow-list: ATen ops that the padding rules know (``is_known``), and operations of other libraries that the user
declared, on one device, with plain strided tensors, which read no tensor data on the host (``host_reads``), draw no
random numbers and return no Python value. Everything else runs eagerly, with a reason. A registered break op is refused
before anything else is asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .alias import hidden_writes, is_collective, is_random, is_tensor_value
from .host_reads import host_read
from .padding import is_known
from .padding_rules_declared import is_capture_safe
from .padding_rules_table import refusal
from .reasons import Reason
from .torch_api import FakeTensor, HigherOrderOperator, OpOverload, free_unbacked_symbols

BreakPredicate = Callable[[Node], "Reason | None"]


def is_size(value: Any) -> bool:
    """A Python number or a symbolic one: something that is computed on the host, not a tensor."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def name_of(node: Node) -> str:
    """How an operation is written in reasons and tables: ``aten.linear``, ``mylib.attention``, ``cond``."""
    target = node.target
    if isinstance(target, OpOverload):
        short = str(target)
        return short[: -len(".default")] if short.endswith(".default") else short
    if isinstance(target, HigherOrderOperator):
        return target.name()
    return str(getattr(target, "__name__", target))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_of(v)]
    return []


def capture_reason(node: Node, device: torch.device, is_break: BreakPredicate) -> Reason | None:
    """Why ``node`` must not be recorded on ``device``; ``None`` if it may."""
    if node.target is operator.getitem:
        return None  # follows its tuple
    return is_break(node) or _kind_reason(node) or _data_reason(node, device) or _tensor_reason(node, device)


def _kind_reason(node: Node) -> Reason | None:
    target, name = node.target, name_of(node)
    if node.meta.get("opaque"):
        return Reason("not-normalised", f"{name} could not be traced to ATen ({node.meta['opaque']})")
    if isinstance(target, HigherOrderOperator):
        return Reason("higher-order-op", f"{name} runs whole, eagerly")
    if not isinstance(target, OpOverload):
        return Reason("unknown-op", f"{name} is not a PyTorch operator")
    if is_collective(target):
        return Reason("collective", f"{name} is a collective among ranks")
    if target.namespace not in ("aten", "prims") and not (is_known(target) or is_capture_safe(target)):
        fix = "declare it with declare_row_local (or declare_capture_safe), or write it with PyTorch operations"
        return Reason(
            "unknown-op", f"{name} belongs to library {target.namespace!r}, whose kernels are unknown", fix=fix
        )
    return None


def _data_reason(node: Node, device: torch.device) -> Reason | None:
    target, name, value = node.target, name_of(node), node.meta.get("val")
    assert isinstance(target, OpOverload)
    if hidden_writes(node):
        return Reason("unknown-op", f"{name} updates running statistics, which its schema does not say")
    if is_random(node):
        return Reason("random", f"{name} draws random numbers")
    reads = host_read(node, device)
    if reads is not None:
        return reads
    if not is_tensor_value(value) and not target._schema.is_mutable:
        return Reason("python-value", f"{name} returns {type(value).__name__}, not a tensor")
    if any(free_unbacked_symbols(t) for t in tensors_of(value)):
        return Reason("data-dependent", f"{name} has a size that depends on data")
    if not is_known(target) and not is_capture_safe(target):
        why = refusal(target)
        return Reason("unknown-op", f"{name} {why or 'is not in the table of operations known to be safe'}")
    return None


def _tensor_reason(node: Node, device: torch.device) -> Reason | None:
    name = name_of(node)
    mine, theirs = (
        tensors_of(node.meta.get("val")),
        [t for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))],
    )
    places = {t.device for t in mine + theirs}
    if len(places) > 1 and mine and theirs and {t.device for t in mine} != {t.device for t in theirs}:
        return Reason("device-copy", f"{name} moves data between {', '.join(sorted(map(str, places)))}")
    if any(p != device for p in places):
        return Reason("other-device", f"{name} works on {', '.join(sorted(map(str, places)))}, the graph on {device}")
    if any(not _plain(t) for t in mine + theirs):
        return Reason("not-strided", f"{name} works on a sparse, quantised or subclass tensor")
    return None


def _plain(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.is_quantized:
        return False
    return type(t) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and not (t.is_conj() or t.is_neg())
