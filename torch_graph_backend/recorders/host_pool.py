"""The host recorder's memory pool: an imitation of the private pool of a CUDA graph.

Contract. A *block* is a fixed range of bytes. ``HostPool.storage`` leases one to a new torch storage; when the last
tensor on that storage dies, by reference count and whatever views were made, the block is free and a later
lease takes it (best fit, else a new block). Nothing else keeps a block taken: ``Block.storage`` is a second storage
over the same bytes that a tape uses to read and write them at replay, and it does not count.

Unlike on CUDA no access can ever touch invalid memory: every storage over a block, leased or not, keeps the bytes
themselves alive, also after ``close``. What breaks this: a NumPy array made from a pool tensor holds the lease.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

ALIGNMENT = 64
POISON = 0xFF  # NaN in every float format, -1 in every signed integer


@dataclass(eq=False, slots=True)
class Block:
    """``size`` bytes at ``address``. ``memory`` owns them; ``storage`` reads and writes them without a lease."""

    address: int
    size: int
    memory: ctypes.Array[ctypes.c_uint8]
    storage: torch.UntypedStorage
    leased_in: int = -1  # number of the recording that holds or held the lease; -1: none yet

    def poison(self, byte: int = POISON) -> None:
        """Overwrite every byte. Plain C: safe in a finalizer, on any thread, under any torch mode."""
        ctypes.memset(self.address, byte, self.size)


def _new_block(nbytes: int) -> Block:
    size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
    raw = (ctypes.c_uint8 * (size + ALIGNMENT))()
    offset = -ctypes.addressof(raw) % ALIGNMENT
    memory = (ctypes.c_uint8 * size).from_buffer(raw, offset)  # keeps ``raw`` alive
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return Block(ctypes.addressof(memory), size, memory, storage)


def _lease_died(block: Block, freed: deque[Block], poison: bool) -> None:
    """Runs in whichever thread drops the last tensor, possibly inside an allocation: it only appends."""
    if poison:
        block.poison()
    freed.append(block)


@dataclass(eq=False)
class HostPool:
    """Blocks by address, the free ones among them, and those freed too late for their own recording to reuse.

    ``late`` are the blocks that were freed after the recording that leased them had ended. The next recording may
    overwrite them (a CUDA graph would get them from its allocator), so its replay poisons them first: reading a
    boundary value that was dropped too early is then wrong every time, not only when the block happens to be reused.
    """

    poison: bool
    late: list[Block] = field(default_factory=list)
    _blocks: dict[int, Block] = field(default_factory=dict)
    _free: list[Block] = field(default_factory=list)
    _freed: deque[Block] = field(default_factory=deque)
    _recording: int = 0

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self._blocks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, taken or free."""
        return sum(block.size for block in self._blocks.values())

    @property
    def leased_nbytes(self) -> int:
        """Bytes of the blocks that some tensor still lives on."""
        self._drain()
        return self.nbytes - sum(block.size for block in self._free)

    def begin(self) -> tuple[Block, ...]:
        """Start a recording. Returns the blocks that its replay has to poison first (none without ``poison``)."""
        self._drain()
        self._recording += 1
        return tuple(block for block in self.late if block in self._free) if self.poison else ()

    def end(self, poisoned: tuple[Block, ...]) -> None:
        """A recording is complete, and its replay poisons ``poisoned``. A failed recording never gets here."""
        self._drain()
        self.late = [block for block in self.late if block not in poisoned]
        self._recording += 1

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """A new storage of exactly ``nbytes`` (at least one) that holds a block until its last tensor dies."""
        self._drain()
        fitting = [block for block in self._free if block.size >= nbytes]
        if fitting:
            block = min(fitting, key=lambda candidate: candidate.size)
            self._free.remove(block)
        else:
            block = _new_block(nbytes)
            self._blocks[block.address] = block
            if self.poison:
                block.poison()
        block.leased_in = self._recording
        lease = (ctypes.c_uint8 * block.size).from_buffer(block.memory)
        # torch holds the buffer object until the C++ storage dies, so its finalizer is the storage's.
        weakref.finalize(lease, _lease_died, block, self._freed, self.poison).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8, count=nbytes).untyped_storage()

    def block_at(self, address: int) -> Block | None:
        """The block that a storage with this data pointer lies on, or None: the memory is not the pool's."""
        return self._blocks.get(address)

    def address_only(self, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage over bytes that it does not keep: a block's own, or memory of somebody else."""
        block = self.block_at(address)
        if block is not None:
            return block.storage
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8).untyped_storage()

    def close(self) -> None:
        """Forget all blocks. Bytes that a tensor still lies on stay valid until that tensor dies."""
        self._drain()
        self._blocks.clear()
        self._free.clear()
        self.late.clear()

    def _drain(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            if self._blocks.get(block.address) is not block:
                continue  # closed since
            self._free.append(block)
            if block.leased_in != self._recording:
                self.late.append(block)
