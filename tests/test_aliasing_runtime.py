"""Memory that is shared, changed in place, replaced or moved between calls: answers, arguments and state are eager's.

All bit for bit (whole numbers, see ``modes_harness``), over changing sizes, with replays where a replay is expected.
"""

from __future__ import annotations

import collections
import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from equality import check_calls
from modes_harness import OPTIONS, SIZES, Both, H, Net, compiled, linear, on_devices, whole
from torch import Tensor, nn

import torch_graph_backend as tgb

pytestmark = on_devices
KWARGS = {"options": OPTIONS}


def check(model: Any, calls: list[Any], **kwargs: Any) -> Any:
    """``check_calls`` without any tolerance."""
    return check_calls(model, calls, compiled_kwargs=KWARGS, tolerance=0.0, **{"floor": 1, "padded": False, **kwargs})


def weight(device: str) -> Tensor:
    return whole(H, H, device=device, seed=9, dynamic=False)


# -- inputs that are changed, and that share memory --------------------------------------------------------------------


def test_changed_inputs(device: str) -> None:
    """Both a padded input and one of fixed size, each a new tensor at every call."""
    w = weight(device)

    def f(x: Tensor, state: Tensor) -> Tensor:
        x.add_(1.0)
        y = torch.relu(x @ w)
        state.mul_(2.0).sub_(1.0)
        x.mul_(2.0)
        return y @ w + state

    calls = [lambda m, n=n: (whole(n, H, device=device), whole(1, H, device=device, dynamic=False)) for n in SIZES]
    check(f, calls, moves=True, tolerate=("moving-input",))


def test_a_changed_input_that_stays(device: str) -> None:
    """Captured writes land in the caller's tensor once a call, while the other input has another size each time."""
    w = weight(device)

    def f(x: Tensor, state: Tensor) -> Tensor:
        state.neg_().add_(1.0)
        return torch.relu(x @ w) @ w + state

    calls = [
        lambda m, n=n: (whole(n, H, device=device), m.setdefault("state", torch.ones(1, H, device=device)))
        for n in SIZES
    ]
    report = check(f, calls)
    assert report.stats.replays >= 6


SHARED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], bool]] = {
    "overlapping rows": (lambda base: (base[:6], base[3:9]), True),
    "most rows in common": (lambda base: (base[:6], base[1:7]), True),
    "disjoint rows": (lambda base: (base[:6], base[6:12]), False),
    # Storages of their own, which begin elsewhere.
    "overlapping rows, by DLPack": (lambda base: (base[:6], torch.from_dlpack(base[3:9])), True),
    "disjoint rows, by DLPack": (lambda base: (base[:6], torch.from_dlpack(base[6:12])), False),
}


@pytest.mark.parametrize("how", sorted(SHARED))
@pytest.mark.parametrize("changed", ["first", "second", "none"])
def test_inputs_that_share_memory(device: str, how: str, changed: str) -> None:
    """Overlap is looked for at each call, and only where an input is changed."""
    w = weight(device)
    cut, overlaps = SHARED[how]

    def f(a: Tensor, b: Tensor) -> Tensor:
        if changed == "first":
            a.add_(1.0)
        if changed == "second":
            b.add_(1.0)
        return torch.relu(a @ w) + torch.relu(b @ w) @ w

    def apart(memory: dict[str, Any]) -> tuple[Any, ...]:
        return whole(6, H, device=device, seed=1), whole(6, H, device=device, seed=2)

    def shared(memory: dict[str, Any]) -> tuple[Any, ...]:
        parts = cut(whole(12, H, device=device, seed=3))
        for t in parts:
            torch._dynamo.maybe_mark_dynamic(t, 0)
        return parts

    calls = [apart, apart, shared, apart, shared, apart]
    refused = overlaps and changed != "none"
    check(f, calls, moves=True, eager={"aliased-inputs": 2} if refused else {})
    stats = tgb.stats()
    assert stats.replays >= 2, stats


def test_the_same_tensor_twice(device: str) -> None:
    w = weight(device)

    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1.0)
        return torch.relu(b @ w) @ w + a

    def twice(memory: dict[str, Any]) -> tuple[Any, ...]:
        x = whole(5, H, device=device)
        return x, x

    def apart(memory: dict[str, Any]) -> tuple[Any, ...]:
        return whole(5, H, device=device), whole(5, H, device=device, seed=2)

    check(f, [apart, twice, apart, twice, twice, apart], moves=True, tolerate=("aliased-inputs",))
    assert tgb.stats().replays >= 2, tgb.stats()


# -- views as outputs --------------------------------------------------------------------------------------------------


def test_views_of_inputs_as_outputs(device: str) -> None:
    """They are views of the caller's own tensor, so a write through one of them is seen in the argument."""
    w = weight(device)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x @ w) @ w
        return y, x[1:], x.t(), x.view(-1), x[:, :2].unsqueeze(0), x

    both = Both(f)
    for n in SIZES:
        x = whole(n, H, device=device, seed=n)
        out = both(x)
        both.kept.pop()
        out[1].add_(1.0)
        assert torch.equal(out[3].view(n, H), x), "the views are of another tensor"
        assert torch.equal(x[1:], whole(n, H, device=device, seed=n)[1:] + 1)
    both.finish(6)


def test_outputs_that_share_memory(device: str) -> None:
    w = weight(device)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        h = torch.relu(x @ w)
        g = h @ w
        return h, h[1:], h.t(), g, g.view(-1)[::2], h, g[:, 1]

    report = check(f, [(whole(n, H, device=device),) for n in SIZES])
    assert report.stats.replays >= 6


def test_writes_through_views_across_segments(device: str) -> None:
    """A view made before an eager operation is written after it, and read by a later segment through its base."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = linear(H, 6), linear(6, H, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.up(x)
            left, right = h[:, :3], h[:, 3:]
            left.add_(1.0)
            total = h.cumsum(0)
            right.mul_(2.0)
            left[:, 0] = 3.0
            h.clamp_(-50.0, 50.0)
            return self.down(h + total), right

    report = check(Windows().to(device), [(whole(n, H, device=device),) for n in SIZES])
    assert report.stats.replays >= 6


def test_the_caller_writes_into_outputs_and_feeds_them_back(device: str) -> None:
    """An output is the caller's: writing into it reaches no recording, and it may be the next input."""
    w = weight(device).clamp(-1, 1)

    def f(x: Tensor) -> Tensor:
        return torch.relu(x @ w).clamp(max=9.0) @ w

    fast = compiled(f)
    with torch.no_grad():
        for n in SIZES:
            x = whole(n, H, device=device)
            mine = theirs = x
            for _ in range(3):
                mine, theirs = f(mine), fast(theirs)
                assert torch.equal(mine, theirs)
                mine.add_(1.0)
                theirs.add_(1.0)
    assert tgb.stats(f).replays >= 20, tgb.stats(f)


# -- what outputs can look like ----------------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "transposed": lambda h, x: (h.t(), h.t().contiguous(), h.t().contiguous().t()),
    "expanded": lambda h, x: (h[:1].expand(3, H), h[:, :1].expand(-1, 5), h.unsqueeze(1).expand(-1, 2, -1)),
    "steps": lambda h, x: (h[:, ::2], h[:, 1:3], h.flip(1)),
    "as_strided": lambda h, x: (h.as_strided((2, 3), (1, 2)), h.as_strided((3,), (2,), 1)),
    "diagonal": lambda h, x: (h[:4].diagonal(), torch.diag_embed(h)),
}


@pytest.mark.parametrize("how", sorted(STRIDES))
def test_strides_of_outputs(device: str, how: str) -> None:
    w = weight(device)
    shape = STRIDES[how]

    def f(x: Tensor) -> Any:
        h = torch.relu(x @ w) @ w
        return shape(h, x)

    report = check(f, [(whole(n, H, device=device),) for n in SIZES])
    assert report.stats.replays >= 6


def test_channels_last_outputs(device: str) -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
            nn.init.ones_(self.conv.weight)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(self.conv(x))
            return y, y.to(memory_format=torch.channels_last) + 1

    model = Conv().to(device)

    def make(n: int, last: bool) -> tuple[Tensor]:
        x = whole(n, 3, 5, 5, device=device)
        x = x.to(memory_format=torch.channels_last) if last else x
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return (x,)

    calls = [lambda m, n=n, i=i: make(n, i % 3 == 2) for i, n in enumerate((5, 6, 7, 5, 6, 7, 12, 13, 14, 5))]
    report = check(model, calls, tolerate=("input-strides",))
    assert report.stats.replays >= 3, report.stats


def test_kinds_of_outputs(device: str) -> None:
    """0-d, empty, complex, boolean and integer tensors, beside values that are captured."""
    w = weight(device)

    def f(x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(x @ w) @ w
        return {
            "h": h,
            "0-d": h.amax(),
            "0-d fixed": w.sum() + 1,
            "empty": h[:0],
            "empty columns": h[:, :0],
            "complex": torch.complex(h, -h),
            "bool": h > 0,
            "int": h.to(torch.int64) + 1,
            "small": h.to(torch.int8),
            "rows": torch.arange(x.shape[0], device=x.device),
        }

    report = check(f, [(whole(n, H, device=device),) for n in SIZES])
    assert report.stats.replays >= 6


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Result:
    hidden: Tensor
    more: dict[str, Any]


def test_containers(device: str) -> None:
    w = weight(device)

    def f(x: Tensor) -> Any:
        h = torch.relu(x @ w)
        g = h @ w
        ordered = collections.OrderedDict([("g", g), ("pair", Pair(h, [g, (h, None)]))])
        return Result(h, {"ordered": ordered, "sizes": Pair(x.shape[0], "text")})

    fast = compiled(f)
    kept = []
    with torch.no_grad():
        for n in SIZES:
            x = whole(n, H, device=device)
            got, want = fast(x), f(x)
            assert type(got) is Result
            kept.append((got, want))
    for got, want in kept:
        ordered, wanted = got.more["ordered"], want.more["ordered"]
        assert type(ordered) is collections.OrderedDict
        assert type(ordered["pair"]) is Pair
        assert got.more["sizes"] == want.more["sizes"]
        assert torch.equal(got.hidden, want.hidden)
        assert torch.equal(ordered["g"], wanted["g"])
        assert ordered["pair"].left is got.hidden
        assert ordered["pair"].right[0] is ordered["g"]
    assert tgb.stats(f).replays >= 6, tgb.stats(f)


# -- state that is replaced --------------------------------------------------------------------------------------------


class Assigns(nn.Module):
    """Assigns its buffer anew in every forward."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()
        self.register_buffer("total", torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total * 0.5 + 1.0
        return torch.relu(self.proj(x)) @ self.proj.weight + self.total


def test_a_buffer_assigned_in_forward(device: str) -> None:
    both = Both(Assigns().to(device))
    both.sizes(*SIZES, *SIZES, device=device)
    both.finish(5)


def test_a_buffer_assigned_between_calls(device: str) -> None:
    """Another tensor, another tensor's ``.data``, and the old one back."""
    both = Both(Net().to(device))
    first = {id(m): m.count for m in (both.plain, both.model)}

    def replace(m: Net) -> None:
        m.count = torch.full_like(m.count, 3.0)

    def data(m: Net) -> None:
        m.count.data = torch.full_like(m.count, 5.0)

    def back(m: Net) -> None:
        m.count = first[id(m)]

    for change in (replace, data, back, replace):
        both.sizes(*SIZES, device=device)
        both.each(change)
    both.sizes(*SIZES, device=device)
    both.finish(20)


def _swap_data(m: nn.Module) -> None:
    for p in m.parameters():
        p.data = p.data.flip(0).contiguous()


def _replace(m: nn.Module) -> None:
    for layer in (m.up, m.down):
        layer.weight = nn.Parameter(layer.weight.detach().flip(0).contiguous())


def _load(assign: bool) -> Callable[[nn.Module], None]:
    def change(m: nn.Module) -> None:
        m.load_state_dict({k: v.detach().clone().flip(0) for k, v in m.state_dict().items()}, assign=assign)

    return change


def _there_and_back(m: nn.Module) -> None:
    """To the host and back (on a CPU: to another dtype and back): new memory, the same values."""
    device = m.up.weight.device
    m.to("cpu") if device.type == "cuda" else m.to(torch.float64)
    m.to(device, torch.float32)


def _free_and_reuse(m: nn.Module) -> None:
    """The old memory is freed, and something else is put where it was."""
    weight = m.up.weight.detach().flip(0).contiguous()
    like = m.up.weight.shape, m.up.weight.device
    m.up.weight = None
    junk = [torch.full(like[0], float("nan"), device=like[1]) for _ in range(8)]
    m.up.weight = nn.Parameter(weight)
    del junk


#: How weights become others. Those that stay where they are need no further recording.
CHANGES = {
    "data": _swap_data,
    "parameter": _replace,
    "load": _load(False),
    "load, assign": _load(True),
    "there and back": _there_and_back,
    "freed": _free_and_reuse,
}


@pytest.mark.parametrize("how", sorted(CHANGES))
def test_weights_that_change_between_calls(device: str, how: str) -> None:
    """Would catch a recording that reads the memory of old weights, which somebody else owns by then."""
    both = Both(Net().to(device))
    for _ in range(4):
        both.sizes(*SIZES, device=device)
        both.each(CHANGES[how])
    both.sizes(*SIZES, device=device)  # weights are the model's for the registry once it was called with them
    both.finish(20)
    if how == "load":
        assert both.stats.recordings == 2


def test_a_module_moves_to_another_dtype_and_back(device: str) -> None:
    both = Both(Net().to(device))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        both.each(lambda m, dtype=dtype: m.to(dtype))
        for n in (5, 6, 5, 7):
            x = whole(n, H, device=device).to(dtype).clamp(-1, 1)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            both(x)
    both.finish(6)


class Lora(nn.Module):
    """A frozen layer with low-rank adapters: any of them on, none, or one merged into the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = linear(), linear(H, H, 5)
        self.down = nn.ModuleDict({k: nn.Linear(H, 2, bias=False) for k in "ab"})
        self.up = nn.ModuleDict({k: nn.Linear(2, H, bias=False) for k in "ab"})
        for k, value in (("a", 1.0), ("b", 2.0)):
            nn.init.constant_(self.down[k].weight, value)
            nn.init.constant_(self.up[k].weight, -value)
        self.active: tuple[str, ...] = ()

    def merge(self, name: str, sign: int) -> None:
        with torch.no_grad():
            self.base.weight.add_(sign * (self.up[name].weight @ self.down[name].weight))

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        for name in self.active:
            h = h + self.up[name](self.down[name](x))
        return self.out(torch.relu(h))


def test_adapters_switched_and_merged(device: str) -> None:
    both = Both(Lora().to(device))

    def switch(*names: str) -> Callable[[Lora], None]:
        return lambda m: setattr(m, "active", names)

    changes: list[Callable[[Lora], None]] = [
        switch("a"),
        switch(),
        switch("b"),
        switch("a", "b"),
        switch("a"),
        lambda m: (m.merge("a", 1), setattr(m, "active", ()))[1],
        lambda m: m.merge("a", -1),
        switch("b"),
    ]
    for change in changes:
        both.each(change)
        both.sizes(5, 6, 11, 7, 12, device=device)
    both.finish(20)


# -- weights that come and go (offloading) -----------------------------------------------------------------------------


def _offload(m: nn.Module, device: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(m, execution_device=torch.device(device))


def _align(m: nn.Module, device: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    for child in (m.up, m.down):
        weights = {k: v.clone() for k, v in child.state_dict().items()}
        hook = hooks.AlignDevicesHook(torch.device(device), offload=True, weights_map=weights)
        hooks.add_hook_to_module(child, hook)


class Plain(nn.Module):
    """``Net`` without a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(H, 6), linear(6, H, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h * 2 + 1)


@pytest.mark.parametrize("offload", [_offload, _align])
def test_offloaded_weights(device: str, offload: Callable[[nn.Module, str], None]) -> None:
    """``accelerate`` brings weights before a layer's forward and takes them away after it: new addresses each time."""
    model = Plain().to(device)
    plain = copy.deepcopy(model)
    offload(model, device)
    fast = compiled(model)
    kept = []
    with torch.no_grad():
        for n in SIZES:
            x = whole(n, H, device=device)
            kept.append((fast(x), plain(x)))
            assert torch.equal(*kept[-1])
    assert all(torch.equal(a, b) for a, b in kept)
    assert tgb.stats().replays >= 6, tgb.stats()


def test_weights_swapped_by_forward_hooks(device: str) -> None:
    """Weights put into place by a pre-hook outside the compiled code, and thrown away by a post-hook."""
    model = Plain().to(device)
    plain = copy.deepcopy(model)
    stored = {k: v.clone() for k, v in model.state_dict().items()}

    def bring(m: nn.Module, args: Any) -> None:
        for name, p in m.named_parameters():
            p.data = stored[name].clone()

    def drop(m: nn.Module, args: Any, out: Any) -> None:
        for p in m.parameters():
            p.data = torch.full_like(p.data, float("nan"))

    inner = compiled(model)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return inner(x)

    outer = Outer()
    outer.register_forward_pre_hook(lambda m, args: bring(model, args))
    outer.register_forward_hook(lambda m, args, out: drop(model, args, out))
    with torch.no_grad():
        kept = [(outer(x), plain(x)) for n in (*SIZES, *SIZES) if (x := whole(n, H, device=device)) is not None]
    assert all(torch.equal(a, b) for a, b in kept)
    stats = tgb.stats(model)
    assert stats.calls == 2 * len(SIZES), stats


# -- caches ------------------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Writes one row of the caller's cache at the caller's position and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = linear(), linear(H, H, 3)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(1, position, self.key(x).unsqueeze(1))
        return torch.relu(self.out(cache.sum(1) + x))


def test_a_new_cache_for_every_generation(device: str) -> None:
    """After a few moves nothing depends on where the cache lies; old caches stay as they were, and are not kept."""
    both = Both(Attends().to(device))
    old, refs = [], []
    for generation in range(7):
        mine, theirs = (torch.zeros(3, 6, H, device=device) for _ in range(2))
        for step in range(5):
            x = whole(3, H, device=device, seed=10 * generation + step)
            at = torch.tensor([step], device=device)
            with torch.no_grad():
                want, got = both.plain(x, theirs, at), both.fast(x, mine, at)
            assert torch.equal(got, want), f"generation {generation}, step {step}"
            assert torch.equal(mine, theirs), f"the cache differs in generation {generation}, step {step}"
        old.append((mine, mine.clone()))
        refs.append(weakref.ref(mine.untyped_storage()))
    assert all(torch.equal(a, b) for a, b in old), "an earlier generation's cache was written later"
    assert tgb.stats(both.model).replays >= 12, tgb.stats(both.model)
    del mine, old
    gc.collect()
    alive = sum(ref() is not None for ref in refs[:-1])
    assert alive == 0, f"{alive} caches of earlier generations are still in memory"


# -- wrapper subclasses ------------------------------------------------------------------------------------------------


def two(a: Tensor, b: Tensor) -> Any:
    module = pytest.importorskip("torch.testing._internal.two_tensor")
    return module.TwoTensor(a, b)


def parts(t: Any) -> tuple[Tensor, Tensor]:
    return t.a, t.b


@pytest.mark.parametrize("where", ["input", "parameter", "output"])
def test_wrapper_subclasses(device: str, where: str) -> None:
    """A tensor with two inner tensors beside plain work that is captured."""
    w, v = linear().to(device), weight(device)
    double = two(v.clone(), v.clone() * 2)

    def f(x: Tensor, y: Any) -> Any:
        h = torch.relu(w(x)) @ v
        if where == "parameter":
            return h, y @ double
        if where == "input":
            return h, y * 2 + 1
        return h + 1, double + 1

    fast = compiled(f)
    kept = []
    with torch.no_grad():
        for i, n in enumerate(SIZES):
            x = whole(n, H, device=device)
            y = two(whole(n, H, device=device, seed=i), whole(n, H, device=device, seed=i + 1))
            if where == "parameter":
                y = y.a
            kept.append((fast(x, y), f(x, y)))
    for got, want in kept:
        assert torch.equal(got[0], want[0])
        assert type(got[1]) is type(want[1])
        for a, b in zip(parts(got[1]), parts(want[1]), strict=True):
            assert torch.equal(a, b)
    assert tgb.stats(f).replays >= 6, tgb.stats(f)


class Doubled(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        a = whole(H, H, device=device, dynamic=False)
        self.weight = nn.Parameter(two(a, a + 1))
        self.proj = linear().to(device)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.proj(x)) @ self.weight


def test_a_parameter_that_is_a_wrapper_subclass(device: str) -> None:
    model = Doubled(device)
    fast = compiled(model)
    with torch.no_grad():
        kept = [(fast(x), model(x)) for n in SIZES if (x := whole(n, H, device=device)) is not None]
        model.weight.a.add_(1.0)
        kept += [(fast(x), model(x)) for n in SIZES if (x := whole(n, H, device=device)) is not None]
    for got, want in kept:
        for a, b in zip(parts(got), parts(want), strict=True):
            assert torch.equal(a, b)
    assert tgb.stats(model).replays >= 12, tgb.stats(model)


NESTED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "in": lambda v, offsets, w: torch.nested.nested_tensor_from_jagged(v @ w, offsets).values() @ w,
    "computed": lambda v, offsets, w: (torch.nested.nested_tensor_from_jagged(v @ w, offsets) @ w).relu().values() @ w,
    "padded": lambda v, offsets, w: torch.nested.nested_tensor_from_jagged(v @ w, offsets).to_padded_tensor(0.0) @ w,
    "reduced": lambda v, offsets, w: torch.nested.nested_tensor_from_jagged(v @ w, offsets).sum(1) @ w,
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensors_made_inside(device: str, kind: str) -> None:
    """Their ragged size is a symbol; a guard on it would make the compilation fail."""
    v = weight(device)
    fast = compiled(lambda x, offsets: NESTED[kind](x, offsets, v))
    with torch.no_grad():
        for n in (5, 5, 5, 6, 7, 6, 5):
            x, offsets = whole(n, H, device=device, dynamic=False), torch.tensor([0, 2, n], device=device)
            torch.testing.assert_close(fast(x, offsets), NESTED[kind](x, offsets, v))
    assert tgb.stats(fast).replays >= 3, tgb.stats(fast)


# -- ``.data``, in which a trace sees no operation ------------------------------------------------------------------


def read_data(w: Tensor, x: Tensor) -> Any:
    return torch.relu(x.data @ w.data) @ w, (x * 2).data + 1


def changed_argument(w: Tensor, x: Tensor) -> Any:
    x.data.add_(1.0)
    return torch.relu(x @ w) @ w, x.sum(0)


def changed_value(w: Tensor, x: Tensor) -> Any:
    y = x @ w
    y.data[1:].mul_(2.0)
    return torch.relu(y) @ w, y


def returned_data(w: Tensor, x: Tensor) -> Any:
    y = x @ w
    return x.data, y.data.t(), y


def assigned_data(w: Tensor, x: Tensor) -> Any:
    y = x @ w
    y.data = x * 2.0
    return y @ w


@pytest.mark.parametrize("body", [read_data, changed_argument, changed_value, returned_data, assigned_data])
def test_data_of_a_tensor(body: Callable[[Tensor, Tensor], Any], device: str) -> None:
    """Would catch ``x.data`` as a constant of the trace: what was written through it was lost, without a word."""
    w = nn.Parameter(weight(device))
    calls = [lambda m, n=n: (whole(n, H, device=device),) for n in (5, 6, 5, 7, 2)]
    check(lambda x: body(w, x), calls, moves=True, tolerate=("moving-input", "nothing-to-capture"))
