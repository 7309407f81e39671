"""Why something is not captured: the one vocabulary that every pass and the runtime share.

Contract: a predicate returns ``Reason | None``, never a bool (``None`` means "no objection"). A ``code`` is
stable: users filter on it, ``stats`` counts by it, tests assert on it. ``CODES`` lists every code with what it
means; a ``Reason`` with another code cannot be made. ``FIXES`` says what changes it where the place that made the
reason knows nothing better. ``SOFT`` codes are policy, which the user decides; all others are hard.
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
    "collective": "the operation exchanges data among ranks",
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
    "audit-failed": "an audit found that padded rows change its real rows, or memory of the caller's",
    # segment codes: the segment is recorded, but with plain kernels
    "inductor-failed": "Inductor could not compile a segment of a small key",
    "inductor-unsuitable": "Inductor's assumptions do not hold for a segment of a small key",
    "inductor-time": "the seconds that compiling a graph may take are used up",
    "inductor-unavailable": "Inductor has no compiler here",
    # segment codes: the segment is captured, and was not tried out
    "not-audited": "a segment of an audited call could not be tried out",
    # graph codes
    "normalise-failed": "the graph could not be normalised and runs as it came",
    "nothing-to-capture": "no operation of this graph can be captured",
    "metadata-mutation": "an operation changes a tensor's metadata in place",
    "symbol-unreadable": "a size symbol cannot be read from the arguments",
    "slot-refused": "a declared slot contradicts the padding proof, or the graph, and is not applied",
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
    "other-strides": "an operation lays its result out otherwise than its fake implementation says",
    "input-shape": "an input's shape differs from the compiled one",
    "aliased-inputs": "inputs share memory and one of them is changed",
    "already-capturing": "the caller is already capturing a graph",
    "dispatch-mode": "a dispatch mode is active",
    "busy": "it was called from inside too many breaks of calls of compiled graphs",
    "no-recorder": "there is no recorder for this device",
    "disabled": "capturing is turned off",
    "slot-mismatch": "a declared slot does not have the shape that shape_fn gives",
    # answers of would_replay alone: no call is counted with them
    "not-recorded": "nothing is recorded yet that would serve such a call",
    "unknown": "what the call would do cannot be told without making it",
}

#: What changes it, by code: one imperative sentence that fits any place. A reason's own ``fix`` goes before.
FIXES: dict[str, str] = {
    "break-op": "nothing to do if the break is meant; else tgb.unregister_break_op, and compile again",
    "unknown-op": "write it with ATen operations if the cut costs too much",
    "data-dependent": "avoid .item(), nonzero and boolean masks; use torch.where or a fixed number of rows",
    "random": "call model.eval() if it is dropout; draw numbers outside of the compiled function",
    "collective": "nothing to do: all ranks call it in the order of the program, between segments",
    "higher-order-op": "nothing to do: it is one eager step; or write the branch with torch.where",
    "other-device": "put the tensor on the model's device before the call",
    "device-copy": "move the tensor once, outside of the compiled function",
    "not-strided": "pass plain strided tensors",
    "not-normalised": "report it with the plan; the text has the error",
    "python-value": "keep the value in a tensor",
    "exact-symbol": "nothing to do for a growing cache or a data-dependent size; a cache of fixed length is captured",
    "padding": "keep the padded dimension fixed (torch._dynamo.mark_static), at the price of a graph a size",
    "derived-size": "keep the padded size a whole factor of a dimension: view(batch * length, -1), not n + 1",
    "mutation": "change memory on one side only: move the in-place operation, or write out of place",
    "output-alias": "return one of the tensors that share memory, or a .clone()",
    "returned-copy": "nothing to do: this is the cheaper way",
    "small-segment": "set min_segment_kernels=1 to capture it",
    "moving-input": "pass the same tensor every time, such as one cache that is reset",
    "audit-failed": "take back what was declared about the operation; report it if nothing was",
    "inductor-failed": "nothing to do: plain kernels are recorded; the log has the error",
    "inductor-unsuitable": "nothing to do: plain kernels are recorded",
    "inductor-time": "raise inductor_seconds, or record ahead with tgb.capture",
    "inductor-unavailable": "install a C++ compiler (CPU) or Triton (CUDA), or set inductor='off'",
    "not-audited": "nothing to do: what was declared is relied on; or take it back",
    "normalise-failed": "change what the text names; report an unexpected error with its traceback",
    "nothing-to-capture": "see the reasons of its operations in tgb.explain",
    "metadata-mutation": "write x = x.squeeze(0) for x.squeeze_(0)",
    "slot-refused": "declare a policy that the text allows, or leave the slot undeclared",
    "symbol-unreadable": "pass a tensor that has the size as a dimension, or the size as an int",
    "grad": "call the model under torch.no_grad() or torch.inference_mode()",
    "beyond-largest-bucket": "list a larger size in options['buckets'], or raise max_size",
    "size-not-listed": "list the size in options['buckets'], or allow padding",
    "zero-size": "nothing to do: there is nothing to compute",
    "bucket-invalid": "list sizes that fulfil the condition which the text names",
    "out-of-memory": "use fewer or smaller buckets",
    "recording-cap": "raise max_recordings, or use fewer buckets",
    "input-dtype": "pass the dtype of the first call",
    "input-device": "pass tensors on the device of the first call",
    "input-layout": "pass a plain strided tensor",
    "input-strides": "call .contiguous() if the first call's tensor was contiguous",
    "other-strides": "call .contiguous() before the operation that the text names",
    "input-shape": "report it: Dynamo should have compiled anew",
    "aliased-inputs": "pass tensors that do not share memory",
    "already-capturing": "call the function outside of your own capture",
    "dispatch-mode": "leave the dispatch mode (a FLOP counter, say) for this call",
    "busy": "do not call the compiled function from inside one of its own breaks",
    "no-recorder": "use a CPU or a CUDA device",
    "slot-mismatch": "correct shape_fn, or leave it out",
    "disabled": "see the options enabled, record and the phase's backend",
    "capture-failed": "make the operation that the log names a break op",
    "not-recorded": "call the function twice with such arguments",
    "unknown": "pass what torch.compile was given, and leave no graph break in it",
}

#: Capturing would be right; policy, cost or a limit decided against it. All other codes are hard: capturing would be
#: wrong (or impossible), and no option can ask for it.
SOFT: frozenset[str] = frozenset(
    {
        "break-op",
        "returned-copy",
        "small-segment",
        "moving-input",
        "beyond-largest-bucket",
        "size-not-listed",
        "out-of-memory",
        "recording-cap",
        "disabled",
        "not-recorded",
        "inductor-failed",
        "inductor-unsuitable",
        "inductor-time",
        "inductor-unavailable",
    }
)


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

    @property
    def advice(self) -> str:
        """What would change it: the reason's own ``fix``, else what is true of its code anywhere."""
        return self.fix or FIXES[self.code]

    @property
    def soft(self) -> bool:
        """Whether policy, cost or a limit decided, which the user can change, and not correctness."""
        return self.code in SOFT

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.text}"]
        if self.where:
            parts.append(f"at {self.where}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)
