"""What the demo found, as plain data, and how it is printed: rich tables if rich is there, aligned text if not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Width of a report that goes to a file or a pipe, where there is no terminal to ask.
FILE_WIDTH = 120


@dataclass(frozen=True)
class Row:
    """One generated sequence. ``other`` is the compiled text where the tokens differ."""

    name: str
    length: int
    prompt: str
    text: str
    tokens_equal: bool
    other: str | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds that one call of ``generate`` took, eagerly and in both compiled rounds."""

    name: str
    batch: int
    length: int
    eager: float
    first: float
    again: float


@dataclass(frozen=True)
class Counts:
    """``tgb.stats`` at the end of the run, as numbers."""

    calls: int
    replays: int
    first_calls: int
    recordings: int
    graphs: int
    padding_waste: float
    second_round_replays: int
    eager: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: Any, *, second_round_replays: int) -> Counts:
        return cls(
            calls=stats.calls,
            replays=stats.replays,
            first_calls=stats.first_calls,
            recordings=stats.recordings,
            graphs=stats.graphs,
            padding_waste=stats.padding_waste,
            second_round_replays=second_round_replays,
            eager=dict(stats.eager),
        )


@dataclass(frozen=True)
class Report:
    versions: str
    rows: list[Row]
    times: list[Timing]
    counts: Counts
    plans: list[str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Equality alone proves nothing: an all-eager run is equal too."""
        return all(row.tokens_equal for row in self.rows) and self.counts.replays > 0


def show(report: Report) -> None:
    """Print the report: texts, segments, counts, times, and the verdict last."""
    for row in report.rows:
        _show_row(row)
    for plan in report.plans:
        print(f"\n{plan}")
    _table("calls of compiled graphs", ("what", "number"), _count_rows(report.counts))
    _table("seconds for each generate", TIME_COLUMNS, _time_rows(report.times))
    equal = sum(row.tokens_equal for row in report.rows)
    print(f"\ntokens equal: {equal} of {len(report.rows)} sequences; {report.counts.replays} replays")
    print("OK" if report.ok else "FAILED: " + _failure(report))
    print(f"{report.versions}; {report.seconds:.0f} s in all")


TIME_COLUMNS = ("call", "batch", "prompt tokens", "eager", "bcg, first round (with tracing)", "bcg, second round")


def _show_row(row: Row) -> None:
    print(f"\n{row.name} ({row.length} tokens): {row.prompt}")
    print(f"  {row.text!r}")
    if row.other is not None:
        print(f"  compiled: {row.other!r}")
    print(f"  tokens equal: {'yes' if row.tokens_equal else 'no'}")


def _count_rows(counts: Counts) -> list[tuple[str, str]]:
    return [
        ("graphs that Dynamo made", str(counts.graphs)),
        ("calls", str(counts.calls)),
        ("replayed", str(counts.replays)),
        ("  of these in the second round", str(counts.second_round_replays)),
        ("first calls of a key (uncaptured, on the same buffers)", str(counts.first_calls)),
        *((f"eager: {code}", str(number)) for code, number in sorted(counts.eager.items())),
        ("eager, all reasons", str(sum(counts.eager.values()))),
        ("recordings held", str(counts.recordings)),
        ("padding waste (padded rows / all rows computed)", f"{counts.padding_waste:.1%}"),
    ]


def _time_rows(times: Sequence[Timing]) -> list[tuple[str, ...]]:
    rows = [(t.name, str(t.batch), str(t.length), *_seconds(t.eager, t.first, t.again)) for t in times]
    totals = (sum(t.eager for t in times), sum(t.first for t in times), sum(t.again for t in times))
    return [*rows, ("all", "", "", *_seconds(*totals))]


def _seconds(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.2f}" for value in values)


def _failure(report: Report) -> str:
    wrong = [row.name for row in report.rows if not row.tokens_equal]
    return f"tokens differ in {', '.join(wrong)}" if wrong else "nothing was replayed"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print()
    if importlib.util.find_spec("rich") is None:
        print(plain_table(title, columns, rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns with two spaces between them."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *text])
