"""The rule table is complete on purpose: every core ATen overload has a rule or a refusal that says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._ops import OpOverload

from torch_graph_backend.passes.padding import is_known
from torch_graph_backend.passes.padding_rules_base import RULES
from torch_graph_backend.passes.padding_rules_table import METADATA, REFUSED, find_entry, refusal

aten = torch.ops.aten


def overloads() -> Iterator[OpOverload]:
    """Every ATen overload that the dispatcher knows (``dir`` shows those alone that were used before)."""
    names = sorted({n.partition(".")[0].removeprefix("aten::") for n in _dispatch_names() if n.startswith("aten::")})
    for name in names:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


def _dispatch_names() -> list[str]:
    return torch._C._dispatch_get_all_op_names()


ALL = list(overloads())
CORE = [op for op in ALL if torch.Tag.core in op.tags]


def test_every_core_overload_is_classified() -> None:
    """Would catch an operation that a new PyTorch adds, or a rule that a rename has lost."""
    open_ones = [str(op) for op in CORE if not is_known(op) and refusal(op) is None]
    assert not open_ones, "write a rule, or an entry of REFUSED that says why not"
    assert len(CORE) > 180


def test_no_overload_is_both_ruled_and_refused() -> None:
    both = [str(op) for op in ALL if find_entry(op) is not None and refusal(op) is not None]
    assert not both


def test_refusals_and_rules_name_operations_that_exist() -> None:
    """Would catch a misspelt entry, which would be without effect."""
    names = {op.overloadpacket.__name__.removesuffix("_") for op in ALL} | {op.overloadpacket.__name__ for op in ALL}
    names |= {f"{op.overloadpacket.__name__}.{op._overloadname}" for op in ALL}
    later = {"nll_loss_nd", "_fused_rms_norm", "_autocast_to_full_precision", "_autocast_to_reduced_precision"}
    unknown = {n for n in (*REFUSED, *RULES) if n not in names and n not in later}
    assert not {n for n in unknown if "." not in n}, unknown


def test_in_place_forms_agree_with_functional_ones() -> None:
    """An in-place form has the rule of its functional form, and is refused where that is."""
    compared = 0
    for op in ALL:
        name = op.overloadpacket.__name__
        functional = getattr(getattr(aten, name[:-1], None), op._overloadname, None) if name.endswith("_") else None
        if functional is None or name.startswith("__") or name in METADATA:
            continue
        mine, theirs = find_entry(op), find_entry(functional)
        if mine is None and theirs is not None:
            written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
            assert written != [op._schema.arguments[0].name] or torch.Tag.nondeterministic_seeded in op.tags, op
            continue
        assert mine == theirs, op
        compared += 1
    assert compared > 150


def test_out_forms_are_refused() -> None:
    """They write into a tensor that another part of the graph owns: none is ever captured, and the reason says so."""
    found = [op for op in ALL if any(a.is_out for a in op._schema.arguments)]
    assert len(found) > 300
    for op in found:
        assert find_entry(op) is None
        assert refusal(op) == "writes its result into a tensor that it is given"


def test_random_operations_have_no_rule() -> None:
    """Unless they have a form that draws nothing, which the rule asks for."""
    random = {op.overloadpacket.__name__ for op in ALL if torch.Tag.nondeterministic_seeded in op.tags and is_known(op)}
    assert all("dropout" in name or "attention" in name for name in random), random


@pytest.mark.parametrize("name", ["nonzero.default", "rand.default", "as_strided.default", "add.out", "where.default"])
def test_the_reason_says_why(name: str) -> None:
    packet, _, overload = name.partition(".")
    why = refusal(getattr(getattr(aten, packet), overload))
    assert why is not None
    assert len(why) > 10
