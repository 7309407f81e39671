"""The buffer registry of one compiled graph: its declared slots by argument, where their values come from, and what
``bs`` and ``tokens`` mean in it.

Contract. A slot belongs to the argument of its name. ``vet`` says what the graph itself has against a declaration;
``refused`` ones keep the padding that undeclared slots have. Values that do not come from the caller (``source_fn``,
``post_fill``) take the argument's place wherever it is read, in recorded and in eager code alike, so a call's answer
does not depend on what is captured. A slot that the call does not supply holds its policy's value, or is an error:
never what an earlier call left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_graph_backend.config import argument_name
from torch_graph_backend.errors import SlotError
from torch_graph_backend.passes.classify import Classified
from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.symbols import SymbolInfo, expr_of
from torch_graph_backend.plan import Plan
from torch_graph_backend.policies import GraphSlot, PaddingPolicy
from torch_graph_backend.slots import Sizes, Window

#: What a phase's one padded size counts.
_PHASE_ROLES = {"decode": "bs", "prefill": "tokens"}


class Arguments(Mapping[str, Any]):
    """What a call was given, by the names that the user knows. Nothing is copied."""

    def __init__(self, index: Mapping[str, int], args: Sequence[Any]) -> None:
        self._index, self._args = index, args

    def __getitem__(self, name: str) -> Any:
        return self._args[self._index[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


class BufferRegistry:
    """The slots of one compiled graph.

    ``declared``: argument index -> slot, for the enabled ones that name an argument; ``unknown``: names that match
    none; ``refused``: argument index -> why its padding is not applied.
    """

    def __init__(
        self, slots: Sequence[GraphSlot] = (), placeholders: Sequence[Node] = (), phase: str | None = None
    ) -> None:
        self.placeholders = tuple(placeholders)
        self.phase = phase
        self.index: dict[str, int] = {}
        sources: dict[str, int] = {}
        for i, p in enumerate(placeholders):
            source = p.meta.get("source") or p.name
            sources[source] = i
            self.index.setdefault(argument_name(source), i)
        found = {s.name: self.index.get(s.name, sources.get(s.name)) for s in slots}
        self.unknown = [name for name, i in found.items() if i is None]
        self.declared = {k: s for s in slots if s.enabled and (k := found[s.name]) is not None}
        self.refused: dict[int, Reason] = {}
        self.symbols: tuple[SymbolInfo, ...] = ()
        self.roles: dict[str, sympy.Symbol] = {}
        #: Slots whose real rows ``post_fill`` writes in the buffer itself, and the others of foreign value.
        self.computed: dict[int, GraphSlot] = {}
        self.sourced = {i: s for i, s in self.declared.items() if s.supplied_by_user}

    # -- the proof -----------------------------------------------------------------------------------------------

    @property
    def names(self) -> dict[str, str]:
        """Placeholder -> the slot's name, of all that declare something the graph or the proof may object to."""
        chosen = {i: s for i, s in self.declared.items() if s.tail or s.axis or s.dtype or s.device}
        return {self.placeholders[i].name: s.name for i, s in chosen.items()}

    @property
    def tails(self) -> dict[str, Tail]:
        """Placeholder -> what the proof may assume of its tail."""
        return {self.placeholders[i].name: tail for i, s in self.declared.items() if (tail := s.tail) is not None}

    def vet(self, classified: Classified) -> dict[str, Reason]:
        """What the graph has against a declaration: its dtype, its device, the sizes that it carries."""
        self.symbols = tuple(s for s in classified.symbols if s.kind == "bucketed")
        self.roles = {}
        found = {}
        for i, slot in self.declared.items():
            text = self._tensor_problem(slot, self.placeholders[i].meta.get("val")) or self._axis_problem(slot, i)
            if text:
                found[self.placeholders[i].name] = Reason("slot-refused", f"slot {slot.name!r} {text}")
        self._other_roles()
        return found

    def _tensor_problem(self, slot: GraphSlot, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return f"is {type(value).__name__}, not a tensor"
        if slot.dtype is not None and slot.dtype is not value.dtype:
            return f"is declared {slot.dtype}, the argument is {value.dtype}"
        device = slot.device
        if isinstance(device, torch.device) and (
            device.type != value.device.type or device.index not in (None, value.device.index)
        ):
            return f"is declared on {device}, the argument is on {value.device}"
        if slot.padding_policy.takes_value and not _fits(slot.pad_value, value.dtype):
            return f"has pad_value {slot.pad_value!r}, which is no {value.dtype}"
        return ""

    def _axis_problem(self, slot: GraphSlot, index: int) -> str:
        bucketed = {s.symbol for s in self.symbols}
        shape = [expr_of(n) for n in self.placeholders[index].meta["val"].shape]
        carried = [n for n in shape if n in bucketed]
        if slot.axis is None or not bucketed:  # a graph for one size: Dynamo's first, before it sees a size change
            return ""
        if slot.axis == "none":
            return f"is declared without a padded size, but has {carried[0]}" if carried else ""
        if not carried:
            return f"is declared along {slot.axis!r}, but carries no padded size"
        first = carried[0]
        taken = self.roles.get(slot.axis)
        if taken is not None and taken != first:
            return f"is declared along {slot.axis!r}, which is another size in a slot before it"
        if any(symbol == first and role != slot.axis for role, symbol in self.roles.items()):
            return f"is declared along {slot.axis!r}, but a slot before it calls the same size otherwise"
        self.roles[slot.axis] = first
        return ""

    def _other_roles(self) -> None:
        """Sizes that no slot names: the phase's, then whatever is left, in order."""
        free = [s.symbol for s in self.symbols if s.symbol not in self.roles.values()]
        wanted = [r for r in (_PHASE_ROLES.get(self.phase or ""), "bs", "tokens") if r]
        for role in dict.fromkeys(wanted):
            if role not in self.roles and free:
                self.roles[role] = free.pop(0)

    # -- the plan ------------------------------------------------------------------------------------------------

    def refuse(self, reasons: Mapping[str, Reason]) -> None:
        """Take note of what the proof refused, by placeholder."""
        index = {p.name: i for i, p in enumerate(self.placeholders)}
        self.refused = {index[name]: reason for name, reason in reasons.items()}

    def policy(self, arg: int) -> tuple[PaddingPolicy, float | int | bool]:
        """The padding that is applied to an argument's slot, and its value."""
        slot = self.declared.get(arg)
        if slot is None or arg in self.refused:
            return PaddingPolicy.REPEAT_ROW, 0
        return slot.padding_policy, slot.fill_value or 0

    def adopt(self, plan: Plan) -> None:
        """Learn from the plan which computed slots nobody reads but the segments: those are written in place."""
        slots = {s.arg for s in plan.slots}
        refs = [ref for step in plan.steps for _, ref in step.inputs]
        refs += [b.source for b in plan.bridges] + [o.ref for o in plan.outputs if o.ref is not None]
        elsewhere = {int(ref.key) for ref in refs if ref.kind == "arg"} | set(plan.pinned)
        foreign = {i: s for i, s in self.declared.items() if s.supplied_by_user}
        self.computed = {i: s for i, s in foreign.items() if s.post_fill and i in slots and i not in elsewhere}
        self.sourced = {i: s for i, s in foreign.items() if i not in self.computed}

    def sizes(self, at: Sizes) -> tuple[int, int]:
        """``bs`` and ``tokens`` at these sizes; where a graph has one padded size it is both, where it has none, 1."""
        found = {role: at[symbol] for role, symbol in self.roles.items() if symbol in at}
        return found.get("bs", found.get("tokens", 1)), found.get("tokens", found.get("bs", 1))

    def shape_reason(self, plan: Plan, buffers: Sequence[torch.Tensor], bucket: Sizes) -> Reason | None:
        """Why the buffers of a key are not what the user's ``shape_fn`` says."""
        for planned, buffer in zip(plan.slots, buffers, strict=True):
            slot = self.declared.get(planned.arg)
            if slot is None or slot.shape_fn is None:
                continue
            wanted = tuple(slot.shape_fn(*self.sizes(bucket)))
            if wanted != tuple(buffer.shape):
                text = f"slot {slot.name!r} has shape {tuple(buffer.shape)}, its shape_fn says {wanted}"
                return Reason("slot-mismatch", text)
        return None

    def check_slice(self, arg: int, buffer: torch.Tensor, window: Window, sizes: Sizes) -> None:
        """Raise ``SlotError`` unless the user's ``slice_fn`` finds the real rows where the graph has them."""
        slot = self.declared.get(arg)
        if slot is None or slot.slice_fn is None:
            return
        real, found = window.real_rows(buffer, sizes), slot.slice_fn(buffer, *self.sizes(sizes))
        here = [(tuple(t.shape), t.stride(), t.data_ptr()) for t in (real, found)]
        if here[0] != here[1]:
            problem = f"slice_fn gives rows of shape {tuple(found.shape)}, the graph has {tuple(real.shape)}"
            if here[0][0] == here[1][0]:
                problem = "slice_fn gives other rows of the buffer than the first ones"
            raise SlotError(slot.name, problem, fix="return a view of the leading rows, or leave slice_fn out")

    # -- a call --------------------------------------------------------------------------------------------------

    @property
    def foreign(self) -> bool:
        """Whether some value does not come from the caller."""
        return bool(self.sourced or self.computed)

    def supplied(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of a call, with the values of sourced slots in their places."""
        return self._replaced(args, self.sourced)

    def whole(self, args: Sequence[Any]) -> list[Any]:
        """The same of the slots that a recording would have computed in place: for a call that runs eagerly."""
        return self._replaced(args, self.computed)

    def stand_ins(self, args: Sequence[Any]) -> list[Any]:
        """``args`` as ``would_replay`` sees them: without calling anything of the user's. A value that does not come
        from the caller has the argument's shape, dtype, device and strides, and no gradient of it."""
        out = list(args)
        for i in self.sourced:
            if isinstance(out[i], torch.Tensor) and out[i].requires_grad:
                out[i] = out[i].detach()
        return out

    def untold(self, plan: Plan, seen: bool) -> Reason | None:
        """Why it cannot be told, without calling functions of the user's, whether a call would replay that nothing else
        is against. ``seen``: this real size was replayed, and ``slice_fn`` agreed."""
        for i, slot in self.sourced.items():
            if slot.source_fn is not None:
                return _untold(slot, "source_fn gives its value, and may refuse the call")
            if i in plan.pinned:
                return _untold(slot, "segments change it in place, and each call has it elsewhere")
        slices = (s for p in plan.slots if (s := self.declared.get(p.arg)) is not None and s.slice_fn is not None)
        found = None if seen else next(slices, None)
        return None if found is None else _untold(found, "slice_fn has not been asked for the rows of this size")

    def _replaced(self, args: Sequence[Any], slots: Mapping[int, GraphSlot]) -> list[Any]:
        given, out = Arguments(self.index, args), list(args)
        for i, slot in slots.items():
            if isinstance(args[i], torch.Tensor):
                out[i] = self._value(slot, given, args[i])
        return out

    @staticmethod
    def _value(slot: GraphSlot, given: Arguments, argument: torch.Tensor) -> torch.Tensor:
        if slot.post_fill is not None:
            rows = torch.empty_like(argument)
            slot.post_fill(rows, given)
            return rows
        found = slot.source_fn(given) if slot.source_fn is not None else None
        if found is None:
            if slot.fill_value is None:
                problem = f"the call does not supply it, and {slot.padding_policy.value} has no value for it"
                raise SlotError(slot.name, problem, fix="return a tensor, or declare ZERO or FILL_SENTINEL")
            return torch.full_like(argument, slot.fill_value)
        return _checked(slot.name, found, argument)

    def post_fills(self, plan: Plan, views: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], None] | None:
        """What computes the slots of a key at one real size in place, given a call's arguments. ``views``: the real
        rows of ``plan.slots``."""
        chosen = [
            (slot.post_fill, views[k])
            for k, planned in enumerate(plan.slots)
            if (slot := self.computed.get(planned.arg)) is not None and slot.post_fill is not None
        ]
        if not chosen:
            return None
        index = self.index

        def fill(args: Sequence[Any]) -> None:
            given = Arguments(index, args)
            for post_fill, rows in chosen:
                post_fill(rows, given)

        return fill


def _untold(slot: GraphSlot, text: str) -> Reason:
    return Reason("unknown", f"slot {slot.name!r}: {text}", fix="make the call, or leave the function out")


def _checked(name: str, found: Any, argument: torch.Tensor) -> torch.Tensor:
    """What ``source_fn`` returned, if it can stand for the argument: a narrower dtype is widened, nothing else cast."""
    if not isinstance(found, torch.Tensor):
        raise SlotError(name, f"source_fn returned {type(found).__name__}, not a tensor")
    if found.shape != argument.shape or found.device != argument.device:
        wanted = f"{list(argument.shape)} on {argument.device}"
        raise SlotError(name, f"source_fn returned {list(found.shape)} on {found.device}, the argument is {wanted}")
    if found.dtype is argument.dtype:
        return found if found.stride() == argument.stride() else torch.empty_like(argument).copy_(found)
    if torch.promote_types(found.dtype, argument.dtype) is not argument.dtype:
        raise SlotError(name, f"source_fn returned {found.dtype}, the argument is {argument.dtype}")
    return torch.empty_like(argument).copy_(found)


def _fits(value: float | int | bool, dtype: torch.dtype) -> bool:
    """Whether a number is one of a dtype, exactly (floating-point dtypes round, and have NaN)."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if isinstance(value, float) and not value.is_integer():
        return False
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max
