"""What the user declares about operations and arguments; ``torch_graph_backend/declare.py`` is the public face.

Contract. Plain data, process-wide, read when a graph is planned. A ``RowLocal`` is a promise that the rules take as
given; it is never more than what its fields say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .layout import INDEPENDENT, Layout
from .padding_rules_base import Call, Entry, Operand, RefusedError, content, for_outputs
from .torch_api import OpOverload

__all__ = [
    "CAPTURE_SAFE",
    "DECLARED",
    "PROMISED",
    "TRASH",
    "TRASH_ROWS",
    "RowLocal",
    "declared_entry",
    "is_capture_safe",
    "is_declared",
    "is_promised",
    "trash_row_of",
]


@dataclass(frozen=True)
class RowLocal:
    """Row ``i`` of every output depends on row ``i`` of the inputs alone, along the leading ``dims`` dimensions.

    ``rows``: names of the tensor arguments that have these dimensions (``None``: every tensor argument). The others
    must not be padded.
    """

    dims: int
    rows: tuple[str, ...] | None = None


#: Declared operations by ``library::name`` or ``library::name.overload``.
DECLARED: dict[str, RowLocal] = {}
#: Operations of which a recording may be made, by name as in ``DECLARED``.
CAPTURE_SAFE: dict[str, None] = {}
#: Names of integer arguments whose entries are valid, non-negative indices.
PROMISED: dict[str, None] = {}
#: By the name of an argument: a row, of dimension 0, that nobody reads.
TRASH_ROWS: dict[str, int] = {}
#: Marks a placeholder, and an operation that relies on it: the number of that row.
TRASH = "trash_row"


def trash_row_of(source: str, also: Mapping[str, int]) -> int | None:
    """The row of an argument that nobody reads; ``also``: what one compile says."""
    for name, row in {**TRASH_ROWS, **also}.items():
        if _called(source, name) or source.startswith(f"L['{name}']["):
            return row
    return None


def _called(source: str, name: str) -> bool:
    """Whether Dynamo's name for an argument ends in a name: ``L['idx']``, ``L['self'].idx``, ``..._buffers['idx']``."""
    return source == name or source.endswith((f".{name}", f"['{name}']"))


def is_promised(source: str) -> bool:
    """Whether an argument was promised."""
    return any(_called(source, name) for name in PROMISED)


def is_capture_safe(op: OpOverload) -> bool:
    """Whether an operation of another library was declared capture-safe."""
    name = str(op._schema.name)
    return name in CAPTURE_SAFE or f"{name}.{op._overloadname or 'default'}" in CAPTURE_SAFE


def is_declared(target: object) -> bool:
    """Whether the rule of an operation is the user's word."""
    return (
        isinstance(target, OpOverload)
        and target.namespace != "aten"
        and _found(f"{target._schema.name}.{target._overloadname}") is not None
    )


def _found(qualified: str) -> RowLocal | None:
    return DECLARED.get(qualified) or DECLARED.get(qualified.partition(".")[0])


def declared_entry(qualified: str) -> Entry | None:
    """The rule of a declared operation."""
    found = _found(qualified)
    return None if found is None else Entry(lambda call: _row_local(call, found), frozenset())


def _row_local(call: Call, promise: RowLocal) -> Sequence[Layout]:
    """Padding may be in the promised dimensions alone, alike in every argument that has it, and comes out there."""
    found: Layout | None = None
    for name, value in call.args.items():
        for x in (v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Operand)):
            if not x.carries:
                continue  # every row may read all of it
            if promise.rows is not None and name not in promise.rows:
                raise RefusedError(f"argument {name!r} is padded, and not declared to have rows")
            inner = [d for d in x.layout.dims if d >= promise.dims]
            if inner:
                raise RefusedError(f"padded dim {inner[0]} of {name!r} is not declared row-local")
            if found is not None and x.layout.axes != found.axes:
                raise RefusedError("its arguments hold the padding in different dimensions")
            found = x.layout
    return for_outputs(call, content(found or INDEPENDENT))
