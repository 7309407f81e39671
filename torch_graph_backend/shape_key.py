"""ShapeKey: what distinguishes one recording of a compiled graph from another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """The key of one recording. Equal keys may share a recording; the number of recordings is the product of all
    values that occur, so every field is used frugally.

    * ``size``: the padded size of the bucketed symbol, after rounding up to a bucket. Unit: requests for decode,
      tokens for prefill, else rows of whatever dimension was bucketed. A tuple, in the plan's order, if two or more
      symbols are bucketed; ``()`` if none is. ``of`` picks the right form.
    * ``stream_idx``: the lane, when batches run on several streams at once and each needs a recording of its own.
    * ``variant_label``: a Python-level variant of the model, such as ``"lora"``.
    * ``attention_variant``: a variant of the attention, such as ``"sparse"``; None is the default one.
    * ``pinned``: the exact sizes, never padded, of symbols that shape memory whose address is pinned (a cache).
    """

    size: int | tuple[int, ...]
    stream_idx: int | None = None
    variant_label: str | None = None
    attention_variant: str | None = None
    pinned: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: Sequence[int], pinned: Sequence[int] = ()) -> ShapeKey:
        """The key for these bucket sizes, one a bucketed symbol, with ``size`` in its canonical form."""
        return cls(sizes[0] if len(sizes) == 1 else tuple(sizes), pinned=tuple(pinned))

    @property
    def sizes(self) -> tuple[int, ...]:
        """``size`` as a tuple."""
        return self.size if isinstance(self.size, tuple) else (self.size,)

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.sizes)) or "static"]
        if self.pinned:
            parts.append("pinned=" + "x".join(map(str, self.pinned)))
        if self.stream_idx is not None:
            parts.append(f"stream={self.stream_idx}")
        if self.variant_label is not None:
            parts.append(f"variant={self.variant_label}")
        if self.attention_variant is not None:
            parts.append(f"attention={self.attention_variant}")
        return " ".join(parts)


def _rank(key: ShapeKey) -> tuple[object, ...]:
    """Sorts the largest product of sizes first; every later component only makes the order total."""
    stream = -1 if key.stream_idx is None else key.stream_idx
    return (
        -math.prod(key.sizes),
        tuple(-size for size in key.sizes),
        (-math.prod(key.pinned), tuple(-size for size in key.pinned)),
        stream,
        (key.variant_label is not None, key.variant_label or ""),
        (key.attention_variant is not None, key.attention_variant or ""),
    )


def recording_order(keys: Iterable[ShapeKey]) -> list[ShapeKey]:
    """``keys``, largest first: smaller recordings then reuse the memory pool's blocks that larger ones made.

    Largest means the product of ``size``, then that of ``pinned``; the order does not depend on the order of ``keys``.
    """
    return sorted(keys, key=_rank)
