"""What is not repaired, because it would be wrong or would not pay; and what the proof of a repair rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import check_calls
from test_repair import (
    COUNTED,
    LADDER,
    LAST,
    LOOKED_UP,
    MASKED,
    SIZES,
    Between,
    H,
    Positions,
    cached,
    calls,
    one_segment,
    run,
)
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend.passes.classify import classify
from torch_graph_backend.passes.normalize import normalise
from torch_graph_backend.passes.repair import repair


def index_add(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.index_add_(0, at, m.proj(h))
    return h + cache.sum(0)


def accumulate(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.index_put_((at,), m.proj(h), accumulate=True)
    return h + cache.sum(0)


def scatter_reduce(m: Between, h: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.scatter_(0, at[:, None].expand(-1, H), m.proj(h), reduce="multiply")
    return h + cache.sum(0)


@pytest.mark.parametrize("op", [index_add, accumulate, scatter_reduce], ids=lambda f: f.__name__)
def test_accumulating_writes_stay_eager(op: Callable[..., Tensor]) -> None:
    """A padded row that repeats a real one would be counted twice."""
    (plan,) = run(op, cached(), tolerance=1e-4).plans
    assert not plan.repairs(), plan
    assert any("index" in name or "scatter" in name for name in plan.eager_ops()), plan


REFUSED: dict[str, Callable[..., Tensor]] = {
    "sort": lambda m, h: m.proj(h.sort(0).values),
    "median": lambda m, h: m.proj(h) / h.median(0).values,
    "median that skips NaN": lambda m, h: m.proj(h) * h.nanmedian(),
    "quantile": lambda m, h: m.proj(h) - h.quantile(0.3, dim=0),
    "last of a view that is written": lambda m, h: m.proj(h + h[-1].add_(1)),
    "a power of the size": lambda m, h: m.proj(h * h.shape[0] ** 0.5),
    "p-th root": lambda m, h: m.proj(h) / h.renorm(2, 1, 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_not_repaired_and_still_equal(name: str) -> None:
    (plan,) = run(REFUSED[name], calls()).plans
    assert not plan.repairs(), plan
    assert plan.regions, plan


def test_nan_in_real_rows_is_kept() -> None:
    """Would catch a masked reduction that hides a NaN, or a filler that wins over real values."""
    args = calls()
    for (x,) in args[::2]:
        x[1, 2] = float("nan")
        x[2] = -float("inf")
    for name in ("amax", "sum", "softmax", "mean"):
        one_segment(run(MASKED[name], args))


class Bare(Between):
    """The operation alone."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.op(self, x, *rest)


EMPTY_ISLANDS: dict[str, Callable[..., Any]] = {
    "at the end": lambda m, x: m.second(m.first(x).relu()).mean(0),
    "at the beginning": lambda m, x: m.first(x.amax(0) * x).relu(),
}


@pytest.mark.parametrize("name", EMPTY_ISLANDS)
def test_a_mask_that_joins_nothing_is_not_worth_it(name: str) -> None:
    """An eager operation before the first segment, or behind the last one, costs less than a masked copy."""
    torch._dynamo.reset()
    tgb.reset()
    report = check_calls(Bare(EMPTY_ISLANDS[name]).eval(), calls(), compiled_kwargs=LADDER)
    (plan,) = report.plans
    assert not plan.repairs(), plan
    assert not plan.counts, plan
    assert len(plan.regions) == 1, plan


def test_half_precision_mean_is_summed_in_single() -> None:
    """Would catch a sum that overflows, or is rounded, where ``mean`` is not."""
    torch._dynamo.reset()
    tgb.reset()
    model = Between(lambda m, h: h + m.proj((h * 3000).mean(0)), torch.float16).eval()
    sizes = (30, 29, 30, 27)
    options = {"options": {"buckets": [32]}, "dynamic": True}
    fills = (float("nan"), 6e4, None)  # 1e30 is no half
    report = check_calls(model, calls(sizes, torch.float16), compiled_kwargs=options, tolerance=2e-2, poison=fills)
    one_segment(report)


def test_under_autocast() -> None:
    """Would catch a rewrite whose dtype autocast changes: softmax and sums are single precision there, products not."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)

    def op(m: Between, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.softmax(h.t() @ m.proj(h), 0).sum(0) + (m.proj(h) / h.shape[0]).amax(0) + m.proj(h)[-1]
            return h + m.proj(h).softmax(0) * y

    fills = (float("nan"), 1e30, None)
    check_calls(Between(op).eval(), calls(), compiled_kwargs=LADDER, tolerance=5e-2, poison=fills)
    (plan,) = tgb.plans()
    assert sum(plan.repairs().values()) >= 4, plan


def test_statistics_under_autocast() -> None:
    """Would catch a mean, or a norm, in the dtype of the region instead of its own."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)

    def op(m: Between, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m.proj(h)
            means = y.mean(0) + h.mean(0) + y.mean(0, dtype=torch.float32) + y.nanmean(0)
            return h + means + m.proj(y / (1 + y.std(0))) + y.norm(dim=0) + h.logsumexp(0)

    fills = (float("nan"), 1e30, None)
    report = check_calls(Between(op).eval(), calls(), compiled_kwargs=LADDER, tolerance=5e-2, poison=fills)
    assert sum(one_segment(report).repairs().values()) == 7


def both(m: Between, h: Tensor) -> Tensor:
    """Every kind of repair, over two padded sizes."""
    scores = torch.softmax(h @ h.transpose(-1, -2), -1) @ h
    return scores * h.shape[0] + m.proj(h.mean((0, 1))) + h.amax(1, keepdim=True) - h[:, -1:] / h.shape[1]


def test_two_padded_sizes() -> None:
    """Would catch counts that are mixed up, and a mask along the wrong dimension."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    shapes = ((3, 5), (2, 7), (3, 6), (5, 3), (3, 5), (5, 3), (2, 7))
    args = [(torch.randn(b, t, H, generator=g),) for b, t in shapes]
    report = check_calls(Between(both).eval(), args, compiled_kwargs={"options": {"buckets": [4, 8]}, "dynamic": True})
    plan = one_segment(report)
    assert len(plan.counts) == 2, plan


def test_a_number_that_is_no_size_is_read_on_the_device() -> None:
    """A position that counts up from call to call neither is in the key nor makes an eager island."""
    torch._dynamo.reset()
    tgb.reset()

    def step(m: Bare, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(start, start + x.shape[0])
        return m.second(m.first(x) * places[:, None] + start), places

    args = [(x, 10 + 3 * i) for i, (x,) in enumerate(calls())]
    report = check_calls(Bare(step).eval(), args, compiled_kwargs=LADDER, tolerance=1e-4)
    plan = next(p for p in report.plans if p.bucketed)
    assert len(plan.steps) == 1, plan
    assert plan.repairs(), plan


@pytest.mark.parametrize("options", [{"verify_memory": True}, {"outputs": "view"}], ids=str)
def test_with_other_options(options: dict[str, Any]) -> None:
    """Would catch counts that the memory check, or views as outputs, do not know."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)
    model = Between(lambda m, h: h + m.proj(h[-1]) + h.mean(0)).eval()
    kwargs = {"options": {"buckets": [8], **options}, "dynamic": True}
    compiled = torch.compile(model, backend="bcg", **kwargs)
    with torch.no_grad():
        for (x,) in calls():
            torch.testing.assert_close(compiled(x).clone(), model(x), rtol=1e-5, atol=1e-5)
    assert tgb.stats(model).replays == len(SIZES) - 1


def test_recorded_ahead() -> None:
    """Would catch a warm-up on counts of zero, whose last row would be row -1."""
    torch._dynamo.reset()
    tgb.reset()
    torch.manual_seed(0)
    model = Between(LAST["last three"]).eval()
    compiled = torch.compile(model, backend="bcg", options={"buckets": [4, 8]})
    (x,) = calls((7,))[0]
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        tgb.capture(compiled, x, sizes=[4, 8])
        for (x,) in calls():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert tgb.stats(model).replays == len(SIZES), tgb.stats(model)


# -- the graph ---------------------------------------------------------------------------------------------------------


def repaired(op: Callable[..., Any], *args: Tensor) -> tuple[Any, Any, Any]:
    """The normalised graph, the repaired one, and its classification."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        kind = Positions if op in LOOKED_UP.values() else Between
        torch.compile(kind(op).eval(), backend=backend, dynamic=True)(*args)
    normal = normalise(found[0])
    return normal, *repair(normal, lambda g: classify(g, torch.device("cpu"), lambda n: None))


@pytest.mark.parametrize("name", [*MASKED, *COUNTED, *LAST, *LOOKED_UP])
def test_the_rewritten_graph_is_the_same_function_at_its_own_size(name: str) -> None:
    """The proof of a repair is about padding; this is the other half: at the real size nothing changes."""
    torch.manual_seed(0)
    x = torch.randn(5, H)
    normal, graph, _ = repaired((MASKED | COUNTED | LAST | LOOKED_UP)[name], x)
    want, got = (evaluate(g, x) for g in (normal, graph))
    assert any("real_size" in n.meta for n in graph.graph.nodes)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def evaluate(normal: Any, x: Tensor) -> list[Tensor]:
    """Outputs of a graph, and what it changed, run on real tensors."""
    g = torch.Generator().manual_seed(0)
    values: dict[Any, Any] = {}
    made: list[Tensor] = []
    (h,) = (p.meta["val"] for p in normal.placeholders if p.meta["source"] == "L['x']")
    sizes = {s.node.expr: n for s, n in zip(h.shape, x.shape, strict=True) if isinstance(s, torch.SymInt)}
    for node in normal.graph.nodes:
        val = node.meta.get("val")
        if "real_size" in node.meta:
            values[node] = torch.tensor(sizes[node.meta["real_size"]])
        elif node.op == "placeholder" and isinstance(val, torch.Tensor):
            shape = [sizes[n.node.expr] if isinstance(n, torch.SymInt) else n for n in val.shape]
            whole = not val.dtype.is_floating_point
            values[node] = torch.zeros(shape, dtype=val.dtype) if whole else torch.randn(shape, generator=g)
            made.append(values[node])
        elif node.op == "placeholder":
            values[node] = sizes[val.node.expr]
        elif node.op == "output":
            return [*(values[a] for a in node.all_input_nodes), *made]
        else:
            args, kwargs = torch.fx.node.map_aggregate(
                (node.args, node.kwargs), lambda a: values[a] if isinstance(a, torch.fx.Node) else a
            )
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")


def test_the_original_graph_is_not_changed() -> None:
    normal, graph, classified = repaired(MASKED["mean"], torch.randn(5, H))
    assert graph.graph is not normal.graph
    assert "real_size" not in {k for n in normal.graph.nodes for k in n.meta}
    names = {n.name for n in normal.graph.nodes if n.op != "output"}
    assert names <= {n.name for n in graph.graph.nodes}
    assert all(v.kind != "eager" for v in classified.verdicts.values())


def _shifted(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x) * 2
    c[1 : h.shape[0] + 1] = c[: h.shape[0]]
    return h.relu() + 1


def _transposed(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x) * 2
    c[:, : h.shape[0]] = c.t()[:, : h.shape[0]]
    return h.relu() + 1


def _copied_rows(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x) * 2
    c.index_copy_(0, torch.arange(h.shape[0]), c[1 : h.shape[0] + 1])
    return h.relu() + 1


@pytest.mark.parametrize("function", [_shifted, _transposed, _copied_rows])
def test_a_write_that_reads_its_own_memory_is_not_repaired(function: Callable[..., torch.Tensor]) -> None:
    """Eager raises where the two overlap, or reads what it has written already; a repeated copy would do neither."""
    fast = torch.compile(function, backend="bcg", options={"buckets": [4, 16]})
    with torch.no_grad():
        for n in (5, 6, 7, 5, 6, 7, 3, 3, 3):
            x = torch.randn(n, 16)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            ours, theirs = (torch.arange(256.0).reshape(16, 16) for _ in range(2))
            answers = []
            for run, memory in ((fast, ours), (function, theirs)):
                try:
                    answers.append(run(x, memory))
                except RuntimeError as error:
                    answers.append(type(error))
            assert isinstance(answers[0], type(answers[1])), (n, answers)
            if isinstance(answers[1], torch.Tensor):
                assert torch.equal(answers[0], answers[1])
            assert torch.equal(ours, theirs), n
