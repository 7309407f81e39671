"""Modes of the process and of the call: the answer is eager's in each, replays go on where they may, state is equal.

All bit for bit (whole numbers, see ``modes_harness``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equality import compare
from modes_harness import OPTIONS, SIZES, Both, H, Net, compiled, linear, on_devices, whole
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import torch_graph_backend as tgb
from torch_graph_backend.recorders.cuda import CudaRecorder
from torch_graph_backend.recorders.host import HostRecorder

pytestmark = on_devices


# -- gradients, inference mode -----------------------------------------------------------------------------------------


def test_gradients_on_and_off(device: str) -> None:
    """Eager with a reason while they are on; replays before and after; the gradients are eager's."""
    both = Both(Net().to(device))
    for _ in range(3):
        both.sizes(5, 6, 7, device=device)
        both.grad = True
        for n in (5, 6):
            x = whole(n, H, device=device)
            want, got = both.plain(x), both.fast(x)
            compare(got, want, "with gradients", exact=True)
            assert got.requires_grad
            got.sum().backward()
            want.sum().backward()
        both.grad = False
    for a, b in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    both.finish(7, eager=("grad",))
    assert both.stats.eager["grad"] == 6


def test_all_grad_modes_in_turn(device: str) -> None:
    """``no_grad``, ``inference_mode``, gradients on but needed by nothing, and a frozen model with gradients on."""
    model = Net().to(device).requires_grad_(False)
    both = Both(model)
    modes: list[Callable[[], Any]] = [
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.inference_mode(False),
    ]
    kept = []
    for i, n in enumerate(SIZES * 4):
        x = whole(n, H, device=device, seed=i)
        with modes[i % 4]():
            want, got = both.plain(x), both.fast(x)
            assert got.is_inference() == want.is_inference()
            compare(got, want, f"call {i}", exact=True)
            kept.append((got, want.clone()))
    assert all(torch.equal(a, b) for a, b in kept)
    both.finish(20)


# -- autocast and numeric switches -------------------------------------------------------------------------------------


def test_autocast_on_off_and_with_another_dtype(device: str) -> None:
    """Each is a graph of its own; the cast weights of one are not used by another, nor old ones after an update."""
    kind = torch.device(device).type
    contexts: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        lambda: torch.autocast(kind, torch.bfloat16),
        lambda: torch.autocast(kind, torch.float16),
        lambda: torch.autocast(kind, torch.bfloat16, cache_enabled=False),
        lambda: torch.autocast(kind, enabled=False),
    ]
    both = Both(Net().to(device))
    for i in range(3):
        for context in contexts:
            with context():
                both.sizes(5, 6, 7, device=device, seed=i)
        both.each(lambda m: m.up.weight.data.add_(1.0))
    both.finish(25)


def test_autocast_around_several_calls(device: str) -> None:
    """Inside one region autocast keeps cast weights; an update of the weights within it must be seen as in eager."""
    both = Both(Net().to(device))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        both.sizes(5, 6, 11, 7, 12, device=device)
    both.each(lambda m: m.up.weight.data.add_(1.0))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        both.sizes(5, 6, 11, 7, 12, device=device)
    both.finish(6)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_deterministic_algorithms(device: str) -> None:
    both = Both(Net().to(device))
    for on in (False, True, False, True):
        with deterministic(on):
            both.sizes(5, 6, 11, 7, 12, device=device)
    both.finish(12)


class Precise(nn.Module):
    """Its product shows the precision that it was computed with: 1 + 2**-12 is 1 in TF32 and in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 16), 1.0 + 2.0**-12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) * 2.0


def test_matmul_precision_is_not_frozen(device: str) -> None:
    """A recording made with TF32 off must not answer a call with TF32 on, nor the reverse."""
    both = Both(Precise().to(device))
    for value in ("highest", "high", "highest", "high", "medium", "highest"):
        with precision(value):
            for _ in range(4):
                both(torch.eye(16, device=device))
    both.finish(8)


def test_settings_that_a_recording_freezes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has recordings of its own, which are there when it comes back; what the device freezes is the recorder's to
    say (here: a setting that there is not)."""
    now = ["a"]
    monkeypatch.setattr(CudaRecorder if device == "cuda" else HostRecorder, "settings", lambda self: now[0])
    both = Both(Net().to(device))
    seen = []
    for now[0] in ("a", "b", "a", "b", "a"):
        before = both.stats
        asked = []
        for _ in range(3):
            x = whole(5, H, device=device)
            with torch.no_grad():
                asked.append(tgb.would_replay(both.fast, x) is None)
            both(x)
        found = both.stats - before
        seen.append((found.first_calls, found.recordings, found.replays))
        assert asked == ([False, False, True] if found.recordings else [True] * 3)
    assert seen == [(1, 1, 2)] * 2 + [(0, 0, 3)] * 3
    x = whole(5, H, device=device)
    tgb.capture(both.fast, x, sizes=[5, 11])  # which makes this call
    with torch.no_grad():
        both.plain(x)
    before = both.stats
    both.sizes(5, 11, device=device)
    assert (both.stats - before).replays == 2
    both.finish(8)


def test_default_dtype_changes(device: str) -> None:
    """A factory without a dtype, and a Python number, take the default of the call."""
    w = whole(H, H, device=device, dynamic=False)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x @ w) * 2, torch.ones(3, device=x.device) + x.shape[0]

    both = Both(f)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            both.sizes(5, 6, 11, 7, 12, device=device)
    finally:
        torch.set_default_dtype(torch.float32)
    both.finish(12)


def test_default_device_changes(device: str) -> None:
    w = whole(H, H, device=device, dynamic=False)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x @ w) * 2, torch.arange(3) + 1

    both = Both(f)
    for target in (None, device, "meta", None, device):
        torch.set_default_device(target)
        try:
            for n in (5, 6, 11, 7, 12):
                x = whole(n, H, device=device)
                got, want = both.fast(x), f(x)
                assert torch.equal(got[0], want[0])
                assert got[1].device == want[1].device
                if target != "meta":
                    assert torch.equal(got[1], want[1])
        finally:
            torch.set_default_device(None)
    both.finish(8, eager=("dispatch-mode",))  # torch 2.11: every call under a default device


# -- modes that watch --------------------------------------------------------------------------------------------------


def test_flops_are_counted_as_in_eager(device: str) -> None:
    """After replays, and again after more: Dynamo enters no code again that was called under the counter."""
    both = Both(Net().to(device))
    for _ in range(3):
        torch._dynamo.reset()
        both.sizes(5, 6, 11, 7, 12, device=device)
        assert both.stats.replays >= 3, both.stats
        for n in (6, 11):
            x = whole(n, H, device=device)
            counts = []
            for model in (both.plain, both.fast):
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    model(x)
                counts.append(counter.get_total_flops())
            assert counts[0] == counts[1] > 0
    both.finish(0, eager=("dispatch-mode",))


class Doubling(TorchFunctionMode):
    """Changes what ``torch.relu`` does and counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.relu
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.relu else out


def test_function_modes_take_effect(device: str) -> None:
    """Inside the mode answers are those of eager inside the mode; outside of it those of eager outside."""
    both = Both(Net().to(device))
    for inside in (False, True, False, True):
        for n in (5, 6, 11, 7):
            x = whole(n, H, device=device)
            with torch.no_grad(), Doubling() if inside else contextlib.nullcontext():
                want, got = both.plain(x), both.fast(x)
            compare(got, want, f"inside {inside}", exact=True)
    both.finish(4)


class Hook:
    """Adds one to the output and to a count on the device (a Python count would be guarded: a graph for each value)."""

    def __init__(self, device: str) -> None:
        self.calls = torch.zeros(1, device=device)

    def __call__(self, module: Any, args: Any, out: Tensor) -> Tensor:
        self.calls.add_(1)
        return out + 1


def as_method(m: Any) -> Any:
    m.compile(backend="bcg", options=OPTIONS)
    return m


@pytest.mark.parametrize("compile_", [compiled, as_method])
def test_hooks_registered_before_compiling(device: str, compile_: Callable[[Any], Any]) -> None:
    """On a submodule and on the model itself: they run once a call and change the answer."""
    model = Net().to(device)
    hooks = []
    for module in (model.up, model):
        hooks.append(Hook(device))
        module.register_forward_hook(hooks[-1])
    both = Both(model, compile_)
    both.sizes(*SIZES, device=device)
    both.finish(6)
    assert all(hook.calls.item() == len(SIZES) for hook in hooks)


@pytest.mark.parametrize("compile_", [compiled, as_method])
def test_hooks_registered_after_compiling(device: str, compile_: Callable[[Any], Any]) -> None:
    """Dynamo does not look for new hooks of submodules (any backend gets the same graph) until it is reset."""
    both = Both(Net().to(device), compile_)
    both.sizes(*SIZES, device=device)
    handles = [m.down.register_forward_hook(Hook(device)) for m in (both.plain, both.model)]
    torch._dynamo.reset()
    both.sizes(*SIZES, device=device)
    assert both.stats.replays >= 6, both.stats
    for handle in handles:
        handle.remove()
    torch._dynamo.reset()
    both.sizes(*SIZES, device=device)
    both.finish(6)


# -- random numbers ----------------------------------------------------------------------------------------------------


def state_of(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: nn.functional.dropout(h, 0.5, training=True),
    "rand_like": lambda h: (torch.rand_like(h) > 0.5) * h,
    "randperm": lambda h: h[torch.randperm(h.shape[0], device=h.device)],
    "bernoulli": lambda h: torch.bernoulli(torch.full_like(h, 0.5)) * h,
    "normal_": lambda h: torch.empty_like(h).normal_().sign() * h,
    "multinomial": lambda h: h[torch.multinomial(torch.ones(h.shape[0], device=h.device), 3)],
    "randint": lambda h: torch.randint(0, 5, (h.shape[0], 1), device=h.device) + h,
}


@pytest.mark.parametrize("kind", sorted(RANDOM))
def test_random_numbers_of_a_seed(device: str, kind: str) -> None:
    """The values of eager for the same seed, at padded sizes as well, and the generator where eager leaves it."""
    up, down = linear().to(device), linear(H, H, 2).to(device)
    draw = RANDOM[kind]

    def f(x: Tensor) -> Tensor:
        h = torch.relu(up(x)) + 1
        return down(draw(h)) + draw(h).sum()

    fast = compiled(f)
    with torch.no_grad():
        for i, n in enumerate(SIZES):
            x = whole(n, H, device=device, seed=i)
            answers = []
            for function in (f, fast):
                torch.manual_seed(i)
                answers.append((function(x), state_of(device), function(x)))
            for want, got in zip(*answers, strict=True):
                assert torch.equal(got, want), f"{kind}, {n} rows, call {i}"
    stats = tgb.stats(f)
    assert stats.replays >= 10, stats


def test_a_training_module_with_dropout(device: str) -> None:
    """Train and eval in turn, without gradients."""
    model = nn.Sequential(linear(), nn.ReLU(), nn.Dropout(0.5), linear(H, H, 2)).to(device)
    both = Both(model)
    for round_ in range(4):
        both.each(lambda m, on=round_ % 2 == 0: m.train(on))
        for n in (5, 6, 11, 7, 12):
            x = whole(n, H, device=device)
            states = []
            with torch.no_grad():
                outs = []
                for m in (both.plain, both.fast):
                    torch.manual_seed(n)
                    outs.append(m(x))
                    states.append(state_of(device))
            compare(outs[1], outs[0], f"round {round_}, {n} rows", exact=True)
            assert torch.equal(*states)
    both.finish(10)


def test_a_generator_that_is_passed(device: str) -> None:
    """Its state advances as in eager, the default generator's does not."""
    up, down = linear().to(device), linear(H, H, 2).to(device)

    def f(x: Tensor, g: torch.Generator) -> Tensor:
        h = torch.relu(up(x))
        return down(h + torch.randint(0, 3, (x.shape[0], 1), generator=g, device=x.device))

    fast = compiled(f)
    mine, theirs = (torch.Generator(device).manual_seed(3) for _ in range(2))
    before = state_of(device)
    with torch.no_grad():
        for n in SIZES:
            x = whole(n, H, device=device)
            assert torch.equal(fast(x, mine), f(x, theirs))
            assert torch.equal(mine.get_state(), theirs.get_state())
    assert torch.equal(state_of(device), before)
