"""The arena: one piece of memory in which the slots and bridges of all keys of a device lie on top of each other.

Contract (C1). Every slot and bridge is written in a call before it is read in the same call, and one call runs at a
time on a device; so two keys may use the same bytes. ``take`` lays out the buffers of one key in existing chunks,
first fit, and allocates one more chunk for what does not fit: together the chunks are about as large as the largest
key needs. Only what has to survive from call to call has memory of its own (``own``). A chunk lives as long as a
``Lease`` on it; the arena itself holds chunks weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Every buffer starts at a multiple of this many bytes, as in PyTorch's CUDA allocator.
ALIGNMENT = 512

#: Shape, stride (elements) and dtype of a buffer.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Lease:
    """The buffers of one key, and the chunks that they lie in. ``nbytes``: what had to be allocated for it."""

    buffers: tuple[torch.Tensor, ...]
    chunks: tuple[torch.Tensor, ...]
    nbytes: int


class Arena:
    """Chunks of bytes. ``allocate(nbytes)`` returns a one-dimensional uint8 tensor."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._chunks: list[weakref.ref[torch.Tensor]] = []  # no WeakSet: tensors do not compare to a bool
        self._owned: list[weakref.ref[torch.Tensor]] = []

    def _living(self) -> list[torch.Tensor]:
        """All chunks, largest first: that fits best."""
        found = [c for ref in self._chunks if (c := ref()) is not None]
        self._chunks = [weakref.ref(c) for c in found]
        return sorted(found, key=lambda c: -c.numel())

    @property
    def nbytes(self) -> int:
        return sum(c.numel() for c in (*self._living(), *self._private()))

    def _private(self) -> list[torch.Tensor]:
        return [c for ref in self._owned if (c := ref()) is not None]

    @property
    def storages(self) -> set[int]:
        """Addresses of the memory that buffers lie in."""
        return {c.untyped_storage().data_ptr() for c in (*self._living(), *self._private())}

    def own(self, layouts: Sequence[Layout]) -> Lease:
        """Buffers that no other lease will ever lie on: what they hold stays. Contents are what was allocated."""
        if not layouts:
            return Lease((), (), 0)
        sizes = [_nbytes(layout) for layout in layouts]
        chunk = self._allocate(sum(sizes))
        self._owned = [ref for ref in self._owned if ref() is not None] + [weakref.ref(chunk)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        buffers = tuple(_on(chunk, at, layout) for at, layout in zip(starts, layouts, strict=True))
        return Lease(buffers, (chunk,), sum(sizes))

    def take(self, layouts: Sequence[Layout]) -> Lease:
        """Buffers of these layouts, none overlapping another of the same lease; contents are whatever was there."""
        sizes = [_nbytes(layout) for layout in layouts]
        chunks = self._living()
        used = [0] * len(chunks)
        places: dict[int, tuple[int, int]] = {}
        missing: list[int] = []
        for i in sorted(range(len(layouts)), key=lambda i: -sizes[i]):
            found = next((k for k, c in enumerate(chunks) if used[k] + sizes[i] <= c.numel()), None)
            if found is None:
                missing.append(i)
                continue
            places[i] = (found, used[found])
            used[found] += sizes[i]
        if missing:
            chunk = self._allocate(sum(sizes[i] for i in missing))
            self._chunks.append(weakref.ref(chunk))
            chunks.append(chunk)
            at = 0
            for i in missing:
                places[i] = (len(chunks) - 1, at)
                at += sizes[i]
        buffers = tuple(_on(chunks[places[i][0]], places[i][1], layout) for i, layout in enumerate(layouts))
        leased = tuple(chunks[k] for k in sorted({k for k, _ in places.values()}))
        return Lease(buffers, leased, sum(sizes[i] for i in missing))


def _nbytes(layout: Layout) -> int:
    """Bytes of a buffer, rounded up to the alignment (an empty one needs an address too)."""
    shape, stride, dtype = layout
    elements = 0 if 0 in shape else 1 + sum((n - 1) * st for n, st in zip(shape, stride, strict=True))
    return -(-max(elements * dtype.itemsize, 1) // ALIGNMENT) * ALIGNMENT


def _on(chunk: torch.Tensor, offset: int, layout: Layout) -> torch.Tensor:
    shape, stride, dtype = layout
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=chunk.device)
        # The chunk's address is aligned for every dtype, and so is the offset.
        return tensor.set_(chunk.untyped_storage(), offset // dtype.itemsize, shape, stride)
