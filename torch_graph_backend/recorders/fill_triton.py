"""One kernel that fills all slots, tails and counts of a key: the fused form of ``slots.Filler``, for CUDA.

Contract. The same result as a ``Filler`` of the same buffers, in one launch, whatever the policies. Everything that a
real size decides is in a table on the device, made once: where a buffer lies, its sizes and strides, its real sizes,
what its tail holds. A call adds the addresses of its sources. Addresses that were seen before are on the device
already (a caching allocator hands out the same ones again and again); new ones are copied there, asynchronously, from
pinned memory. The kernel depends on no size, so no size compiles it anew.

Bits are copied, never numbers: the kernel knows element sizes, no dtypes. Rows that are contiguous on both sides are
moved in words of eight bytes.

The kernel is launched on the device of the buffers, whatever device is current, and on its current stream (Triton takes
both from torch when it launches). All device work is in ``fill``, so what orders the fills of one key on the device
(``replay_session``: an event, when the caller changes streams) orders uploads too: a place on the device is used again
for other addresses. A stream that captures gets plain copies: a launch would go on reading such a place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import sympy
import torch

from torch_graph_backend.ledger import log
from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.passes.torch_api import current_raw_stream
from torch_graph_backend.slots import Factor, Filler, Sizes, Window

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

#: Dimensions of a job; buffers that have more are none for this kernel.
DIMS = 4
#: Entries that one program moves.
BLOCK = 1024
#: Sets of source addresses that a frame keeps on the device. A further one takes the place of the first.
KNOWN = 16
#: A size for the trial run.
_ROWS = sympy.Symbol("rows", integer=True, positive=True)
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


@functools.cache
def failure(device: torch.device) -> str:
    """Why the kernel does not run on a device; empty if it does. Asked once: it is compiled there (Triton needs a C
    compiler for that, or files of its own), launched, and its result is looked at."""
    buffer, source = (torch.full((n, 2), float(n), device=device) for n in (3, 2))
    try:
        filler = fused([buffer], [Window(((0, (Factor(3, _ROWS),)),))], {_ROWS: 2}, [(2, 1)])
        assert filler is not None
        with guard(device):
            filler.launch(filler.upload((source.data_ptr(),)))
        wrong = "" if bool((buffer == 2.0).all()) else "it leaves wrong values"
    except Exception as error:  # whatever Triton or a driver raises: grouped copies do the same
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        log.warning("slots on %s are filled by grouped copies; the fill kernel does not run: %s", device, wrong)
    return wrong


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a device the current one, where it is not: Triton launches on the current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class FusedFiller:
    """Fills buffers from sources of one real size, with one kernel. Made by ``fused``.

    ``rows``: the table. ``fixed``: addresses of jobs that no source of a call serves. ``wide``: jobs that move words
    larger than their elements; a call whose source is not aligned to them is served by a plain filler (``make`` makes
    one), and so is one with sources that are not as ``expected`` (dtype and strides; admission compares them too).
    """

    def __init__(
        self,
        real: Sequence[torch.Tensor],
        rows: Sequence[Sequence[int]],
        fixed: dict[int, int],
        copied: Sequence[int],
        wide: Collection[int],
        expected: Sequence[tuple[torch.dtype, Sequence[int]]],
        device: torch.device,
        make: Callable[[], Filler],
    ) -> None:
        self.real, self.copied, self.device = real, tuple(copied), device
        self.make, self.plain = make, functools.cache(make)
        self.fixed, self.wide, self.jobs, self.expected = fixed, frozenset(wide), len(rows), tuple(expected)
        blocks = [(job, at) for job, row in enumerate(rows) for at in range(0, row[1], BLOCK)]
        self.grid = (len(blocks),)
        self.table_words = _even([word for row in rows for word in row])
        self.block_words = _even([word for block in blocks for word in block])
        self.memory: torch.Tensor | None = None
        #: The stream that the memory was used on last: it must not be given away while another one still reads it.
        self.stream = 0
        #: By the addresses of the sources: their place on the device; ``None``: this kernel does not serve them.
        self.known: dict[tuple[int, ...], torch.Tensor | None] = {}
        self.places: list[tuple[int, ...] | None] = [None] * KNOWN
        self.next = 0
        self.once: set[tuple[int, ...]] = set()
        #: Operations of the last fill.
        self.launches = 1

    def fill(self, sources: Sequence[torch.Tensor], between: Callable[[], None] | None = None) -> None:
        """As ``Filler.fill``; ``between`` runs first: the kernel reads what it writes."""
        if between is not None:
            between()
        with guard(self.device):
            addresses = None
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not capturing:
                pointers = tuple([sources[i].data_ptr() for i in self.copied])
                addresses = self.known[pointers] if pointers in self.known else self._met(pointers, sources)
            if addresses is not None:
                self.launches = 1
                self.launch(addresses)
                return
            # What a plain filler makes inside a capture is the capture's: not to be kept.
            plain = self.make() if capturing else self.plain()
            plain.fill(sources)
            self.launches = plain.launches

    def launch(self, addresses: torch.Tensor | None) -> None:
        """One kernel on the current stream of the current device, which is that of the buffers."""
        assert self.memory is not None
        assert addresses is not None
        if self.device.type == "cuda" and (stream := current_raw_stream(self.device)) != self.stream:
            self.stream = stream
            self.memory.record_stream(torch.cuda.current_stream(self.device))
        if self.grid[0]:
            fill_kernel[self.grid](self.table, addresses, self.blocks, HEAD, COLUMNS, BLOCK)

    def _met(self, pointers: tuple[int, ...], sources: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Source addresses that the device does not have: put there, unless they may never come again."""
        if self.jobs < UPLOAD_FROM and pointers not in self.once:
            if len(self.once) >= 16 * KNOWN:
                self.once.clear()
            self.once.add(pointers)
            return None
        if not all(self._serves(sources[i], *what) for i, what in zip(self.copied, self.expected, strict=True)):
            return None
        return self.upload(pointers)

    def _serves(self, source: torch.Tensor, dtype: torch.dtype, strides: Sequence[int]) -> bool:
        """Whether the bits at a source's address are its values, laid out as the table says."""
        laid = all(n <= 1 or a == b for n, a, b in zip(source.shape, source.stride(), strides, strict=True))
        here = source.device == self.device and source.dtype is dtype
        return laid and here and not (source.is_conj() or source.is_neg())

    def upload(self, pointers: tuple[int, ...]) -> torch.Tensor | None:
        """Source addresses by job, on the device, in the place of those that came first; ``None``: not aligned."""
        if self.memory is None:
            self._place()
        row = [0] * (self.jobs + self.jobs % 2)
        for job, pointer in (*zip(self.copied, pointers, strict=True), *self.fixed.items()):
            row[job] = pointer
        if (before := self.places[self.next]) is not None:
            self.known.pop(before, None)  # first: what follows may run out of memory
        made = None
        if not any(row[job] % 8 for job in self.wide):
            made = self.rows[self.next]
            self._send(made, row)
        self.places[self.next] = pointers
        self.next = (self.next + 1) % KNOWN
        self.known[pointers] = made
        return made

    def _place(self) -> None:
        """Everything that stays, in one piece of memory. Its parts begin at even words: Triton compiles anew for
        addresses that 16 does not divide."""
        words = [*self.table_words, *self.block_words]
        width = self.jobs + self.jobs % 2
        with torch.inference_mode(False), torch.no_grad():
            memory = torch.empty(len(words) + KNOWN * width, dtype=torch.int64, device=self.device)
            self.rows = [memory.narrow(0, len(words) + k * width, width) for k in range(KNOWN)]
            self.table = memory.narrow(0, 0, len(self.table_words))
            self.blocks = memory.narrow(0, len(self.table_words), len(self.block_words))
        self._send(memory.narrow(0, 0, len(words)), words)
        if self.device.type == "cuda":
            self.stream = current_raw_stream(self.device)
        self.memory = memory  # last: what came before may run out of memory

    def _send(self, target: torch.Tensor, words: Sequence[int]) -> None:
        """Copy to the device without waiting; torch keeps the pinned memory until that is done."""
        with torch.inference_mode(False), torch.no_grad():
            host = torch.tensor(words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            target.copy_(host, non_blocking=True)


def _even(words: Sequence[int]) -> list[int]:
    return [*words, *([0] * (len(words) % 2))]


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
    expected = [(buffers[i].dtype, tuple(strides[i])) for i in copied]
    if not rows:
        return None

    def make() -> Filler:
        return Filler(buffers, windows, sizes, filled, tails, numbers)

    return FusedFiller(real, rows, fixed, copied, wide - set(filled), expected, buffers[0].device, make)


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
