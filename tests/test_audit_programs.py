"""Random programs and the zoo under audit: what the proof allows passes, so an audit gives no false alarm.

``AUDIT_EXAMPLES`` sets the number of random programs (40 unless given); ``AUDIT_ZOO=all`` audits the whole zoo.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from equality import check_calls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_padding_programs import STEP, STEPS

import torch_graph_backend as tgb

EXAMPLES = int(os.environ.get("AUDIT_EXAMPLES", "40"))
#: Those that are quick and differ most: convolutions, recurrences, experts, a static cache.
QUICK = ("dit", "convnet_eval", "lstm", "cond")


def program(steps: list[tuple[int, int, int]]) -> Any:
    """A function of three tensors: each step takes two values made before it; a step that does not fit is left out."""

    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        pool = [a * 1, b * 1, w * 1]
        for step, i, j in steps:
            pool.append(STEPS[step](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)], a))
        return pool[-3:]

    return function


def fitting(steps: list[tuple[int, int, int]], sizes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The steps that run at all of these sizes."""
    kept: list[tuple[int, int, int]] = []
    for step in steps:
        try:
            for size in sizes:
                if any(t.dim() > 4 or t.numel() > 4096 for t in program([*kept, step])(*tensors(*size))):
                    raise ValueError
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        kept.append(step)
    return kept


def tensors(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    made = torch.randn(batch, length, 8), torch.randn(length, 8), torch.randn(8, 8)
    for t, dims in zip(made, ((0, 1), (0,), ()), strict=True):
        for d in dims:
            torch._dynamo.maybe_mark_dynamic(t, d)
    return made


SIZES = [(3, 5), (3, 5), (4, 7), (3, 6)]


@pytest.mark.slow
def test_random_programs_pass_their_audits() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="AUDIT_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(STEP, min_size=2, max_size=7))
    def prop(steps: list[tuple[int, int, int]]) -> None:
        torch._dynamo.reset()
        tgb.reset()
        torch.manual_seed(0)
        kept = fitting(steps, SIZES)
        function = program(kept)
        options = {"buckets": [8, 16], "audit": "every:1", "min_segment_kernels": 1}
        fast = torch.compile(function, backend="bcg", options=options)
        with torch.no_grad():
            for size in SIZES:
                args = tensors(*size)
                try:
                    want = function(*args)
                except IndexError:  # of these numbers: an index that is computed from them
                    continue
                torch.testing.assert_close(fast(*args), want, rtol=1e-4, atol=1e-4, equal_nan=True)
        stats = tgb.stats(fast)
        assert not stats.audit_failures, f"{kept}: {stats}"
        seen.update(programs=1, audits=stats.audits, captured=sum(p.captured_kernels for p in tgb.plans(fast)))

    prop()
    assert seen["audits"] > 2 * EXAMPLES, seen
    assert seen["captured"] > 3 * EXAMPLES, seen


def zoo() -> list[str]:
    pytest.importorskip("transformers")
    from zoo.models import ZOO

    return list(ZOO) if os.environ.get("AUDIT_ZOO") == "all" else [n for n in QUICK if n in ZOO]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo())
def test_the_zoo_passes_its_audits(name: str, device: str) -> None:
    """Real models, nothing declared: an alarm would be false, or a fault of the proof."""
    from zoo.models import ZOO

    case = ZOO[name]
    if why := case.missing(device):
        pytest.skip(why)
    dtype = case.dtype(device)
    options = {**case.options, "audit": "capture"}
    model = case.model(device, dtype)
    with case.around():
        tolerance = 1e-5 if dtype is torch.float32 else 0.1
        calls = case.arguments(device, dtype)
        stats = check_calls(
            model,
            calls,
            compiled_kwargs={"options": options},
            floor=case.kernels,
            padded=case.padded,
            tolerate=case.eager,
            tolerance=tolerance,
            bitwise=False,
        ).stats
    assert not stats.audit_failures, stats
    assert stats.audits >= 2 or not stats.replays, stats
