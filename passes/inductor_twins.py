"""Operations that keep eager's kernels in a segment compiled for a CPU, from before Inductor takes them apart.

Contract. ``keep_eager`` runs on the traced graph of a segment and changes it in place. An operation stays as it is if
it is known to be eager's when Inductor fuses it (``FUSED``, compared on special values of each dtype by
``tests/test_inductor_ops.py``), moves data only, or is no function of ATen. Any other one becomes its *twin*: an
operation of the same schema that Inductor has no decomposition or pattern for, and in whose place its code calls
eager's kernel.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from .alias import hidden_writes
from .torch_api import OpOverload, call_eager_kernel

aten = torch.ops.aten

#: Data that is moved, made or looked at: no arithmetic.
_MOVES = """
_reshape_alias _reshape_copy _to_copy _unsafe_view alias as_strided_scatter cat clone constant_pad_nd contiguous copy
copy_ detach diagonal_scatter empty empty_like empty_permuted empty_strided expand_copy fill flip full full_like
lift_fresh lift_fresh_copy masked_fill new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
permute_copy repeat roll scalar_tensor select_scatter slice_scatter stack tril triu view_copy where zeros zeros_like
"""

#: Operations whose fused code has eager's values to the last bit.
_SAME = """
abs add all amax amin any bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min div eq floor ge
gt isinf isnan le logical_and logical_not logical_or logical_xor lt maximum minimum mul ne neg pow reciprocal relu rsub
sign signbit square sub trunc
"""

#: Operations whose fused code is as near to the exact value as eager's: what they are made of is computed by other
#: formulas (some last digits), and ``inductor_sums`` adds for them.
_NEAR = """
cos exp log log1p log2 rsqrt sigmoid silu sin sqrt tanh mean sum var _softmax _log_softmax
"""

#: Products and convolutions call libraries, as eager code does. (Not those of batches, for which Inductor takes other
#: calls. Batch norms are here because in training they write what their schema does not say.)
_LIBRARIES = """
_batch_norm_no_update _batch_norm_with_update _convolution _native_batch_norm_legit
_native_batch_norm_legit_no_training addmm convolution cudnn_batch_norm mkldnn_convolution mm native_batch_norm
"""

#: Writes of some entries: Inductor finds out that it need not copy the rest, and ``EagerKernels`` has eager's kernel.
_ENTRIES = """
_index_put_impl_ index_add_ index_copy_ index_fill_ index_put_ index_reduce_ put_ scatter_ scatter_add_ scatter_reduce_
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


EXACT = _names(_MOVES + _SAME)
FUSED = EXACT | _names(_NEAR + _LIBRARIES)
FUSED_WITH_HALVES = FUSED - _names("var")  # see ``inductor_sums.SPREADS``
ENTRIES = _names(_ENTRIES)

_library = torch.library.Library("tgb_eager", "FRAGMENT")
_twins: dict[OpOverload, OpOverload] = {}


def twin(op: OpOverload) -> OpOverload:
    """The operation of ``op``'s schema that Inductor knows nothing of."""
    if op not in _twins:
        schema = op._schema
        name = f"{schema.name.split('::')[1]}__{schema.overload_name or 'default'}"
        text = str(schema)
        _library.define(name + text[text.index("(") :])
        made = getattr(torch.ops.tgb_eager, name).default
        _library.impl(name, op, "CompositeExplicitAutograd")
        call_eager_kernel(made, op)
        _twins[op] = made
    return _twins[op]


def keep_eager(graph: Graph, exact: Collection[Node] = ()) -> str | None:
    """Put twins where Inductor's code is not known to be eager's: near enough, or to the last bit for the values of
    ``exact`` and those in float64, which nothing can check. Returns what stands in the way, if anything."""
    halves = any(_is(n, torch.float16, torch.bfloat16) for n in graph.nodes)
    for node in list(graph.nodes):
        if node.op != "call_function" or not _on_cpu(node) or not isinstance(node.target, OpOverload):
            continue
        bits = node in exact or any(_is(n, torch.float64, torch.complex64, torch.complex128) for n in _around(node))
        if node.target.namespace != "aten" or _is_fused(
            node, EXACT if bits else FUSED_WITH_HALVES if halves else FUSED
        ):
            continue
        functional = None if hidden_writes(node) else _functional(node.target)
        found = None if functional is None else _of_numbers(functional, node.args)
        if found is not None and functional is node.target:
            node.target = twin(found)
        elif found is not None:
            _written_back(graph, node, found)
        elif bits and _is_fused(node, FUSED):
            return f"{node.target} is not eager's to the last bit, and decides"
    return None


def _is_fused(node: Node, known: frozenset[str]) -> bool:
    assert isinstance(node.target, OpOverload)
    name = node.target._schema.name
    if name in known or name.removesuffix("_") in known:
        return not _is_special(node, name.removeprefix("aten::").removesuffix("_"))
    return False


def _is_special(node: Node, name: str) -> bool:
    """Arguments with which an operation of ``FUSED`` is another one."""
    if name in ("add", "sub", "rsub"):  # ``alpha`` is a product that eager code may fuse, and rounds otherwise
        return bool(node.kwargs.get("alpha", 1) != 1 or (len(node.args) > 2 and node.args[2] != 1))
    if name == "pow":  # other powers are roots, or by a function that eager code does not use
        return not (len(node.args) == 2 and isinstance(node.args[1], (int, float)) and node.args[1] in (1, 2))
    if name == "div":
        return node.kwargs.get("rounding_mode") is not None
    if name == "_to_copy":  # what becomes of a float out of range is up to the compiler
        return bool(_is_float(node.args[0]) and not _is_float(node) and not _is(node, torch.bool))
    return False


def _around(node: Node) -> list[Node]:
    return [node, *node.all_input_nodes]


def _is_float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _is(node: Node, *dtypes: torch.dtype) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, torch.Tensor) and v.dtype in dtypes for v in values)


def _functional(op: Any) -> OpOverload | None:
    """``op`` if it is a function; the function that it writes the result of, if it writes its first argument; else
    None."""
    schema = op._schema
    if not schema.is_mutable:
        aliases = any(r.alias_info is not None for r in schema.returns)
        tensors = all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns)
        return op if tensors and not aliases and schema.returns else None
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    packet = getattr(aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    if written != [0] or not schema.name.endswith("_") or packet is None or schema.name in ENTRIES:
        return None
    found = getattr(packet, schema.overload_name or "default", None)
    return None if found is None or found._schema.is_mutable else found


def _of_numbers(op: OpOverload, args: tuple[Any, ...]) -> OpOverload | None:
    """``op`` itself, or its overload for numbers: operations of ATen take those for tensors too, twins do not."""
    numbers = [a.name for a, v in zip(op._schema.arguments, args, strict=False) if _is_number_for_tensor(a, v)]
    if not numbers:
        return op
    found = getattr(op.overloadpacket, "Scalar", None)
    same = found is not None and len(found._schema.arguments) == len(op._schema.arguments)
    return found if same and numbers == [op._schema.arguments[1].name] else None


def _is_number_for_tensor(argument: Any, value: Any) -> bool:
    return str(argument.type) == "Tensor" and not isinstance(value, Node)


def _written_back(graph: Graph, node: Node, functional: OpOverload) -> None:
    """``x.f_()`` as ``x.copy_(f(x))``."""
    with graph.inserting_before(node):
        value = graph.call_function(twin(functional), node.args, dict(node.kwargs))
    value.meta = {k: v for k, v in node.meta.items() if k != "val"}
    target = node.args[0]
    node.target, node.args, node.kwargs = aten.copy_.default, (target, value), {}


def _on_cpu(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    found = [v.device.type for v in values if isinstance(v, torch.Tensor)]
    return bool(found) and set(found) == {"cpu"}
