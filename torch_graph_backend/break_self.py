"""Numbers for the instances whose methods are break ops: an operator takes a number, the step finds the object.

Contract. A number belongs to one object for as long as the process lives; the object is held weakly. While it compiles,
Dynamo evaluates ``id(self)``, guards on the object's identity, and asks for the number of the object at that address:
a copy of a module, or another instance, is compiled with a number of its own and never runs on the first one's state.
(The address, because not every supported Dynamo hands an object itself to a function that it calls while tracing.) An
object that the compiled code makes does not exist yet while tracing: that is an error.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any

from torch_graph_backend.errors import BreakOpError

_numbers = itertools.count()
_instances: dict[int, weakref.ref[Any]] = {}
#: ``id(object)`` -> its number; the entry goes with the object, whose id may then be another's.
_known: dict[int, int] = {}


def number_at(address: int, op: str) -> int:
    """The number of the object that lives at ``address``, which the caller knows to be alive."""
    this = ctypes.cast(address, ctypes.py_object).value
    if type(this).__module__.startswith("torch._dynamo"):  # the tracer's own stand-in for an object to come
        problem = "the object that it is called on is made inside the compiled code"
        raise BreakOpError(op, problem, fix="make the object before, or pass what is needed to a function")
    return handle_of(this, op)


def handle_of(this: Any, op: str) -> int:
    """The number of an object."""
    known = _known.get(id(this))
    if known is not None and _instances[known]() is this:
        return known
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
