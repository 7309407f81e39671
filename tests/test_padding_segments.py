"""The proof against 47 labelled segments: none unsound, and no more than the two listed ones over-cautious."""

from __future__ import annotations

import pytest
from padding_harness import check_all, prove
from padding_segments import CAUTIOUS, MIXES, SEGMENTS


@pytest.mark.parametrize("name", SEGMENTS)
def test_segment(name: str) -> None:
    """A label of *mixes* must be refused, every other must not be, and what is not refused must hold numerically."""
    function, specs, label = SEGMENTS[name]
    traced = prove(function, specs)
    refused = bool(traced.result.reasons)
    assert refused == (label == MIXES or name in CAUTIOUS), [str(r) for r in traced.result.reasons.values()]
    check_all(traced, specs)


def test_the_corpus_is_what_it_says() -> None:
    assert len(SEGMENTS) == 47
    assert len(CAUTIOUS) <= 2
    assert sum(label == MIXES for _, _, label in SEGMENTS.values()) > 15
