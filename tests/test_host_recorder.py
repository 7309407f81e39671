"""The host recorder: recording executes nothing, replay equals eager, and CUDA-graph bugs corrupt here too."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_graph_backend.recorders.base import Recording
from torch_graph_backend.recorders.host import CaptureError, HostRecorder, ReplayError

Tensors = Sequence[torch.Tensor]


@pytest.fixture
def recorder() -> Iterator[HostRecorder]:
    made = HostRecorder()
    yield made
    made.cleanup()


def slot(value: torch.Tensor) -> torch.Tensor:
    """A static input holding ``value``."""
    return value.clone(memory_format=torch.preserve_format)


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit, with layout. NaN equals NaN: the random programs may divide by zero."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])


# --- recording executes nothing ---------------------------------------------------------------------------------------


def test_recording_leaves_a_counter_alone_and_each_replay_counts_once(recorder: HostRecorder) -> None:
    counter = torch.zeros((), dtype=torch.int64)
    recording = recorder.capture_one(lambda c: (c.add_(1),), [counter])
    assert counter.item() == 0
    recorder.replay(recording)
    recorder.replay(recording)
    assert counter.item() == 2


def test_recording_leaves_slots_and_closed_over_tensors_alone(recorder: HostRecorder) -> None:
    x, weight = torch.ones(3, 4), torch.ones(4)

    def segment(x: torch.Tensor) -> Tensors:
        x[1] = 7.0
        x.t().mul_(3)
        torch._foreach_add_([weight], 1.0)
        torch.neg(x, out=x)
        return (x + weight,)

    recorder.capture_one(segment, [x])
    assert torch.equal(x, torch.ones(3, 4))
    assert torch.equal(weight, torch.ones(4))


def test_results_hold_no_data_until_the_first_replay(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda x: (x * 2,), [torch.ones(3)])
    assert recording.outputs[0].isnan().all()


def test_the_python_of_a_segment_runs_once(recorder: HostRecorder) -> None:
    runs: list[int] = []

    def segment(x: torch.Tensor) -> Tensors:
        runs.append(1)
        return (x + 1,)

    recording = recorder.capture_one(segment, [torch.ones(2)])
    recorder.replay(recording)
    assert runs == [1]


def test_views_and_allocations_cost_no_kernel(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda x: (x.view(-1)[2:], x.t(), torch.empty(3), x.detach()), [torch.ones(2, 2)])
    assert recording.kernels == 0


def test_views_that_their_schemas_do_not_declare_cost_no_kernel(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda x: (x.t().reshape(-1), *torch.unsafe_split(x, 1)), [torch.ones(2, 2)])
    assert recording.kernels == 1, "the clone of reshape"


def test_recording_draws_no_random_numbers(recorder: HostRecorder) -> None:
    state = torch.get_rng_state()
    recorder.capture_one(lambda x: (F.dropout(x), torch.rand(3), x.normal_(), torch.randperm(4)), [torch.ones(8)])
    assert torch.equal(torch.get_rng_state(), state)


# --- replay equals eager ----------------------------------------------------------------------------------------------


def in_place_on_views(x: torch.Tensor) -> Tensors:
    y = x + 0
    y[1:].mul_(2)
    y[0] = 5.0
    y.t()[1].add_(y[:, 0])
    return y, y.view(-1)[::3]


def out_variants(x: torch.Tensor) -> Tensors:
    out, grown = torch.empty(4, 6), torch.empty(0)
    values, where = torch.empty(4), torch.empty(4, dtype=torch.int64)
    torch.mul(x, 3, out=out)
    torch.add(out, x, out=grown)
    torch.max(x, dim=1, out=(values, where))
    return out, grown, values, where


def scatters(x: torch.Tensor) -> Tensors:
    index = torch.arange(4).flip(0)
    y = torch.zeros_like(x).index_copy_(0, index, x)
    z = y.scatter(1, index.unsqueeze(1), x[:, :1])
    z[index, index] = 0.5
    return y, z, x.gather(1, index.unsqueeze(1)), x.index_select(0, index), x[index]


def foreach(x: torch.Tensor) -> Tensors:
    parts = [x + 1, x[:2] * 2]
    torch._foreach_add_(parts, 2.0)
    torch._foreach_mul_(parts, parts)
    return *parts, *torch._foreach_neg(parts)


def attention(x: torch.Tensor) -> Tensors:
    q = x.view(1, 2, 4, 3)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True), torch.softmax(q @ q.mT, -1)


def autocast_linear(x: torch.Tensor) -> Tensors:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = F.linear(x, torch.full((5, 6), 0.3), torch.ones(5))
        return hidden, F.layer_norm(hidden, (5,)), hidden @ hidden.t()


def resized(x: torch.Tensor) -> Tensors:
    y = torch.empty(0).resize_(4, 6)
    y.copy_(x)
    y.t_()
    return (y,)


LSTM = torch.nn.LSTM(6, 5).requires_grad_(False)

SEGMENTS: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "pointwise": lambda x: (x * 2 + 1, torch.sigmoid(x), x.pow(2).clamp(min=0.1)),
    "linear": lambda x: (F.linear(x, torch.full((5, 6), 0.1), torch.ones(5)),),
    "views": lambda x: (x[1:, ::2], x.view(-1), x.unbind(0)[2], x.expand(2, 4, 6)),
    "view-of-result": lambda x: ((x + 1).t()[1:], (x * 2).reshape(2, -1)),
    "copying-reshape": lambda x: (x.t().reshape(-1), x.t().contiguous()),
    "in-place-on-views": in_place_on_views,
    "split": lambda x: tuple(part * 2 for part in x.split([2, 3, 1], dim=1)),
    "split-copy": lambda x: torch.ops.aten.split_copy.Tensor(x, 2),
    "unsafe-split": lambda x: tuple(torch.unsafe_split(x, 2)),
    "topk": lambda x: tuple(x.topk(2, dim=1)),
    "max-dim": lambda x: tuple(x.max(dim=0)),
    "layer-norm": lambda x: torch.native_layer_norm(x, [6], torch.ones(6), torch.zeros(6), 1e-5),
    "batch-norm": lambda x: (F.batch_norm(x, torch.zeros(6), torch.ones(6), training=True),),
    "optional-result": lambda x: (LSTM(x.view(4, 1, 6))[0],),
    "cat": lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, x])),
    "foreach": foreach,
    "scatters": scatters,
    "embedding": lambda x: (F.embedding((x > 0).long(), x),),
    "attention": attention,
    "autocast-linear": autocast_linear,
    "out": out_variants,
    "resized": resized,
    "bool": lambda x: (x > 0, (x > 0).logical_not(), (x > 0).any(1)),
    "int": lambda x: (x.long(), x.argmax(1), torch.arange(7), x.int() // 2),
    "bfloat16": lambda x: (x.bfloat16(), x.bfloat16() @ x.bfloat16().t()),
    "complex": lambda x: (torch.complex(x, x + 1), torch.fft.fft(x), torch.complex(x, x).conj() * 2),
    "lazy-conjugate": lambda x: (
        torch.complex(x, x).conj(),
        torch.complex(x, x).conj().imag,
        torch.complex(x, x).conj().imag + 1,
    ),
    "zero-size": lambda x: (x[:0] + 1, torch.zeros(0, 3), torch.cat([x[:0], x])),
    "non-contiguous": lambda x: (x.t() + 1, torch.empty_like(x.t()).copy_(x.t()), x.t().clone()),
    "channels-last": lambda x: (F.conv2d(x.view(1, 1, 4, 6), torch.ones(2, 1, 3, 3)),),
    "zero-dim": lambda x: (x.sum(), x.mean() * 2, x.sum() > 0, torch.scalar_tensor(2.0) + x.sum()),
    "scalar-operand": lambda x: (torch.where(x > 0, x, 0.0), x * torch.tensor(3.0), x.clamp(min=torch.tensor(0.0))),
    "integer-division": lambda x: (x.long() / 3, torch.full((2,), 3), torch.zeros(2)),
    "masked": lambda x: (x.masked_fill(x > 0, -1.0), torch.where(x > 0, x, -x), x.tril()),
    "cumulative": lambda x: (x.cumsum(0), x.sort(1)[0], x.flip(0), x.roll(1, 0)),
    "the-input-itself": lambda x: (x,),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_replay_equals_eager(recorder: HostRecorder, name: str) -> None:
    segment = SEGMENTS[name]
    generator = torch.Generator().manual_seed(1)
    static = torch.zeros(4, 6)
    with recorder.capture_session():
        recording = recorder.capture_one(segment, [static])
    for _ in range(2):
        static.copy_(torch.randn(4, 6, generator=generator))
        with torch.no_grad():  # as recorded: some kernels are chosen by it
            want = segment(static.clone())
        recorder.replay(recording)
        assert len(recording.outputs) == len(want)
        for got, expected in zip(recording.outputs, want, strict=True):
            assert_same(got, expected)


def test_a_replay_draws_what_eager_draws(recorder: HostRecorder) -> None:
    x = torch.ones(64)

    def segment(x: torch.Tensor) -> Tensors:
        return F.dropout(x, 0.5), torch.rand(4), x.bernoulli(0.3), torch.randperm(9)

    recording = recorder.capture_one(segment, [x])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        want = [*segment(x), *segment(x)]
        torch.manual_seed(3)
        got = []
        for _ in range(2):
            recorder.replay(recording)
            got += [output.clone() for output in recording.outputs]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_a_factory_freezes_the_default_dtype(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda: (torch.full((2,), 0.1),), [])
    torch.set_default_dtype(torch.float16)
    try:
        recorder.replay(recording)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(recording.outputs[0], torch.full((2,), 0.1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_mode_does_not_change_a_replay(recorder: HostRecorder, mode: Callable[[], Any]) -> None:
    x, weight = torch.rand(3, 4), torch.nn.Parameter(torch.rand(5, 4))
    recording = recorder.capture_one(lambda x: (F.linear(x, weight), x.add_(1)), [x])
    want = F.linear(x, weight)
    with mode():
        recorder.replay(recording)
    assert_same(recording.outputs[0], want.detach())


def test_the_callers_autocast_is_recorded_and_not_applied_twice(recorder: HostRecorder) -> None:
    x, weight = torch.rand(3, 4), torch.rand(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with recorder.capture_session():
            recording = recorder.capture_one(lambda x: (F.linear(x, weight),), [x])
        want = F.linear(x, weight)
        recorder.replay(recording)
    first = recording.outputs[0].clone()
    recorder.replay(recording)
    assert_same(first, want)
    assert_same(recording.outputs[0], want)


def test_another_thread_replays(recorder: HostRecorder) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    recording = recorder.capture_one(lambda x: (x * weight,), [torch.full((2,), 3.0)])
    thread = threading.Thread(target=recorder.replay, args=[recording])
    thread.start()
    thread.join()
    assert recording.outputs[0].tolist() == [3.0, 3.0]


def test_inference_tensors_are_recorded_operation_by_operation(recorder: HostRecorder) -> None:
    with torch.inference_mode():
        x, weight = torch.rand(4, 6), torch.rand(5, 6)
        recording = recorder.capture_one(lambda x: (F.linear(x, weight), x.reshape(-1), x.t().reshape(-1)), [x])
        recorder.replay(recording)
        assert torch.equal(recording.outputs[0], F.linear(x, weight))
        assert torch.equal(recording.outputs[2], x.t().reshape(-1))
    assert recording.outputs[1].data_ptr() == x.data_ptr()


def test_results_of_a_recording_under_inference_mode_can_be_written_later(recorder: HostRecorder) -> None:
    with torch.inference_mode():
        recording = recorder.capture_one(lambda x: (x + 1,), [torch.ones(2)])
        allocated = recorder.allocate((2,), (1,), torch.float32)
    recording.outputs[0].add_(1)
    allocated.add_(1)
    assert not recording.outputs[0].is_inference()
    assert not allocated.is_inference()


# --- what corrupts a CUDA graph corrupts here -------------------------------------------------------------------------


def test_a_swapped_tensor_is_stale(recorder: HostRecorder) -> None:
    weights = {"w": torch.full((2,), 2.0)}
    recording = recorder.capture_one(lambda x: (x * weights["w"],), [torch.ones(2)])
    weights["w"] = torch.full((2,), 5.0)
    gc.collect()
    recorder.replay(recording)
    assert recording.outputs[0].tolist() == [2.0, 2.0]


def test_swapped_data_of_a_parameter_is_stale(recorder: HostRecorder) -> None:
    weight = torch.nn.Parameter(torch.full((2,), 2.0))
    recording = recorder.capture_one(lambda x: (x * weight,), [torch.ones(2)])
    weight.data = torch.full((2,), 5.0)
    recorder.replay(recording)
    assert recording.outputs[0].tolist() == [2.0, 2.0]


def test_a_changed_python_value_is_stale(recorder: HostRecorder) -> None:
    position = [3]
    recording = recorder.capture_one(lambda x: (x + position[0], x[position[0] :]), [torch.zeros(5)])
    position[0] = 4
    recorder.replay(recording)
    assert recording.outputs[0].tolist() == [3.0] * 5
    assert recording.outputs[1].shape == (2,)


def test_a_slot_that_is_not_refilled_is_stale(recorder: HostRecorder) -> None:
    x, y = torch.zeros(2), torch.ones(2)
    recording = recorder.capture_one(lambda x, y: (x + y,), [x, y])
    x.fill_(10.0)
    recorder.replay(recording)
    assert recording.outputs[0].tolist() == [11.0, 11.0]


def boundary_program(recorder: HostRecorder, hold: bool, allocating: bool) -> torch.Tensor:
    """produce -> middle -> read, where the boundary value is dropped before ``middle`` is recorded unless held."""
    x, other = torch.full((8,), 2.0), torch.zeros(8)
    produce = recorder.capture_one(lambda x: (x * 3,), [x])
    read = recorder.capture_one(lambda y: (y + 1,), [produce.outputs[0]])
    held: list[Any] = [produce.outputs] if hold else []
    handles = [produce.handle]
    del produce
    gc.collect()
    middle = recorder.capture_one(lambda o: (o + 100,) if allocating else (o.add_(100),), [other])
    recorder.replay(Recording((), handles[0], 1))
    recorder.replay(middle)
    recorder.replay(read)
    held.clear()
    return read.outputs[0].clone()


def test_a_boundary_value_held_until_its_last_reader_is_right(recorder: HostRecorder) -> None:
    assert boundary_program(recorder, hold=True, allocating=True).tolist() == [7.0] * 8


def test_a_boundary_value_dropped_too_early_is_overwritten_by_the_next_recording(recorder: HostRecorder) -> None:
    assert boundary_program(recorder, hold=False, allocating=True).tolist() == [101.0] * 8


def test_a_boundary_value_dropped_too_early_is_overwritten_without_poison_too() -> None:
    assert boundary_program(HostRecorder(poison=False), hold=False, allocating=True).tolist() == [101.0] * 8


def test_a_boundary_value_dropped_too_early_is_poison_though_nothing_reused_it(recorder: HostRecorder) -> None:
    assert boundary_program(recorder, hold=False, allocating=False).isnan().all()


def test_a_result_that_is_reused_after_an_early_drop_is_never_poisoned_while_it_is_held(recorder: HostRecorder) -> None:
    first = recorder.capture_one(lambda x: (x + 1,), [torch.ones(8)])
    del first
    second = recorder.capture_one(lambda x: (x + 2,), [torch.ones(8)])
    third = recorder.capture_one(lambda y: (y * 2,), [second.outputs[0]])
    recorder.replay(second)
    recorder.replay(third)
    assert third.outputs[0].tolist() == [6.0] * 8


def test_a_block_freed_and_taken_again_within_one_segment_is_not_poisoned_by_the_next(recorder: HostRecorder) -> None:
    held = [recorder.capture_one(lambda x: (x + 1,), [torch.ones(8)]).outputs[0]]

    def segment(x: torch.Tensor) -> Tensors:
        held.clear()
        return (x * 4,)

    second = recorder.capture_one(segment, [torch.ones(8)])
    third = recorder.capture_one(lambda y: (y * 2,), [second.outputs[0]])
    recorder.replay(second)
    recorder.replay(third)
    assert third.outputs[0].tolist() == [8.0] * 8


def test_a_dead_result_is_poisoned_at_once(recorder: HostRecorder) -> None:
    first = recorder.capture_one(lambda x: (x + 1,), [torch.ones(8)])
    recorder.replay(first)
    address = first.outputs[0].data_ptr()
    block = recorder._pool.block_at(address)
    assert block is not None
    assert bytes(block.memory[:4]) != b"\xff\xff\xff\xff"
    del first
    assert bytes(block.memory[:32]) == b"\xff" * 32


# --- what cannot be recorded ------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "boolean-index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "list-index": lambda x: x[[0, 2]],
    "as-tensor": lambda x: torch.as_tensor([1, 2]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "write-to-host-scalar": lambda x: torch.tensor(0.0).add_(1),
    "growing-out": lambda x: torch.add(x, 1, out=torch.empty(2)),
    "meta-device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse() * 2,
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_cannot_be_recorded_is_refused_and_the_recorder_goes_on(
    recorder: HostRecorder, name: str
) -> None:
    x = torch.ones(3)

    def segment(x: torch.Tensor) -> Tensors:
        y = x + 1
        return y, REFUSED[name](y)

    with pytest.raises(CaptureError, match="not permitted") as caught:
        recorder.capture_one(segment, [x])
    assert recorder.leased_bytes == 0, "the kept exception must not hold pool memory"
    assert caught.value.op
    assert recorder.can_run() is None
    recording = recorder.capture_one(lambda x: (x * 2,), [x])
    recorder.replay(recording)
    assert recording.outputs[0].tolist() == [2.0] * 3
    assert recording.kernels == 1


def test_the_segments_own_exception_is_passed_on(recorder: HostRecorder) -> None:
    def segment(x: torch.Tensor) -> Tensors:
        y = x + 1
        raise KeyError(f"mine {y.shape}")

    with pytest.raises(KeyError, match="mine"):
        recorder.capture_one(segment, [torch.ones(3)])
    assert recorder.leased_bytes == 0
    assert recorder.can_run() is None


def test_a_shape_error_is_raised_when_recording(recorder: HostRecorder) -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        recorder.capture_one(lambda x: (x.add_(torch.ones(4)),), [torch.ones(3)])


def test_nothing_of_the_recorder_may_be_used_inside_a_segment(recorder: HostRecorder) -> None:
    other = recorder.capture_one(lambda: (torch.zeros(1),), [])
    codes: list[str] = []

    def segment() -> Tensors:
        reason = recorder.can_run()
        codes.append(reason.code if reason else "")
        for nested in (
            lambda: recorder.capture_one(lambda: (), []),
            lambda: recorder.replay(other),
            lambda: recorder.allocate((1,), (1,), torch.float32),
            recorder.cleanup,
        ):
            with pytest.raises(CaptureError, match="is recording"):
                nested()
        return ()

    recorder.capture_one(segment, [])
    assert codes == ["already-capturing"]
    assert recorder.can_run() is None


@torch.library.custom_op("host_recorder_test::scale_into", mutates_args={"out"})
def scale_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> torch.Tensor:
    out.copy_(x * factor)
    return x * (factor + 1)


def test_a_custom_operation_without_a_fake_cannot_be_described(recorder: HostRecorder) -> None:
    with pytest.raises(CaptureError, match="scale_into"):
        recorder.capture_one(lambda x: (scale_into(x, x, 2.0),), [torch.ones(2)])


def test_a_custom_operation_that_writes_and_returns_is_run_by_the_replay(recorder: HostRecorder) -> None:
    runs: list[int] = []

    @torch.library.custom_op("host_recorder_test::bump", mutates_args={"out"})
    def bump(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        out.add_(x)
        return x * 2

    bump.register_fake(lambda x, out: torch.empty_like(x))
    x, out = torch.ones(2), torch.zeros(2)
    recording = recorder.capture_one(lambda x, out: (bump(x, out),), [x, out])
    assert not runs
    recorder.replay(recording)
    assert out.tolist() == [1.0, 1.0]
    assert recording.outputs[0].tolist() == [2.0, 2.0]
    assert runs == [1]


def test_an_allocation_keeps_overlapping_strides(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda: (torch.empty_strided((3, 2), (0, 1)),), [])
    assert recording.outputs[0].stride() == (0, 1)


def test_a_default_device_does_not_reach_the_recorders_own_memory(recorder: HostRecorder) -> None:
    x = torch.ones(2)
    with torch.device("meta"):
        recording = recorder.capture_one(lambda x: (x + 1,), [x])
        recorder.replay(recording)
    assert recording.outputs[0].tolist() == [2.0, 2.0]


def test_an_expanded_result_gets_memory_of_its_own(recorder: HostRecorder) -> None:
    @torch.library.custom_op("host_recorder_test::spread", mutates_args=())
    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.clone().expand(3, 2)

    spread.register_fake(lambda x: torch.empty_like(x).expand(3, 2))
    recording = recorder.capture_one(lambda x: (spread(x),), [torch.tensor([1.0, 2.0])])
    recorder.replay(recording)
    assert recording.outputs[0].tolist() == [[1.0, 2.0]] * 3


# --- the pool ---------------------------------------------------------------------------------------------------------


def three_layers(x: torch.Tensor) -> Tensors:
    for _ in range(3):
        x = torch.relu(x @ x.t()) @ x + 1
    return (x,)


def test_the_pool_stays_flat_over_recordings_that_are_dropped(recorder: HostRecorder) -> None:
    x = torch.ones(4, 6)
    recorder.capture_one(three_layers, [x])
    recorder.capture_one(three_layers, [x])
    size = recorder.nbytes
    for _ in range(200):
        recorder.capture_one(three_layers, [x])
    assert recorder.nbytes == size
    assert recorder.leased_bytes == 0


def test_a_smaller_recording_reuses_the_blocks_of_a_larger_one(recorder: HostRecorder) -> None:
    recorder.capture_one(three_layers, [torch.ones(64, 6)])
    size = recorder.nbytes
    recorder.capture_one(three_layers, [torch.ones(16, 6)])
    assert recorder.nbytes == size


def test_intermediates_share_memory_within_a_segment(recorder: HostRecorder) -> None:
    def chain(x: torch.Tensor) -> Tensors:
        for _ in range(50):
            x = x + 1
        return (x,)

    recording = recorder.capture_one(chain, [torch.zeros(256)])
    recorder.replay(recording)
    assert recorder.nbytes == 2 * 1024
    assert recording.outputs[0].tolist() == [50.0] * 256


def test_the_best_fitting_block_is_taken(recorder: HostRecorder) -> None:
    recorder.capture_one(lambda: (torch.zeros(1024), torch.zeros(64), torch.zeros(256)), [])
    recording = recorder.capture_one(lambda: (torch.zeros(60),), [])
    assert recorder.leased_bytes == 256
    assert recording.outputs[0].untyped_storage().nbytes() == 240


def test_blocks_are_aligned(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda: tuple(torch.zeros(size) for size in (1, 3, 17, 100)), [])
    assert all(output.data_ptr() % 64 == 0 for output in recording.outputs)


def test_a_view_keeps_its_block_taken(recorder: HostRecorder) -> None:
    view = recorder.capture_one(lambda x: (x + 1,), [torch.ones(4, 4)]).outputs[0][1:, ::2].detach()
    assert recorder.leased_bytes == 64
    del view
    assert recorder.leased_bytes == 0


def test_a_recording_alone_keeps_no_block_taken(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(three_layers, [torch.ones(4, 6)])
    handle = recording.handle
    assert recorder.leased_bytes > 0
    del recording
    assert recorder.leased_bytes == 0
    assert len(handle.steps) > 0


def test_a_replay_after_its_blocks_were_given_away_is_garbage_but_safe(recorder: HostRecorder) -> None:
    handle = recorder.capture_one(lambda x: (x + 1,), [torch.ones(8)]).handle
    later = recorder.capture_one(lambda x: (x + 5,), [torch.ones(8)])
    recorder.replay(later)
    recorder.replay(Recording((), handle, 1))
    assert later.outputs[0].tolist() == [2.0] * 8


def test_cleanup_frees_the_pool_and_invalidates_every_recording(recorder: HostRecorder) -> None:
    recording = recorder.capture_one(lambda x: (x + 1,), [torch.ones(8)])
    recorder.replay(recording)
    recorder.cleanup()
    assert recorder.nbytes == 0
    with pytest.raises(ReplayError, match="cleaned up"):
        recorder.replay(recording)
    assert recording.outputs[0].tolist() == [2.0] * 8, "memory that a caller still holds stays valid"


def test_another_recorders_recording_is_refused(recorder: HostRecorder) -> None:
    with pytest.raises(ReplayError, match="another recorder"):
        HostRecorder().replay(recorder.capture_one(lambda: (torch.zeros(1),), []))


def test_allocate_keeps_the_strides_and_lies_outside_the_pool(recorder: HostRecorder) -> None:
    tensor = recorder.allocate((2, 3), (1, 4), torch.bfloat16)
    assert tensor.stride() == (1, 4)
    assert not tensor.any()
    assert recorder.nbytes == 0
    assert recorder.allocate((0, 3), (3, 1), torch.int64).shape == (0, 3)


# --- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_session_sets_and_restores_the_state_also_after_an_exception(
    recorder: HostRecorder, collecting: bool, caching: bool
) -> None:
    before = gc.isenabled(), torch.is_autocast_cache_enabled()
    (gc.enable if collecting else gc.disable)()
    torch.set_autocast_cache_enabled(caching)
    try:
        with (  # noqa: PT012 (the block ends in the exception whose undoing is tested)
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=caching),
            pytest.raises(KeyError),
            recorder.capture_session(),
        ):
            inside = (gc.isenabled(), torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled())
            autocast, grad = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
            raise KeyError
        after = gc.isenabled(), torch.is_autocast_cache_enabled()
    finally:
        (gc.enable if before[0] else gc.disable)()
        torch.set_autocast_cache_enabled(before[1])
    assert inside == (False, False, False)
    assert autocast
    assert not grad
    assert after == (collecting, caching)


# --- random programs --------------------------------------------------------------------------------------------------

FUNCTIONAL: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * 0.5 - b,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.cumsum(0) / 4,
    lambda a, b: a @ b / 4,
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: a.sort(1)[0],
    lambda a, b: a.sum(0, keepdim=True) + b,
]
VIEWS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a.t(),
    lambda a, b: a[:1].expand(4, 4),
    lambda a, b: a.reshape(2, 8).view(4, 4),
    lambda a, b: a.flip(1).t(),
]
IN_PLACE: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda a, b: a[1:3].mul_(0.5),
    lambda a, b: a.t()[0].add_(1),
    lambda a, b: a.copy_(b.clone()),
    lambda a, b: a[:, 2].copy_(b.sum(0)),
    lambda a, b: torch._foreach_add_([a], [b.clone()]),
]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(FUNCTIONAL + VIEWS + IN_PLACE), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=10,
)


def run_program(program: Sequence[tuple[Callable[..., Any], int, int]], x: torch.Tensor) -> Tensors:
    """A stack of 4x4 values; only the last three stay reachable, so that memory is reused within the segment."""
    values = [x, x + 1]
    for operation, first, second in program:
        a, b = values[first % len(values)], values[second % len(values)]
        if operation in IN_PLACE:
            if 0 not in a.stride():
                operation(a, b)
        else:
            values = [*values, operation(a, b)][-3:]
    return values


@given(PROGRAMS, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_random_programs_replay_bit_for_bit_on_three_fills(program: list[Any], seed: int) -> None:
    recorder = HostRecorder()
    generator = torch.Generator().manual_seed(seed)
    static = torch.zeros(4, 4)
    recording = recorder.capture_one(lambda x: run_program(program, x), [static])
    assert not static.any()
    for _ in range(3):
        fill = torch.randn(4, 4, generator=generator)
        eager = fill.clone()
        want = run_program(program, eager)
        static.copy_(fill)
        recorder.replay(recording)
        assert torch.equal(static, eager)
        for got, expected in zip(recording.outputs, want, strict=True):
            assert_same(got, expected)
    recorder.cleanup()
