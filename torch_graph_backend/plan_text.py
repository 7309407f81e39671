"""How a Plan prints: compact enough to paste into a bug report, complete enough to answer "why is this eager"."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from torch_graph_backend.plan import CapturedSegment, EagerRegion, Plan
from torch_graph_backend.policies import PaddingPolicy

#: Equal steps in a row (the layers of a model) print once; more than this many reasons of a step are summed up.
_REASONS_SHOWN = 12
#: Names listed on one line before the rest is counted.
_LISTED = 4


def plan_text(plan: Plan, reasons: bool = True) -> str:
    """The plan as text: symbols, memory, steps (repeated ones folded) and, unless left out, reasons by user line."""
    lines = [
        f"Plan {plan.name} on {plan.device}: {len(plan.segments)} captured segments ({plan.captured_kernels} kernels), "
        f"{len(plan.regions)} eager regions ({plan.eager_kernels} kernels), {plan.host_ops} size computations"
    ]
    if plan.reason is not None:
        lines.append(f"  not captured: {plan.reason}")
    lines += _sizes(plan)
    if plan.slots:
        # Those with a declared padding first: that is what a reader looks for.
        ordered = sorted(plan.slots, key=lambda s: s.policy is PaddingPolicy.REPEAT_ROW)
        shown = [
            str(s) for s in ordered[: max(_LISTED, sum(s.policy is not PaddingPolicy.REPEAT_ROW for s in ordered))]
        ]
        more = len(plan.slots) - len(shown)
        lines.append("  slots: " + ", ".join(shown) + (f", and {more} more" if more else ""))
    lines += [f"  not applied: {reason}" for _, reason in plan.refused]
    lines += [
        f"  declared: {op.op} {op.declared}" + (f"  at {op.where}" if op.where else "") for op in plan.declared_ops()
    ]
    lines.append(
        f"  bridges: {len(plan.bridges)}; cuts: {len(plan.cuts)} ({sum(c.private for c in plan.cuts)} copied); "
        f"pinned arguments: {len(plan.pinned)}"
        + (f", changed by segments: {len(plan.mutated)}" if plan.mutated else "")
    )
    if plan.hoisted:
        lines.append(f"  hoisted: {plan.hoisted} operations on Python values alone are constants of the plan")
    sizes = [c.name for c in plan.counts if c.symbol is not None]
    if sizes:
        found = ", ".join(f"{n} x {how}" for how, n in plan.repairs().most_common())
        lines.append(f"  repaired: {found}; real sizes on the device: {', '.join(sizes)}")
    numbers = dict.fromkeys(plan.placeholders[c.arg] for c in plan.counts if c.symbol is None)
    if numbers:
        lines.append(f"  numbers of the caller's, read on the device: {', '.join(numbers)}")
    if plan.declared:
        lines.append(f"  taken on the user's word: {'; '.join(plan.declared[:_LISTED])}")
    lines += _steps(plan)
    if reasons:
        lines += _reasons(plan)
    return "\n".join(lines)


def _sizes(plan: Plan) -> list[str]:
    """Sizes that matter to the key one by one; exact ones of one cause (a cache length per layer) together."""
    lines = [f"  size {s.name} = {s.source}: {s.kind} ({s.why})" for s in plan.symbols if s.kind != "exact"]
    exact: dict[str, list[str]] = {}
    for s in plan.symbols:
        if s.kind == "exact":
            exact.setdefault(s.why, []).append(f"{s.name} = {s.source}")
    for why, names in exact.items():
        more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        lines.append(f"  size {', '.join(names[:_LISTED])}{more}: exact ({why})")
    return lines


def step_text(step: CapturedSegment | EagerRegion) -> str:
    """``captured  23 kernels: 7 aten.linear, 5 aten.mul.Tensor, ...``"""
    kind = "captured" if isinstance(step, CapturedSegment) else "eager   "
    counts = Counter(op.op for op in step.ops if op.kernel)
    ops = ", ".join(f"{n} {op}" if n > 1 else op for op, n in counts.most_common())
    views = sum(not op.kernel for op in step.ops)
    return f"{kind} {step.kernels:3d} kernels: {ops or 'none'}" + (f" (+{views} views)" if views else "")


def _steps(plan: Plan) -> list[str]:
    """Fold runs of (captured, eager) pairs that print alike: layers."""
    texts = [step_text(s) for s in plan.steps]
    pairs = [tuple(texts[i : i + 2]) for i in range(0, len(texts), 2)]
    lines, at = [], 0
    for pair, group in groupby(pairs):
        n = len(list(group))
        for k, text in enumerate(pair):
            first = at + k
            last = first + 2 * (n - 1)
            label = f"{first}" if n == 1 else f"{first},{first + 2}..{last}"
            lines.append(f"  step {label:<10} {text}" + (f"  [{n} times]" if n > 1 else ""))
        at += n * len(pair)
    return lines


def flow_text(plan: Plan) -> str:
    """What the text of a plan leaves out: who reads what from where, and what becomes of outputs."""
    lines = []
    for step in plan.steps:
        reads = ", ".join(f"{name} <- {ref}" for name, ref in step.inputs)
        lines.append(f"{type(step).__name__} {step.index}: reads {reads or 'nothing'}; makes {', '.join(step.outputs)}")
    lines += [f"bridge {i}: {b.value} {b.spec} from {b.source} after {b.after}" for i, b in enumerate(plan.bridges)]
    for i, c in enumerate(plan.cuts):
        lines.append(f"cut {i}: {c.value} {c.spec} after {c.after}{' private' if c.private else ''} {c.spec.padding}")
    lines += [f"output: {o.ref}{' checked' if o.check else ''}" for o in plan.outputs]
    return "\n".join(lines)


def _reasons(plan: Plan) -> list[str]:
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for region in plan.regions:
        for op in region.ops:
            if op.reason is not None:
                grouped.setdefault((op.reason.code, op.op, op.where), []).append(op.reason.text)
    if not grouped:
        return []
    lines = ["  eager because:"]
    ordered = sorted(grouped.items(), key=lambda kv: -len(kv[1]))
    for (code, _, where), texts in ordered[:_REASONS_SHOWN]:
        lines.append(f"    {len(texts):3d} x {code}: {texts[0]}" + (f"  at {where}" if where else ""))
    rest = ordered[_REASONS_SHOWN:]
    if rest:
        lines.append(f"    and {sum(len(t) for _, t in rest)} more, on {len(rest)} lines")
    return lines
