"""Checks of single options: each takes an option's name and value, and returns what ``Config`` holds or raises
``BadOption``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_graph_backend.buckets import clean
from torch_graph_backend.errors import BadOption

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Without:
    """An entry of ``break_ops`` that is no break in this compile, though it is registered."""

    target: Any


def positive(name: str, value: Any) -> int:
    """An int >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadOption(name, value, "an int >= 1")
    return value


def natural(name: str, value: Any) -> int:
    """An int >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadOption(name, value, "an int >= 0")
    return value


def flag(name: str, value: Any) -> bool:
    """A bool and nothing that merely behaves like one."""
    if not isinstance(value, bool):
        raise BadOption(name, value, "True or False")
    return value


def strict_option(name: str, value: Any) -> bool | str:
    """A bool, or ``"ops"``."""
    if not isinstance(value, bool) and value != "ops":
        raise BadOption(name, value, "True or False, or 'ops'")
    return value


def choice(*accepted: str | None) -> Check:
    """A check for one of ``accepted``."""

    def check(name: str, value: Any) -> Any:
        if (value is None or isinstance(value, str)) and value in accepted:
            return value
        raise BadOption(name, value, " or ".join(map(repr, accepted)))

    return check


def audit_option(name: str, value: Any) -> str | None:
    """When to audit."""
    if value in (None, "off", "capture"):
        return None if value is None else str(value)
    if isinstance(value, str) and re.fullmatch(r"every:[1-9]\d*", value):
        return value
    raise BadOption(name, value, "None, 'off', 'capture' or 'every:N' with N >= 1", fix="such as 'every:1000'")


def trash_rows_option(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    """``{argument: row}`` as pairs, in the order given."""
    accepted = "a dict of argument names to row numbers >= 0, such as {'cache': 0}"
    if not isinstance(value, Mapping):
        raise BadOption(name, value, accepted)
    for key, row in value.items():
        if not (isinstance(key, str) and key.isidentifier()) or isinstance(row, bool) or not isinstance(row, int):
            raise BadOption(name, value, accepted)
        if row < 0:
            raise BadOption(name, value, accepted)
    return tuple(value.items())


def optional(check: Check) -> Check:
    """``check``, but None is accepted too."""
    return lambda name, value: None if value is None else check(name, value)


def sizes_option(name: str, value: Any) -> tuple[int, ...]:
    """A list of sizes, cleaned."""
    return clean(value, name)


def phase_backend_option(name: str, value: Any) -> str:
    """How a phase is recorded; a removed name is answered with its successor."""
    accepted = ("full", "breakable", "disabled")
    if value == "tc_piecewise":
        raise BadOption(name, value, " or ".join(map(repr, accepted)), fix="use 'breakable' instead of 'tc_piecewise'")
    return choice(*accepted)(name, value)


def break_ops_option(name: str, value: Any) -> tuple[Any, ...]:
    """Names and callables (functions, op overloads, higher-order ops), without duplicates, in the order given.

    A dict says for each whether it is a break in this compile: those that are not become ``Without``.
    """
    accepted = "a list of op names ('namespace::op'), ops or functions, or a dict of them to True or False"
    if isinstance(value, Mapping):
        if not all(isinstance(chosen, bool) for chosen in value.values()):
            raise BadOption(name, value, accepted)
        chosen = break_ops_option(name, list(value))
        return tuple(op if value[op] else Without(op) for op in chosen)
    if not isinstance(value, (list, tuple)):
        raise BadOption(name, value, accepted)
    for op in value:
        named = isinstance(op, str) and bool(op.strip())
        if not named and not (callable(op) and isinstance(op, Hashable)):
            raise BadOption(name, op, accepted)
    return tuple(dict.fromkeys(value))


def named_buckets_option(name: str, value: Mapping[Any, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """``{symbol name: sizes}`` as pairs in the order given."""
    for key in value:
        if not isinstance(key, str) or not key:
            raise BadOption(name, key, "a dict whose keys are names, such as 'input_ids:1'")
        if re.search(r":-\d+$", key):
            raise BadOption(name, key, "a dict whose dimensions are counted from the front, such as 'input_ids:1'")
    return tuple((key, clean(sizes, f"{name}[{key!r}]")) for key, sizes in value.items())


def buckets_option(name: str, value: Any) -> Any:
    """A list of sizes, a dict of them, or None."""
    if value is None:
        return None
    return named_buckets_option(name, value) if isinstance(value, Mapping) else clean(value, name)
