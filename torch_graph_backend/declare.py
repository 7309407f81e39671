"""What a user may declare where the proof cannot look: custom operations, indices, rows that nobody reads.

Contract. A declaration is a promise about correctness that nothing here checks. The option ``audit`` tries out those
about padding; that an operation may be recorded (``declare_capture_safe``) nothing tries out. Declarations are
process-wide and apply to graphs compiled afterwards. They never override a rule: ATen operations have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_graph_backend.errors import DeclarationError, nearest
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.alias import is_collective
from torch_graph_backend.passes.host_reads import TAGS
from torch_graph_backend.passes.padding_rules_declared import CAPTURE_SAFE, DECLARED, PROMISED, TRASH_ROWS, RowLocal
from torch_graph_backend.passes.torch_api import OpOverload, OpOverloadPacket, all_operations

#: Declared names of which it was said already that there is no such operation.
_reported: set[str] = set()


def declare_row_local(op: Any, *, dims: int = 1, rows: Iterable[str] | None = None) -> Any:
    """Declare a custom operation row-local, so that it may be captured and padded. Returns ``op``.

    ``op`` is an operator of a library other than ATen: ``torch.ops.mylib.norm``, one of its overloads, what
    ``torch.library.custom_op`` returns, or its name ``"mylib::norm"``. The promise has three parts:

    * *row-local*: an entry of an output at ``[i, ...]`` depends on the inputs at ``[i, ...]`` alone, ``i`` ranging
      over the leading ``dims`` dimensions of every tensor argument and of every output (all of the same sizes there);
    * *whole arguments*: if ``rows`` is given, only the arguments of these names are padded rows. A tensor argument
      without any padded dimension, such as a weight, may always be read whole by every row;
    * *capture-safe*: no synchronisation, no copy between devices, no shape or Python value that depends on data,
      nothing read that is not an argument, no argument changed.

    Raises ``DeclarationError`` (BCG311) for ATen operations, for operations that change an argument or draw random
    numbers, and for names in ``rows`` that are no tensor arguments (if the operation exists already).
    """
    name = _foreign(op)
    if not isinstance(dims, int) or isinstance(dims, bool) or dims < 1:
        raise DeclarationError(name, f"dims={dims!r} is not a positive number of leading dimensions")
    chosen = None if rows is None else tuple([rows] if isinstance(rows, str) else rows)
    for overload in _overloads(name):
        _check_recordable(name, overload)
        _check_rows(name, overload, chosen)
    DECLARED[name] = RowLocal(dims, chosen)
    return op


def undeclare_row_local(op: Any) -> None:
    """Undo ``declare_row_local``. Raises ``DeclarationError`` if it was not declared."""
    name = _name_of(op)
    if DECLARED.pop(name, None) is None:
        raise DeclarationError(name, "is not declared")


def declare_capture_safe(op: Any) -> Any:
    """Declare that a custom operation may be recorded and replayed. Returns ``op``.

    ``op``: as for ``declare_row_local``. The promise: whatever its arguments hold, the operation

    * launches the same kernels on the same memory: no synchronisation, no copy between devices or from host memory, no
      shape, Python value or branch that depends on data, no random number;
    * reads nothing and changes nothing but what its schema says, and allocates with PyTorch's allocator alone.

    An argument that its schema marks as changed may be changed. The promise says nothing about padding: the operation
    is captured where no padded size occurs in its arguments and results (at a fixed size, say), and with
    ``declare_row_local`` also where one does. Elsewhere it runs eagerly, with the reason ``padding``.

    Raises ``DeclarationError`` (BCG311) for ATen operations and collectives, for operations that PyTorch tags as data
    dependent, and for those that draw random numbers.
    """
    name = _foreign(op)
    for overload in _overloads(name):
        _check_recordable(name, overload)
    CAPTURE_SAFE[name] = None
    return op


def undeclare_capture_safe(op: Any) -> None:
    """Undo ``declare_capture_safe``. Raises ``DeclarationError`` if it was not declared."""
    name = _name_of(op)
    if CAPTURE_SAFE.pop(name, name) is not None:
        raise DeclarationError(name, "is not declared")


def declare_indices(*names: str) -> None:
    """Declare that integer arguments of the compiled functions hold valid indices wherever they are used as such.

    ``names`` are parameter names (``"last_token"``), or names of buffers of the module. *Valid* means: never negative
    (which would count from the end, and the end is padded), and inside the dimension that they index. Raises
    ``DeclarationError`` for what is no name.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise DeclarationError(repr(name), "is not the name of a parameter")
    PROMISED.update(dict.fromkeys(names))


def undeclare_indices(*names: str) -> None:
    """Undo ``declare_indices``. Raises ``DeclarationError`` for a name that was not declared."""
    for name in names:
        if PROMISED.pop(name, name) is not None:
            raise DeclarationError(repr(name), "is not declared")


def declare_trash_row(name: str, row: int) -> None:
    """Declare that nobody reads row ``row`` (>= 0, of dimension 0) of a tensor that compiled functions change.

    ``name``: a parameter (``"cache"``; a list of tensors: each of them), or a buffer of the module. Padded rows may
    then write to that row, which makes writes capturable that add up (``index_add_``, ``accumulate=True``). Its content
    is undefined from then on. Raises ``DeclarationError`` for what is no name or no row.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise DeclarationError(repr(name), "is not the name of a parameter")
    if not isinstance(row, int) or isinstance(row, bool) or row < 0:
        raise DeclarationError(repr(name), f"has no row {row!r}", fix="count rows from 0")
    TRASH_ROWS[name] = row


def undeclare_trash_row(name: str) -> None:
    """Undo ``declare_trash_row``. Raises ``DeclarationError`` for a name that was not declared."""
    if TRASH_ROWS.pop(name, None) is None:
        raise DeclarationError(repr(name), "is not declared")


def report_unmatched() -> None:
    """Say once of every declared name that no operation has it, although its library is loaded."""
    missing = [n for n in (*DECLARED, *CAPTURE_SAFE) if n not in _reported and not _overloads(n)]
    for name in missing:
        known = {n.partition(".")[0] for n in _names_in(name.partition("::")[0])}
        if known:
            _reported.add(name)
            close = nearest(name.partition(".")[0], known)
            hint = f"; did you mean {close!r}?" if close else ""
            log.warning("%s was declared, but there is no such operation%s", name, hint)


def _names_in(library: str) -> list[str]:
    """The operations of a library that exist by now."""
    return [n for n in all_operations() if n.startswith(f"{library}::")]


def _foreign(op: Any) -> str:
    """The name of an operation about which something can be declared."""
    name = _name_of(op)
    if name.startswith(("aten::", "prims::")):
        raise DeclarationError(name, "is PyTorch's own, and its rule cannot be overridden")
    return name


def _name_of(op: Any) -> str:
    """``library::name``, with the overload's name if one was given."""
    if isinstance(op, OpOverload):
        return str(op._schema.name) + (f".{op._overloadname}" if op._overloadname != "default" else "")
    if isinstance(op, OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, torch.library.CustomOpDef):
        return str(op._qualname)
    if isinstance(op, str):
        name = op.strip()
        if all(name.partition("::")) and "::" not in name.partition("::")[2]:
            return name
    raise DeclarationError(repr(op), "is neither an operator nor a name like 'library::operation'")


def _overloads(name: str) -> list[OpOverload]:
    """The overloads that a name stands for; none if the library was not loaded yet."""
    library, _, rest = name.partition("::")
    short, _, wanted = rest.partition(".")
    packet = getattr(getattr(torch.ops, library), short, None)
    if packet is None:
        return []
    return [getattr(packet, o) for o in packet.overloads() if not wanted or o == wanted]


def _check_recordable(name: str, op: OpOverload) -> None:
    if is_collective(op):
        raise DeclarationError(name, "is a collective, and ranks may pad to different sizes")
    if TAGS & set(op.tags):
        raise DeclarationError(name, "is tagged as data dependent, so that a recording would freeze what it read")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise DeclarationError(name, "draws random numbers, which depend on the padded shape")


def _check_rows(name: str, op: OpOverload, rows: tuple[str, ...] | None) -> None:
    if op._schema.is_mutable:
        raise DeclarationError(name, "changes an argument", fix="return the result as a new tensor")
    tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
    for row in rows or ():
        if row not in tensors:
            raise DeclarationError(name, f"has no tensor argument {row!r}", fix=f"choose from {', '.join(tensors)}")
