"""Padding policies and declared slots: what a user may say of a static input buffer, and how the option is read.

Contract. Plain frozen data and its checks. A declaration is what the user *wants* of a buffer's tail; whether a graph
may have it is decided by the padding proof (``slot_proof``), and what is refused falls back to ``REPEAT_ROW``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from torch_graph_backend.errors import BadOption, UnknownOption
from torch_graph_backend.passes.padding_tails import STALE, Tail

AXES = ("bs", "tokens", "none")


class PaddingPolicy(enum.Enum):
    """What the tail of a static buffer, the rows beyond the real ones, holds when a recording is replayed.

    * ``REPEAT_ROW`` (the default): a copy of row 0, made at every call.
    * ``ZERO``: zero, written at every call.
    * ``FILL_SENTINEL``: ``pad_value``, written at every call.
    * ``FILL_ONCE``: ``pad_value`` in the whole buffer when it is allocated; later only real rows are written, so a row
      that was real in an earlier, larger call keeps what it held then.
    * ``FOREACH_COPY``: zero when it is allocated; later only real rows are written, the tail stays as it was.
    * ``KEEP_PAD``: never touched, not even when it is allocated; nobody may read it.
    """

    REPEAT_ROW = "REPEAT_ROW"
    ZERO = "ZERO"
    FILL_SENTINEL = "FILL_SENTINEL"
    FILL_ONCE = "FILL_ONCE"
    FOREACH_COPY = "FOREACH_COPY"
    KEEP_PAD = "KEEP_PAD"

    @property
    def survives(self) -> bool:
        """Whether the tail is kept from call to call, so that the buffer needs memory of its own."""
        return self in (PaddingPolicy.FILL_ONCE, PaddingPolicy.FOREACH_COPY, PaddingPolicy.KEEP_PAD)

    @property
    def takes_value(self) -> bool:
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)

    def start(self, buffer: torch.Tensor, pad_value: float | int | bool) -> None:
        """What is written to a buffer once, when it is allocated."""
        if self in (PaddingPolicy.FILL_ONCE, PaddingPolicy.FOREACH_COPY):
            buffer.fill_(pad_value)

    def tail(self, pad_value: float | int | bool) -> Tail | None:
        """What the padding proof may take for granted of the tail (``None``: a copy of row 0)."""
        if self is PaddingPolicy.REPEAT_ROW:
            return None
        if self.survives:
            return STALE
        return Tail(0 if self is PaddingPolicy.ZERO else pad_value)


@dataclass(frozen=True)
class GraphSlot:
    """One declared static input buffer.

    * ``name``: the argument's name; nested ones dotted (``batch.ids`` for ``batch["ids"]`` or ``batch.ids``).
    * ``shape_fn(bs, tokens)``: the shape that the buffer must have at a bucket; checked, since the graph knows it.
    * ``dtype``, ``device``: what they must be; checked.
    * ``axis``: which padded size the slot carries, ``"bs"`` (requests), ``"tokens"`` or ``"none"``; checked. Where a
      slot carries two sizes, it is that of the first padded dimension. It decides what ``bs`` and ``tokens`` mean.
    * ``padding_policy``, ``pad_value``: see ``PaddingPolicy``.
    * ``enabled``: ``False`` leaves the argument as if it were not declared.
    * ``copy_from_fb``: ``False`` for a computed slot, whose value does not come from the caller's argument.
    * ``post_fill(rows, arguments)``: writes all real rows of a computed slot in place; ``arguments`` maps names to what
      the call was given.
    * ``slice_fn(buffer, bs, tokens)``: the view of the buffer that holds the real rows, for layouts that are not padded
      on dimension 0 (``[3, T]``). The graph knows it too; a view that differs is refused (``SlotError``).
    * ``source_fn(arguments)``: the tensor to copy, if it is not the argument of this name. It takes the argument's
      place in eager code as well. ``None`` from it means that the call does not supply the slot.

    Raises ``BadOption`` for a value that is not accepted.
    """

    name: str
    shape_fn: Callable[[int, int], tuple[int, ...]] | None = None
    dtype: torch.dtype | None = None
    axis: str | None = None
    device: torch.device | str | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.REPEAT_ROW
    pad_value: float | int | bool = 0
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: Callable[[torch.Tensor, Mapping[str, Any]], None] | None = None
    slice_fn: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None
    source_fn: Callable[[Mapping[str, Any]], torch.Tensor | None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadOption("slots", self.name, "a dict whose keys are names of arguments, such as 'positions'")
        object.__setattr__(self, "padding_policy", _policy(f"{self._scope}.padding", self.padding_policy))
        self._check("axis", None if self.axis is None else self.axis in AXES, " or ".join(map(repr, AXES)))
        self._check("dtype", None if self.dtype is None else isinstance(self.dtype, torch.dtype), "a torch.dtype")
        if self.device is not None:
            object.__setattr__(self, "device", self._device())
        for name in ("enabled", "copy_from_fb"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name in ("shape_fn", "post_fill", "slice_fn", "source_fn"):
            found = getattr(self, name)
            self._check(name, None if found is None else callable(found), "a function")
        number = isinstance(self.pad_value, (bool, int, float))
        self._check("pad_value", number, "a number")
        if self.pad_value != 0 and not self.padding_policy.takes_value:
            accepted = f"left out with padding {self.padding_policy.value!r}, which has no value"
            raise BadOption(f"{self._scope}.pad_value", self.pad_value, accepted)
        self._check_source()

    def _check_source(self) -> None:
        computed = not self.copy_from_fb
        if self.post_fill is not None and not computed:
            raise BadOption(f"{self._scope}.post_fill", self.post_fill, "given together with copy_from_fb=False")
        if self.source_fn is not None and computed:
            raise BadOption(f"{self._scope}.source_fn", self.source_fn, "left out with copy_from_fb=False")
        if computed and self.post_fill is None and self.fill_value is None:
            accepted = "True, or given together with post_fill, or with a padding that has a value"
            raise BadOption(f"{self._scope}.copy_from_fb", self.copy_from_fb, accepted)

    def _device(self) -> torch.device:
        try:
            return torch.device(self.device)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):
            raise BadOption(f"{self._scope}.device", self.device, "a device") from None

    def _check(self, name: str, good: bool | None, accepted: str) -> None:
        if good is False:
            raise BadOption(f"{self._scope}.{name}", getattr(self, name), accepted)

    @property
    def _scope(self) -> str:
        return f"slots[{self.name!r}]"

    @property
    def tail(self) -> Tail | None:
        """What the padding proof may take for granted of its padded rows (``None``: copies of row 0)."""
        return self.padding_policy.tail(self.pad_value)

    @property
    def fill_value(self) -> float | int | bool | None:
        """What a slot holds that the call does not supply; ``None`` if its policy has no value."""
        if self.padding_policy is PaddingPolicy.ZERO:
            return 0
        return self.pad_value if self.padding_policy.takes_value else None

    @property
    def supplied_by_user(self) -> bool:
        """Whether the value comes from somewhere else than the caller's argument."""
        return self.source_fn is not None or not self.copy_from_fb

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults, in the form that the option ``slots`` takes."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if f.default is not MISSING}
        changed = {f.name: changed[f.name] for f in fields(self) if f.name in changed and changed[f.name] != f.default}
        if "padding_policy" in changed:
            changed["padding"] = changed.pop("padding_policy").value
        return changed


#: The keys of a slot's dict: the fields, and ``padding`` for short.
_KEYS = (*(f.name for f in fields(GraphSlot) if f.name != "name"), "padding")


def _policy(name: str, value: Any) -> PaddingPolicy:
    if isinstance(value, PaddingPolicy):
        return value
    if isinstance(value, str) and value in PaddingPolicy.__members__:
        return PaddingPolicy[value]
    raise BadOption(name, value, " or ".join(map(repr, PaddingPolicy.__members__)))


def parse_slots(name: str, value: Any) -> tuple[GraphSlot, ...]:
    """The option ``slots``: a dict of names to dicts or ``GraphSlot``, or a list of ``GraphSlot``.

    Raises ``BadOption`` or ``UnknownOption``.
    """
    accepted = "a dict of argument names to dicts (or GraphSlot), or a list of GraphSlot"
    if isinstance(value, (list, tuple)):
        if not all(isinstance(slot, GraphSlot) for slot in value):
            raise BadOption(name, value, accepted)
        value = {slot.name: slot for slot in value} if len({s.name for s in value}) == len(value) else None
        if value is None:
            raise BadOption(name, "a list", "a list of slots with different names")
    if not isinstance(value, Mapping):
        raise BadOption(name, value, accepted)
    return tuple(_slot(key, given) for key, given in value.items())


def _slot(name: Any, given: Any) -> GraphSlot:
    if isinstance(given, GraphSlot):
        if given.name != name:
            raise BadOption(f"slots[{name!r}]", given.name, f"a GraphSlot of the name {name!r}")
        return given
    if not isinstance(given, Mapping):
        raise BadOption(f"slots[{name!r}]", given, "a dict or a GraphSlot")
    for key in given:
        if key not in _KEYS:
            raise UnknownOption(key, _KEYS, scope=f"slots[{name!r}]")
    if "padding" in given and "padding_policy" in given:
        raise BadOption(f"slots[{name!r}].padding", given["padding"], "left out where padding_policy is given")
    renamed = {"padding_policy" if key == "padding" else key: v for key, v in given.items()}
    return GraphSlot(name, **renamed)
