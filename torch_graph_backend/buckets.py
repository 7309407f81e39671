"""Bucket ladders: which sizes are recorded, and which recorded size serves a real one.

A *size* counts rows of a padded dimension: requests in a decode batch, tokens in a prefill. A *ladder* is an ascending
tuple of sizes (*rungs*); a real size is rounded up to the next rung and the rows between are padding. Each rung costs
one recording (memory and time), each padded row costs compute, so ladders are dense where relative waste hurts and
sparse where it does not. Everything here is pure and knows no tensors.
"""

from __future__ import annotations

import numbers
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch_graph_backend.errors import BadBuckets

#: ``(first, last or None, step)``, all inclusive; None means "up to the maximum".
_Tier = tuple[int, int | None, int]

#: SGLang's decode ladder (requests).
_DECODE: tuple[_Tier, ...] = ((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 511, 16), (512, None, 32))
#: SGLang's ladder for speculative decoding (requests).
_SPECULATIVE: tuple[_Tier, ...] = ((1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, None, 16))
#: SGLang's prefill ladder (tokens).
_PREFILL: tuple[_Tier, ...] = (
    (4, 32, 4),
    (48, 256, 16),
    (288, 512, 32),
    (576, 1024, 64),
    (1280, 4096, 256),
    (4608, None, 512),
)

_DENSE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64)
_TO_128 = (72, 80, 88, 96, 104, 112, 128)
#: Rungs of the octave (P, 2P] in units of P/16. Neighbours differ by a factor of at most 8/7, so that waste stays
#: within 1/8; five rungs could not span an octave that way ((8/7)**5 < 2), so six are the fewest.
_OCTAVE = (18, 20, 22, 25, 28, 32)


def _size(value: object, name: str) -> int:
    """``value`` as an int >= 1, or BadBuckets naming it. Integer-like scalars (numpy) count, bools do not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise BadBuckets(name, value, "is not an integer")
    if value < 1:
        raise BadBuckets(name, value, "is not positive")
    return int(value)


def clean(sizes: Iterable[int], name: str = "buckets") -> tuple[int, ...]:
    """``sizes`` without duplicates, ascending. ``name`` is what an error calls them.

    Raises BadBuckets, naming the value, for anything but a non-empty iterable of positive integers.
    """
    if isinstance(sizes, (str, bytes, bytearray, Mapping)) or not isinstance(sizes, Iterable):
        raise BadBuckets(name, sizes, "is not a list of sizes")
    kept = sorted({_size(value, name) for value in sizes})
    if not kept:
        raise BadBuckets(name, sizes, "has no size in it")
    return tuple(kept)


def _tiered(tiers: tuple[_Tier, ...], largest: int, name: str) -> tuple[int, ...]:
    """The sizes of ``tiers`` up to ``largest``, which is appended if it is none of them."""
    largest = _size(largest, name)
    rungs: list[int] = []
    for first, last, step in tiers:
        rungs.extend(range(first, min(largest, last or largest) + 1, step))
    if not rungs or rungs[-1] != largest:
        rungs.append(largest)
    return tuple(rungs)


def decode_ladder(max_bs: int) -> tuple[int, ...]:
    """SGLang's decode ladder: ``1, 2, 4, 8, 12``, 16 to 256 by 8, 272 to 511 by 16, from 512 by 32; unit: requests.

    Capped at ``max_bs``, which is appended if it is off the ladder (36 rungs at 256, 52 at 512).
    """
    return _tiered(_DECODE, max_bs, "max_bs")


def speculative_ladder(max_bs: int) -> tuple[int, ...]:
    """SGLang's ladder for speculative decoding: 1 to 8 by 1, 10 to 32 by 2, 40 to 64 by 4, 72 to 256 by 8, then by 16.

    Unit: requests. Capped at ``max_bs``, which is appended if it is off the ladder (51 rungs at 256).
    """
    return _tiered(_SPECULATIVE, max_bs, "max_bs")


def prefill_ladder(max_tokens: int) -> tuple[int, ...]:
    """SGLang's prefill ladder: 4 to 32 by 4, 48 to 256 by 16, 288 to 512 by 32, 576 to 1024 by 64, 1280 to 4096 by 256,
    from 4608 by 512; unit: tokens. Capped at ``max_tokens``, which is appended if it is off the ladder (58 at 8192).
    """
    return _tiered(_PREFILL, max_tokens, "max_tokens")


def default_ladder(max_size: int) -> tuple[int, ...]:
    """The ladder for a size of which nothing is known: 57 rungs up to 8192. Capped at ``max_size``, which is appended.

    * Up to 64: ``1, 2, 3, 4, 6, 8, 12, 16``, then by 8. At most 7 rows are padding. That can be 29 % of a bucket
      (17 in 24), but with so few rows a matrix multiply waits for its weights and works on tiles of 16 rows or more
      anyway, so closer rungs would pay recordings for nothing.
    * Above 64: six rungs an octave (seven up to 128), powers of two among them since real sizes love them. For every
      ``n`` in ``65..max_size`` waste, ``(bucket - n) / bucket``, is at most 1/8; no ladder that keeps the powers of two
      needs fewer than six an octave for that. Rungs are multiples of 8 (from 2048 on of 128), which kernels like; only
      an appended ``max_size`` may not be.
    """
    max_size = _size(max_size, "max_size")
    rungs = list(_DENSE + _TO_128)
    while rungs[-1] < max_size:
        unit = rungs[-1] // 16
        rungs.extend(unit * factor for factor in _OCTAVE)
    return (*rungs[: bisect_left(rungs, max_size)], max_size)


def exact_ladder(max_size: int) -> tuple[int, ...]:
    """Padding disabled: every size ``1..max_size`` is a rung of its own."""
    return tuple(range(1, _size(max_size, "max_size") + 1))


def filter_multiple(
    sizes: Iterable[int], width: int, mul_base: int, pool_size: int | None = None, name: str = "buckets"
) -> tuple[int, ...]:
    """The sizes whose row count ``size * width`` is a multiple of ``mul_base``, as collectives need it.

    ``width``: rows that one request occupies (1, or the draft width). ``pool_size``: the most requests there can be;
    rounded up to ``mul_base`` it caps the sizes, and is appended if it cut any off. Raises BadBuckets if none is left.
    """
    kept = clean(sizes, name)
    width, mul_base = _size(width, "width"), _size(mul_base, "mul_base")
    if pool_size is not None:
        cap = -(-_size(pool_size, "pool_size") // mul_base) * mul_base
        if kept[-1] > cap:
            kept = (*(size for size in kept if size < cap), cap)
    aligned = tuple(size for size in kept if size * width % mul_base == 0)
    if not aligned:
        problem = f"has no size that, times {width}, is a multiple of {mul_base}"
        raise BadBuckets(name, list(kept), problem, fix=f"add a multiple of {mul_base}")
    return aligned


@dataclass(frozen=True)
class Ladder:
    """The rungs of one symbol; made from any iterable that ``clean`` accepts.

    ``exact=True`` disables padding: only a size that is a rung itself is served.
    """

    sizes: tuple[int, ...]
    exact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", clean(self.sizes))

    @property
    def largest(self) -> int:
        """The last rung."""
        return self.sizes[-1]

    def pick(self, n: int) -> int | None:
        """The smallest rung >= ``n``; None for ``n <= 0``, beyond the largest, or off the rungs of an exact ladder."""
        if n <= 0:
            return None
        at = bisect_left(self.sizes, n)
        if at == len(self.sizes) or (self.exact and self.sizes[at] != n):
            return None
        return self.sizes[at]

    def waste(self, n: int) -> float | None:
        """The share of the bucket that is padding when ``n`` rows are real, 0 to below 1; None if no bucket fits."""
        bucket = self.pick(n)
        return None if bucket is None else (bucket - n) / bucket
