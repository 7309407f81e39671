"""Operations that write into a buffer made for them write straight into the buffer that the next segment reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import check_calls
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.frames import Frame

W = 8


WRITTEN: list[int] = []


@torch.library.custom_op("tgb_direct::mix_out", mutates_args=("out",))
def mix_out(x: Tensor, out: Tensor) -> None:
    WRITTEN.append(out.data_ptr())
    out.copy_(x.softmax(0))


@mix_out.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def rows(device: str, n: int, dim: int = 0, seed: int = 0) -> Tensor:
    shape = (n, W) if dim == 0 else (W, n)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + n)).to(device)
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


@pytest.fixture
def bridged(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each bridge that was filled had been written in place."""
    seen: list[bool] = []
    real = Frame.bridge

    def bridge(self: Frame, index: int, values: Any) -> None:
        buffers = [self.entry.bridges[i] for i in self.bridge_fillers[index][0]]
        seen.extend(v.data_ptr() == b.data_ptr() for v, b in zip(values, buffers, strict=True))
        real(self, index, values)

    monkeypatch.setattr(Frame, "bridge", bridge)
    return seen


def plain(x: Tensor) -> Tensor:
    h = torch.relu(x * 2)
    out = torch.empty_like(h)
    mix_out(h, out)
    return out * 3 + h


def reused(x: Tensor) -> Tensor:
    """One buffer written twice, read in between: two states of one memory."""
    h = torch.relu(x * 2)
    out = torch.empty_like(h)
    mix_out(h, out)
    y = out * 3 + h
    mix_out(y, out)
    return out.exp() + y


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    """The caller gets the buffer too, and may keep it."""
    h = torch.relu(x * 2)
    out = h.new_empty(h.shape)
    mix_out(h, out)
    return out * 3 + h, out


def transposed(x: Tensor) -> Tensor:
    """Eager's strides depend on the real size: the buffer's rows are no such memory, but where it is the bucket."""
    h = torch.relu(x * 2)
    out = torch.empty_strided((x.shape[0], W), (1, x.shape[0]), device=x.device)
    mix_out(h, out)
    return out * 3 + h


def never_written(x: Tensor) -> Tensor:
    """Nothing is written: what eager computes with is undefined, but its size is not."""
    h = torch.relu(x * 2)
    out = torch.empty_like(h)
    mix_out(h, torch.empty_like(h))
    return out.shape[0] + h


#: With whether results are written in place: ``None``, where the bucket is the size alone.
CASES: list[tuple[Callable[..., Any], bool | None]] = [
    (plain, True),
    (reused, False),
    (returned, False),
    (transposed, None),
    (never_written, False),
]


@pytest.mark.parametrize(("function", "direct"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_buffers_for_results(device: str, bridged: list[bool], function: Any, direct: bool) -> None:
    calls = [(rows(device, n),) for n in (5, 6, 5, 11, 7, 12, 8, 5)]
    check_calls(function, calls, floor=1, padded=False)
    assert any(bridged) == (direct is not False)
    assert not bridged or all(bridged) == (direct is True)
    if direct:
        assert [b.direct for b in tgb.plans()[0].bridges] == [True]


def test_nothing_is_copied_for_a_result_written_in_place(device: str) -> None:
    fast = torch.compile(plain, backend="bcg")
    with torch.no_grad():
        for n in (5, 5, 7, 7, 7):
            WRITTEN.clear()
            x = rows(device, n)
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-5, atol=1e-6)
    (graph,) = registry.all_graphs()
    (entry,) = [e for e in graph.entries.values() if e.recorded and e.key.size == 8]
    assert WRITTEN[0] == entry.bridges[0].data_ptr()
    (frame,) = [f for s, f in entry.frames.items() if 7 in s]
    assert not frame.bridge_fillers[1][1].groups, "no copy is left to do, only tails"
