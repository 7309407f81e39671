"""How a plan calls a break op: the user's function itself, its results checked against the fake, each time.

Contract (C3). ``callee(op)`` is what generated code calls: at first a ``FirstCall``, which looks for what an operator
must not do and then puts the bare function in its own place, so that a replay goes through no wrapper and no
dispatcher. ``Check`` writes the lines that compare a result with what the fake implementation promised; a result that
differs raises ``BridgeMismatch`` with the op, expected and got, before anything reads it. Nothing is cast or broadcast.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from torch_graph_backend.break_define import BreakOp, defined
from torch_graph_backend.errors import BreakOpError, BridgeMismatch, KeptArgument
from torch_graph_backend.passes.capturable import name_of, tensors_of
from torch_graph_backend.passes.source_lines import where
from torch_graph_backend.passes.torch_api import storage_uses


class FirstCall:
    """Calls a break op once with care; from then on the module of the generated code has the function itself, until
    ``arm`` asks for care again (an audit does)."""

    def __init__(self, op: BreakOp, where: str) -> None:
        self.op, self.where = op, where
        self.__name__ = op.function.__name__
        self.scope: dict[str, Any] = {}
        self.name = ""

    def place(self, scope: dict[str, Any], name: str) -> None:
        """Where the generated code finds this object."""
        self.scope, self.name = scope, name

    def arm(self) -> None:
        """Take care again at the next call."""
        self.scope[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = careful(self.op, args, kwargs)
        except BreakOpError as error:
            raise error.at(self.where) from None
        self.scope[self.name] = self.op.call if self.op.method else self.op.function
        return result


def careful(op: BreakOp, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One call, with a look at what an operator must not do. Raises ``BreakOpError``."""
    names = [a.name for a in op.overload._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    given = [(name, t) for name, value in named.items() for t in tensors_of(value)]
    versions = [t._version for _, t in given if not t.is_inference()]
    lent = [] if op.keeps_args else [(name, t) for name, t in given if type(t) is torch.Tensor]
    before = [_owners(t) for _, t in lent]
    result = op.call(*args, **kwargs)
    _check_unchanged(op, given, versions)
    _check_new(op, given, result)
    if _kept(lent, before) is not None:
        gc.collect()  # an exception that was caught holds its frames, and they hold the arguments
        kept = _kept(lent, before)
        if kept is not None:
            raise KeptArgument(op.name, kept)
    return result


def _check_unchanged(op: BreakOp, given: Sequence[tuple[str, torch.Tensor]], versions: Sequence[int]) -> None:
    # An argument that shares memory with one that is declared changes with it, and so does its version.
    declared = {_memory(t) for name, t in given if name in op.mutates_args} - {0}
    for (name, t), version in zip([g for g in given if not g[1].is_inference()], versions, strict=True):
        if name not in op.mutates_args and _memory(t) not in declared and t._version != version:
            problem = f"changes its argument {name!r} in place, which it does not declare"
            raise BreakOpError(op.name, problem, fix=f"declare it: mutates_args=({name!r},)")


def _check_new(op: BreakOp, given: Sequence[tuple[str, torch.Tensor]], result: Any) -> None:
    memory = {_memory(t): name for name, t in given}
    memory.pop(0, None)
    for out in tensors_of(result):
        shared = memory.get(_memory(out))
        if shared is not None:
            problem = f"returns its argument {shared!r}, or a view of it; an op must return new tensors"
            fix = f"return nothing: the caller has {shared!r}" if shared in op.mutates_args else "return a clone"
            raise BreakOpError(op.name, problem, fix=fix)


def _kept(lent: Sequence[tuple[str, torch.Tensor]], before: Sequence[tuple[int, int]]) -> str | None:
    """The first argument that has more owners than before."""
    now = [_owners(t) for _, t in lent]
    more = (i for i in range(len(lent)) if now[i][0] > before[i][0] or now[i][1] > before[i][1])
    return next((lent[i][0] for i in more), None)


def _owners(t: torch.Tensor) -> tuple[int, int]:
    """References to a tensor object, and to its memory."""
    return sys.getrefcount(t), storage_uses(t) if _memory(t) else 0


def _memory(t: torch.Tensor) -> int:
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
    return t.untyped_storage().data_ptr() if plain else 0


class Check:
    """The check of one node's results, as generated code. ``lines`` of source use ``names`` as globals."""

    def __init__(self, node: Node, dims: Callable[[Any], str | None], bind: Callable[[Any, str], str]) -> None:
        self.node, self.dims, self.bind = node, dims, bind

    def line(self) -> str | None:
        """One statement that raises if the value of the node is not what was promised; None if nothing was."""
        value: Any = self.node.meta.get("val")
        several = isinstance(value, (tuple, list))
        items = tensors_of(value)
        if not items or (several and len(items) != len(value)):
            return None
        name = self.node.name
        shapes = [[self.dims(s) for s in v.shape] for v in items]
        texts = [f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})" for shape in shapes]
        verify = Verify(self.node, [(v.dtype, v.device) for v in items], type(value) if several else None)
        call = f"{self.bind(verify, f'verify_{name}')}({name}, [{', '.join(texts)}])"
        if any(None in shape for shape in shapes):  # a size that only the data knows
            return call
        wrong = [f"type({name}) is not {type(value).__name__} or len({name}) != {len(items)}"] if several else []
        for i, (item, text) in enumerate(zip(items, texts, strict=True)):
            wrong.append(self.differs(f"{name}[{i}]" if several else name, item, text))
        return f"if {' or '.join(wrong)}: {call}"

    def differs(self, got: str, item: torch.Tensor, shape: str) -> str:
        tensor = self.bind(torch.Tensor, "Tensor")
        dtype = self.bind(item.dtype, str(item.dtype).removeprefix("torch."))
        # The quickest question for each kind of device; what has no index is asked in full.
        place = f"not {got}.is_cpu" if item.device.type == "cpu" else f"{got}.get_device() != {item.device.index}"
        return f"type({got}) is not {tensor} or {got}.dtype is not {dtype} or {got}.shape != {shape} or {place}"


class Verify:
    """The whole check of one node's results; a quick check in the generated code calls it only if something differs."""

    def __init__(self, node: Node, items: list[tuple[torch.dtype, torch.device]], several: type | None) -> None:
        self.op, self.where, self.items, self.several = name_of(node), where(node), items, several
        self.__name__ = f"verify_{node.name}"

    def __call__(self, value: Any, shapes: Sequence[Sequence[int | None]]) -> None:
        values = value if self.several else [value]
        good = isinstance(values, (tuple, list)) and len(values) == len(self.items)
        for got, (dtype, device), shape in zip(values, self.items, shapes, strict=False) if good else ():
            good = good and isinstance(got, torch.Tensor) and got.dtype is dtype and _same(got.device, device)
            good = good and len(got.shape) == len(shape)
            good = good and all(s is None or s == n for s, n in zip(shape, got.shape, strict=True))
        if not good:
            wanted = [_text(d, s, p) for (d, p), s in zip(self.items, shapes, strict=True)]
            raise BridgeMismatch(self.op, _joined(wanted, self.several), described(value), where=self.where)


def _same(got: torch.device, wanted: torch.device) -> bool:
    return got.type == wanted.type and (wanted.index is None or got.index == wanted.index)


def _text(dtype: torch.dtype, shape: Sequence[Any], device: torch.device) -> str:
    sizes = ", ".join("any" if s is None else str(s) for s in shape)
    return f"{str(dtype).removeprefix('torch.')}[{sizes}] on {device}"


def _joined(texts: list[str], several: type | None) -> str:
    return texts[0] if several is None else f"{several.__name__} of {len(texts)}: {'; '.join(texts)}"


def described(value: Any) -> str:
    """A value in words, such as ``float32[8, 64] on cuda:0``; never its data."""
    if isinstance(value, torch.Tensor):
        return _text(value.dtype, value.shape, value.device)
    if isinstance(value, (tuple, list)):
        return _joined([described(v) for v in value], type(value))
    return "None" if value is None else f"a {type(value).__name__}"


def callee(node: Node) -> FirstCall | None:
    """What a plan calls in place of an operator of ours; None for other operations."""
    op = defined(node.target)
    return None if op is None else FirstCall(op, where(node))
