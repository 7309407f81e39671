"""CompiledGraph: what Dynamo calls. Admit, pick a key, fill, replay, hand out; or answer eagerly with a reason.

Contract (C2, C6). Every call is counted once. A call that cannot run the plan runs the Dynamo graph as it came, which
is what eager mode would have answered. No forward is run twice: everything that can refuse a call is asked before the
first step runs; from then on an exception is the user's own and the graph stays usable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

from torch.fx import GraphModule

from torch_graph_backend.admission import Bounds, Inputs, Keys, grad_reason, mode_reason
from torch_graph_backend.ahead import current_wish, serve
from torch_graph_backend.audit import Audit, Auditor
from torch_graph_backend.audit_rows import Layouts
from torch_graph_backend.buffer_registry import BufferRegistry
from torch_graph_backend.codegen import Program, generate
from torch_graph_backend.config import Config
from torch_graph_backend.device_state import DeviceState
from torch_graph_backend.entry import Entry
from torch_graph_backend.errors import StrictModeError
from torch_graph_backend.inductor import Compiles, prepare
from torch_graph_backend.instances import MAX_MOVES, Instance, Instances
from torch_graph_backend.ledger import Ledger, log
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.passes.source_lines import caller_line
from torch_graph_backend.passes.torch_api import takes_ambient_device
from torch_graph_backend.plan import Plan
from torch_graph_backend.recorders.base import SHORTAGE
from torch_graph_backend.shape_key import ShapeKey
from torch_graph_backend.shortage import no_buffers, ran_out, with_all_memory
from torch_graph_backend.tensor_marks import Marks
from torch_graph_backend.validate import bucket_reason

#: A recording that was replayed this often paid: recording 18 kernels took 0.32 ms on an H200, a replay saves 0.1.
WORTH_RECORDING = 16
#: A graph serves so many sets of weights; further ones run eagerly.
MAX_INSTANCES = 64
#: Bytes of restless parameters that a call copies at most: 64 MiB take about 30 us of an H200's bandwidth.
MAX_COPIED = 64 * 2**20


class CompiledGraph:
    """One Dynamo graph. ``plan`` is ``None`` if it could not be normalised; ``reason`` says why nothing is captured."""

    def __init__(self, gm: GraphModule, name: str, config: Config, reason: Reason | None) -> None:
        self.gm, self.name, self.config, self.reason = gm, name, config, reason
        self.ledger = Ledger(name)
        self.plan: Plan | None = None
        self.seconds: dict[str, float] = {}
        #: By key, number of the instance, depth (how many calls the call was made inside of), and the settings of the
        #: process that a recording freezes.
        self.entries: dict[tuple[ShapeKey, int, int, Hashable], Entry] = {}
        self.lock: Any = threading.RLock()
        self.turns_grad_on = self.pure = False
        self.ambient = takes_ambient_device(gm)
        #: Weights as they are met: of other modules that share the graph, and new ones.
        self.given = Marks()
        self.closed = False
        self.registry = BufferRegistry()
        self.compiles = Compiles()

    @property
    def ir(self) -> NormalGraph | None:
        """The normalised graph, if there is one."""
        return getattr(self, "normal", None)

    def adopt(
        self, plan: Plan, normal: NormalGraph, layouts: Layouts, written: Sequence[int], state: DeviceState, pure: bool
    ) -> None:
        """Take a plan into use, also one that was made anew. ``pure``: a call that failed half-way may be run again."""
        self.pure = pure
        self.plan, self.normal, self.state, self.lock = plan, normal, state, state.lock
        self.recorder = state.recorder
        self.turns_grad_on = normal.turns_grad_on
        self.reason = self.reason or plan.reason
        self.registry.adopt(plan)
        self.entries = {}
        self.program: Program = generate(plan, normal)
        self.inputs = Inputs(plan, normal, written)
        self.auditor = Auditor(self.config.audit, layouts, bool(plan.declared))
        symbols = [s.symbol for s in (*plan.bucketed, *plan.exact_in_key)]
        ladders = [self.config.ladder_for(s.source) for s in plan.bucketed]
        self.keys = Keys(plan, ladders, Bounds.of(normal.fake_mode, symbols, plan.conditions))
        self.instances = Instances([i for i in plan.pinned if normal.placeholders[i].meta.get("static")])
        self.unpinned = [i for i, p in enumerate(normal.placeholders) if p.meta.get("unpinned")]

    # -- calls ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        if self.registry.sourced:
            args = tuple(self.registry.supplied(args))
        reason = self.reason or grad_reason(args, self.turns_grad_on) or mode_reason(self.ambient)
        if reason is not None:
            return self.eagerly(reason, args)
        with self.lock:
            found = self.admit(list(args))
            if isinstance(found, Reason):
                return self.eagerly(found, args)
            entry, sizes = found
            reason = self.ready(entry, args)
            if reason is None:
                entry.state.running = True
                try:
                    out = self.run(entry, sizes, list(args))
                except SHORTAGE as error:
                    reason = ran_out(entry, error, self.pure)
                    if not self.pure:
                        raise
                finally:
                    entry.state.running = False
            if reason is None and self.pure and entry.mislaid is not None:
                reason = self.reason  # which came to light in this call
            if reason is None:
                if self.unpinned:  # no instance knows these
                    self.given.add(args[i] for i in self.unpinned)
                if (wish := current_wish()) is not None:
                    serve(self, wish, list(args))
                return out
            return self.eagerly(reason, args)

    def eagerly(self, reason: Reason, args: Sequence[Any]) -> Any:
        """The Dynamo graph as it came; counted, logged once a code, refused if the user asked for strictness."""
        self.refuse_if_strict(reason)
        self.ledger.count_eager(reason)
        if (wish := current_wish()) is not None:
            wish.done.append((self.name, "", reason))
        given = self.registry.whole(args) if self.registry.computed else args
        return with_all_memory(lambda: self.gm.forward(*given), self.state if self.pure else None, self.name)

    def refuse_if_strict(self, reason: Reason) -> None:
        """Raise, if the user asked for strictness, before anything of this call has run."""
        if self.config.strict:
            raise StrictModeError(reason.at(caller_line()), f"a call of {self.name}")

    def replay_reason(self, args: Sequence[Any]) -> Reason | None:
        """Why this call would not replay a recording; ``None`` if it would. Runs, counts and changes nothing."""
        args = self.registry.stand_ins(args)
        reason = self.reason or grad_reason(args, self.turns_grad_on) or mode_reason(self.ambient)
        if reason is not None:
            return reason
        state = self.level()
        if state is None:
            return Reason("not-recorded", "nothing is recorded for calls from inside of a break")
        reason = state.recorder.can_run()
        if reason is not None:
            return reason
        sizes = self.program.sizes_of(args)
        picked = self.keys.pick(sizes)
        if isinstance(picked, Reason):
            return picked
        reason = self.inputs.slot_reason(args, sizes) or self.inputs.alias_reason(args, sizes, self.registry.sourced)
        if reason is not None:
            return reason
        instance = self.instances.peek(list(args))
        entry = None if instance is None else self.entries.get(self.place(picked[0], instance, state))
        if entry is None:
            known = bool(self.instances.known) and instance is None
            return Reason("not-recorded", f"key {picked[0]} had no call yet" + (" with these weights" if known else ""))
        if not entry.recorded:
            resting = Reason("out-of-memory", f"key {entry.key} ran out of memory lately") if entry.rest else None
            found = entry.refused or resting or entry.uncaptured
            return found or Reason("not-recorded", f"key {entry.key} is not recorded yet")
        moved = [i for i in entry.moved(list(args)) if i not in self.registry.sourced]  # those lie elsewhere anyway
        if moved:
            return Reason("not-recorded", f"{self.inputs.plan.placeholders[moved[0]]} moved since the recording")
        if self.auditor.due(entry, sizes):
            return Reason("unknown", "the call would be audited, and what fails an audit is answered eagerly")
        return self.registry.untold(entry.plan, sizes in entry.frames)

    def level(self) -> DeviceState | None:
        """The state that a call of this thread would use, as ``DeviceState.idle`` but without making one."""
        if not self.lock.acquire(blocking=False):
            return self.state  # another thread is running, and this one would wait for it
        try:
            state: DeviceState | None = self.state
            while state is not None and state.running:
                state = state.inner
            return state
        finally:
            self.lock.release()

    def admit(self, args: list[Any]) -> tuple[Entry, tuple[int, ...]] | Reason:
        """The entry that serves this call, or why none does. Runs nothing of the user's."""
        state = self.state.idle()
        if state is None:
            return Reason("busy")
        reason = state.recorder.can_run()
        if reason is not None:
            return reason
        sizes = self.program.sizes_of(args)
        picked = self.keys.pick(sizes)
        if isinstance(picked, Reason):
            return picked
        reason = self.inputs.slot_reason(args, sizes) or self.inputs.alias_reason(args, sizes)
        if reason is not None:
            return reason
        key, bucket = picked
        instance = self.instances.find(args)
        if instance is None:
            found = self.new_instance(args)
            if not isinstance(found, Instance):
                return found if isinstance(found, Reason) else self.admit(args)
            instance = found
        at = self.place(key, instance, state)
        entry = self.entries.get(at)
        if entry is None:
            made = self.make_entry(key, bucket, sizes, instance, state)
            if isinstance(made, Reason):
                return made
            entry = self.entries[at] = made
        elif entry.recorded and (moved := entry.moved(args)):
            self.address_moved(entry, moved)
            return self.reason or self.admit(args)
        reason = entry.refused or entry.resting()
        if not entry.recorded:
            reason = reason or self.inputs.pinned_reason(args, sizes)
        if reason is not None:
            return reason
        state.used(entry)
        return entry, sizes

    @staticmethod
    def place(key: ShapeKey, instance: Instance, state: DeviceState) -> tuple[ShapeKey, int, int, Hashable]:
        """Where the entry of a call is found."""
        return key, instance.number, state.depth, state.recorder.settings()

    def new_instance(self, args: list[Any]) -> Instance | Reason | None:
        """Weights that were not seen before, here or at these addresses; ``None``: the plan was made anew."""
        gone = self.instances.drop_gone()
        for at in [at for at in self.entries if at[1] in gone]:
            del self.entries[at]
        if len(self.instances.known) >= MAX_INSTANCES:
            text = f"{self.name} serves {MAX_INSTANCES} sets of weights already"
            return Reason("recording-cap", text, fix="compile modules that share code one by one")
        made = self.instances.add(args)
        self.given.add(args[i] for i in self.instances.weights)
        restless = self.instances.restless()
        if restless:
            nbytes = sum(args[i].nbytes for i in restless)
            if nbytes > MAX_COPIED:
                text = f"{nbytes / 2**20:.0f} MiB of parameters lie elsewhere at almost every call"
                self.reason = Reason("moving-input", text, fix="keep the parameters where they are")
                return self.reason
            log.info("%s: %d parameters keep moving; they are copied in from now on", self.name, len(restless))
            self.replan(moving=[self.normal.placeholders[i].name for i in restless])
            return None
        return made

    def make_entry(
        self, key: ShapeKey, bucket: Sequence[int], sizes: tuple[int, ...], instance: Instance, state: DeviceState
    ) -> Entry | Reason:
        """Allocate the static memory of a key, unless the cap is reached or the bucket is not valid."""
        assert self.plan is not None
        for other in self.entries.values():
            if other.dead():
                other.forget()
        held = sum(at[1:3] == (instance.number, state.depth) for at in self.entries)
        if held >= self.config.max_recordings:
            text = f"{self.name} keeps {held} keys already"
            return Reason("recording-cap", text, fix="raise max_recordings, or use fewer buckets")
        limit = self.config.max_bytes or state.recorder.device_bytes // 2
        if self.state.nbytes >= limit:
            text = f"recordings hold {self.state.nbytes / 2**20:.0f} MiB on {self.plan.device} already"
            return Reason("recording-cap", text, fix="raise max_bytes, or use fewer or smaller buckets")
        at = {s.symbol: v for s, v in zip(self.plan.symbols, sizes, strict=True)}
        at.update({s.symbol: b for s, b in zip(self.plan.bucketed, bucket, strict=True)})
        try:
            entry = Entry(key, self.plan, self.normal, self.program, state, at, instance, self.registry)
        except SHORTAGE as error:
            return no_buffers(state, key, error)
        entry.verify = self.config.verify_memory
        entry.refused = bucket_reason(entry) or self.registry.shape_reason(self.plan, entry.slots, at)
        return entry

    def run(self, entry: Entry, sizes: tuple[int, ...], args: list[Any]) -> Any:
        """Run the plan: uncaptured on a first call, replayed once it is recorded."""
        replay = entry.recorded
        audited = self.auditor.frame(entry, sizes, args)
        frame = audited or (entry.frame(sizes, args) if replay else entry.first_frame(sizes, args))
        with entry.recorder.replay_session():
            out = self.program.run(args, sizes, frame)
        self.ledger.fill_launches += frame.launches
        if not replay and entry.mislaid is not None:
            self.reason = entry.mislaid
            if not self.pure:
                self.ledger.count_eager(entry.mislaid)
            return out
        if replay:
            entry.replays += 1
            if entry.replays == WORTH_RECORDING:
                entry.instance.paid = True
        else:
            entry.ran_on.add(threading.get_ident())
        if audited is not None and self.audit_failed(audited.audit):
            return out
        real, computed = self.rows(entry, sizes)
        if replay or entry.uncaptured is None:
            self.ledger.count_run(entry.key, replay, real, computed)
        else:
            self.ledger.count_eager(entry.uncaptured)
        return out

    def audit_failed(self, audit: Audit) -> bool:
        """Count an audited call. One that failed has eager's answer, and counts as eager; the plan is made anew."""
        self.ledger.count_audit(audit.seconds, bool(audit.tried), list(audit.failed.values()), audit.untried)
        if audit.failed:
            self.ledger.count_eager(next(iter(audit.failed.values())))
            self.replan(refused=audit.failed)
        return bool(audit.failed)

    def rows(self, entry: Entry, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Real and computed rows: products of the bucketed sizes (1 and 1 if nothing is bucketed)."""
        real = computed = 1
        for i in self.keys.bucketed:
            real *= sizes[i]
            computed *= entry.size_args[i]
        return real, computed

    def ready(self, entry: Entry, args: Sequence[Any]) -> Reason | None:
        """Compile a key's segments before its first call and record it on its second; a reason if there was no memory
        for it (nothing has run then)."""
        if entry.mislaid is not None:
            self.reason = entry.mislaid
            return self.reason
        reason = None
        self.prepare(entry, args)
        if not entry.recorded and entry.uncaptured is None and threading.get_ident() in entry.ran_on:
            reason = self.record(entry, args)
        if self.config.strict:
            failed = entry.uncaptured or next((d.reason for d in entry.demoted.values()), None)
            if failed is not None:
                self.refuse_if_strict(failed)
        return reason

    def prepare(self, entry: Entry, args: Sequence[Any]) -> None:
        """Have Inductor compile what the options want compiled of this key, once."""
        prepare(self, entry, args)

    def record(self, entry: Entry, args: Sequence[Any]) -> Reason | None:
        """Record a key. A segment that fails is demoted; if all fail, the key runs uncaptured from then on (C7)."""
        start = time.perf_counter()
        try:
            entry.record(args, self.config.progress)
        except SHORTAGE as error:
            return ran_out(entry, error, self.pure)
        except Exception as error:
            entry.uncaptured = Reason("capture-failed", f"recording key {entry.key} failed: {error}")
            log.warning("%s: %s", self.name, entry.uncaptured, exc_info=error)
            return None
        entry.replays = 0
        for demoted in entry.demoted.values():
            log.warning("%s: a segment runs uncaptured: %s", self.name, demoted.reason)
        demotions = [d.reason for d in entry.demoted.values()]
        self.ledger.count_plain(entry.key, list(entry.plain.values()), len(entry.compiled))
        self.ledger.count_recording(entry.key, time.perf_counter() - start, entry.nbytes, demotions)
        return None

    def address_moved(self, entry: Entry, moved: Sequence[int]) -> None:
        """A tensor that segments change lies elsewhere: the recording goes; one that moves too often is unpinned."""
        names = [self.inputs.plan.placeholders[i] for i in moved[:3]]
        log.info("%s: %s moved; recording again", self.name, ", ".join(names))
        entry.moves = 0 if entry.replays >= WORTH_RECORDING else entry.moves + 1
        entry.forget()
        if entry.moves >= MAX_MOVES:
            self.replan(moving=[self.normal.placeholders[i].name for i in moved])

    def replan(self, moving: Sequence[str] = (), refused: Mapping[str, Reason] | None = None) -> None:
        """Make the plan again with more of it eager; replaced by the backend when it compiles."""

    def release(self, addresses: Set[int]) -> None:
        """Drop the recordings of every set of weights that has one at these addresses."""
        with self.lock:
            dropped = [n for n, i in self.instances.known.items() if addresses & {*i.pointers} - {0}]
            for at in [at for at in self.entries if at[1] in dropped]:
                del self.entries[at]

    def close(self) -> None:
        """Drop every recording and buffer; later calls run eagerly."""
        self.closed = True
        with self.lock:
            self.entries.clear()
            self.compiles = Compiles()
            self.reason = self.reason or Reason("disabled", "the graph was closed")
