"""One captured segment of one audited call: run it again and again from the same state, and look at what it leaves.

Contract (C2). ``Trial`` keeps a copy of everything that the segment reads through padded buffers or changes, and puts
it back before every run and at the end. What it ``observe``s is what later code can see: the real rows of results and
of boundary values, and the whole of every argument that the segment changes, but for a row declared as trash.
``settle`` answers in place of a segment that must not be trusted: the same operations at the real size, on the real
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torch_graph_backend.audit_compare import adds_in_any_order, close, largest_of, same
from torch_graph_backend.audit_rows import Bound, Bounds, guarded, spoil, write
from torch_graph_backend.codegen import probed
from torch_graph_backend.passes.capturable import tensors_of
from torch_graph_backend.passes.layout import product
from torch_graph_backend.passes.padding_rules_declared import TRASH
from torch_graph_backend.plan import CapturedSegment, TensorSpec

if TYPE_CHECKING:
    from torch_graph_backend.entry import Entry

#: The last try: the segment's operations at the real size, without any padding.
REAL_SIZE = "real size"
#: The first try: other contents in rows that are declared to be read by nobody.
TRASH_ROW = "trash row"
Observed = list[torch.Tensor]


class Trial:
    """``run`` executes the segment once on the static memory and returns its outputs there; ``values`` are the boundary
    values that it reads. ``possible`` is false where the place of some padding is not known."""

    def __init__(
        self,
        entry: Entry,
        sizes: Sequence[int],
        args: Sequence[Any],
        bounds: Bounds,
        step: CapturedSegment,
        values: dict[str, Any],
        run: Callable[[], Sequence[Any]],
    ) -> None:
        self.entry, self.args, self.bounds, self.step, self.values, self.run = entry, args, bounds, step, values, run
        self.real_args = tuple(sizes)
        self.sizes = {s.symbol: n for s, n in zip(entry.plan.symbols, sizes, strict=True)}
        self.inputs = entry.inputs(step, args, values)
        self.padded = [self._bounds_of(name, ref) for name, ref in step.inputs]
        self.made = [self.bounds.of(name) for name in step.outputs]
        self.possible = all(None not in found for found in (*self.padded, *self.made))
        self.state = [t for value, found in zip(self.inputs, self.padded, strict=True) if found for t in flat(value)]
        self.written = [args[i] for i in step.writes]
        self.trash = self._trash_rows()
        self.state += self.trash
        named = zip(step.inputs, self.inputs, strict=True)
        self.holds_trash = {name for (name, _), value in named if self._hidden(value)}
        self.scale = max((float(largest_of(t)) for t in (*self.state, *self.written)), default=0.0)
        self.any_order = adds_in_any_order(step.ops, entry.plan.device)
        with torch.inference_mode(False), torch.no_grad():
            self.before = [t.clone() for t in (*self.state, *self.written)]

    def _trash_rows(self) -> list[torch.Tensor]:
        """Rows that nobody reads of the arguments that the segment works on, where the plan relies on that."""
        plan, normal = self.entry.plan, self.entry.normal
        used = {t.untyped_storage().data_ptr() for value in self.inputs for t in flat(value)}
        found = []
        relied = any(TRASH in self.bounds.nodes[op.value].meta for step in plan.segments for op in step.ops)
        for i in plan.pinned if relied else ():
            row = normal.placeholders[i].meta.get(TRASH)
            if row is not None and self.args[i].size(0) > row and self.args[i].untyped_storage().data_ptr() in used:
                found.append(self.args[i].narrow(0, row, 1))
        return found

    def _hidden(self, value: Any) -> bool:
        """Whether a value lies in memory with a row that nobody reads."""
        hidden = {t.untyped_storage().data_ptr() for t in self.trash}
        return any(t.untyped_storage().data_ptr() in hidden for t in flat(value))

    def _bounds_of(self, name: str, ref: Any) -> list[Bound | None]:
        """Where the padding of an input is; empty for what is read in place and for constants."""
        plan, e = self.entry.plan, self.entry
        if ref.kind == "slot":
            known = self.bounds.of(name)[0]  # what the proof takes as given of its tail, if anything
            planned = plan.slots[int(ref.key)]
            spec = dense(planned.spec) if planned.arg in e.registry.computed else planned.spec
            return [Bound(spec, e.slot_windows[int(ref.key)], known is None or known.free)]
        if ref.kind == "bridge":
            return [Bound(plan.bridges[int(ref.key)].spec, e.bridge_windows[int(ref.key)])]
        return self.bounds.of(str(ref.key)) if ref.kind == "static" else []

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, Bound]]:
        """Padded inputs: name, memory, bound."""
        for (name, _), value, found in zip(self.step.inputs, self.inputs, self.padded, strict=True):
            for tensor, bound in zip(flat(value) if found else (), found, strict=True):
                if bound is not None:
                    yield name, tensor, bound

    def alike(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether two runs left the same: bit for bit, if the segment gives the same bits twice."""
        return same(left, right) or (self.any_order and close(left, right, self.scale))

    @contextmanager
    def modes(self) -> Iterator[None]:
        """To write into memory that may have been made under inference mode, without gradients."""
        inference = any(t.is_inference() for t in (*self.state, *self.written))
        with torch.inference_mode(inference), torch.no_grad():
            yield

    def restore(self) -> None:
        with self.modes():
            for tensor, value in zip((*self.state, *self.written), self.before, strict=True):
                write(tensor, value)

    def spoil(self, how: str) -> None:
        """Write a fill into every padded row that the segment reads and of which nothing is claimed; or into the rows
        that nobody reads."""
        if how == TRASH_ROW:
            with self.modes():
                for row in self.trash:
                    row.fill_(float("nan") if row.is_floating_point() else 1)
            return
        careful = guarded(self.step, self.bounds.nodes)
        with self.modes():
            for name, tensor, bound in self.pairs():
                if bound.free:
                    spoil(tensor, bound.window, self.sizes, how, name in careful)

    def attempt(self, how: str = "") -> Observed:
        """What one run leaves, with this fill (none: as the call has it)."""
        self.restore()
        if how == REAL_SIZE:
            return self.observe_real(self.run_real())
        if how:
            self.spoil(how)
        return self.observe(self.run())

    def plain(self) -> Observed:
        """What the plan's own operations leave, at the bucket's size."""
        self.restore()
        with self.entry.recorder.capture_session(self.entry.writes_inference(self.args), pool=False):
            made = self.entry.program.steps[self.step.index](*self.entry.size_args, *self.inputs)
        return self.observe(made)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def observe(self, made: Sequence[Any]) -> Observed:
        self.empty_trash()
        found = []
        for value, bounds in zip(made, self.made, strict=True):
            found += [b.rows(t, self.sizes).clone() for t, b in zip(flat(value), bounds, strict=True) if b and b.exact]
        return found + self._memory()

    def observe_real(self, made: Sequence[Any]) -> Observed:
        self.empty_trash()
        found = []
        for value, bounds in zip(made, self.made, strict=True):
            pairs = zip(flat(value), bounds, strict=True)
            found += [b.window.split_like(t, self.sizes).clone() for t, b in pairs if b and b.exact]
        return found + self._memory()

    def _memory(self) -> Observed:
        rows = [b.rows(t, self.sizes).clone() for _, t, b in self.pairs() if b.exact]
        return rows + [t.clone() for t in self.written]

    def empty_trash(self) -> None:
        """What was written to a row that nobody reads does not count: it is put back."""
        at = len(self.state) - len(self.trash)
        with self.modes():
            for row, saved in zip(self.trash, self.before[at : len(self.state)], strict=True):
                row.copy_(saved)

    def probe(self, how: str) -> dict[str, Observed]:
        """The real rows of every value that the segment computes, operation by operation."""
        self.restore()
        found: dict[str, Observed] = {}

        def look(name: str, value: Any) -> None:
            seen = []
            if self._hidden(value):
                self.holds_trash.add(name)
                value = None
            for t, b in zip(flat(value), self.bounds.of(name) if value is not None else (), strict=True):
                if b is not None and b.exact:
                    rows = b.window.split_like(t, self.sizes) if how == REAL_SIZE else b.rows(t, self.sizes)
                    seen.append(rows.clone())
            found[name] = seen

        step = probed(self.entry.plan, self.entry.normal, self.step, look)
        if how == REAL_SIZE:
            self.run_real(step)
        else:
            if how:
                self.spoil(how)
            with self.entry.recorder.capture_session(self.entry.writes_inference(self.args), pool=False):
                step(*self.entry.size_args, *self.inputs)
        return found

    # -- at the real size --------------------------------------------------------------------------------------------

    def run_real(self, step: Callable[..., Sequence[Any]] | None = None) -> Sequence[Any]:
        """The segment's operations on the real rows alone; what they change in place is changed in memory."""
        inputs: list[Any] = []
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, bounds in zip(self.inputs, self.padded, strict=True):
            cuts = [self._cut(t, b, back) for t, b in zip(flat(value) if bounds else (), bounds, strict=True)]
            inputs.append(value if not bounds else cuts if isinstance(value, (tuple, list)) else cuts[0])
        with self.entry.recorder.capture_session(self.entry.writes_inference(self.args), pool=False):
            made = (step or self.entry.program.steps[self.step.index])(*self.real_args, *inputs)
        with self.modes():
            for target, value in back:
                write(target, value)
        return made

    def _cut(
        self, tensor: torch.Tensor, bound: Bound | None, back: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        assert bound is not None
        view = bound.cut(tensor, self.sizes)
        if not view.copy:
            return view.source
        with torch.no_grad():
            out, target = view.fresh()
            target.copy_(view.source)
        back.append((view.source, target))
        return out

    def settle(self) -> Sequence[Any]:
        """Eager's answer, in the real rows of the segment's outputs, and its changes to memory."""
        self.restore()
        made = self.run()
        self.restore()
        results = self.run_real()
        with self.modes():
            for value, result, bounds in zip(made, results, self.made, strict=True):
                for t, r, b in zip(flat(value), flat(result), bounds, strict=True):
                    assert b is not None
                    target, source = b.rows(t, self.sizes), b.window.split_like(r, self.sizes)
                    if (target.data_ptr(), target.stride()) != (source.data_ptr(), source.stride()):
                        write(target, source)
        return made


def dense(spec: TensorSpec) -> TensorSpec:
    """As a computed value lies in memory: one entry each, also where the argument repeats one (stride 0)."""
    if 0 not in spec.stride:
        return spec
    stride = [product(spec.shape[d + 1 :]) for d in range(len(spec.shape))]
    return replace(spec, stride=tuple(stride))


def flat(value: Any) -> list[torch.Tensor]:
    return tensors_of(value)
