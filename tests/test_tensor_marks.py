"""The user's tensors are recognised later, and may be swapped all the same."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torch_graph_backend as tgb
from torch_graph_backend.tensor_marks import Mark, Marks

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def model(subclass: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    for layer in net:
        for name, p in layer.named_parameters() if subclass else ():
            setattr(layer, name, nn.Parameter(TwoTensor(p.clone(), p.clone()), requires_grad=False))
    return net


def swapped_after_calls(net: nn.Module) -> None:
    """``to()`` swaps the weights for converted ones; it raises if anybody holds a weak reference to them."""
    plain = copy.deepcopy(net)
    fast = torch.compile(net, backend="bcg")
    for dtype in (torch.float32, torch.float64):
        net.to(dtype)
        plain.to(dtype)
        for _ in range(3):
            x = torch.randn(3, 4, dtype=dtype)
            torch.testing.assert_close(fast(x), plain(x))
        found = tgb.stats(net)
        assert found.graphs >= 1
        assert found.calls >= 3
    tgb.close(net)
    before = tgb.stats(net).replays
    fast(x)
    assert tgb.stats(net).replays == before, "its graphs are closed"
    other = model(subclass=False)
    assert tgb.stats(other).graphs == 0


def test_weights_of_a_wrapper_subclass_are_swapped_by_default() -> None:
    swapped_after_calls(model(subclass=True))


@pytest.mark.usefixtures("swapping")
def test_all_weights_are_swapped_on_demand() -> None:
    swapped_after_calls(model(subclass=False))


@pytest.mark.usefixtures("swapping")
def test_a_mark_of_a_storage() -> None:
    kept, gone = torch.randn(3), torch.randn(3)
    marks = Marks()
    marks.add([kept, gone, kept])
    first, second = marks
    assert first.is_of(kept)
    assert not first.is_of(gone)
    assert first.among({id(kept): kept, id(gone): gone}) is kept
    assert first.among({id(gone): gone}) is None
    view = kept[:2]
    assert not first.is_of(view), "the same memory, another tensor"
    del gone
    gc.collect()
    assert not second.alive
    assert [m.id for m in marks] == [first.id]


def test_a_mark_of_what_has_no_storage() -> None:
    sparse = torch.eye(3).to_sparse()
    mark = Mark(sparse)
    assert mark.is_of(sparse)
    del sparse
    gc.collect()
    assert not mark.alive
