"""One test a kind of fault that was found by attacking the backend: the answer, the state and the errors are eager's.

Each compares call after call, over changing sizes, with poisoned tails where padding is involved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_graph_backend as tgb

W = torch.arange(16.0).reshape(4, 4).sin()
TABLE = torch.arange(40.0).reshape(10, 4).cos()


def rows(n: int, *more: int) -> torch.Tensor:
    return torch.randn(n, *more, 4)


def agree(
    function: Callable[..., Any],
    sizes: Sequence[Any],
    make: Callable[..., tuple[torch.Tensor, ...]],
    dims: Sequence[int] = (0,),
    compiled: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Call eager and compiled code with equal arguments; answers, arguments and raised types must be equal."""
    fast = torch.compile(function, backend="bcg", options=options or None) if compiled is None else compiled
    for size in sizes:
        torch.manual_seed(sum(size) if isinstance(size, tuple) else size)
        args = make(*size) if isinstance(size, tuple) else make(size)
        theirs = copy.deepcopy(args)
        for t in theirs:
            for d in dims:
                if t.dim() > d and t.size(d) > 1:
                    torch._dynamo.maybe_mark_dynamic(t, d)
        with torch.no_grad():
            want, got = (outcome(f, a) for f, a in ((function, args), (fast, theirs)))
        if isinstance(want, str):
            assert got == want
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, size=size: f"at {size}: {m}")
        torch.testing.assert_close(theirs, args, rtol=1e-5, atol=1e-5)
    return fast


def outcome(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        out = function(*args)
    except (IndexError, RuntimeError, ZeroDivisionError) as error:
        return type(error).__name__
    return [t.clone() for t in (out if isinstance(out, tuple) else (out,))]


def assert_replayed(function: Callable[..., Any]) -> None:
    stats = tgb.stats(function)
    assert stats.replays == stats.calls - stats.first_calls, stats
    assert stats.replays > 0, stats


def test_writes_to_the_callers_memory_keep_their_place_before_what_can_raise() -> None:
    """``c.add_(1)`` before an index out of range must have happened when the error arrives."""

    def f(c: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        c.add_(1)
        return TABLE[i] @ W + x

    def make(n: int) -> tuple[torch.Tensor, ...]:
        i = torch.randint(0, 10, (n,))
        if n == 7:
            i[3] = 99
        return torch.zeros(4), i, rows(n)

    agree(f, (5, 6, 5, 6, 7, 8, 7), make)


def test_running_statistics_are_read_after_the_update_that_no_schema_shows() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.norm(self.linear(x)), self.norm.running_mean * 2 + 1

    net = Net()
    twin = copy.deepcopy(net)
    agree(net, (5, 6, 5, 6, 7), lambda n: (rows(n),), compiled=torch.compile(twin, backend="bcg"))
    torch.testing.assert_close(twin.state_dict(), net.state_dict())


KEPT: list[torch.Tensor] = []


@torch.library.custom_op("tgb_kinds::keep", mutates_args=())
def keep(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x)
    return x * 2


@keep.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operation_may_keep_what_it_was_given() -> None:
    """A view of static memory would change under it at the next call."""
    KEPT.clear()
    fast = torch.compile(lambda x: keep(torch.relu(x @ W)) @ W, backend="bcg")
    want = []
    with torch.no_grad():
        for n in (5, 6, 5, 6, 7, 8, 8, 7):
            x = rows(n)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            fast(x)
            want.append(torch.relu(x @ W))
    torch.testing.assert_close(KEPT, want)


def test_inference_tensors_changed_in_place() -> None:
    """Caches allocated and used under ``inference_mode``: the usual set-up of a server."""

    def f(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.add_(1)
        return x @ W + b

    fast = torch.compile(f, backend="bcg")
    with torch.inference_mode():
        mine, theirs = torch.zeros(4), torch.zeros(4)
        for n in (5, 6, 5, 6, 7, 7):
            x = rows(n)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(fast(x, theirs), f(x, mine))
    torch.testing.assert_close(theirs, mine)
    assert tgb.stats(fast).replays > 0


def test_inference_mode_inside_the_function() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return (x @ W) * 2

    fast = torch.compile(f, backend="bcg")
    with torch.no_grad():
        for n in (5, 6, 5):
            assert fast(rows(n)).is_inference()


def test_buffers_that_share_memory() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.arange(8.0))
            self.register_buffer("b", self.a[2:6])
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a.masked_fill_(torch.rand_like(self.a) < 2, 7.0)
            return self.linear(x) + self.b

    net, twin = Net(), Net()
    twin.linear.load_state_dict(net.linear.state_dict())
    fast = torch.compile(twin, backend="bcg")
    with torch.no_grad():
        for n in (5, 6, 5, 6):
            for m in (net, twin):
                m.a.copy_(torch.arange(8.0) * n)
            torch.testing.assert_close(fast(x := rows(n)), net(x))


def test_two_results_of_one_operation() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x @ W).topk(2, 1))

    fast = agree(f, (5, 6, 5, 6), lambda n: (rows(n),))
    assert tgb.plans(fast)[-1].captured_ops()["aten.topk"] == 1
    assert_replayed(fast)


def test_two_padded_sizes_in_a_fresh_dimension() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, t, _ = x.shape
        return x @ W, torch.zeros(b * t, 4) + 1, W[:1].expand(b * t, 4) * 2

    sizes = ((7, 5), (8, 6), (7, 5), (8, 5), (7, 6), (5, 3), (6, 4))
    agree(f, sizes, lambda b, t: (rows(b, t),), dims=(0, 1))


def write_square(x: torch.Tensor) -> torch.Tensor:
    v = x @ W
    v[: x.shape[1]] = 0
    return v


def write_mask(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.zeros(64, x.shape[1])
    z[: x.shape[1]] = 1
    return x @ W, z.sum(1) + 1


def add_square(x: torch.Tensor) -> torch.Tensor:
    v = x @ W
    v[: x.shape[1]] += x[0, :, None, :1]
    return v.relu()


@pytest.mark.parametrize("function", [write_square, write_mask, add_square])
def test_writes_through_as_many_rows_as_another_dimension_has(function: Callable[..., Any]) -> None:
    """At the bucket such a view covers more rows than at the real size, and they are not padding."""
    agree(function, ((7, 5), (8, 6), (7, 5), (8, 5), (7, 5), (8, 3)), lambda b, t: (rows(b, t),), dims=(0, 1))


def test_positions_beyond_the_embedding() -> None:
    """Rows of a position table beyond the real size need not be valid indices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.arange(512).unsqueeze(0))
            self.table, self.linear = nn.Embedding(60, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table(self.positions[:, : x.size(1)])

    fast = agree(Net(), (50, 57, 58, 60, 58, 60), lambda n: (torch.randn(2, n, 4),), dims=(1,))
    assert tgb.stats(fast).replays > 0


def test_integer_division_by_what_counts_on_in_padded_rows() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        d = torch.arange(x.size(0)) - 7
        return x @ W, 100 // d, torch.full((1,), 100) % d

    agree(f, (5, 7, 5, 7), lambda n: (rows(n),))


LIBRARY = torch.library.Library("tgb_kinds2", "DEF")
LIBRARY.define("noise(Tensor x) -> Tensor")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("noise", lambda x: x + torch.rand(4), "CompositeExplicitAutograd")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
for _name in ("noise", "twice"):
    torch.library.register_fake(f"tgb_kinds2::{_name}", torch.empty_like, lib=LIBRARY)


def noise_in_an_op(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = (torch.ops.tgb_kinds2.twice(x @ W) @ W).relu()
    c = torch.ops.tgb_kinds2.noise(v)
    return c @ W, torch.rand(4) + 1


def noise_in_a_branch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = (torch.ops.tgb_kinds2.twice(x @ W) @ W).relu()
    c = torch.cond(v.sum() > -1e9, lambda a: a + torch.rand(4), lambda a: a - torch.rand(4), (v,))
    return c @ W, torch.rand(4) + 1


@pytest.mark.parametrize("function", [noise_in_an_op, noise_in_a_branch])
def test_random_numbers_are_drawn_in_program_order(function: Callable[..., Any]) -> None:
    fast = torch.compile(function, backend="bcg")
    with torch.no_grad():
        for n in (5, 6, 5, 6):
            x = rows(n)
            torch.manual_seed(1)
            want = function(x)
            torch.manual_seed(1)
            torch.testing.assert_close(fast(x), want)


def test_a_branch_that_works_in_place_by_keyword() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ W
        z = torch.cond(
            x.sum() > -1e9, lambda a: F.relu(a, inplace=True) + 1, lambda a: F.relu(a, inplace=True) - 1, (y,)
        )
        return z @ W, y * 2, y

    agree(f, (5, 6, 5, 6), lambda n: (rows(n),))


def test_a_captured_write_through_a_view_that_the_caller_gets() -> None:
    def f(c: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = c.view(-1)
        v.add_(1)
        return torch.relu(x @ W) + v, v

    fast = torch.compile(f, backend="bcg")
    mine, theirs, x = torch.zeros(1, 1), torch.zeros(1, 1), rows(5)
    with torch.no_grad():
        for _ in range(4):
            want, got = f(mine, x), fast(theirs, x)
            torch.testing.assert_close(got, want)
            assert got[1].data_ptr() == theirs.data_ptr()
    torch.testing.assert_close(theirs, mine)


LIBRARY.define("increase_(Tensor(a!) x) -> ()")
LIBRARY.impl("increase_", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
torch.library.register_fake("tgb_kinds2::increase_", lambda x: None, lib=LIBRARY)


@pytest.mark.parametrize("shape", [lambda y: y.reshape(-1, 2), lambda y: y.t().reshape(2, -1)])
def test_a_value_of_derived_size_changed_by_an_eager_operation(shape: Callable[..., Any]) -> None:
    """2 * n rows: what a later captured operation reads cannot be padded from outside."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = torch.relu(shape(x @ W))
        torch.ops.tgb_kinds2.increase_(v)
        return (v * 2 + 1).tanh(), x @ W

    agree(f, (5, 6, 5, 6, 7, 8, 7), lambda n: (rows(n),))


def diagonal_of_a_view(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = m[:3]
    v.diagonal().fill_(1)
    return x @ W, v


def steps_of_a_view(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = m.view(-1)
    v[::2].mul_(2)
    return x @ W, v


def rows_of_a_transpose(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = m.t()
    v[0].add_(1)
    y = (x @ W) + m[0]
    v[1].add_(2)
    return y, v, m[2]


@pytest.mark.parametrize("function", [diagonal_of_a_view, steps_of_a_view, rows_of_a_transpose])
def test_writes_through_a_view_of_a_view_that_the_caller_gets(function: Callable[..., Any]) -> None:
    """The outer view is made eagerly; a captured view of it would be one of a copy."""
    m = torch.randn(4, 4)
    agree(function, (5, 6, 5, 6, 5), lambda n: (rows(n), m.clone()))


def test_the_exact_size_is_used_where_the_bucket_is_not_valid() -> None:
    """A table of 54 rows, size 50, bucket 56: the exact size is a key of its own."""
    table = torch.randn(54, 4)
    fast = agree(
        lambda x, t: torch.relu(x @ W + t[: x.shape[0]]), (5, 50, 50, 50), lambda n: (rows(n), table), buckets=[8, 56]
    )
    assert_replayed(fast)


def test_strides_and_offsets_of_inputs_need_not_be_known() -> None:
    """Static memory has strides of its own: a slice with gaps is captured all the same."""
    for make in (lambda n: (rows(n + 3)[3:],), lambda n: (rows(2 * n)[::2],), lambda n: (torch.randn(n, 8)[:, ::2],)):
        torch._dynamo.reset()
        fast = agree(lambda x: torch.relu(x @ W) * 2, (5, 6, 7, 5), make, buckets=[8])
        assert tgb.plans(fast)[-1].captured_ops()["aten.matmul"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_first_rows_of_a_convolution(dtype: torch.dtype) -> None:
    """Tails are copies of row 0; a kernel may multiply what is behind the last window by zero (oneDNN, bfloat16)."""
    w = torch.randn(16, 1, 10).to(dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (F.conv1d(x, w, stride=5) * 2).relu() * 2

    fast = torch.compile(f, backend="bcg", options={"buckets": [64, 128]})
    with torch.no_grad():
        for n in (110, 115, 110, 51, 50, 115):
            x = torch.randn(2, 1, n).to(dtype)
            x[..., 0] = float("inf")
            torch._dynamo.mark_dynamic(x, 2)
            assert torch.equal(fast(x).isfinite(), f(x).isfinite()), f"{n} samples"


def test_a_recurrence_over_a_padded_batch() -> None:
    """A loop that is written out is proved like any other operations: padded rows of the batch stay apart."""
    from torch._higher_order_ops.scan import scan

    w = torch.randn(4, 4) / 2

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = torch.tanh(carry @ w + row)
            return carry, carry / (1 + carry.sum(-1, keepdim=True).abs())

        last, seen = scan(step, torch.zeros_like(x[:, 0]), x, dim=1)
        # ``scan`` puts the steps in front on torch 2.11, in ``dim`` later. A mere stack of results would stay eager.
        return last, seen.sigmoid()

    fast = torch.compile(f, backend="bcg")
    with torch.no_grad():
        for n in (5, 6, 5, 9, 7, 6, 11):
            x = rows(n, 3, 4)
            torch.testing.assert_close(fast(x), f(x), rtol=1e-6, atol=1e-6)
    assert_replayed(f)
    assert not any(op.reason for plan in tgb.plans(f) for region in plan.regions for op in region.ops)


def test_tensors_that_dynamo_leaves_in_the_graph() -> None:
    """Under Inductor's freezing a module's tensors are part of the graph: tracing must not change them."""
    import torch._inductor.config as inductor_config

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return torch.relu(self.linear(x)) * 2 + self.count

    model = Counting()
    plain = copy.deepcopy(model)
    with inductor_config.patch(freezing=True), torch.no_grad():
        fast = torch.compile(model, backend="bcg")
        for n in (5, 6, 5, 9, 7, 6, 11):
            x = rows(n)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-6, atol=1e-6)
            assert torch.equal(model.count, plain.count)
    assert tgb.stats().replays >= 3


def ends_a_row_early(h: torch.Tensor) -> None:
    h[:-1].mul_(0.5)


def ends_in_the_middle(h: torch.Tensor) -> None:
    h[: h.shape[0] // 2].zero_()


def whole_windows(h: torch.Tensor) -> None:
    h.unfold(0, 2, 2).mul_(3.0)


def shifted_up(h: torch.Tensor) -> None:
    h[:-1] = h[1:].clone()


def shifted_down(h: torch.Tensor) -> None:
    h[1:].add_(h[:-1].clone())


@pytest.mark.parametrize("write", [ends_a_row_early, ends_in_the_middle, whole_windows, shifted_up, shifted_down])
def test_writes_through_a_view_that_ends_before_the_rows_do(write: Callable[[torch.Tensor], None]) -> None:
    """The padded rows of such a view begin on real ones: a captured write would change those."""

    def f(x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x) * 2
        write(h)
        return h + 1

    agree(f, (5, 6, 5, 7, 9, 6, 5, 12), lambda n: (rows(n),))
    assert tgb.stats().replays > 0
