"""Memory that runs out (C7): what is given back, which key rests, and what is tried again.

Contract. A call that ran out of memory is answered eagerly, and an eager call beside recordings gets their memory:
eager code alone would have had it. A call that has changed something that outlives it is not begun twice: there the
exception is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_graph_backend.device_state import DeviceState
from torch_graph_backend.entry import Entry
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.recorders.base import SHORTAGE

#: Calls of a key that are answered eagerly after it ran out of memory; doubled each time.
FIRST_REST = 64
FEWER = "use fewer or smaller buckets"


def no_buffers(state: DeviceState, key: object, error: BaseException) -> Reason:
    """The static memory of a new key could not be allocated: half of the recordings make room for the next one."""
    state.relieve()
    return Reason("out-of-memory", f"the buffers of key {key} could not be allocated: {error}", fix=FEWER)


def ran_out(entry: Entry, error: BaseException, pure: bool) -> Reason:
    """Drop what was used least recently; this key is answered eagerly for a while."""
    entry.forget()
    # Half of them is enough for other recordings. But the pool's memory goes back with its last recording alone,
    # and an eager call that changes something could not be tried once more.
    dropped = entry.state.relieve(keep=entry, everything=not (pure or entry.recorder.frees_parts))
    entry.rest_for(FIRST_REST)
    text = f"key {entry.key} ran out of memory; {dropped} other recordings were dropped: {error}"
    return Reason("out-of-memory", text, fix=f"{FEWER}, or lower max_bytes")


def with_all_memory(forward: Callable[[], Any], state: DeviceState | None, name: str) -> Any:
    """An eager call; once more with the memory of the recordings of ``state``, where that is given."""
    try:
        return forward()
    except SHORTAGE:
        if state is None or not state.give_way():
            raise
    log.warning("%s: an eager call ran out of memory; all recordings were dropped for it", name)
    return forward()
