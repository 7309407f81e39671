"""``stats``: what happened to a model's calls, as numbers that add up, subtract, and can be expected by a test.

Contract. ``calls == replays + first_calls + sum(eager.values())``, in a difference too. A ``Stats`` is a snapshot and
never changes. The registry is weak: counts of a graph that Dynamo dropped are gone, also from a later snapshot.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch_graph_backend import registry
from torch_graph_backend.errors import StatsMismatch
from torch_graph_backend.ledger import KeyCount
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.runner import CompiledGraph
from torch_graph_backend.shape_key import ShapeKey

_SECONDS = ("normalise", "plan", "record", "audit", "inductor")
#: What ``expect`` takes, alone or after ``min_`` and ``max_``.
_COUNTS = (
    "graphs",
    "calls",
    "replays",
    "first_calls",
    "recordings",
    "eager",
    "padding_waste",
    "fill_launches",
    "nbytes",
    "audits",
    "unaudited",
)
#: What a difference subtracts of a key; its memory and its demoted segments are as they are now.
_KEY_FIELDS = (
    "first_calls",
    "replays",
    "record_seconds",
    "rows_real",
    "rows_computed",
    "compiles",
    "compile_seconds",
)


@dataclass(frozen=True)
class GraphStats:
    """Counts of one compiled graph. ``serial`` tells it from every other graph of the process."""

    serial: int
    name: str
    replays: int
    first_calls: int
    recordings: int
    rows_real: int
    rows_computed: int
    fill_launches: int
    nbytes: int
    eager: Counter[str]
    reasons: dict[str, Reason]
    seconds: dict[str, float]
    keys: dict[ShapeKey, KeyCount]
    audits: int = 0
    audit_failures: tuple[Reason, ...] = ()
    unaudited: Counter[Reason] = field(default_factory=Counter)

    @staticmethod
    def of(graph: CompiledGraph) -> GraphStats:
        """A snapshot of one graph."""
        ledger = graph.ledger
        keys = {k: replace(c) for k, c in ledger.keys.items()}
        seconds = {**dict.fromkeys(_SECONDS, 0.0), **graph.seconds}
        seconds["audit"] += ledger.audit_seconds
        seconds["record"] += sum(c.record_seconds for c in keys.values())
        seconds["inductor"] += sum(c.compile_seconds for c in keys.values())
        return GraphStats(
            ledger.serial,
            graph.name,
            ledger.replays,
            ledger.first_calls,
            ledger.recordings,
            ledger.rows_real,
            ledger.rows_computed,
            ledger.fill_launches,
            sum(e.nbytes for e in graph.entries.values()),
            Counter(ledger.eager),
            dict(ledger.eager_texts),
            seconds,
            keys,
            ledger.audits,
            tuple(ledger.audit_failures),
            Counter(ledger.unaudited),
        )

    def since(self, before: GraphStats) -> GraphStats:
        """What was added to ``before``, an earlier snapshot of the same graph."""
        eager = self.eager - before.eager
        keys = {k: _key_since(c, before.keys.get(k, KeyCount())) for k, c in self.keys.items()}
        return GraphStats(
            self.serial,
            self.name,
            self.replays - before.replays,
            self.first_calls - before.first_calls,
            self.recordings - before.recordings,
            self.rows_real - before.rows_real,
            self.rows_computed - before.rows_computed,
            self.fill_launches - before.fill_launches,
            self.nbytes - before.nbytes,
            eager,
            {code: reason for code, reason in self.reasons.items() if code in eager},
            {name: value - before.seconds[name] for name, value in self.seconds.items()},
            {k: c for k, c in keys.items() if c.first_calls or c.replays or c.record_seconds},
            self.audits - before.audits,
            self.audit_failures[len(before.audit_failures) :],
            self.unaudited - before.unaudited,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "name": self.name,
            "replays": self.replays,
            "first_calls": self.first_calls,
            "recordings": self.recordings,
            "eager": dict(self.eager),
            "padding_waste": _waste(self.rows_real, self.rows_computed),
            "fill_launches": self.fill_launches,
            "nbytes": self.nbytes,
            "seconds": dict(self.seconds),
            "audits": self.audits,
            "audit_failures": [str(reason) for reason in self.audit_failures],
            "unaudited": {str(reason): n for reason, n in self.unaudited.items()},
            "keys": {
                str(k): {
                    "first_calls": c.first_calls,
                    "replays": c.replays,
                    "padding_waste": _waste(c.rows_real, c.rows_computed),
                    "record_seconds": c.record_seconds,
                    "nbytes": c.nbytes,
                    "demoted": [str(reason) for reason in c.demoted],
                    "inductor": {
                        "segments": c.compiled,
                        "compiles": c.compiles,
                        "seconds": c.compile_seconds,
                        "plain": [str(reason) for reason in c.plain],
                    },
                }
                for k, c in sorted(self.keys.items(), key=lambda i: str(i[0]))
            },
        }


@dataclass(frozen=True)
class Stats:
    """Counts over all graphs of a model. ``calls`` counts calls of compiled graphs (a model with graph breaks makes
    several a step); ``calls == replays + first_calls + sum(eager.values())``. ``padding_waste`` is the share of
    computed rows that were padding, 0.0 to 1.0. ``fill_launches``: operations that filled slots. ``seconds``:
    normalise, plan, record, audit, inductor. ``audits``: audited calls, of which a segment at least was tried;
    ``audit_failures``: what failed, and runs eagerly since; ``unaudited``: segments that were to be tried and could not
    be, as often as that was; ``unaudited_reasons``: why. ``nbytes``: memory that had to be allocated for the keys there
    are now, buffers and recordings; graphs of a device share it.

    ``limits``: a sentence for each code object that has as many graphs as Dynamo makes of one (further ones run without
    a backend, and uncounted).

    ``after - before`` is what happened in between: ``graphs`` counts graphs compiled since, ``nbytes`` is the change.
    """

    by_graph: tuple[GraphStats, ...]
    graphs: int
    limits: tuple[str, ...] = ()

    @property
    def replays(self) -> int:
        return sum(g.replays for g in self.by_graph)

    @property
    def first_calls(self) -> int:
        return sum(g.first_calls for g in self.by_graph)

    @property
    def recordings(self) -> int:
        return sum(g.recordings for g in self.by_graph)

    @property
    def audits(self) -> int:
        return sum(g.audits for g in self.by_graph)

    @property
    def audit_failures(self) -> tuple[Reason, ...]:
        return tuple(reason for g in self.by_graph for reason in g.audit_failures)

    @property
    def unaudited(self) -> int:
        return sum(self.unaudited_reasons.values())

    @property
    def unaudited_reasons(self) -> Counter[Reason]:
        return sum((g.unaudited for g in self.by_graph), Counter())

    @property
    def fill_launches(self) -> int:
        return sum(g.fill_launches for g in self.by_graph)

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.by_graph)

    @property
    def eager(self) -> Counter[str]:
        """Calls that ran eagerly, by reason code."""
        return sum((g.eager for g in self.by_graph), Counter())

    @property
    def reasons(self) -> dict[str, Reason]:
        """The first reason of each code in ``eager``."""
        found: dict[str, Reason] = {}
        for g in self.by_graph:
            found = {**g.reasons, **found}
        return found

    @property
    def padding_waste(self) -> float:
        return _waste(sum(g.rows_real for g in self.by_graph), sum(g.rows_computed for g in self.by_graph))

    @property
    def seconds(self) -> dict[str, float]:
        return {name: sum(g.seconds[name] for g in self.by_graph) for name in _SECONDS}

    @property
    def keys(self) -> dict[str, dict[ShapeKey, KeyCount]]:
        """Per graph (its place and name) and key: first calls, replays, seconds of recording, rows."""
        return {f"{i} {g.name}": g.keys for i, g in enumerate(self.by_graph)}

    @property
    def calls(self) -> int:
        return self.replays + self.first_calls + sum(self.eager.values())

    def __sub__(self, before: Stats) -> Stats:
        known = {g.serial: g for g in before.by_graph}
        parts = tuple(g.since(known[g.serial]) if g.serial in known else g for g in self.by_graph)
        limits = tuple(text for text in self.limits if text not in before.limits)
        return Stats(parts, sum(g.serial not in known for g in self.by_graph), limits)

    def expect(self, **wanted: float) -> Stats:
        """Raise ``StatsMismatch``, an ``AssertionError``, unless all counts are as wanted; else return these stats.

        ``replays=3`` is exact; ``min_replays=3`` and ``max_padding_waste=0.2`` are bounds, themselves included. Names:
        ``graphs``, ``calls``, ``replays``, ``first_calls``, ``recordings``, ``eager`` (all codes together),
        ``padding_waste``, ``fill_launches``, ``nbytes``, ``audits``, ``unaudited``. An unknown name is a ``TypeError``.
        """
        wrong = []
        for name, value in wanted.items():
            bound, count = _split(name)
            got = sum(self.eager.values()) if count == "eager" else getattr(self, count)
            good = got >= value if bound == "min_" else got <= value if bound == "max_" else got == value
            if not good:
                word = {"min_": "at least ", "max_": "at most ", "": ""}[bound]
                wrong.append(f"{count}: expected {word}{_number(value)}, got {_number(got)}")
        if wrong:
            raise StatsMismatch(wrong, str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: the totals, the reasons, and each graph with its keys."""
        return {
            **{name: getattr(self, name) for name in _COUNTS if name != "eager"},
            "eager": {
                code: {"count": n, "text": r.text, "where": r.where, "fix": r.advice, "soft": r.soft}
                for code, n in self.eager.most_common()
                if (r := self.reasons[code])
            },
            "audit_failures": [str(reason) for reason in self.audit_failures],
            "unaudited_reasons": {str(reason): n for reason, n in self.unaudited_reasons.items()},
            "limits": list(self.limits),
            "seconds": self.seconds,
            "by_graph": [g.to_dict() for g in self.by_graph],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        lines = [
            f"{self.graphs} graphs, {self.calls} calls: {self.replays} replayed, {self.first_calls} first calls, "
            f"{sum(self.eager.values())} eager; {self.recordings} recordings, padding waste {self.padding_waste:.1%}"
        ]
        reasons = self.reasons
        for code, n in self.eager.most_common():
            lines.append(f"  eager {n:5d} x {reasons[code]}")
        lines += [f"  audit failed: {reason}" for reason in self.audit_failures]
        lines += [f"  audit {n:5d} x {reason}" for reason, n in self.unaudited_reasons.most_common()]
        lines += [f"  recompile limit: {text}" for text in self.limits]
        for name, keys in self.keys.items():
            if keys:
                counts = ", ".join(
                    f"{k}: {c.first_calls}+{c.replays}" for k, c in sorted(keys.items(), key=lambda i: str(i[0]))
                )
                lines.append(f"  {name}: keys (first calls + replays) {counts}")
                lines += [f"    key {k}: {reason}" for k, c in keys.items() for reason in c.demoted]
                lines += [f"    {text}" for text in inductor_lines(keys)]
        used = [f"{k} {v:.2f}" for k, v in self.seconds.items() if v or k not in ("audit", "inductor")]
        lines.append("  seconds: " + ", ".join(used))
        if self.nbytes:
            lines.append(f"  memory of keys: {self.nbytes / 2**20:.2f} MiB")
        return "\n".join(lines)


def stats(model: Any = None) -> Stats:
    """Counts of ``model`` (a module, a compiled module or function), or of everything compiled if ``None``.

    A graph that ``tgb.reset()`` closed counts for as long as Dynamo keeps it, and so do its later, eager calls.
    """
    graphs = registry.all_graphs() if model is None else registry.graphs_of(model)
    parts = tuple(GraphStats.of(g) for g in graphs)
    return Stats(parts, len(parts), tuple(registry.limits_of(model)))


class measure:  # noqa: N801 (used as a function: ``with tgb.measure(model) as part``)
    """``with tgb.measure(model) as part: ...`` counts what happens inside: ``part.stats``, during and after it.

    Without a model it counts everything. The same as ``after - before`` of two ``tgb.stats(model)``.
    """

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self._before: Stats | None = None
        self._found: Stats | None = None

    def __enter__(self) -> measure:
        self._before, self._found = stats(self.model), None
        return self

    def __exit__(self, *_: object) -> None:
        self._found = self.stats

    @property
    def stats(self) -> Stats:
        if self._found is not None:
            return self._found
        if self._before is None:
            raise RuntimeError("measure() counts inside of a with statement")
        return stats(self.model) - self._before


def inductor_lines(keys: Mapping[ShapeKey, KeyCount]) -> list[str]:
    """What Inductor compiled of a graph, in one line, and why it did not compile the rest, a line for each reason."""
    lines = []
    found = {k: c for k, c in sorted(keys.items(), key=lambda i: str(i[0])) if c.compiled}
    if found:
        counts, made = ", ".join(f"{k}: {c.compiled}" for k, c in found.items()), sum(c.compiles for c in keys.values())
        lines.append(f"Inductor: segments of keys {counts}; {made} compiles")
    plain: dict[Reason, list[str]] = {}
    for key, count in keys.items():
        for reason in count.plain:
            plain.setdefault(reason, []).append(str(key))
    lines += [f"plain kernels, key {', '.join(dict.fromkeys(at))}: {reason}" for reason, at in plain.items()]
    return lines


def _waste(real: int, computed: int) -> float:
    return 1 - real / computed if computed else 0.0


def _key_since(now: KeyCount, before: KeyCount) -> KeyCount:
    return replace(now, **{f: getattr(now, f) - getattr(before, f) for f in _KEY_FIELDS})


def _split(name: str) -> tuple[str, str]:
    """``"min_replays"`` -> ``("min_", "replays")``."""
    for bound in ("min_", "max_", ""):
        if name.startswith(bound) and name[len(bound) :] in _COUNTS:
            return bound, name[len(bound) :]
    raise TypeError(f"stats have no {name!r}; there are {_listed(_COUNTS)}, each also with min_ or max_ before it")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _number(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
