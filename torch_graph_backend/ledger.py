"""The ledger: every call is counted as replayed, a first call, or eager with a reason code; each reason is logged once.

Contract. ``calls == replays + first_calls + sum(eager.values())`` always. Nothing here touches tensors.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.shape_key import ShapeKey

log = logging.getLogger("torch_graph_backend")
_serials = itertools.count()


@dataclass
class KeyCount:
    """What happened on one key: first calls (one, plus one per re-record), replays, seconds spent recording, bytes that
    had to be allocated for it, why segments of its last recording run uncaptured, and its share of the ledger's
    ``rows_real`` and ``rows_computed``. ``compiled`` segments run Inductor's code, for which ``compiles`` were made in
    ``compile_seconds`` (the others were there); ``plain``: why others of this key run plain kernels."""

    first_calls: int = 0
    replays: int = 0
    record_seconds: float = 0.0
    nbytes: int = 0
    demoted: tuple[Reason, ...] = ()
    rows_real: int = 0
    rows_computed: int = 0
    compiled: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    plain: tuple[Reason, ...] = ()


@dataclass
class Ledger:
    """Counts of one compiled graph. ``rows_real`` and ``rows_computed`` are products of bucketed sizes, summed over
    calls that ran the plan; their ratio gives the padding waste. ``fill_launches``: operations issued by these calls to
    fill slots. ``eager_texts`` keeps the first reason of a code. ``audits`` counts audited calls of which a segment
    could be tried, ``unaudited`` the segments of such calls that could not be, by the reason; ``audit_seconds``: what
    audits took on top. ``serial`` tells the graph from every other one of the process."""

    name: str
    replays: int = 0
    first_calls: int = 0
    recordings: int = 0
    rows_real: int = 0
    rows_computed: int = 0
    fill_launches: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    eager_texts: dict[str, Reason] = field(default_factory=dict)
    keys: dict[ShapeKey, KeyCount] = field(default_factory=dict)
    audits: int = 0
    audit_seconds: float = 0.0
    audit_failures: list[Reason] = field(default_factory=list)
    unaudited: Counter[Reason] = field(default_factory=Counter)
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def calls(self) -> int:
        return self.replays + self.first_calls + sum(self.eager.values())

    def count_eager(self, reason: Reason) -> None:
        """One whole call ran eagerly."""
        self.eager[reason.code] += 1
        if reason.code not in self.eager_texts:
            self.eager_texts[reason.code] = reason
            log.warning("%s: a call runs eagerly: %s", self.name, reason)

    def count_run(self, key: ShapeKey, replayed: bool, real: int, computed: int) -> None:
        """One call ran the plan, uncaptured (a first call) or replayed."""
        entry = self.keys.setdefault(key, KeyCount())
        self.rows_real += real
        self.rows_computed += computed
        entry.rows_real += real
        entry.rows_computed += computed
        if replayed:
            self.replays += 1
            entry.replays += 1
        else:
            self.first_calls += 1
            entry.first_calls += 1

    def count_audit(
        self, seconds: float, tried: bool, failures: Sequence[Reason] = (), untried: Sequence[Reason] = ()
    ) -> None:
        """A call was to be audited. ``tried``: some segment of it was; ``untried``: why others could not be. What
        failed runs eagerly from now on."""
        self.audits += tried
        for reason in untried:
            if reason not in self.unaudited:
                log.warning("%s: %s", self.name, reason)
            self.unaudited[reason] += 1
        self.audit_seconds += seconds
        for reason in failures:
            log.error("%s: an audit failed: %s", self.name, reason)
        self.audit_failures += failures

    def count_recording(self, key: ShapeKey, seconds: float, nbytes: int = 0, demoted: Sequence[Reason] = ()) -> None:
        """A key was recorded, all of it but the demoted segments."""
        self.recordings += 1
        entry = self.keys.setdefault(key, KeyCount())
        entry.record_seconds += seconds
        entry.nbytes = nbytes
        entry.demoted = tuple(demoted)

    def count_compiles(
        self, key: ShapeKey, compiled: int, made: int, seconds: float, plain: Sequence[Reason] = ()
    ) -> None:
        """Inductor's part of a key was decided: ``made`` compiles in ``seconds``."""
        entry = self.keys.setdefault(key, KeyCount())
        entry.compiles += made
        entry.compile_seconds += seconds
        self.count_plain(key, plain, compiled)

    def count_plain(self, key: ShapeKey, plain: Sequence[Reason], compiled: int) -> None:
        """How many segments of a key run Inductor's code, and why others that might do not."""
        if plain or compiled:
            entry = self.keys.setdefault(key, KeyCount())
            entry.compiled, entry.plain = compiled, tuple(plain)
