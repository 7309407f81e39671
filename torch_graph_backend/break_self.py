"""Numbers for the instances whose methods are break ops: an operator takes a number, the step finds the object.

Contract. A number belongs to one object for as long as the process lives; the object is held weakly. Dynamo asks for
the number while it compiles and guards on the object's identity, so a copy of a module, or another instance, is
compiled with a number of its own and never runs on the first one's state.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch_graph_backend.errors import BreakOpError

_numbers = itertools.count()
_instances: dict[int, weakref.ref[Any]] = {}
#: ``id(object)`` -> its number; the entry goes with the object, whose id may then be another's.
_known: dict[int, int] = {}


def handle_of(this: Any, op: str) -> int:
    """The number of an object; called while compiling, with the real object."""
    known = _known.get(id(this))
    if known is not None and _instances[known]() is this:
        return known
    if not getattr(this, "__dict__", None):
        # An object that the compiled code makes itself reaches us without what its constructor gave it.
        problem = (
            f"the {type(this).__name__} that it is called on has no attributes, or is made inside the compiled code"
        )
        raise BreakOpError(op, problem, fix="make the object before, or pass what is needed as arguments of a function")
    number = next(_numbers)

    def forget(_: Any, key: int = id(this), number: int = number) -> None:
        _instances.pop(number, None)
        if _known.get(key) == number:
            del _known[key]

    try:
        _instances[number] = weakref.ref(this, forget)
    except TypeError as error:
        fix = "add '__weakref__' to its __slots__"
        raise BreakOpError(op, f"{type(this).__name__} cannot be referred to weakly", fix=fix) from error
    _known[id(this)] = number
    return number


def instance(number: int, op: str) -> Any:
    """The object behind a number. Raises ``BreakOpError`` if it is gone."""
    found = _instances.get(number)
    this = None if found is None else found()
    if this is None:
        raise BreakOpError(op, "the object that it was compiled for is gone", fix="keep it alive, or compile again")
    return this
