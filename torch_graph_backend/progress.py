"""A progress bar while a key is recorded: tqdm on a terminal, one line where there is none (bars garble log files)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shown(items: Sequence[T], title: str, wanted: bool) -> Iterable[T]:
    """``items``, with a bar on stderr while they are worked through, if ``wanted``."""
    if not wanted:
        return items
    if importlib.util.find_spec("tqdm") is None or not sys.stderr.isatty():
        print(f"{title}: {len(items)} segments", file=sys.stderr, flush=True)  # noqa: T201 (asked for)
        return items
    from tqdm import tqdm

    return tqdm(items, desc=title, unit="segment", leave=False)
