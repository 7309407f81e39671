"""The kernel that fills everything in one launch, bit for bit against the grouped copies.

On a machine without a GPU the kernel runs under Triton's interpreter, which has to be turned on before the kernel is
defined: so this file runs itself once more, in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from graph_harness import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import CUDA, INTERPRETED, run_again

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.passes.padding_tails import STALE, Tail
from torch_graph_backend.recorders import fill_choice
from torch_graph_backend.slots import Factor, Filler, Window

BENCH = Path(__file__).resolve().parent.parent / "docs" / "bench" / "fill.json"

pytest.importorskip("triton", reason="needs Triton, which a CPU build of PyTorch comes without")

HERE = INTERPRETED or CUDA
inside = pytest.mark.skipif(not HERE, reason="test_under_the_interpreter runs it")
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")

N, M = sympy.symbols("N M", integer=True, positive=True)
BUCKET = {N: 6, M: 5}
GUARD = 4
FOREIGN = 99


@pytest.mark.skipif(HERE, reason="this is the inner run, or there is a GPU")
def test_under_the_interpreter() -> None:
    """All the rest of this file."""
    run_again(__file__, skipped="2", timeout=500)


@pytest.mark.skipif(HERE, reason="a GPU compiles it for itself; the interpreter compiles nothing")
def test_it_compiles_for_a_gpu() -> None:
    """What the interpreter takes and the compiler does not would show on a GPU only."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from torch_graph_backend.recorders.fill_triton import BLOCK, COLUMNS, HEAD, fill_kernel

    constants = {"head": HEAD, "columns": COLUMNS, "block": BLOCK}
    signature = dict.fromkeys(("table", "sources", "blocks"), "*i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=fill_kernel, signature=signature, constexprs=constants)
    assert compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.fixture(autouse=True)
def every_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few jobs: else the copies would serve addresses that come for the first time."""
    from torch_graph_backend.recorders import fill_triton

    monkeypatch.setattr(fill_triton, "UPLOAD_FROM", 0)


def fused(*args: Any, **kwargs: Any) -> Any:
    from torch_graph_backend.recorders.fill_triton import fused as make

    return make(*args, **kwargs)


#: Sizes, in which N and M are padded.
SHAPES = [(N,), (N, 4), (N, 3, 2), (3, N), (N, M), (2, N, M, 4), (5,), (N, 1, 8), (7, 3), (), (1, N, 1)]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.int32, torch.uint8, torch.float64]
TAILS = [None, Tail(0), Tail(1), STALE]


def at(shape: tuple, sizes: dict) -> tuple[int, ...]:
    return tuple(sizes.get(d, d) for d in shape)


def window(shape: tuple) -> Window:
    return Window(tuple((i, (Factor(BUCKET[d], d),)) for i, d in enumerate(shape) if d in BUCKET))


class Pair:
    """Two equal buffers in foreign memory: one for each way."""

    def __init__(self, shape: tuple, dtype: torch.dtype, transposed: bool, offset: int) -> None:
        self.shape, self.dtype, self.transposed = shape, dtype, transposed
        full = at(shape, BUCKET)
        numel = torch.Size(full).numel()
        self.memories = [torch.full((numel + 2 * GUARD + offset,), FOREIGN, device=DEVICE).to(dtype) for _ in range(2)]
        self.buffers = []
        for memory in self.memories:
            inner = memory[GUARD + offset : GUARD + offset + numel]
            laid = inner.view(full[::-1]).permute([*range(len(full))][::-1]) if transposed else inner.view(full)
            laid.copy_(torch.arange(numel, device=DEVICE).view(full))
            self.buffers.append(laid)

    def source(self, real: dict, seed: int, odd: int) -> torch.Tensor:
        """Strided as its buffer is; ``odd`` elements into its memory."""
        shape = at(self.shape, real)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 90, shape, generator=generator).to(self.dtype)
        memory = torch.zeros(values.numel() + odd, dtype=self.dtype, device=DEVICE)
        laid = (
            memory[odd:].view(shape[::-1]).permute([*range(len(shape))][::-1])
            if self.transposed
            else memory[odd:].view(shape)
        )
        return laid.copy_(values)


kinds = st.tuples(
    st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(TAILS), st.booleans(), st.integers(0, 3)
)
calls = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=3)


@inside
@settings(max_examples=25 if DEVICE.type == "cpu" else 200, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=5), calls)
def test_the_same_bits_as_grouped_copies(chosen: list, sizes: list) -> None:
    """Any shapes, layouts, element sizes, tails and alignments, call after call; nothing beside a slot is written."""
    pairs = [Pair(shape, dtype, transposed, offset) for shape, dtype, _, transposed, offset in chosen]
    windows = [window(shape) for shape, *_ in chosen]
    tails = [tail for _, _, tail, *_ in chosen]
    counts = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2)]
    for k, (n, m, odd) in enumerate(sizes):
        real = {N: n, M: m}
        sources = [p.source(real, 7 * k + i, odd) for i, p in enumerate(pairs)]
        one, two = ([p.buffers[i] for p in pairs] for i in range(2))
        Filler(one, windows, real, tails=tails, numbers=[(counts[0], n)]).fill(sources)
        strides = [s.stride() for s in sources]
        filler = fused(two, windows, real, strides, tails=tails, numbers=[(counts[1], n)])
        assert filler is not None
        filler.fill(sources)
        for pair in pairs:
            assert torch.equal(*pair.memories)
        assert torch.equal(*counts)


@inside
def test_the_same_addresses_are_copied_to_the_device_once() -> None:
    pair = Pair((N, 4), torch.float32, False, 0)
    sources = [[pair.source({N: 3}, seed, 0)] for seed in range(3)]
    filler = fused([pair.buffers[1]], [window((N, 4))], {N: 3}, [(4, 1)])
    sends = []
    for i in (0, 1, 0, 2, 1, 0):
        with counted(filler) as sent:
            filler.fill(sources[i])
        assert torch.equal(pair.buffers[1][:3], sources[i][0])
        assert torch.equal(pair.buffers[1][3:], sources[i][0][:1].expand(3, 4))
        sends.append(len(sent))
    assert sends == [2, 1, 0, 1, 0, 0]  # the table and an address, then addresses, and nothing for one seen before


@contextmanager
def counted(filler: Any) -> Iterator[list[Any]]:
    """The targets of the copies to the device inside."""
    sent: list[Any] = []
    real = filler._send
    filler._send = lambda target, words: sent.append(target) or real(target, words)
    try:
        yield sent
    finally:
        filler._send = real


@inside
def test_few_jobs_are_copied_where_addresses_never_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies serve an address once; the second time it is worth a place on the device. Both count what they did."""
    from torch_graph_backend.recorders import fill_triton

    monkeypatch.setattr(fill_triton, "UPLOAD_FROM", 8)
    buffer = torch.zeros(6, 2, device=DEVICE)
    window = Window(((0, (Factor(6, N),)),))
    filler = fused([buffer], [window], {N: 4}, [(2, 1)])
    sources = [torch.full((4, 2), float(k), device=DEVICE) for k in range(300)]
    for k, source in enumerate(sources):
        filler.fill([source])
        assert torch.equal(buffer, torch.full((6, 2), float(k), device=DEVICE))
        assert filler.launches == filler.plain().launches > 1
    assert not filler.known
    assert len(filler.once) < 300
    for _ in range(2):
        filler.fill([sources[-1]])
        assert filler.launches == 1
    assert len(filler.known) == 1
    assert torch.equal(buffer, torch.full((6, 2), 299.0, device=DEVICE))


@inside
def test_more_addresses_than_are_kept() -> None:
    """A further one takes the place of the one that came first, which is copied anew when it comes back. No memory of
    the device is asked for again."""
    from torch_graph_backend.recorders.fill_triton import KNOWN

    pair = Pair((N, 4), torch.float32, False, 0)
    sources = [[pair.source({N: 3}, seed, 0)] for seed in range(KNOWN + 3)]
    filler = fused([pair.buffers[1]], [window((N, 4))], {N: 3}, [(4, 1)])
    filler.fill(sources[0])
    memory, rows = filler.memory, {row.data_ptr() for row in filler.rows}
    order = [*range(KNOWN + 3), *random.Random(0).sample(range(KNOWN + 3), KNOWN)]
    for i in order:
        filler.fill(sources[i])
        assert torch.equal(pair.buffers[1][:3], sources[i][0])
    assert len(filler.known) == KNOWN
    assert filler.memory is memory
    assert {row.data_ptr() for row in filler.known.values()} == rows
    with counted(filler) as sent:
        filler.fill(sources[order[-1]])
        filler.fill(next(s for s in sources if (s[0].data_ptr(),) not in filler.known))
    assert len(sent) == 1


@inside
def test_an_address_that_could_not_be_sent_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out while the table, or an address, is put on the device: the next fill does it again."""
    pair = Pair((N, 4), torch.float32, False, 0)
    sources = [[pair.source({N: 3}, seed, 0)] for seed in range(3)]
    filler = fused([pair.buffers[1]], [window((N, 4))], {N: 3}, [(4, 1)])
    real = filler._send
    for k, source in enumerate(sources):
        with monkeypatch.context() as patch:

            def out_of_memory(*_: Any) -> None:
                raise torch.OutOfMemoryError("injected")

            patch.setattr(filler, "_send", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                filler.fill(source)
        assert filler._send == real
        assert len(filler.known) == k
        filler.fill(source)
        assert torch.equal(pair.buffers[1][:3], source[0])


@inside
def test_sources_that_are_not_as_the_table_says_are_copied() -> None:
    """Another layout, another dtype, values that are not the bits in memory (a lazy conjugate or negative): the plain
    copies know what they mean."""
    for dtype, spoil in [
        (torch.float32, lambda t: t.repeat(1, 2)[:, ::2]),
        (torch.float32, lambda t: t.t().contiguous().t()),
        (torch.float32, lambda t: t.double()),
        (torch.float32, torch._neg_view),
        (torch.complex64, lambda t: (t + 1j).conj()),
    ]:
        pair = Pair((N, 4), dtype, False, 0)
        source = spoil(pair.source({N: 3}, 1, 0))
        filler = fused([pair.buffers[1]], [window((N, 4))], {N: 3}, [(4, 1)])
        for _ in range(3):
            filler.fill([source])
            assert torch.equal(pair.buffers[1][:3], source.to(dtype).resolve_conj().resolve_neg())
            assert filler.launches == filler.plain().launches > 1


@inside
def test_a_kernel_that_does_not_run_is_found_out_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Triton needs a C compiler of the user, which may be missing: grouped copies then, and one line in the log."""
    from torch_graph_backend.recorders import fill_triton

    monkeypatch.setattr(fill_choice, "ENABLED", True)
    monkeypatch.setattr(fill_choice, "DEVICES", {"cuda", "cpu"})
    buffers = [torch.zeros(6, 4, device=DEVICE) for _ in range(2)]
    fill_triton.failure.cache_clear()
    assert fill_choice.fusable(buffers)
    for broken, text in ((None, "is not subscriptable"), (_Nothing(), "wrong values")):
        fill_triton.failure.cache_clear()
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(fill_triton, "fill_kernel", broken)
            assert not fill_choice.fusable(buffers)
            assert not fill_choice.fusable(buffers)
        assert [text in r.getMessage() for r in caplog.records] == [True]
        assert not fill_choice.fusable(buffers)
    fill_triton.failure.cache_clear()


@inside
def test_everything_happens_on_the_device_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial run, uploads, launches and plain copies: Triton takes whatever device is current."""
    from torch_graph_backend.recorders import fill_triton

    inside_of: list[torch.device] = []
    kernel, outside = fill_triton.fill_kernel, []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        inside_of.append(device)
        yield
        inside_of.pop()

    class Watched:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            outside.append(not inside_of)
            return kernel[grid]

    monkeypatch.setattr(fill_triton, "fill_kernel", Watched())
    monkeypatch.setattr(fill_triton, "guard", guard)
    fill_triton.failure.cache_clear()
    assert fill_triton.failure(DEVICE) == ""
    pair = Pair((N, 4), torch.float32, False, 0)
    filler = fused([pair.buffers[1]], [window((N, 4))], {N: 3}, [(4, 1)])
    send, plain = filler._send, filler.make()
    monkeypatch.setattr(filler, "_send", lambda *a: outside.append(not inside_of) or send(*a))
    monkeypatch.setattr(filler, "plain", lambda: outside.append(not inside_of) or plain)
    for odd in (0, 0, 1):
        filler.fill([pair.source({N: 3}, 1, odd)])
    assert outside
    assert not any(outside)


def test_the_guard_changes_the_device_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_graph_backend.recorders.fill_triton import guard

    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda d: entered.append(d) or nullcontext())
    for name in ("cpu", "cuda:0", "cuda:1", "cuda:0"):
        with guard(torch.device(name)):
            pass
    assert entered == [torch.device("cuda", 1)]


class _Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_: None


@inside
def test_where_the_kernel_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as shipped; and wherever buffers are not on one device of a kind that it runs on."""
    buffers = [torch.zeros(6, 4, device=DEVICE) for _ in range(2)]
    monkeypatch.setattr(fill_choice, "DEVICES", {DEVICE.type})
    assert fill_choice.fusable(buffers) is fill_choice.ENABLED
    monkeypatch.setattr(fill_choice, "ENABLED", True)
    assert fill_choice.fusable(buffers)
    assert not fill_choice.fusable([*buffers, torch.zeros(6, 4, device="meta")])
    assert not fill_choice.fusable([])
    monkeypatch.setattr(fill_choice, "DEVICES", {"another"})
    assert not fill_choice.fusable(buffers)


@inside
def test_what_the_kernel_cannot_fill_is_left_to_the_copies() -> None:
    """16 bytes an element, five dimensions that do not merge, padding inside of a dimension."""
    wide = torch.zeros(6, dtype=torch.complex128, device=DEVICE)
    assert fused([wide], [window((N,))], {N: 3}, [(1,)]) is None
    many = torch.zeros(3, 3, 3, 3, 6, device=DEVICE).permute(4, 3, 2, 1, 0)
    assert fused([many], [window((N, 3, 3, 3, 3))], {N: 3}, [(81, 27, 9, 3, 1)]) is None
    inner = Window(((0, (Factor(6, N), Factor(2))),))
    assert fused([torch.zeros(12, device=DEVICE)], [inner], {N: 3}, [(1,)]) is None


@inside
def test_no_size_compiles_anew() -> None:
    """The kernel takes the addresses of its tables, and three constants that never change."""
    from torch_graph_backend.recorders.fill_triton import fill_kernel

    if INTERPRETED:
        for jobs in range(1, 6):  # Triton compiles anew for an address that 16 does not divide
            pairs = [Pair((N, 3), torch.int16, False, 0) for _ in range(jobs)]
            filler = fused([p.buffers[1] for p in pairs], [window((N, 3))] * jobs, {N: 3}, [(3, 1)] * jobs)
            filler.fill([p.source({N: 3}, 0, 0) for p in pairs])
            places = [t.storage_offset() for t in (filler.table, filler.blocks, *filler.rows)]
            assert not any(at % 2 for at in places)
        assert fill_kernel.arg_names == ["table", "sources", "blocks", "head", "columns", "block"]
        return
    compiled_before = None
    for n in (1, 2, 3, 5, 6):
        pair = Pair((N, 4), torch.float32, False, 0)
        fused([pair.buffers[1]], [window((N, 4))], {N: n}, [(4, 1)]).fill([pair.source({N: n}, n, n % 2)])
        found = sum(len(c[0]) for c in fill_kernel.device_caches.values())
        assert compiled_before in (None, found)
        compiled_before = found


def one(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    z = torch.relu(x @ x.new_ones(4, 4)) + y
    return z * x.shape[0] + i.unsqueeze(-1)


@inside
@pytest.mark.parametrize("tail", ["REPEAT_ROW", "ZERO", "FILL_ONCE"])
def test_through_the_backend(tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With computed slots and counts, one launch a replay; every answer is eager's."""
    monkeypatch.setattr(fill_choice, "FUSED_FROM", 1)
    monkeypatch.setattr(fill_choice, "fusable", lambda _: True)
    slots = {"x": {"padding": tail}, "y": {"copy_from_fb": False, "post_fill": lambda rows, a: rows.copy_(a["x"] + 1)}}
    with compiled(one, dynamic=True, buckets=[8], slots=slots) as g:
        launches = []
        for n in (5, 6, 3, 7, 5, 7):
            x, y, i = torch.randn(n, 4, device=DEVICE), torch.randn(n, 4, device=DEVICE), torch.arange(n, device=DEVICE)
            torch.testing.assert_close(g(x, y, i), one(x, x + 1, i))
            launches.append(tgb.stats(g).fill_launches)
        tgb.stats(g).expect(first_calls=1, replays=5)
        assert [b - a for a, b in itertools.pairwise(launches)] == [1] * 5
        (graph,) = [x for x in registry.graphs_of(g) if x.plan.bucketed]
        (entry,) = graph.entries.values()
        assert {type(f.slot_filler).__name__ for f in entry.frames.values()} == {"FusedFiller"}


def test_the_choice_is_what_the_bench_says() -> None:
    """``FUSED_FROM`` is the least count of slots from which on the kernel wins, by the time until the device is done,
    at the addresses that come again and again; ``None`` while nothing is measured."""
    if not BENCH.exists():
        assert fill_choice.FUSED_FROM is None
        return
    rows = [r for r in json.loads(BENCH.read_text(encoding="utf-8"))["rows"] if r["addresses"] == "same"]
    assert winner(rows) == fill_choice.FUSED_FROM


def winner(rows: list[dict[str, Any]]) -> int | None:
    """The least count from which on the kernel is faster under every kind of tail."""
    total: Callable[[str, int, str], float] = lambda way, n, tails: next(  # noqa: E731
        r["total_us"] for r in rows if (r["way"], r["slots"], r["tails"]) == (way, n, tails)
    )
    kinds = {r["tails"] for r in rows}
    good = {n: all(total("fused", n, k) < total("grouped", n, k) for k in kinds) for n in {r["slots"] for r in rows}}
    wins = [n for n in good if all(good[m] for m in good if m >= n)]
    return min(wins, default=None)


def test_the_winner() -> None:
    def row(way: str, n: int, us: float) -> dict[str, Any]:
        return {"way": way, "slots": n, "tails": "row 0", "total_us": us}

    def rows(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            row(w, n, us)
            for n, p in zip((2, 10, 40), pairs, strict=True)
            for w, us in zip(("grouped", "fused"), p, strict=True)
        ]

    assert winner(rows((5, 9), (20, 10), (80, 11))) == 10
    assert winner(rows((5, 3), (20, 10), (80, 11))) == 2
    assert winner(rows((5, 3), (20, 10), (80, 99))) is None
