"""Static buffers against an index-by-index oracle: real rows, tails, cuts, strides, and not one byte beside them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import sympy
import torch
import torch.nn.functional as F
from graph_harness import assert_same, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_graph_backend.plan import Padding, TensorSpec
from torch_graph_backend.slots import CutView, Filler, Window, buffer_strides, evaluate

B, T = sympy.symbols("B T", integer=True, positive=True)
CPU = torch.device("cpu")
ONE = sympy.Integer(1)
GUARD = 5  # elements of foreign memory before and after a buffer
FOREIGN = -77

Sizes = dict[sympy.Symbol, int]


@dataclass(frozen=True)
class Case:
    """A tensor whose dimensions are products of factors, by its layout in memory, at a bucket and at real sizes."""

    dims: tuple[tuple[sympy.Expr, ...], ...]
    memory: tuple[int, ...]  # dimensions from the outermost in memory to the innermost
    gap: int  # stride of the innermost dimension
    expanded: frozenset[int]  # dimensions of stride 0
    bucket: tuple[int, int]
    real: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> TensorSpec:
        shape = tuple(sympy.Mul(*factors) for factors in self.dims)
        stride = [ONE] * len(shape)
        step: sympy.Expr = sympy.Integer(self.gap)
        for d in reversed(self.memory):
            stride[d] = sympy.Integer(0) if d in self.expanded else step
            step = step if d in self.expanded else step * shape[d]
        return TensorSpec(shape, tuple(stride), self.dtype, CPU, self.padding)

    @property
    def padding(self) -> Padding:
        out = []
        for d, factors in enumerate(self.dims):
            entries = [
                (f, sympy.Mul(*factors[:k]), sympy.Mul(*factors[k + 1 :])) for k, f in enumerate(factors) if f in (B, T)
            ]
            if entries:
                out.append((d, tuple(sorted(entries, key=str))))
        return tuple(out)

    def sizes(self, which: tuple[int, int]) -> Sizes:
        return {B: which[0], T: which[1]}


constants = st.sampled_from([sympy.Integer(1), sympy.Integer(2), sympy.Integer(3)])
size_pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def cases(draw: st.DrawFn, merged: bool) -> Case:
    """``merged``: factors may share a dimension, as after a view; else each dimension is one symbol or a constant."""
    if merged:
        pool = draw(st.sampled_from([[B], [T], [B, T], [T, B]]))
        factors = list(pool)
        for _ in range(draw(st.integers(0, 3))):
            factors.insert(draw(st.integers(0, len(factors))), draw(constants))
        cuts = sorted(draw(st.sets(st.integers(1, len(factors) - 1)))) if len(factors) > 1 else []
        dims = [tuple(factors[a:b]) for a, b in itertools.pairwise([0, *cuts, len(factors)])]
    else:
        dims = [(draw(st.one_of(st.sampled_from([B, T]), constants)),) for _ in range(draw(st.integers(0, 4)))]
    memory = tuple(draw(st.permutations(range(len(dims)))))
    expanded = draw(st.sets(st.integers(0, len(dims) - 1), max_size=2)) if dims and not merged else set()
    bucket = draw(size_pairs)
    real = (draw(st.integers(1, bucket[0])), draw(st.integers(1, bucket[1])))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16]))
    return Case(tuple(dims), memory, draw(st.sampled_from([1, 1, 2])), frozenset(expanded), bucket, real, dtype)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor can touch."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def guarded(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer inside a larger memory of foreign values, and that memory."""
    memory = torch.full((span(shape, stride) + 2 * GUARD,), FOREIGN, dtype=dtype)
    return memory.as_strided(shape, stride, GUARD), memory


def source_of(case: Case, seed: int) -> torch.Tensor:
    """The caller's tensor at the real sizes, with the strides that the graph was compiled for."""
    sizes = case.sizes(case.real)
    shape = [evaluate(s, sizes) for s in case.spec.shape]
    stride = [evaluate(s, sizes) for s in case.spec.stride]
    return (torch.arange(span(shape, stride)) + seed).to(case.dtype).as_strided(shape, stride)


def assert_foreign_untouched(buffer: torch.Tensor, memory: torch.Tensor) -> None:
    mine = torch.zeros(memory.shape, dtype=torch.bool)
    mine.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset()).fill_(True)
    assert (memory[~mine] == FOREIGN).all()


# --- filling ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(cases(merged=False), min_size=1, max_size=3), size_pairs, st.data())
def test_a_fill_writes_every_row_and_nothing_else(
    many: list[Case], bucket: tuple[int, int], data: st.DataObject
) -> None:
    """Catches a stale row, a wrong tail, mixed-up buffers of a group, and a write beside the buffer."""
    real = (data.draw(st.integers(1, bucket[0])), data.draw(st.integers(1, bucket[1])))
    many = [Case(c.dims, c.memory, c.gap, c.expanded, bucket, real, c.dtype) for c in many]
    made = [guarded(*buffer_strides(c.spec, c.sizes(bucket)), c.dtype) for c in many]
    windows = [Window.at(c.padding, c.sizes(bucket)) for c in many]
    filler = Filler([b for b, _ in made], windows, many[0].sizes(real))
    for seed in (100, 1):
        sources = [source_of(c, seed + i) for i, c in enumerate(many)]
        filler.fill(sources)
        for case, source, (buffer, memory) in zip(many, sources, made, strict=True):
            n = case.sizes(real)
            limits = [n.get(f[0], None) for f in case.dims]
            for at in itertools.product(*map(range, buffer.shape)):
                read = tuple(0 if limit is not None and i >= limit else i for i, limit in zip(at, limits, strict=True))
                assert buffer[at] == source[read], (case, at)
            assert_foreign_untouched(buffer, memory)


@settings(max_examples=100, deadline=None)
@given(cases(merged=False))
def test_a_buffer_has_eagers_strides_and_no_overlap(case: Case) -> None:
    """A kernel that looks at strides must take the same path; an expanded tensor's buffer must hold every row."""
    shape, stride = buffer_strides(case.spec, case.sizes(case.bucket))
    sizes = case.sizes(case.bucket)
    assert shape == tuple(evaluate(s, sizes) for s in case.spec.shape)
    wanted = tuple(evaluate(s, sizes) for s in case.spec.stride)
    spread = any(s == 0 and n > 1 for n, s in zip(shape, wanted, strict=True))
    assert stride == (torch.empty(shape).stride() if spread else wanted)
    places = [sum(i * s for i, s in zip(at, stride, strict=True)) for at in itertools.product(*map(range, shape))]
    assert len(set(places)) == len(places)


def test_an_overlapping_source_fills_a_buffer() -> None:
    """Sliding windows (``unfold``) overlap in memory: their buffer must not, or it cannot be written."""
    spec = TensorSpec((T, sympy.Integer(3)), (ONE, ONE), torch.float32, CPU, ((0, ((T, ONE, sympy.Integer(1)),)),))
    buffer, memory = guarded(*buffer_strides(spec, {T: 4}), torch.float32)
    source = torch.arange(4.0).unfold(0, 3, 1)
    Filler([buffer], [Window.at(spec.padding, {T: 4})], {T: 2}).fill([source])
    assert_same(buffer.clone(), source[[0, 1, 0, 0]])
    assert_foreign_untouched(buffer, memory)


def test_an_overlapping_input_through_the_backend() -> None:
    """The same from the outside: tails that overwrite real rows are a silently wrong answer."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.linear(x, w))

    w = torch.randn(2, 3)
    with compiled(f, buckets=[8]) as g:
        for n in (5, 6, 7):
            x = torch.arange(float(n + 2)).unfold(0, 3, 1)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(g(x, w), f(x, w))


def test_an_expanded_result_through_the_backend() -> None:
    """A private cut of a result that eager hands out expanded: it has stride 0 and cannot be copied into as it is."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).unsqueeze(1).expand(-1, 3, -1)

    w = torch.randn(4, 4)
    with compiled(f, dynamic=True, buckets=[8]) as g:
        for n in (5, 6, 7):
            x = torch.randn(n, 4)
            torch.testing.assert_close(g(x, w), f(x, w))


def test_fills_of_other_sizes_leave_nothing_behind() -> None:
    """A large fill, then a small one: the rows between are row 0 again."""
    case = Case(((T,), (sympy.Integer(2),)), (0, 1), 1, frozenset(), (1, 4), (1, 4))
    buffer, _ = guarded(*buffer_strides(case.spec, case.sizes((1, 4))), torch.float32)
    for n in (4, 1, 3):
        source = torch.randn(n, 2)
        Filler([buffer], [Window.at(case.padding, case.sizes((1, 4)))], {B: 1, T: n}).fill([source])
        assert torch.equal(buffer, torch.cat([source, source[:1].expand(4 - n, 2)]))


# --- windows ----------------------------------------------------------------------------------------------------------


def oracle(case: Case, value: torch.Tensor) -> torch.Tensor:
    """The real rows of ``value``, by splitting every dimension into its factors."""
    bucket, real = case.sizes(case.bucket), case.sizes(case.real)
    split = value.reshape([evaluate(f, bucket) for factors in case.dims for f in factors])
    for d, f in enumerate(f for factors in case.dims for f in factors):
        split = split.narrow(d, 0, evaluate(f, real))
    return split.reshape([evaluate(s, real) for s in case.spec.shape])


def value_of(case: Case) -> torch.Tensor:
    """A captured value at the bucket, laid out as its spec says; entries differ except along expanded dimensions."""
    sizes = case.sizes(case.bucket)
    shape = [evaluate(s, sizes) for s in case.spec.shape]
    stride = [evaluate(s, sizes) for s in case.spec.stride]
    return torch.arange(span(shape, stride) + GUARD).as_strided(shape, stride, GUARD)


@settings(max_examples=250, deadline=None)
@given(cases(merged=True))
def test_real_rows_of_merged_dimensions(case: Case) -> None:
    """``(B*T)`` and ``(T*B)``, outer and inner factors, buckets of one: the window is the real rows, in order."""
    value = value_of(case)
    rows = Window.at(case.padding, case.sizes(case.bucket)).real_rows(value, case.sizes(case.real))
    assert rows.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert torch.equal(rows.reshape(oracle(case, value).shape), oracle(case, value))


@settings(max_examples=100, deadline=None)
@given(cases(merged=True))
def test_split_like_agrees_with_real_rows(case: Case) -> None:
    """What is copied into a split buffer must come split the same way."""
    window = Window.at(case.padding, case.sizes(case.bucket))
    rows = window.real_rows(value_of(case), case.sizes(case.real))
    assert window.split_like(source_of(case, 0), case.sizes(case.real)).shape == rows.shape


@settings(max_examples=250, deadline=None)
@given(st.one_of(cases(merged=True), cases(merged=False)), st.booleans())
def test_cuts_have_eagers_rows_shape_and_strides(case: Case, private: bool) -> None:
    """Catches wrong rows, strides of the bucket instead of eager's, and a private cut that shares memory."""
    value, window = value_of(case), Window.at(case.padding, case.sizes(case.bucket))
    real = case.sizes(case.real)
    cut = CutView(value, case.spec, window, private, real)
    want = oracle(case, value)
    taken = [cut.take(), cut.take()]
    for got in taken:
        assert tuple(got.shape) == tuple(want.shape)
        assert torch.equal(got, want)
        stride = tuple(evaluate(s, real) for s in case.spec.stride)
        assert all(n <= 1 or a == b for n, a, b in zip(got.shape, got.stride(), stride, strict=True)), (
            got.stride(),
            stride,
        )
    places = [t.untyped_storage().data_ptr() for t in (value, *taken)]
    if private:
        assert len(set(places)) == 3
        taken[0].fill_(-1)
        assert torch.equal(taken[1], want)
        assert torch.equal(oracle(case, value), want)


def test_a_cut_follows_its_value() -> None:
    """A cut is made once per real size and taken at every replay: it must read what the replay wrote."""
    spec = TensorSpec((T, sympy.Integer(2)), (sympy.Integer(2), ONE), torch.float32, CPU, ((0, ((T, ONE, ONE),)),))
    value = torch.zeros(4, 2)
    for private in (False, True):
        cut = CutView(value, spec, Window.at(spec.padding, {T: 4}), private, {T: 3})
        for fill in (1.0, 2.0):
            value.fill_(fill)
            assert_same(cut.take(), torch.full((3, 2), fill))


def test_a_leading_cut_is_a_view() -> None:
    """A copy where a view would do costs a kernel at every replay."""
    spec = TensorSpec((T, sympy.Integer(2)), (sympy.Integer(2), ONE), torch.float32, CPU, ((0, ((T, ONE, ONE),)),))
    value = torch.zeros(4, 2)
    cut = CutView(value, spec, Window.at(spec.padding, {T: 4}), False, {T: 3})
    assert not cut.copy
    assert cut.take().data_ptr() == value.data_ptr()


def test_an_inner_cut_is_contiguous_as_in_eager() -> None:
    """A kernel that walks ``data_ptr`` must find eager's memory: an inner cut has to be a copy."""
    spec = TensorSpec((sympy.Integer(2), T), (T, ONE), torch.float32, CPU, ((1, ((T, ONE, ONE),)),))
    value = torch.arange(8.0).view(2, 4)
    got = CutView(value, spec, Window.at(spec.padding, {T: 4}), False, {T: 3}).take()
    assert got.is_contiguous()
    assert torch.equal(got, value[:, :3])


@pytest.mark.parametrize("order", [(B, T), (T, B)])
def test_both_symbols_at_bucket_one(order: tuple[sympy.Symbol, sympy.Symbol]) -> None:
    """With a bucket of one both factors start at the same place: neither order may confuse the window."""
    case = Case(((*order, sympy.Integer(2)),), (0,), 1, frozenset(), (1, 1), (1, 1))
    value = value_of(case)
    assert torch.equal(
        CutView(value, case.spec, Window.at(case.padding, case.sizes((1, 1))), False, case.sizes((1, 1))).take(), value
    )


@pytest.mark.parametrize("expr", [T // 2, sympy.Max(T, B) - 1, sympy.Min(T, 3) * B, sympy.Integer(7)])
def test_evaluate(expr: sympy.Expr) -> None:
    """Size expressions with floor division and bounds are integers at real sizes."""
    got = evaluate(sympy.sympify(expr), {T: 5, B: 2})
    assert got == {"floor(T/2)": 2, str(sympy.Max(T, B) - 1): 4, str(sympy.Min(T, 3) * B): 6, "7": 7}[str(expr)]
    assert type(got) is int
