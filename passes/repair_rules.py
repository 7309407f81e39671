"""How each kind of operation is repaired: one function a family, found by the operation's name.

Contract. A rule is called with the editor at the node. It adds nodes and ends with ``editor.put``; or it raises
``UnrepairableError``, and everything is taken back. Refused on purpose: accumulating writes (a repeated row would count
twice), sorting and what is found by it (a real NaN, or a real value equal to the filler, would trade places with
padding), products under autocast whose dtype would change, results that are views the caller can see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .alias import arguments
from .repair_edit import Editor, UnrepairableError
from .symbols import expr_of
from .torch_api import OpOverload

aten = torch.ops.aten

Rule = Callable[[Editor, Node], None]

#: The kinds of repair, as the plan prints them. ``MASKED`` copies its input, so it has to pay for itself.
MASKED, COUNTED, REPEATED, LAST, LOOKED_UP, TRASHED = (
    "padded rows masked out",
    "reads the real size on the device",
    "padded rows write what the last real row writes",
    "looks up real rows by the real size",
    "padded rows look up what the last real row looks up",
    "padded rows write to a row that nobody reads",
)

#: Dtypes that hold any size that occurs.
_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)

RULES: dict[str, Rule] = {}


def repairs(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under ATen names, in-place forms by their functional name."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def pair(node: Node) -> tuple[Node, Node]:
    """The first two arguments, where both are tensors."""
    first, second = list(arguments(node).values())[:2]
    if not isinstance(first, Node) or not isinstance(second, Node):
        raise UnrepairableError("an argument is not a tensor")
    return first, second


# -- the size as data --------------------------------------------------------------------------------------------------

#: Overloads that take a tensor where this one takes a number.
_WITH_TENSOR = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor", "Tensor": "Tensor", "default": "Tensor"}


def size_as_data(e: Editor, node: Node) -> None:
    """A number that depends on a padded size becomes a tensor on the device: ``x * s``, ``length.add_(s)``."""
    assert isinstance(node.target, OpOverload)
    named = arguments(node)
    schema = {a.name: str(a.type) for a in node.target._schema.arguments}
    numbers = [k for k, v in named.items() if not isinstance(v, (list, tuple)) and e.mentions(v)]
    if not numbers or any(schema[k] not in ("number", "Tensor", "Optional[number]") for k in numbers):
        raise UnrepairableError("no size is used as data")
    name = node.target.overloadpacket.__name__
    if name in ("full", "new_full", "full_like", "scalar_tensor"):
        return _filled_with_size(e, node, named, numbers)
    counts = {k: e.number(e.expr(named[k])) for k in numbers}
    if name == "rsub":
        if named.get("alpha", 1) != 1:
            raise UnrepairableError("a scaled difference")
        return e.put(COUNTED, aten.sub.Tensor, counts["other"], named["self"])
    if name == "masked_fill":  # its form with a tensor reads it on the host
        return e.put(COUNTED, aten.where.self, named["mask"], counts["value"], named["self"])
    wanted = _WITH_TENSOR.get(node.target._overloadname, "")
    target = getattr(node.target.overloadpacket, wanted, None)
    if target is None or [a.name for a in target._schema.arguments] != list(schema):
        raise UnrepairableError("there is no form of it that takes a tensor")
    given: dict[str, Any] = named | counts
    if name == "clamp":  # both limits are tensors or neither is
        for k, v in given.items():
            if isinstance(v, (int, float)):
                wide = torch.int64 if isinstance(v, int) else torch.float64
                given[k] = e.add(aten.full.default, [], v, dtype=wide, device=e.device)
    e.put(COUNTED, target, given.pop("self"), **given)


@repairs("arange")
def shifted_arange(e: Editor, node: Node) -> None:
    """``arange(start, start + k)`` counts from 0, plus ``start``."""
    named = arguments(node)
    start, step = named.get("start", 0), named.get("step", 1)
    value = node.meta["val"]
    if not e.mentions(start) or step != 1 or value.dtype not in _EXACT or value.dim() != 1:
        raise UnrepairableError("it does not start at a size")
    length = value.shape[0] if isinstance(value.shape[0], int) else e.size(expr_of(value.shape[0]))
    steps = e.add(aten.arange.default, length, dtype=value.dtype, device=e.device)
    e.put(COUNTED, aten.add.Tensor, steps, e.number(e.expr(start)))


def _filled_with_size(e: Editor, node: Node, named: dict[str, Any], numbers: list[str]) -> None:
    """A new tensor full of a size: zeros plus that number."""
    key = "s" if "s" in named else "fill_value"
    if numbers != [key]:
        raise UnrepairableError("another number than the value depends on a padded size")
    count = e.number(e.expr(named[key]))
    value = node.meta["val"]
    if value.dtype not in _EXACT:
        raise UnrepairableError(f"a size in {value.dtype}")
    rest = {k: v for k, v in named.items() if k not in (key, "self", "size")} | {"dtype": value.dtype}
    leading = [named[k] for k in ("self", "size") if k in named]
    zeros = e.add(node.target, *leading, 0, **rest)
    e.put(COUNTED, aten.add.Tensor, zeros, count if value.dim() else e.add(aten.to.dtype, count, value.dtype))


# -- products ----------------------------------------------------------------------------------------------------------


@repairs("mm", "bmm", "matmul", "mv", "dot")
def contraction(e: Editor, node: Node) -> None:
    """Both operands zero in the padded rows of the contracted dimension: 0 times NaN would be NaN."""
    a, b = pair(node)
    for k in ("a", "b"):
        x = a if k == "a" else b
        dim = x.meta["val"].dim() - 1 if k == "a" else max(x.meta["val"].dim() - 2, 0)
        symbol = e.carried(x, dim)
        if symbol is None:
            raise UnrepairableError("an operand that is not padded where the other one is")
        x = e.masked(x, dim, symbol, 0)
        a, b = (x, b) if k == "a" else (a, x)
    e.put(MASKED, node.target, a, b)
