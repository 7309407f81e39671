"""Arguments that overlap, by their addresses."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from torch_graph_backend.admission import overlap

EXTENT = st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda e: (e[0], e[0] + e[1]))


@given(st.lists(EXTENT, max_size=7), st.sets(st.integers(0, 6)))
def test_an_overlap_is_found_if_there_is_one(extents: list[tuple[int, int]], written: set[int]) -> None:
    def meet(i: int, j: int) -> bool:
        (a, b), (c, d) = extents[i], extents[j]
        return i in written and a < d and c < b

    found = overlap([(*e, i) for i, e in enumerate(extents)], written)
    assert meet(*found) if found else not any(meet(i, j) for i, j in permutations(range(len(extents)), 2))
