"""Every exception this package raises on purpose: one class a cause, one stable code a class.

Contract: ``str(error)`` is one line, ``[code] message; at file.py:12; fix: what to change``, where the last two parts
appear when they are known (``StatsMismatch`` alone has the stats, ``MissingFake`` lines of code on further lines). A
``code`` never changes its meaning. Errors hold strings only, never tensors or option values, so they can be pickled (a
worker process may send one home) and keep no memory alive.

Raised while ``torch.compile`` compiles, an error reaches the user inside
``torch._dynamo.exc.BackendCompilerFailed``, whose ``inner_exception`` is the error itself.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

from torch_graph_backend.passes.reasons import Reason

#: difflib's similarity below which a name is no suggestion; 0.5 still finds a two-letter name with one letter missing.
_SIMILAR = 0.5

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that most resembles ``name``, whose case does not count; None if none does."""
    found = difflib.get_close_matches(name.strip().lower(), list(valid), n=1, cutoff=_SIMILAR)
    return found[0] if found else None


def _rebuild(cls: type[TorchGraphBackendError], args: tuple[Any, ...], state: dict[str, Any]) -> TorchGraphBackendError:
    """Unpickle: restore the state instead of calling ``__init__``, whose parameters differ from class to class."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class TorchGraphBackendError(Exception):
    """Base of all errors. ``message`` says what is wrong, ``where`` is the user's ``file:line`` or empty, and ``fix``
    is an imperative sentence or empty. ``template`` is the format string that a subclass fills to make its message.
    """

    code: ClassVar[str] = "BCG001"
    template: ClassVar[str] = "{message}"

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def at(self, where: str) -> TorchGraphBackendError:
        """This error with the user's line, unless it has one already."""
        self.where = self.where or where
        return self

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.message}"]
        if self.where:
            parts.append(f"at {self.where}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


class UnknownOption(TorchGraphBackendError, ValueError):  # noqa: N818 (the name is the cause)
    """An option that does not exist. ``nearest`` is the valid name it resembles most (with its ``scope``), or None.

    ``scope`` is the option whose dict the name stood in (``"decode"``), or empty; ``valid`` are the names without it.
    """

    code = "BCG101"
    template = "unknown option {option!r} (valid: {valid})"

    def __init__(
        self, option: object, valid: Iterable[str], *, scope: str = "", where: str = "", fix: str = ""
    ) -> None:
        prefix = f"{scope}." if scope else ""
        leaf = option if isinstance(option, str) else _short.repr(option)
        self.option = prefix + leaf
        self.valid = tuple(prefix + name for name in valid)
        found = nearest(leaf, [name[len(prefix) :] for name in self.valid])
        self.nearest = None if found is None else prefix + found
        if not fix:
            fix = f"did you mean {self.nearest!r}?" if self.nearest else "remove it"
        message = self.template.format(option=self.option, valid=", ".join(self.valid))
        super().__init__(message, where=where, fix=fix)


class BadOption(TorchGraphBackendError, ValueError):  # noqa: N818 (the name is the cause)
    """An option with a value that is not accepted. ``value`` is the value's (shortened) repr."""

    code = "BCG102"
    template = "option {option!r} is {value}, but it must be {accepted}"

    def __init__(self, option: str, value: object, accepted: str, *, where: str = "", fix: str = "") -> None:
        self.option = option
        self.value = _short.repr(value)
        self.accepted = accepted
        message = self.template.format(option=option, value=self.value, accepted=accepted)
        super().__init__(message, where=where, fix=fix)


class BadBuckets(TorchGraphBackendError, ValueError):  # noqa: N818 (the name is the cause)
    """A list of bucket sizes that cannot be used. ``value`` is the repr of the offending value, ``name`` the list's."""

    code = "BCG103"
    template = "{name}: {value} {problem}"

    def __init__(self, name: str, value: object, problem: str, *, where: str = "", fix: str = "") -> None:
        self.name = name
        self.value = _short.repr(value)
        self.problem = problem
        message = self.template.format(name=name, value=self.value, problem=problem)
        super().__init__(message, where=where, fix=fix or "list positive integers, such as [1, 2, 4, 8]")


class StrictModeError(TorchGraphBackendError):
    """A call or a graph was not captured although ``strict=True``. ``what`` names it, ``reason`` says why."""

    code = "BCG201"
    template = "{what} was not captured: {code}: {text}"

    def __init__(self, reason: Reason, what: str = "this call") -> None:
        self.reason = reason
        self.what = what
        message = self.template.format(what=what, code=reason.code, text=reason.text)
        super().__init__(message, where=reason.where, fix=f"{reason.advice}; or set strict=False to run it eagerly")


class BreakOpError(TorchGraphBackendError):
    """A break op was declared, registered or called in a way that cannot work."""

    code = "BCG301"
    template = "break op {op!r}: {problem}"

    def __init__(self, op: str, problem: str, *, where: str = "", fix: str = "") -> None:
        self.op = op
        self.problem = problem
        super().__init__(self.template.format(op=op, problem=problem), where=where, fix=fix)

    def __repr__(self) -> str:  # Dynamo shows the repr of what an op raises while it is traced
        return f"{type(self).__name__}: {self}"


class MissingFake(BreakOpError):  # noqa: N818 (the name is the cause)
    """A break op was compiled without a fake implementation, which says what its results look like.

    ``lines`` are the lines of code to add. They stand in the text one below the other: this text has several lines.
    """

    code = "BCG302"

    def __init__(self, op: str, lines: Iterable[str], *, where: str = "") -> None:
        self.lines = tuple(lines)
        problem = "has no fake implementation, so its results are not known while compiling"
        super().__init__(op, problem, where=where, fix="add")

    def __str__(self) -> str:
        return "\n    ".join([f"{super().__str__()}:", *self.lines])


class KeptArgument(BreakOpError):  # noqa: N818 (the name is the cause)
    """A break op kept an argument, or a view of one, after it returned, though it was declared with
    ``keeps_args=False``. ``argument`` names it."""

    code = "BCG303"

    def __init__(self, op: str, argument: str, *, where: str = "", fix: str = "") -> None:
        self.argument = argument
        problem = f"keeps its argument {argument!r}, or a view of it, although keeps_args=False; a replay overwrites it"
        super().__init__(op, problem, where=where, fix=fix or "keep a clone, or leave keeps_args=False out")


class DeclarationError(TorchGraphBackendError):
    """Something was declared (row-local, capture-safe, an index, a trash row) that cannot be. ``what`` names it."""

    code = "BCG311"
    template = "declaration of {what}: it {problem}"

    def __init__(self, what: str, problem: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.problem = problem
        super().__init__(self.template.format(what=what, problem=problem), where=where, fix=fix)


class SlotError(TorchGraphBackendError):
    """A function of a declared slot answered with something that the slot cannot hold. ``slot`` is its name."""

    code = "BCG312"
    template = "slot {slot!r}: {problem}"

    def __init__(self, slot: str, problem: str, *, where: str = "", fix: str = "") -> None:
        self.slot = slot
        self.problem = problem
        super().__init__(self.template.format(slot=slot, problem=problem), where=where, fix=fix)


class ReplayError(TorchGraphBackendError, RuntimeError):
    """A recorder was asked to replay a recording that was cleaned up, or that is not its own."""

    code = "BCG401"
    template = "the recording of {what} was cleaned up, or is another recorder's, and cannot be replayed"

    def __init__(self, what: object, *, where: str = "", fix: str = "") -> None:
        self.what = str(what)
        super().__init__(self.template.format(what=self.what), where=where, fix=fix or "record it again")


class CaptureError(TorchGraphBackendError, RuntimeError):
    """An operation that is not permitted while recording was reached. ``op`` names it, ``problem`` says what it did."""

    code = "BCG402"
    template = "{op} is not permitted while recording: {problem}"

    def __init__(self, op: str, problem: str, *, where: str = "", fix: str = "") -> None:
        self.op = op
        self.problem = problem
        message = self.template.format(op=op, problem=problem)
        super().__init__(message, where=where, fix=fix or f"make {op} a break op, so that it runs between the segments")


class NothingToRecord(TorchGraphBackendError):  # noqa: N818 (the name is the cause)
    """``capture`` could record no key. ``reasons`` says why, one text a graph or key."""

    code = "BCG404"
    template = "nothing was recorded ahead: {reasons}"

    def __init__(self, reasons: Iterable[str], *, where: str = "", fix: str = "") -> None:
        self.reasons = tuple(reasons)
        none = "the call reached no compiled graph; was the model compiled with backend='bcg'?"
        super().__init__(self.template.format(reasons="; ".join(self.reasons) or none), where=where, fix=fix)


class MemoryFault(TorchGraphBackendError):  # noqa: N818 (the name is the cause)
    """Found by the option ``verify_memory``: a segment's results depend on memory that its call did not write."""

    code = "BCG405"
    template = "segment {segment} of key {key} reads memory that this call neither wrote nor pinned"

    def __init__(self, segment: int, key: str, *, where: str = "", fix: str = "") -> None:
        self.segment, self.key = segment, key
        super().__init__(self.template.format(segment=segment, key=key), where=where, fix=fix or "report it as a bug")


class BridgeMismatch(TorchGraphBackendError):  # noqa: N818 (the name is the cause)
    """An eager region returned something else than the graph was built for (structure, shape, dtype or device).

    ``expected`` and ``got`` are descriptions, such as ``"float32[8, 64] on cuda:0"``; nothing was cast or broadcast.
    """

    code = "BCG403"
    template = "{op} returned {got}, but its fake implementation promised {expected}"

    def __init__(self, op: str, expected: object, got: object, *, where: str = "", fix: str = "") -> None:
        self.op = op
        self.expected = str(expected)
        self.got = str(got)
        message = self.template.format(op=op, expected=self.expected, got=self.got)
        super().__init__(message, where=where, fix=fix or f"make {op} and its fake implementation agree")


class StatsMismatch(TorchGraphBackendError, AssertionError):  # noqa: N818 (the name is the cause)
    """``Stats.expect`` found other counts. ``problems`` has one text a count; ``found`` is the stats as they print."""

    code = "BCG501"
    template = "the counts are not as expected: {problems}"

    def __init__(self, problems: Iterable[str], found: str, *, where: str = "", fix: str = "") -> None:
        self.problems = tuple(problems)
        self.found = found
        fix = fix or "see the counts below, and what tgb.explain(model) says"
        super().__init__(self.template.format(problems="; ".join(self.problems)), where=where, fix=fix)

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.found}"
