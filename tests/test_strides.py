"""Kernels that lay out their results otherwise than their fake implementations: the answer has eager's strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.strides import compared

PROGRAMS: dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, ...]]]] = {
    "max_pool1d": (lambda x: F.max_pool1d(x.transpose(1, 2) * 1, 2), lambda n: (torch.randn(n, 6, 4),)),
    "batch_norm": (
        lambda x: F.batch_norm(x.transpose(1, 2) * 1, torch.zeros(4, device=x.device), torch.ones(4, device=x.device)),
        lambda n: (torch.randn(n, 6, 4),),
    ),
    "batch statistics": (
        lambda x: F.batch_norm(x.t() * 1, None, None, training=True),
        lambda n: (torch.randn(4, n),),
    ),
    "floor_divide": (lambda x, y: (x.t() * 2) // y, lambda n: (torch.randn(4, n), torch.ones(4))),
    "channel_shuffle": (
        lambda x: F.channel_shuffle(x * 1, 2),
        lambda n: (torch.randn(n, 4, 6, 6).contiguous(memory_format=torch.channels_last),),
    ),
    "roll": (
        lambda x: (x * 1).roll(1, 1),
        lambda n: (torch.randn(n, 4, 6, 6).contiguous(memory_format=torch.channels_last),),
    ),
    "one_hot": (
        lambda x: F.one_hot((x.transpose(1, 2) > 0).long(), 2),
        lambda n: (torch.randn(n, 6, 4),),
    ),
    "log_sigmoid": (lambda x: F.logsigmoid(x.t() * 1), lambda n: (torch.randn(4, n),)),
    "cross_entropy": (
        lambda x, y: F.cross_entropy(x.transpose(1, 3) * 1, (y.transpose(1, 2) > 0).long(), reduction="none"),
        lambda n: (torch.randn(n, 3, 3, 5), torch.randn(n, 3, 3)),
    ),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x.t().sigmoid(), (y > 0) * 1.0, reduction="none"),
        lambda n: (torch.randn(4, n), torch.randn(n, 4)),
    ),
    "interpolate": (
        lambda x: F.interpolate(x * 1, scale_factor=2, mode="bilinear"),
        lambda n: (torch.randn(n, 3, 4, 4).contiguous(memory_format=torch.channels_last),),
    ),
    "logical": (
        lambda x, y: torch.logical_and(x.t()[:, None] * 1, y.t() * 1),
        lambda n: (torch.randn(4, n), torch.randn(4, 5)),
    ),
}

SIZES = (5, 7, 6, 7, 3, 7)


def check(device: str, f: Callable[..., Any], given: Callable[[int], tuple[Tensor, ...]], inductor: str = "off") -> Any:
    compiled = torch.compile(f, backend="bcg", options={"buckets": [8], "inductor": inductor})
    with torch.no_grad():
        for n in SIZES:
            args = [a.to(device) for a in given(n)]
            mine = [a.clone() for a in args]
            want, got = f(*args), compiled(*mine)
            assert got.stride() == want.stride(), f"size {n}: strides {got.stride()}, eager {want.stride()}"
            torch.testing.assert_close(got, want)
            for a, b in zip(mine, args, strict=True):
                assert torch.equal(a, b)
    stats = tgb.stats(compiled)
    assert stats.calls == len(SIZES)
    return stats


@pytest.mark.parametrize("behind", ["nothing", "a product"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_are_eagers(device: str, name: str, behind: str) -> None:
    """Would catch: a result laid out as planned, where the kernel lays it out otherwise, from the first call on."""
    f, given = PROGRAMS[name]
    check(device, f if behind == "nothing" else lambda *args: f(*args) * 2, given)


@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_beside_a_change_of_an_argument(device: str, name: str) -> None:
    """A call that changes something cannot be run again: not even its first answer may be laid out wrongly."""
    f, given = PROGRAMS[name]

    def change(*args: Tensor) -> Tensor:
        found = f(*args) * 2
        args[0].add_(1)
        return found

    check(device, change, given)


@pytest.mark.parametrize("name", ["max_pool1d", "floor_divide"])
def test_strides_of_compiled_segments(device: str, name: str) -> None:
    f, given = PROGRAMS[name]
    check(device, lambda *args: torch.relu(f(*args)) * 2, given, "small")


def test_what_is_laid_out_as_promised_is_captured(device: str) -> None:
    """Transposed results alone are no reason to give up."""
    stats = check(device, lambda x: (x.t() * 2 + 1).relu() / 3, lambda n: (torch.randn(4, n),))
    assert not stats.eager


def test_on_a_gpu_results_alone_are_compared() -> None:
    """Attention there may be laid out otherwise than its fake implementation says: no reason to give up."""
    compiled = torch.compile(lambda x: (x * 2).relu() + 1, backend="bcg", options={"buckets": [8], "inductor": "off"})
    with torch.no_grad():
        for n in (5, 6):
            x = torch.randn(n, 4)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            compiled(x)
    (plan,) = tgb.plans(compiled)
    (step,) = plan.segments
    graph = registry.all_graphs()[0].normal.graph
    assert compared(plan, graph)[0] == set(step.outputs)
    there = replace(plan, device=torch.device("cuda", 0))
    assert compared(there, graph) == ({c.value for c in plan.cuts if c.private}, set())
    assert compared(replace(there, cuts=()), graph) == (set(), set())
