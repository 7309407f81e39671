"""Bucket ladders: the published ones rung by rung, the default one's waste, picking, cleaning and alignment."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_graph_backend.buckets import (
    Ladder,
    clean,
    decode_ladder,
    default_ladder,
    exact_ladder,
    filter_multiple,
    prefill_ladder,
    speculative_ladder,
)
from torch_graph_backend.errors import BadBuckets

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=40)
LADDERS = [decode_ladder, prefill_ladder, speculative_ladder, default_ladder, exact_ladder]


def test_decode_ladder():
    # Written out from the description, independently of the code: 1, 2, 4, 8, 12, then 16..256 by 8, and so on.
    full = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, 1025, 32)]
    assert decode_ladder(1024) == tuple(full)
    assert decode_ladder(10) == (1, 2, 4, 8, 10)
    assert decode_ladder(500)[-3:] == (480, 496, 500)
    assert (len(decode_ladder(256)), len(decode_ladder(512))) == (36, 52)


def test_prefill_ladder():
    head = [4, 8, 12, 16, 20, 24, 28, 32, 48, 64]
    assert list(prefill_ladder(64)) == head
    assert prefill_ladder(1000)[-3:] == (896, 960, 1000)
    assert prefill_ladder(5120)[-5:] == (3584, 3840, 4096, 4608, 5120)
    assert prefill_ladder(3) == (3,)
    assert (len(prefill_ladder(2048)), len(prefill_ladder(8192)), len(prefill_ladder(16384))) == (42, 58, 74)
    assert {256, 288, 512, 576, 1024, 1280} <= set(prefill_ladder(8192))


def test_speculative_ladder():
    assert speculative_ladder(40) == (*range(1, 9), *range(10, 33, 2), 40)
    assert speculative_ladder(304)[-4:] == (256, 272, 288, 304)
    assert (len(speculative_ladder(256)), len(speculative_ladder(512))) == (51, 67)


@pytest.mark.parametrize("ladder", LADDERS)
@given(largest=st.integers(1, 3000))
def test_every_ladder_ascends_from_the_shared_prefix_to_its_largest(ladder, largest):
    rungs = ladder(largest)
    assert rungs[-1] == largest
    assert list(rungs) == sorted(set(rungs))
    assert rungs[0] >= 1
    # Capping only cuts: the rungs below the largest are those of a larger ladder.
    assert rungs[:-1] == tuple(size for size in ladder(3500) if size < largest)


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("largest", [0, -1, True, 8.0, "8", None])
def test_every_ladder_refuses_a_bad_largest(ladder, largest):
    with pytest.raises(BadBuckets, match="is not"):
        ladder(largest)


@given(st.integers(65, 40_000), st.data())
def test_default_ladder_wastes_at_most_an_eighth_above_64(max_size, data):
    n = data.draw(st.integers(65, max_size))
    assert Ladder(default_ladder(max_size)).waste(n) <= 0.125


def test_default_ladder_below_8192():
    rungs = default_ladder(8192)
    ladder = Ladder(rungs)
    assert max(ladder.waste(n) for n in range(65, 8193)) <= 0.125
    assert max(ladder.pick(n) - n for n in range(1, 65)) == 7
    assert [n for n in range(1, 9) if ladder.waste(n) == 0] == [1, 2, 3, 4, 6, 8]
    assert all(size % 8 == 0 for size in rungs if size > 64)
    assert {2**k for k in range(14)} <= set(rungs)
    assert len(rungs) == 57


def test_default_ladder_has_the_fewest_rungs_that_keep_the_powers_of_two():
    # Greedy: from each rung the furthest next one that keeps waste within 1/8, stopping at each power of two.
    for octave in (128, 256, 1024, 4096):
        rung, needed = octave, 0
        while rung < 2 * octave:
            rung, needed = min(math.floor((rung + 1) / (1 - 0.125)), 2 * octave), needed + 1
        assert len([size for size in default_ladder(2 * octave) if size > octave]) == needed


def test_default_ladder_appends_its_largest():
    assert default_ladder(5) == (1, 2, 3, 4, 5)
    assert default_ladder(100)[-3:] == (88, 96, 100)


@given(SIZES, st.integers(-5, 6000), st.booleans())
def test_pick_is_the_smallest_that_fits(sizes, n, exact):
    ladder = Ladder(sizes, exact)
    fitting = [size for size in sizes if (size == n if exact else size >= n) and n > 0]
    assert ladder.pick(n) == (min(fitting) if fitting else None)


@given(SIZES, st.integers(1, 6000))
def test_waste_is_the_padded_share(sizes, n):
    ladder = Ladder(sizes)
    bucket = ladder.pick(n)
    if bucket is None:
        assert n > ladder.largest == max(sizes)
        assert ladder.waste(n) is None
    else:
        assert ladder.waste(n) == 1 - n / bucket or math.isclose(ladder.waste(n), 1 - n / bucket)
        assert 0 <= ladder.waste(n) < 1


def test_pick_at_the_edges():
    ladder = Ladder((4, 8))
    assert [ladder.pick(n) for n in (-1, 0, 1, 4, 5, 8, 9)] == [None, None, 4, 4, 8, 8, None]
    assert [Ladder((4, 8), exact=True).pick(n) for n in (0, 3, 4, 5, 8, 9)] == [None, None, 4, None, 8, None]


def test_ladder_sorts_and_is_frozen_and_hashable():
    ladder = Ladder([8, 4, 8])
    assert ladder.sizes == (4, 8)
    assert {ladder: 1}[Ladder((4, 8))] == 1
    with pytest.raises(AttributeError):
        ladder.sizes = (1,)


def test_exact_ladder_serves_each_size_alone():
    ladder = Ladder(exact_ladder(5), exact=True)
    assert [ladder.pick(n) for n in range(7)] == [None, 1, 2, 3, 4, 5, None]


@given(SIZES)
def test_clean_is_ascending_unique_and_idempotent(sizes):
    cleaned = clean(sizes)
    assert set(cleaned) == set(sizes)
    assert all(a < b for a, b in pairwise(cleaned))
    assert clean(cleaned) == cleaned


@pytest.mark.parametrize("make", [list, tuple, set, iter, np.array, lambda sizes: (size for size in sizes)])
def test_clean_accepts_any_iterable_of_integers(make):
    cleaned = clean(make([8, 4, 2, 8]))
    assert cleaned == (2, 4, 8)
    assert all(type(size) is int for size in cleaned)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([], "[]"),
        ([1, 0], "0"),
        ([1, -7], "-7"),
        ([4, 2.5], "2.5"),
        ([4, 8.0], "8.0"),
        ([True, 4], "True"),
        ([4, None], "None"),
        (["8"], "'8'"),
        ([[8]], "[8]"),
        ("48", "'48'"),
        (b"48", "b'48'"),
        ({8: 1}, "{8: 1}"),
        (8, "8"),
        (None, "None"),
    ],
)
def test_clean_refuses_and_names_the_value(sizes, named):
    with pytest.raises(BadBuckets) as caught:
        clean(sizes, "decode.bs")
    assert caught.value.value == named
    assert str(caught.value).startswith(f"[BCG103] decode.bs: {named} ")


@given(SIZES, st.integers(1, 8), st.integers(1, 16))
def test_filter_multiple_keeps_exactly_the_aligned(sizes, width, base):
    aligned = sorted({size for size in sizes if size * width % base == 0})
    if aligned:
        assert filter_multiple(sizes, width, base) == tuple(aligned)
    else:
        with pytest.raises(BadBuckets, match=f"multiple of {base}"):
            filter_multiple(sizes, width, base)


def test_filter_multiple_caps_at_the_rounded_pool():
    # A pool of 50 requests rounds up to 56; 64 exceeds it, so 56 takes its place.
    assert filter_multiple([8, 12, 16, 48, 64], 1, 8, pool_size=50) == (8, 16, 48, 56)
    assert filter_multiple([8, 16, 48], 1, 8, pool_size=50) == (8, 16, 48)
    assert filter_multiple([2, 3, 4], 2, 4) == (2, 4)


@pytest.mark.parametrize("bad", [{"width": 0}, {"mul_base": 0}, {"pool_size": 0}])
def test_filter_multiple_refuses_bad_parameters(bad):
    with pytest.raises(BadBuckets, match=next(iter(bad))):
        filter_multiple([8], **{"width": 1, "mul_base": 8, **bad})
