"""Which padding rule an operation has: by name, by tag, or through the functional form of an in-place operation."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from . import (  # noqa: F401  (importing a rule file registers its rules)
    padding_rules_contraction,
    padding_rules_factory,
    padding_rules_index,
    padding_rules_pointwise,
    padding_rules_reduction,
    padding_rules_shape,
)
from .padding_rules_base import RULES, Entry
from .padding_rules_declared import declared_entry
from .padding_rules_pointwise import pointwise
from .padding_rules_reduction import reduction

#: Overloads that share a packet with ruled ones but depend on values.
EXCLUDED = frozenset({"where.default"})
#: In-place operations on metadata: the written node itself changes shape, which no layout of it can express.
METADATA = frozenset({"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "set_"})
#: Composites that may return their input itself although their schema does not say so.
MAY_ALIAS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "type_as", "to"})
#: Operations from a tensor to a size: they read metadata, on the host.
SIZE_READS = frozenset({"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "sym_is_contiguous", "dim"})


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
    name = op.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _deterministic_form(op: OpOverload) -> bool:
    """Dropout and attention are tagged as random but have a form that is not; their rules decide by argument."""
    return base_name(op).endswith("dropout") or "attention" in base_name(op)


def _find_entry(op: OpOverload) -> Entry | None:
    written = [i for i, arg in enumerate(op._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
    name, key = base_name(op), f"{base_name(op)}.{op._overloadname}"
    if written not in ([], [0]) or key in EXCLUDED or op.overloadpacket.__name__ in METADATA:
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
