"""Which padding rule an operation has: by name, by tag, or through the functional form of an in-place operation."""

from __future__ import annotations

import torch

from . import (  # noqa: F401  (importing a rule file registers its rules)
    padding_rules_contraction,
    padding_rules_factory,
    padding_rules_index,
    padding_rules_more,
    padding_rules_pointwise,
    padding_rules_reduction,
    padding_rules_shape,
)
from .padding_rules_base import RULES, Entry, RefusedError
from .padding_rules_declared import declared_entry, is_capture_safe
from .padding_rules_pointwise import pointwise
from .padding_rules_reduction import reduction
from .torch_api import OpOverload

#: Overloads that share a packet with ruled ones but depend on values.
EXCLUDED = frozenset({"where.default"})
#: In-place operations on metadata: the written node itself changes shape, which no layout of it can express.
METADATA = frozenset({"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "set_"})
#: Composites that may return their input itself although their schema does not say so.
MAY_ALIAS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "type_as", "to"})
#: Operations that copy, rather than being a view's copying form.
_COPIES = frozenset({"_to_copy", "index_copy", "lift_fresh_copy", "narrow_copy", "diagonal_copy", "as_strided_copy"})
#: Operations from a tensor to a size: they read metadata, on the host.
SIZE_READS = frozenset({"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "sym_is_contiguous", "dim"})


#: Why there is no rule on purpose, by packet or ``packet.overload``: every core ATen operation is in one of the tables.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("rand", "randn", "randperm"), "random values depend on the padded shape"),
    **dict.fromkeys(
        ("_native_batch_norm_legit", "_native_batch_norm_legit.no_stats", "_batch_norm_with_update"),
        "batch statistics average over padded rows",
    ),
    **dict.fromkeys(
        ("nonzero", "masked_select", "masked_scatter", "repeat_interleave.self_Tensor", "bincount"),
        "the result's size, or which entry goes where, depends on all values",
    ),
    **dict.fromkeys(("_local_scalar_dense", "item", "equal", "is_nonzero"), "reads tensor data on the host"),
    **dict.fromkeys(
        ("avg_pool2d_backward", "convolution_backward", "embedding_dense_backward", "max_pool2d_with_indices_backward",
         "native_group_norm_backward", "native_layer_norm_backward", "_adaptive_avg_pool2d_backward"),
        "is the backward of another operation, which sums over padded rows",
    ),
    **dict.fromkeys(("_fft_c2r", "_fft_r2c"), "transforms whole lines, and takes sizes as data"),
    **dict.fromkeys(("as_strided", "as_strided_scatter", "as_strided_copy"), "addresses memory by strides"),
    **dict.fromkeys(("_embedding_bag", "embedding_bag"), "sums rows between offsets, which padding would move"),
    "_pdist_forward": "compares every pair of rows, in one long line",
    "binary_cross_entropy": "raises on values that padded rows may hold",
    **dict.fromkeys(("reflection_pad3d", "replication_pad3d"), "no model that needed it is known"),
    **dict.fromkeys(
        ("linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_qr", "linalg_svd", "linalg_eigh", "linalg_det"),
        "may wait for the device to tell that a matrix is singular",
    ),
}  # fmt: skip


def refusal(op: OpOverload) -> str | None:
    """Why an overload is refused on purpose, whatever its arguments; ``None`` if that was not decided."""
    key = f"{base_name(op)}.{op._overloadname}"
    if any(arg.is_out for arg in op._schema.arguments):
        return "writes its result into a tensor that it is given"
    if key in EXCLUDED:
        return "the result's size depends on values"
    if op.overloadpacket.__name__ in METADATA:
        return "changes the shape or strides of a tensor in place"
    return REFUSED.get(key) or REFUSED.get(base_name(op))


def find_entry(op: object) -> Entry | None:
    """The rule of an overload: by name, by tag, or the functional rule of an in-place operation."""
    if not isinstance(op, OpOverload) or (torch.Tag.nondeterministic_seeded in op.tags and not _deterministic_form(op)):
        return None
    if op.namespace not in ("aten", "prims"):
        return declared_entry(f"{op._schema.name}.{op._overloadname}")
    if op not in _ENTRIES:
        _ENTRIES[op] = _find_entry(op)
    return _ENTRIES[op]


_ENTRIES: dict[OpOverload, Entry | None] = {}
_POINTWISE = Entry(pointwise, frozenset(), loose=True)
_REDUCTION = Entry(reduction, frozenset())


def base_name(op: OpOverload) -> str:
    """The name of the functional form; ``view_copy`` and its like are the view, with memory of its own."""
    name = op.overloadpacket.__name__
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return name.removesuffix("_copy") if name.endswith("_copy") and name not in _COPIES else name


def _deterministic_form(op: OpOverload) -> bool:
    """Dropout and attention are tagged as random but have a form that is not; their rules decide by argument."""
    return base_name(op).endswith("dropout") or "attention" in base_name(op)


def _find_entry(op: OpOverload) -> Entry | None:
    written = [i for i, arg in enumerate(op._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
    name, key = base_name(op), f"{base_name(op)}.{op._overloadname}"
    if written not in ([], [0]) or refusal(op) is not None:
        return None
    if op.namespace == "aten":
        if key in RULES or name in RULES:
            return RULES.get(key) or RULES[name]
        functional = getattr(torch.ops.aten, name, None) if written else None
        op = getattr(functional, op._overloadname, op) if functional is not None else op
    if torch.Tag.reduction in op.tags:
        return _REDUCTION
    return _POINTWISE if torch.Tag.pointwise in op.tags else None


def is_known(op: object) -> bool:
    """Whether an overload has a rule, so that its meaning is known here (with or without padded symbols)."""
    return find_entry(op) is not None or (isinstance(op, OpOverload) and op.overloadpacket.__name__ in SIZE_READS)


KNOWN = is_known


def unknown(op: object) -> RefusedError:
    """Why an operation without a rule is refused."""
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
        return RefusedError("random values depend on the padded shape")
    why = refusal(op) if isinstance(op, OpOverload) and op.namespace == "aten" else None
    if why is not None:
        return RefusedError(why, "unknown-op")
    fix = "declare it with declare_row_local" if isinstance(op, OpOverload) and is_capture_safe(op) else ""
    return RefusedError("no padding rule is known for this operation", "padding" if fix else "unknown-op", fix)
