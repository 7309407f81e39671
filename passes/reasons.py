"""Why something is not captured: the one vocabulary that every pass and the runtime share.

Contract: a predicate returns ``Reason | None``, never a bool (``None`` means "no objection"). A ``code`` is
stable: users filter on it, ``stats`` counts by it, tests assert on it. ``CODES`` lists every code with what it
means; a ``Reason`` with another code cannot be made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Every reason code, with the sentence that ``docs/reasons.md`` shows. A node code says why one operation runs
#: eagerly; a call code says why one whole call did.
CODES: dict[str, str] = {
    # node codes: capture-safety
    "break-op": "the operation was registered as a break",
    "unknown-op": "the operation is not in the table of operations known to be safe",
    "data-dependent": "the result's shape or a Python value depends on tensor data (a sync)",
    "random": "the operation draws random numbers",
    "higher-order-op": "a higher-order operation runs whole, eagerly",
    "other-device": "the operation touches a tensor on another device than the segment's",
    "device-copy": "the operation copies between devices",
    "not-strided": "a sparse, quantised or subclass tensor is involved",
    "not-normalised": "the operation could not be traced to ATen and runs as Dynamo recorded it",
    "python-value": "the operation returns a Python value that is not a size",
    # node codes: symbols and padding
    "exact-symbol": "a shape or scalar depends on a size that is not bucketed",
    "padding": "a padded row could reach a real row (or the size itself is used as data)",
    "derived-size": "a padded size appears in a form that cannot be laid out",
    # node codes: aliasing, mutation and cost
    "mutation": "it changes, or is a view of, memory that an eager operation changes too",
    "output-alias": "it makes a view that the caller gets together with its base or with another view of it",
    "returned-copy": "its result goes straight to the caller, so a captured copy would be copied again",
    "small-segment": "the segment would be too small to pay for its launch",
    "capture-failed": "a segment could not be recorded and runs uncaptured",
    "moving-input": "it changes an input whose address keeps changing",
    # graph codes
    "normalise-failed": "the graph could not be normalised and runs as it came",
    "nothing-to-capture": "no operation of this graph can be captured",
    "metadata-mutation": "an operation changes a tensor's metadata in place",
    "symbol-unreadable": "a size symbol cannot be read from the arguments",
    # call codes
    "grad": "gradients are needed",
    "beyond-largest-bucket": "a size exceeds the largest bucket",
    "size-not-listed": "with padding='exact', only listed sizes are recorded",
    "zero-size": "a padded size is zero",
    "bucket-invalid": "the graph is not valid at the bucket's size",
    "out-of-memory": "there was no memory to record or to run a key",
    "recording-cap": "the limit of recordings is reached",
    "input-dtype": "an input's dtype differs from the compiled one",
    "input-device": "an input's device differs from the compiled one",
    "input-layout": "an input is not the plain strided tensor that was compiled",
    "input-strides": "an input's strides differ from the compiled ones",
    "input-shape": "an input's shape differs from the compiled one",
    "aliased-inputs": "inputs share memory and one of them is changed",
    "already-capturing": "the caller is already capturing a graph",
    "dispatch-mode": "a dispatch mode is active",
    "busy": "it was called from inside too many breaks of calls of compiled graphs",
    "no-recorder": "there is no recorder for this device",
    "disabled": "capturing is turned off",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason: a stable ``code`` (a key of ``CODES``), a sentence, the user's line, and what would change it.

    ``where`` is ``"file.py:12 in forward: y = x.sum()"`` or empty; ``fix`` is an imperative sentence or empty.
    """

    code: str
    text: str = ""
    where: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"unknown reason code {self.code!r}")
        if not self.text:
            object.__setattr__(self, "text", CODES[self.code])

    def at(self, where: str) -> Reason:
        """This reason with the user's line, unless it has one already."""
        return self if self.where or not where else replace(self, where=where)

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.text}"]
        if self.where:
            parts.append(f"at {self.where}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)
