"""Which operation of a segment that failed its audit went wrong first.

Contract. The segment's operations run one by one, from the same state, as the call has it and once more with the fill
(or at the real size) that showed the fault. The first whose real rows differ is named; one that gives other bits when
nothing was changed is passed over. If no operation can be named, the whole segment is at fault, unless some operation
of it gives other bits by itself: then that is what was seen. Where a row is read that nobody should read, the
operations that write padded rows there are at fault.
"""

from __future__ import annotations

from torch_graph_backend.audit_compare import close
from torch_graph_backend.audit_trial import REAL_SIZE, TRASH_ROW, Trial
from torch_graph_backend.ledger import log
from torch_graph_backend.passes.padding_rules_declared import TRASH
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.plan import OpLine
from torch_graph_backend.recorders.base import SHORTAGE

#: How often a result must come again before it counts as deterministic: atomics often have two outcomes alone.
REPEATS = 3


def blame(trial: Trial, how: str) -> dict[str, Reason]:
    """The operations to run eagerly from now on, with the reason of each, by the name of their node."""
    found, steady = None, True
    try:
        found, steady = first_wrong(trial, how)
    except SHORTAGE:
        log.warning("no memory to look for the operation that failed its audit")
    reads_trash = how == TRASH_ROW or (found is not None and _inputs(trial, found) & trial.holds_trash)
    if reads_trash and (writers := _trash_writers(trial)):
        reader = next((op for op in trial.step.ops if op.value == found), None)
        return {name: _trash_reason(op, reader) for name, op in writers.items()}
    if found is None and not steady:
        return {}
    ops = [op for op in trial.step.ops if op.value == found] or list(trial.step.ops)
    return {_original(trial, op): _reason(op, how, found is not None) for op in ops}


def first_wrong(trial: Trial, how: str) -> tuple[str | None, bool]:
    """The name of the first operation that went wrong, and whether all of them are deterministic."""
    base, seen = trial.probe(""), trial.probe(how)
    moving: set[tuple[str, int]] = set()
    for fill, first in [("", base), (how, seen)] * REPEATS:
        again = trial.probe(fill)
        moving |= {(n, k) for n, rows in first.items() for k, t in enumerate(rows) if not trial.alike(t, again[n][k])}
    for name, rows in base.items():
        for k, left in enumerate(rows):
            right = seen[name][k]
            wrong = not (close(left, right, trial.scale) if how == REAL_SIZE else trial.alike(left, right))
            if wrong and ((name, k) not in moving or how == REAL_SIZE):
                return name, not moving
    return None, not moving


def _inputs(trial: Trial, name: str) -> set[str]:
    return {a.name for a in trial.bounds.nodes[name].all_input_nodes}


def _trash_writers(trial: Trial) -> dict[str, OpLine]:
    """The operations of the plan that write padded rows to a row that nobody should read."""
    ops = [op for step in trial.entry.plan.segments for op in step.ops]
    return {op.value: op for op in ops if TRASH in trial.bounds.nodes[op.value].meta}


def _trash_reason(op: OpLine, reader: OpLine | None) -> Reason:
    by = f"{reader.op} ({reader.where})" if reader is not None else "an operation"
    text = f"{op.op} writes padded rows to a row that nobody should read, and {by} reads it"
    return Reason("audit-failed", text, where=op.where)


def _original(trial: Trial, op: OpLine) -> str:
    """The user's operation behind one that a repair added."""
    return str(trial.bounds.nodes[op.value].meta.get("repair_of") or op.value)


def _reason(op: OpLine, how: str, named: bool) -> Reason:
    if how == REAL_SIZE:
        text = "gives other real rows at the bucket's size than at the real size"
    else:
        text = f"gives other real rows when padded rows hold something else ({how})"
    if not named:
        text = f"is in a segment that {text}"
    return Reason("audit-failed", f"{op.op} {text}", where=op.where)
