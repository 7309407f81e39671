"""One kernel that fills all slots, tails and counts of a key: the fused form of ``slots.Filler``, for CUDA.

Contract. The same result as a ``Filler`` of the same buffers, in one launch, whatever the policies. Everything that a
real size decides is in a table on the device, made once: where a buffer lies, its sizes and strides, its real sizes,
what its tail holds. A call adds the addresses of its sources. Addresses that were seen before are on the device
already (a caching allocator hands out the same ones again and again); new ones are copied there, asynchronously, from
pinned memory that is not reused. The kernel depends on no size, so no size compiles it anew.

Bits are copied, never numbers: the kernel knows element sizes, no dtypes. Rows that are contiguous on both sides are
moved in words of eight bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.slots import Filler, Sizes, Window

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

#: Dimensions of a job; buffers that have more are none for this kernel.
DIMS = 4
#: Entries that one program moves.
BLOCK = 1024
#: Sets of source addresses that a frame keeps on the device.
KNOWN = 16
#: With fewer jobs than this, addresses are put on the device when they come the second time: where they never come
#: again, grouped copies are faster (H200: 101 against 139 us with 2 slots, 268 against 141 with 10).
UPLOAD_FROM = 8
#: The columns of a job: buffer, elements, bytes of one, kind of tail, its bits; per dimension size, real size, stride
#: of the buffer, stride of the source.
HEAD = 5
COLUMNS = HEAD + 4 * DIMS
ROW, VALUE, KEEP = range(3)

if triton is not None:
    # No annotations but ``constexpr``: the compiler takes names in them for globals that it must know.
    @triton.jit
    def _move(to, source, bits, writes, reads, constant):  # type: ignore[no-untyped-def]
        """One block of words of a size: from the source where it reads, else the constant."""
        word = tl.load(source, mask=reads, other=0)
        tl.store(to, tl.where(constant, bits.to(word.dtype), word), mask=writes)

    @triton.jit
    def fill_kernel(  # type: ignore[no-untyped-def]
        table, sources, blocks, head: tl.constexpr, columns: tl.constexpr, block: tl.constexpr
    ):
        """A program moves ``block`` words of one job: ``blocks`` has the job and the first word."""
        program = tl.program_id(0)
        job = tl.load(blocks + 2 * program)
        row = table + job * columns
        to, source = tl.load(row), tl.load(sources + job)
        count, size, kind, bits = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
        at = tl.load(blocks + 2 * program + 1) + tl.arange(0, block)
        inside = at < count
        real = inside
        rest = at
        target = at * 0
        origin = at * 0
        for k in tl.static_range(4):  # the last dimension first
            dim = row + head + 4 * (3 - k)
            length, rows = tl.load(dim), tl.load(dim + 1)
            i = rest % length
            rest = rest // length
            real = real & (i < rows)
            target += i * tl.load(dim + 2)
            origin += tl.where(i < rows, i, 0) * tl.load(dim + 3)
        kinds = at * 0 + kind
        writes = (inside & (real | (kinds != 2))).to(tl.int1)
        reads = (inside & (real | (kinds == 0))).to(tl.int1)
        constant = ((kinds == 1) & ~real).to(tl.int1)
        if size == 8:  # a name that two branches give to pointers of two types would not compile
            to8, from8 = to.to(tl.pointer_type(tl.int64)) + target, source.to(tl.pointer_type(tl.int64)) + origin
            _move(to8, from8, bits, writes, reads, constant)
        elif size == 4:
            to4, from4 = to.to(tl.pointer_type(tl.int32)) + target, source.to(tl.pointer_type(tl.int32)) + origin
            _move(to4, from4, bits, writes, reads, constant)
        elif size == 2:
            to2, from2 = to.to(tl.pointer_type(tl.int16)) + target, source.to(tl.pointer_type(tl.int16)) + origin
            _move(to2, from2, bits, writes, reads, constant)
        else:
            to1, from1 = to.to(tl.pointer_type(tl.int8)) + target, source.to(tl.pointer_type(tl.int8)) + origin
            _move(to1, from1, bits, writes, reads, constant)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def missing() -> str:
    """Why this kernel cannot be used at all; empty if it can."""
    return "triton is not installed" if triton is None else ""


class FusedFiller:
    """Fills buffers from sources of one real size, with one kernel. Made by ``fused``.

    ``rows``: the table. ``fixed``: addresses of jobs that no source of a call serves. ``wide``: jobs that move words
    larger than their elements; a call whose source is not aligned to them is served by ``plain``.
    """

    def __init__(
        self,
        real: Sequence[torch.Tensor],
        rows: Sequence[Sequence[int]],
        fixed: dict[int, int],
        copied: Sequence[int],
        wide: Collection[int],
        device: torch.device,
        plain: Callable[[], Filler],
    ) -> None:
        self.real, self.copied, self.device, self.plain = real, tuple(copied), device, plain
        self.fixed, self.wide, self.jobs = fixed, frozenset(wide), len(rows)
        blocks = [(job, at) for job, row in enumerate(rows) for at in range(0, row[1], BLOCK)]
        self.grid = (len(blocks),)
        self.table = self._placed(rows)
        self.blocks = self._placed(blocks)
        #: By the addresses of the sources; ``None``: not aligned.
        self.known: dict[tuple[int, ...], torch.Tensor | None] = {}
        self.once: set[tuple[int, ...]] = set()
        #: Operations of the last fill.
        self.launches = 1

    def _placed(self, values: Sequence[Any]) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return torch.tensor(values, dtype=torch.int64, device=self.device)

    def fill(self, sources: Sequence[torch.Tensor], between: Callable[[], None] | None = None) -> None:
        """As ``Filler.fill``; ``between`` runs first: the kernel reads what it writes."""
        if between is not None:
            between()
        pointers = tuple([sources[i].data_ptr() for i in self.copied])
        addresses = self.known[pointers] if pointers in self.known else self._met(pointers)
        if addresses is None:
            self.plain().fill(sources)
            self.launches = self.plain().launches
            return
        self.launches = 1
        if self.grid[0]:
            fill_kernel[self.grid](self.table, addresses, self.blocks, HEAD, COLUMNS, BLOCK)

    def _met(self, pointers: tuple[int, ...]) -> torch.Tensor | None:
        """Source addresses that the device does not have: put there, unless they may never come again."""
        if self.jobs < UPLOAD_FROM and pointers not in self.once:
            if len(self.once) >= 16 * KNOWN:
                self.once.clear()
            self.once.add(pointers)
            return None
        return self._addresses(pointers)

    def _addresses(self, pointers: tuple[int, ...]) -> torch.Tensor | None:
        """Source addresses by job, on the device."""
        row = [0] * self.jobs
        for job, pointer in (*zip(self.copied, pointers, strict=True), *self.fixed.items()):
            row[job] = pointer
        made = None
        if not any(row[job] % 8 for job in self.wide):
            with torch.inference_mode(False), torch.no_grad():
                host = torch.tensor(row, dtype=torch.int64, pin_memory=self.device.type == "cuda")
                made = host.to(self.device, non_blocking=True)
        if len(self.known) < KNOWN:  # nothing is ever evicted: a kernel on another stream may still read it
            self.known[pointers] = made
        return made


def fused(
    buffers: Sequence[torch.Tensor],
    windows: Sequence[Window],
    sizes: Sizes,
    strides: Sequence[Sequence[int]],
    filled: Collection[int] = (),
    tails: Sequence[Tail | None] = (),
    numbers: Sequence[tuple[torch.Tensor, int]] = (),
) -> FusedFiller | None:
    """A ``FusedFiller`` with the arguments of ``Filler``, and the strides of the sources; ``None`` if this kernel
    cannot fill one of the buffers (too many dimensions, an element of 16 bytes, padding inside of a dimension)."""
    tails = tails or [None] * len(buffers)
    rows: list[list[int]] = []
    wide: set[int] = set()
    real: list[torch.Tensor] = []
    fixed: dict[int, int] = {}
    for i, (buffer, window, stride, tail) in enumerate(zip(buffers, windows, strides, tails, strict=True)):
        view = window.real_rows(buffer, sizes)
        real.append(view)
        if i in filled:  # from itself: only the tail changes
            fixed[i], stride = buffer.data_ptr(), buffer.stride()
        row = _job(buffer, window, view, stride, tail)
        if row is None:
            return None
        if row[2] > buffer.element_size():
            wide.add(i)
        rows.append(row)
    for buffer, number in numbers:
        fixed[len(rows)] = buffer.data_ptr()
        rows.append([buffer.data_ptr(), 1, 8, VALUE, number, *(v for _ in range(DIMS) for v in (1, 0, 0, 0))])
    copied = [i for i in range(len(buffers)) if i not in filled]
    if not rows:
        return None

    @functools.cache
    def plain() -> Filler:
        return Filler(buffers, windows, sizes, filled, tails, numbers)

    return FusedFiller(real, rows, fixed, copied, wide - set(filled), buffers[0].device, plain)


def _job(
    buffer: torch.Tensor, window: Window, view: torch.Tensor, stride: Sequence[int], tail: Tail | None
) -> list[int] | None:
    size = buffer.element_size()
    if size not in _WORDS or any(len(factors) != 1 for _, factors in window.dims) or view.dim() != buffer.dim():
        return None
    kind = ROW if tail is None else KEEP if tail.value is None else VALUE
    dims = _merged([list(d) for d in zip(buffer.shape, view.shape, buffer.stride(), stride, strict=True)])
    if len(dims) > DIMS:
        return None
    bits = _bits(tail.value, buffer.dtype) if tail is not None and tail.value is not None else 0
    per = 8 // size
    last = dims[-1] if dims else [1, 1, 1, 1]
    rest = dims[:-1]
    even = last[0] == last[1] and last[2:] == [1, 1] and last[0] % per == 0
    if per > 1 and even and buffer.data_ptr() % 8 == 0 and all(d[2] % per == 0 and d[3] % per == 0 for d in rest):
        dims = [*([n, r, a // per, b // per] for n, r, a, b in rest), [last[0] // per, last[1] // per, 1, 1]]
        mask = (1 << (8 * size)) - 1
        bits = _signed(sum((bits & mask) << (8 * size * k) for k in range(per)))
        size = 8
    count = 1
    for d in dims:
        count *= d[0]
    dims = [[1, 1, 0, 0]] * (DIMS - len(dims)) + dims
    return [buffer.data_ptr(), count, size, kind, bits, *(v for d in dims for v in d)]


def _merged(dims: list[list[int]]) -> list[list[int]]:
    """Neighbours without padding that are one run of memory on both sides become one; of size 1 none are left."""
    out: list[list[int]] = []
    for d in dims:
        n, rows, mine, theirs = d
        if n == 1:
            continue
        if out and out[-1][0] == out[-1][1] and n == rows and out[-1][2:] == [n * mine, n * theirs]:
            out[-1] = [out[-1][0] * n, out[-1][1] * n, mine, theirs]
        else:
            out.append(list(d))
    return out


def _bits(value: float | int | bool, dtype: torch.dtype) -> int:
    """A number in a dtype, as the integer of the same bits."""
    return int(torch.full((1,), value, dtype=dtype).view(_WORDS[dtype.itemsize]).item())


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
