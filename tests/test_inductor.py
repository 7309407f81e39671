"""Small buckets through Inductor: what is compiled, that the answer is eager's, and what happens when it does not work.

Compiling takes seconds on a CPU, so functions here are small. What they compare was rounded in another order, which is
never more than a few last digits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import check_calls
from torch import nn

import torch_graph_backend as tgb
from torch_graph_backend import inductor, inductor_segment, registry
from torch_graph_backend.config import Config
from torch_graph_backend.inductor_probe import probe, shared
from torch_graph_backend.inductor_segment import CompiledSegment, Output, Unsuitable, static_examples, trace
from torch_graph_backend.ledger import KeyCount
from torch_graph_backend.passes.dedup import InputFacts
from torch_graph_backend.passes.torch_api import cpp_rounds_halves
from torch_graph_backend.recorders.host import HostRecorder
from torch_graph_backend.runner import CompiledGraph

pytestmark = pytest.mark.inductor
CPU = torch.device("cpu")
BUCKETS = [4, 8, 64]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Nothing compiled by an earlier test is reused, and what was found out about the machine is asked again."""
    inductor._known.clear()
    inductor.unavailable.cache_clear()
    yield
    inductor.unavailable.cache_clear()


def rows(n: int, width: int = 16, device: str = "cpu") -> torch.Tensor:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(n)).to(device)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """With time enough on a machine that is busy with other things: the cap has tests of its own."""
    return torch.compile(model, backend="bcg", options={"buckets": BUCKETS, "inductor_seconds": 3600, **options})


def graph() -> CompiledGraph:
    (found,) = registry.all_graphs()
    return found


def keys() -> dict[str, KeyCount]:
    return {str(k): c for k, c in graph().ledger.keys.items()}


def codes(key: str) -> list[str]:
    return [reason.code for reason in keys()[key].plain]


class Mlp(nn.Module):
    def __init__(self, layers: int = 1, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(self.norm(x)))
        return x


# -- which keys --------------------------------------------------------------------------------------------------------


def test_small_keys_are_compiled_and_large_ones_are_not(device: str, no_grad: None) -> None:
    model = Mlp().to(device)
    fast = compiled(model)
    for n in (3, 4, 3, 50, 40, 50):
        torch.testing.assert_close(fast(rows(n, device=device)), model(rows(n, device=device)))
    assert (keys()["4"].compiled, keys()["4"].compiles) == (1, 1)
    assert (keys()["64"].compiled, keys()["64"].compiles) == (0, 0)
    tgb.stats(fast).expect(replays=4, first_calls=2, eager=0)
    assert tgb.stats(fast).seconds["inductor"] > 0
    assert "Inductor: segments of keys 4: 1; 1 compiles" in str(tgb.stats(fast))
    assert "Inductor: segments of keys 4: 1; 1 compiles" in tgb.explain(fast)


def test_first_call_and_replay_run_the_same_code(no_grad: None) -> None:
    """Two calls at one size never differ by tier: bit for bit equal, though Inductor rounds differently from eager."""
    fast = compiled(Mlp(3))
    x = rows(7)
    first, second, third = fast(x), fast(x), fast(x)
    assert keys()["8"].compiled == 1
    assert torch.equal(first, second)
    assert torch.equal(second, third)


@pytest.mark.parametrize("options", [{"inductor": "off"}, {"inductor_max_size": 0}, {"inductor_max_size": 3}])
def test_options_turn_it_off(options: dict[str, Any], no_grad: None) -> None:
    fast = compiled(Mlp(), **options)
    for _ in range(3):
        fast(rows(3))
    assert keys()["4"].compiled == keys()["4"].compiles == 0
    assert not keys()["4"].plain


def test_the_default_is_32() -> None:
    assert Config().inductor_max_size == Config.parse({}).inductor_max_size == 32
    assert Config.parse({"inductor_max_size": 32}).to_dict() == {}
    assert Config.parse({"inductor_max_size": 8}).to_dict() == {"inductor_max_size": 8}


def sized(model: Callable[..., Any], *args: Any) -> int:
    """The size of the only key of a model after one call."""
    with torch.no_grad():
        torch.compile(model, backend="bcg", options={"inductor": "off"})(*args)
    (entry,) = graph().entries.values()
    return inductor.key_size(graph(), entry)


class Attention(nn.Module):
    """One sequence a batch entry; the products inside of the attention are batched ones."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_size_of_graphs_without_bucketed_sizes() -> None:
    """A decode graph of one token is small; a static vision model at batch 32 takes 32 x tokens rows."""
    attention = Attention()
    assert sized(attention, torch.randn(1, 1, 16)) == 1
    torch._dynamo.reset(), tgb.reset()
    assert sized(attention, torch.randn(32, 5, 16)) == 160
    torch._dynamo.reset(), tgb.reset()
    assert sized(lambda x, w: x.relu() @ w, torch.randn(6, 4), torch.randn(4, 4)) == 6
    torch._dynamo.reset(), tgb.reset()
    assert sized(lambda x: x.relu() + 1, torch.randn(3, 5, 4)) == 15


def test_size_is_the_product_of_bucketed_sizes(no_grad: None) -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu() @ w

    x = torch.randn(3, 7, 4)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    fast = compiled(model, inductor="off")
    fast(x, torch.randn(4, 4))
    (entry,) = graph().entries.values()
    assert inductor.key_size(graph(), entry) == 4 * 8


@pytest.mark.slow
def test_all_compiles_once_for_several_buckets(no_grad: None) -> None:
    model = Mlp(2)
    fast = compiled(model, inductor="all", inductor_max_size=4, buckets=[4, 8, 64])
    for n in (3, 4, 3, 7, 50, 6, 40, 50):
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    found = keys()
    assert [found[k].compiled for k in ("4", "8", "64")] == [1, 1, 1]
    assert [found[k].compiles for k in ("4", "8", "64")] == [1, 1, 0]


def test_code_for_several_buckets_is_not_used_where_its_assumptions_fail() -> None:
    import sympy

    s = sympy.Symbol("s", integer=True)
    artefact = inductor_segment.Artefact(list, (s,), (sympy.Eq(sympy.Mod(s, 8), 0), sympy.Ge(s, 2)))
    assert artefact.fits([16])
    assert not artefact.fits([12])


# -- dedup -------------------------------------------------------------------------------------------------------------


def test_equal_layers_are_compiled_once(no_grad: None) -> None:
    """Cut at each softmax over the padded rows: first segment, five equal ones, last one."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.sort(torch.tanh(layer(x)) * 2, 0).values
            return torch.tanh(self.layers[0](x))

    model = Layers()
    fast = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(fast(rows(7)), model(rows(7)))
    assert keys()["8"].compiled == len(graph().plan.segments) == 8
    assert keys()["8"].compiles <= 2


@pytest.mark.slow
def test_a_16_layer_llama_compiles_at_most_4_segments_a_bucket(no_grad: None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=16, num_attention_heads=4, vocab_size=61
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.compile(backend="bcg", options={"buckets": [8], "inductor_seconds": 3600})
    for length in (7, 6, 7):
        ids = torch.randint(1, 61, (1, length))
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        got = model(ids, use_cache=False).logits
        torch.testing.assert_close(got, model.forward(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    count = keys()["8"]
    assert count.compiled >= 16, tgb.stats(model)
    assert count.compiles <= 4, tgb.stats(model)
    tgb.stats(model).expect(replays=2, eager=0)


def test_another_model_of_the_same_structure_compiles_nothing(no_grad: None) -> None:
    first, second = compiled(Mlp()), compiled(Mlp())
    first(rows(3))
    second(rows(3))
    counts = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    assert sum(c.compiles for c in counts) == 1


# -- when it does not work ---------------------------------------------------------------------------------------------


def test_a_failed_compile_leaves_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_grad: None
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no code today")

    monkeypatch.setattr(inductor_segment, "compile_with_inductor", broken)
    model = Mlp()
    fast = compiled(model)
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        for n in (3, 4, 3):
            torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    assert codes("4") == ["inductor-failed"]
    assert "no code today" in str(tgb.stats(fast))
    assert "no code today" in tgb.explain(fast)
    assert [str(r.exc_info[1]) for r in caplog.records if r.exc_info] == ["no code today"]  # with its traceback, once
    assert sum("no code today" in r.message for r in caplog.records) == 1
    tgb.stats(fast).expect(replays=2, eager=0)
    (entry,) = graph().entries.values()
    assert not entry.demoted


def test_after_three_failures_no_further_compile_is_tried(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    tries = []

    def broken(*_: Any) -> Any:
        tries.append(1)
        raise ValueError("no")

    monkeypatch.setattr(inductor_segment, "compile_with_inductor", broken)
    fast = compiled(Mlp(), buckets=[2, 4, 6, 8, 10])
    for n in (2, 3, 5, 7, 9):
        fast(rows(n))
    assert len(tries) == 3
    assert codes("10") == ["inductor-failed"]


def test_time_cap(no_grad: None) -> None:
    model = Mlp()
    fast = compiled(model, inductor_seconds=0, strict=True)
    for n in (3, 4, 3):
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    assert codes("4") == ["inductor-time"]
    tgb.stats(fast).expect(replays=2, eager=0)


def test_time_cap_counts_all_compiles_of_a_graph(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    fast = compiled(Mlp(), inductor_seconds=100)
    fast(rows(3))
    graph().compiles.seconds = 101.0
    fast(rows(7))
    assert keys()["4"].compiled == 1
    assert codes("8") == ["inductor-time"]


def test_a_compile_that_cannot_end_in_time_is_not_begun(no_grad: None) -> None:
    """A model that is one segment is one compile, and one that has begun cannot be cut short."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(40)))
    fast = compiled(model, inductor_seconds=5)
    for n in (3, 4, 3):
        torch.testing.assert_close(fast(rows(n, 8)), model(rows(n, 8)))
    assert codes("4") == ["inductor-time"]
    assert graph().compiles.seconds == 0.0
    tgb.stats(fast).expect(replays=2, eager=0)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_grad: None) -> None:
    asked = []
    monkeypatch.setattr(inductor, "cpp_compiler_error", lambda: asked.append(1) or "there is no g++")
    model = Mlp()
    fast = compiled(model)
    for n in (3, 4, 3, 7):
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    assert codes("4") == codes("8") == ["inductor-unavailable"]
    assert len(asked) == 1
    assert sum("there is no g++" in r.message for r in caplog.records) == 1
    tgb.stats(fast).expect(replays=2, eager=0)


def test_compiling_is_announced(caplog: pytest.LogCaptureFixture, no_grad: None) -> None:
    """Once for a key that compiles, and not for one whose segments are there."""
    fast = compiled(Mlp())
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        for _ in range(3):
            fast(rows(3))
    assert sum("compiling the segments of key 4 with Inductor" in r.message for r in caplog.records) == 1


def test_progress_shows_the_segments(capsys: pytest.CaptureFixture[str], no_grad: None) -> None:
    compiled(Mlp(), progress=True)(rows(3))
    assert "preparing 4: 1 segments" in capsys.readouterr().err


def test_code_that_cannot_be_recorded_goes_back_to_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_grad: None
) -> None:
    from torch_graph_backend.recorders.host_tape import Tape

    def refuses(self: Tape, *_: Any) -> Any:
        raise RuntimeError("not this one")

    model = Mlp()
    fast = compiled(model)
    fast(rows(3))
    monkeypatch.setattr(Tape, "opaque", refuses)
    for n in (3, 4):
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    assert codes("4") == ["inductor-failed"]
    assert keys()["4"].compiled == 0
    tgb.stats(fast).expect(replays=2, eager=0)
    (error,) = [r.exc_info[1] for r in caplog.records if r.exc_info]
    assert str(error) == "not this one"
    assert error.__traceback__ is not None


def test_code_of_which_neither_kind_can_be_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_grad: None
) -> None:
    """What is logged of the segment shows both exceptions: the second one was raised from the first."""
    model = Mlp()
    fast = compiled(model)
    fast(rows(3))
    errors = iter([RuntimeError("the compiled code"), ValueError("the plain kernels")])

    def refuses(*_: Any) -> Any:
        raise next(errors)

    monkeypatch.setattr(graph().recorder, "capture_one", refuses)
    caplog.clear()
    torch.testing.assert_close(fast(rows(3)), model(rows(3)))
    logged = [r.exc_info[1] for r in caplog.records if r.exc_info]
    assert str(logged[0]) == "the compiled code"
    assert str(logged[-1]) == "the plain kernels"
    assert logged[-1].__cause__ is logged[0]
    assert tgb.stats(fast).eager == {"capture-failed": 1}


def test_inductor_owns_no_cuda_graph(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """Whatever the process is set to."""
    import torch._inductor.config as config

    seen = []
    real = inductor_segment.compile_with_inductor

    def spy(gm: Any, inputs: Any, mode: Any, patches: dict[str, Any]) -> Any:
        seen.append(patches["triton.cudagraphs"])
        return real(gm, inputs, mode, patches)

    monkeypatch.setattr(inductor_segment, "compile_with_inductor", spy)
    with config.patch({"triton.cudagraphs": True}):
        compiled(Mlp())(rows(3))
    assert seen == [False]


# -- ahead of time -----------------------------------------------------------------------------------------------------


def test_capture_ahead_records_compiled_segments(device: str, no_grad: None) -> None:
    model = Mlp().to(device)
    fast = compiled(model)
    assert tgb.capture(fast, rows(7, device=device), sizes=[3, 8]) == 2
    assert keys()["4"].compiled == keys()["8"].compiled == 1
    before = tgb.stats(fast)
    torch.testing.assert_close(fast(rows(3, device=device)), model(rows(3, device=device)))
    (tgb.stats(fast) - before).expect(replays=1, first_calls=0)


# -- the answer is eager's ---------------------------------------------------------------------------------------------


def writes_argument(x: torch.Tensor, state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh() + state
    state.add_(1)
    return y * 2


def returns_views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = (x @ w).tanh().chunk(3, -1)
    return q + 1, k.unflatten(-1, (2, -1)), v


def returns_clones(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x @ w).relu()
    return y, y.clone(), x.clone(), x


def writes_into_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh()
    y[:, :3].mul_(2)
    y.t()[1].add_(1)
    return y + x[:, :1]


def clone_then_mutate(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = (x @ w).tanh()
    kept = before.clone()
    before.add_(kept)
    return kept, before


def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sort((x @ w).tanh(), 0).values.t().contiguous().t() * 2


def not_finite(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu()
    z = torch.maximum((y - 0.5).log(), x)  # NaN where the logarithm is
    return torch.stack([(y / 0).clamp(max=3), y.log(), z, (y / 0).amax(-1, True) - y, torch.where(z > 0, z, y)])


def autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return torch.tanh(x @ w).float() @ w.t()


def repaired(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().sum(0) + 1


def statistics(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = (x @ w).tanh()
    spread, centre = torch.std_mean(h, 0)
    found = h.norm(dim=0) + h.nanmean(0) + h.logsumexp(0) + h.argmax() - torch.linalg.vector_norm(h, -1, 0)
    return (h - centre) / (spread + 1) * found + h.var()


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, int], bool]] = {
    "writes an argument": (writes_argument, (16, 16), True),
    "views": (returns_views, (16, 48), False),
    "clones": (returns_clones, (16, 16), False),
    "writes into a view": (writes_into_a_view, (16, 16), False),
    "clone then mutate": (clone_then_mutate, (16, 16), False),
    "transposed": (transposed, (16, 16), False),
    "not finite": (not_finite, (16, 16), False),
    "autocast": (autocast, (16, 16), False),
    "repaired": (repaired, (16, 16), False),
    "repaired statistics": (statistics, (16, 16), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_to_eager(name: str) -> None:
    """Values, strides, dtypes and shared memory of outputs, arguments after the call; tails poisoned."""
    function, shape, state = FUNCTIONS[name]
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 4
    rest = (torch.zeros(16), w) if state else (w,)

    def call(n: int) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
        """Rows of this call, and each side's own state and weight: the same tensors at every call."""
        return lambda side: (rows(n), *side.setdefault("rest", [t.clone() for t in rest]))

    tolerance = 2e-2 if name == "autocast" else 1e-5
    options = {"options": {"buckets": [4, 8], "min_segment_kernels": 1}}
    report = check_calls(
        function,
        [call(n) for n in (3, 3, 7, 5, 3)],
        compiled_kwargs=options,
        bitwise=False,
        tolerance=tolerance,
    )
    assert report.stats.replays >= 3
    found = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    plain = name == "autocast" and not cpp_rounds_halves()
    assert plain or sum(c.compiled for c in found) >= 2, [c.plain for c in found]


@pytest.mark.slow
def test_inside_of_autocast(no_grad: None) -> None:
    """Ambient autocast is part of what is compiled, and is not applied twice."""
    model = Mlp(2)
    fast = compiled(model)
    for n in (3, 4, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = fast(rows(n)), model(rows(n))
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))  # and not outside of it
    counts = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    assert sorted(c.compiles for c in counts) == [int(cpp_rounds_halves()), 1]


def test_inference_mode_and_its_tensors() -> None:
    def model(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).tanh()
        cache.add_(y.sum(0))
        return y * 2

    with torch.inference_mode():
        w, caches = torch.randn(16, 16) / 4, [torch.zeros(16), torch.zeros(16)]
        torch._dynamo.mark_static_address(caches[0])
        fast = compiled(model, buckets=[4])
        for n in (4, 4, 3, 4):
            torch.testing.assert_close(fast(rows(n), caches[0], w), model(rows(n), caches[1], w))
            torch.testing.assert_close(caches[0], caches[1])
    counts = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    assert sum(c.compiled for c in counts) >= 1


def test_verify_memory_finds_nothing(no_grad: None) -> None:
    model = Mlp(2)
    fast = compiled(model, verify_memory=True)
    for n in (3, 4, 2, 3):
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    assert keys()["4"].compiled == 1


def test_unaligned_inputs(device: str, no_grad: None) -> None:
    """A cache that is read and changed where it lies, not at a multiple of 16 bytes."""

    def model(x: torch.Tensor, cache: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).tanh()
        cache.add_(y.sum(0))
        return y * 2

    w = torch.randn(16, 16, device=device) / 4
    memories = [torch.zeros(19, device=device) for _ in range(2)]
    caches = [m[3:] for m in memories]
    for c in caches:
        torch._dynamo.mark_static_address(c)
    fast = compiled(model, buckets=[4])
    for _ in range(4):
        x = rows(4, device=device)
        torch.testing.assert_close(fast(x, caches[0], w), model(x, caches[1], w))
        torch.testing.assert_close(memories[0], memories[1])
    assert keys()["4"].compiled == keys()["4"].compiles == 2


def test_segments_draw_no_random_numbers(no_grad: None) -> None:
    """RNG stays eager, between segments: the same numbers as without the backend."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).tanh()
        return torch.tanh(F.dropout(y, 0.5, training=True) @ w)

    w = torch.randn(16, 16) / 4
    fast = compiled(model)
    for seed, n in enumerate((3, 4, 3)):
        torch.manual_seed(seed)
        want = model(rows(n), w)
        torch.manual_seed(seed)
        torch.testing.assert_close(fast(rows(n), w), want)
    assert keys()["4"].compiled > 0


def test_a_nan_that_inductor_would_fold_away(no_grad: None) -> None:
    """Inductor takes ``x * 0`` for 0, which it is not for NaN and infinities."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w) * 0 + 1

    w = torch.randn(16, 16)
    fast = compiled(model)
    for n in (3, 4, 3):
        x = rows(n)
        x[1] = float("inf")
        assert fast(x, w)[1].isnan().all()
        assert torch.equal(fast(x, w)[0], torch.ones(16))
    assert keys()["4"].compiled == 1


@pytest.mark.parametrize(("slots", "reasons"), [({}, ["inductor-unsuitable"]), ({"n": {
    "padding": "FILL_SENTINEL", "pad_value": 1}}, [])])  # fmt: skip
def test_a_divisor_that_the_probe_would_set_to_zero(slots: Any, reasons: list[str], no_grad: None) -> None:
    """Would catch a probe that raises (a failed compile with a traceback in the log), or ignores what is declared."""

    def model(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu() * (8 // n).unsqueeze(-1)

    w = torch.randn(16, 16)
    fast = compiled(model, slots=slots)
    for rows_ in (3, 2, 3):
        n = torch.arange(1, rows_ + 1)
        torch._dynamo.maybe_mark_dynamic(n, 0)
        torch.testing.assert_close(fast(rows(rows_), w, n), model(rows(rows_), w, n), rtol=1e-5, atol=1e-4)
    assert codes("4") == reasons
    assert keys()["4"].compiled == (not reasons)
    tgb.stats(fast).expect(replays=2, eager=0)


# -- one segment -------------------------------------------------------------------------------------------------------


def facts(*shapes: tuple[int, ...], shares: tuple[int, ...] | None = None) -> list[InputFacts]:
    shares = shares or tuple(range(len(shapes)))
    strides = [torch.empty(s, device="meta").stride() for s in shapes]
    triples = zip(shapes, strides, shares, strict=True)
    return [InputFacts(s, st, torch.float32, CPU, 0, first) for s, st, first in triples]


def traced(function: Callable[..., tuple[Any, ...]], *shapes: tuple[int, ...]) -> inductor_segment.Traced:
    mode, examples = static_examples(facts(*shapes))
    return trace(function, (), mode, examples)


def test_trace_says_where_outputs_lie() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = (x @ w).chunk(2, -1)
        return q, k, x[1:], x, x + 1

    found = traced(f, (3, 4), (4, 8))
    places = [(o.source, o.index, o.whole, o.offset) for o in found.outputs]
    assert places == [
        ("made", 0, False, 0),
        ("made", 0, False, 4),
        ("input", 0, False, 4),
        ("input", 0, True, 0),
        ("made", 1, True, 0),
    ]
    assert [layout[0] for layout in found.layouts] == [(3, 8), (3, 4)]
    assert found.written == frozenset()


def test_trace_finds_written_inputs() -> None:
    def f(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache[1:3].t().add_(1)
        return (x + 1,)

    assert traced(f, (3, 4), (4, 8)).written == {1}


def test_views_as_another_dtype_are_unsuitable() -> None:
    with pytest.raises(Unsuitable, match="another dtype"):
        traced(lambda x: ((y := x + 1), y.view(torch.int32)), (3, 4))


def fake_segment(code: Callable[..., Any], function: Callable[..., Any], *shapes: tuple[int, ...]) -> CompiledSegment:
    return CompiledSegment(code, (), traced(function, *shapes))


def run_probe(segment: CompiledSegment, plain: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    probe(segment, plain, [(f, None, 0) for f in facts(*shapes)])


def two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return y, y.clone(), x.clone()


def test_a_clone_that_was_optimised_away_is_made() -> None:
    """The code returns one tensor twice, and its input: each output still gets memory of its own."""
    segment = fake_segment(lambda x: [y := x + 1, y, x], two, (3, 4))
    run_probe(segment, two, (3, 4))
    assert segment.copied == {1, 2}
    x = torch.zeros(3, 4)
    outputs = segment(x)
    assert len({t.untyped_storage().data_ptr() for t in (*outputs, x)}) == 4
    for got, want in zip(outputs, two(x), strict=True):
        assert torch.equal(got, want)


def test_shared_ignores_empty_tensors() -> None:
    assert shared([torch.empty(0), torch.empty(0)], [torch.empty(0)]) == set()


def test_results_with_other_strides_are_laid_out_as_planned() -> None:
    segment = fake_segment(lambda x: [(x + 1).t().contiguous().t()], lambda x: (x + 1,), (3, 4))
    run_probe(segment, lambda x: (x + 1,), (3, 4))
    (out,) = segment(torch.zeros(3, 4))
    assert out.stride() == (4, 1)
    assert torch.equal(out, torch.ones(3, 4))


def one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.tanh() + 1,)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (lambda x: [x.tanh() + 1.1], "values differ"),
        (lambda x: [(x.tanh() + 1).double()], "float64"),
        (lambda x: [(x.tanh() + 1)[:2]], r"\[2, 4\]"),
        (lambda x: [], "0 results"),
        (lambda x: [(x.tanh() + 1) / 0], "NaN or infinity"),
        (lambda x: [one(x.add_(1))[0]], "values differ"),
    ],
    ids=["values", "dtype", "shape", "count", "infinity", "writes its input"],
)
def test_wrong_code_is_found_before_it_is_used(code: Callable[..., Any], text: str) -> None:
    with pytest.raises(Unsuitable, match=text):
        run_probe(fake_segment(code, one, (3, 4)), one, (3, 4))


def test_code_that_writes_an_input_behind_our_back_is_found() -> None:
    def code(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.tanh() + 1
        x.zero_()
        return [y]

    with pytest.raises(Unsuitable, match="input 0 after the call"):
        run_probe(fake_segment(code, one, (3, 4)), one, (3, 4))


def test_wrong_code_leaves_plain_kernels(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """A miscompiled segment never answers a call."""
    real = inductor_segment.compile_with_inductor

    def wrong(*args: Any) -> Any:
        code = real(*args)
        return lambda *t: [o * 1.5 for o in code(*t)]

    monkeypatch.setattr(inductor_segment, "compile_with_inductor", wrong)
    model = Mlp()
    fast = compiled(model)
    for n in (3, 4, 3):
        torch.testing.assert_close(fast(rows(n)), model(rows(n)))
    assert codes("4") == ["inductor-unsuitable"]
    assert "values differ" in keys()["4"].plain[0].text


def test_the_probe_draws_no_random_number_and_changes_nothing_of_the_callers() -> None:
    def f(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache.add_(1)
        return (x + 1,)

    def code(x: torch.Tensor, cache: torch.Tensor) -> list[torch.Tensor]:
        return list(f(x, cache))

    before = torch.get_rng_state()
    run_probe(fake_segment(code, f, (3, 4), (5,)), f, (3, 4), (5,))
    assert torch.equal(torch.get_rng_state(), before)


def test_overlapping_inputs_that_a_segment_changes(no_grad: None) -> None:
    """Unit of ``unsafe``: Inductor takes inputs to be apart."""
    described = inductor.Described((), frozenset({0}))
    work = inductor._Preparation.__new__(inductor._Preparation)

    class Step:
        index, inputs = 3, (("a", None), ("b", None))

    apart, together = facts((4,), (4,)), facts((4,), (4,), shares=(0, 0))
    assert work.unsafe(Step, [], apart, described) is None  # type: ignore[arg-type]
    found = work.unsafe(Step, [], together, described)  # type: ignore[arg-type]
    assert found is not None
    assert (found.code, "a, b share" in found.text) == ("inductor-unsuitable", True)
    assert work.unsafe(Step, [], together, inductor.Described((), frozenset())) is None  # type: ignore[arg-type]


# -- the host recorder -------------------------------------------------------------------------------------------------


def opaque() -> tuple[CompiledSegment, list[int]]:
    """``x -> (2x, row 1 of it, x itself)`` and adds 1 to x; the list counts runs."""
    runs: list[int] = []

    def code(x: torch.Tensor) -> list[torch.Tensor]:
        runs.append(1)
        out = x * 2
        x.add_(1)
        return [out]

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = x * 2
        x.add_(1)
        return out, out[1], x

    segment = fake_segment(code, plain, (2, 3))
    assert [type(o) for o in segment.outputs] == [Output] * 3
    return segment, runs


def test_recording_runs_nothing_and_replay_works_on_recorded_addresses() -> None:
    segment, runs = opaque()
    recorder = HostRecorder()
    x = torch.ones(2, 3)
    with recorder.record_session():
        made = recorder.capture_one(segment, [x])
    assert not runs
    assert torch.equal(x, torch.ones(2, 3))
    out, row, same = made.outputs
    addresses = [t.data_ptr() for t in made.outputs]
    assert row.data_ptr() == out.data_ptr() + 12
    assert same is x
    for step in (1.0, 2.0, 3.0):
        recorder.replay(made)
        assert torch.equal(out, torch.full((2, 3), 2 * step))
        assert torch.equal(row, torch.full((3,), 2 * step))
        assert torch.equal(x, torch.full((2, 3), step + 1))
    assert [t.data_ptr() for t in made.outputs] == addresses
    assert len(runs) == 3
    x.fill_(10.0)  # the caller's tensor is read where it lies
    recorder.replay(made)
    assert torch.equal(out, torch.full((2, 3), 20.0))


def test_results_lie_in_the_pool_and_go_with_their_last_reader() -> None:
    """Dropping a recorded value gives its block back, as for recorded operations."""
    segment, _ = opaque()
    recorder = HostRecorder()
    x = torch.ones(2, 3)
    with recorder.record_session():
        made = recorder.capture_one(segment, [x])
        assert recorder.leased_bytes > 0
        kept = recorder.alias(made.outputs[0])
        del made
    assert recorder.leased_bytes == 0
    assert kept.isnan().all()  # poisoned
