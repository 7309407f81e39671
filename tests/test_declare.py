"""Declarations: what they let through, what they promise, and what cannot be declared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from equality import poisoned

import torch_graph_backend as tgb
from torch_graph_backend.errors import DeclarationError
from torch_graph_backend.passes.padding_rules_declared import DECLARED, PROMISED, is_promised

LIBRARY = torch.library.Library("declare_tests", "DEF")
LIBRARY.define("scaled(Tensor x, Tensor weight) -> Tensor")
LIBRARY.define("grown(Tensor(a!) x) -> ()")
LIBRARY.define("noisy(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl("scaled", lambda x, weight: torch.tanh(x * weight.sum(0)), "CPU")
LIBRARY.impl("scaled", lambda x, weight: torch.empty_like(x), "Meta")
OPS = torch.ops.declare_tests


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    declared, promised = dict(DECLARED), dict(PROMISED)
    yield
    for table, before in ((DECLARED, declared), (PROMISED, promised)):
        table.clear()
        table.update(before)


def run(function, make, sizes=(7, 5, 7, 6, 5)):
    """Eager answers under poisoned padding; the plan of the last graph."""
    compiled = torch.compile(function, backend="bcg", options={"min_segment_kernels": 1})
    with torch.no_grad(), poisoned() as poison:
        for k, size in enumerate(sizes):
            poison.value = (float("nan"), 1e30)[k % 2]
            args = make(size)
            torch._dynamo.maybe_mark_dynamic(args[0], 0)
            torch.testing.assert_close(compiled(*args), function(*args))
    assert tgb.stats(compiled).replays > 0
    return tgb.plans(compiled)[-1]


WEIGHT = torch.randn(8, 8)


def custom(x, weight):
    return OPS.scaled(x @ weight, weight) @ weight


def last_rows(x, last):
    return (x @ WEIGHT)[last] @ WEIGHT


def test_a_declared_operation_is_captured() -> None:
    before = run(custom, lambda n: (torch.randn(n, 8), WEIGHT))
    assert before.eager_ops()["declare_tests.scaled"] == 1
    torch._dynamo.reset()
    tgb.declare_row_local(OPS.scaled, dims=1, rows="x")
    plan = run(custom, lambda n: (torch.randn(n, 8), WEIGHT))
    assert len(plan.segments) == 1
    assert plan.captured_ops()["declare_tests.scaled"] == 1


def test_promised_indices_are_followed() -> None:
    def make(n):
        return torch.randn(n, 8), torch.tensor([0, n - 1])

    assert "aten.index.Tensor" in run(last_rows, make).eager_ops()
    torch._dynamo.reset()
    tgb.declare_indices("last")
    assert len(run(last_rows, make).segments) == 1


def test_undone() -> None:
    tgb.declare_row_local("declare_tests::scaled")
    tgb.undeclare_row_local(OPS.scaled)
    tgb.declare_indices("last", "first")
    tgb.undeclare_indices("last")
    assert "declare_tests::scaled" not in DECLARED
    assert is_promised("L['first']")
    assert is_promised("L['self'].first")
    assert not is_promised("L['last']")
    assert not is_promised("L['x_first']")


@pytest.mark.parametrize(("declare", "part"), [
    (lambda: tgb.declare_row_local(torch.ops.aten.softmax), "its rule cannot be overridden"),
    (lambda: tgb.declare_row_local("aten::softmax"), "its rule cannot be overridden"),
    (lambda: tgb.declare_row_local(OPS.grown), "changes an argument"),
    (lambda: tgb.declare_row_local(OPS.noisy), "draws random numbers"),
    (lambda: tgb.declare_row_local(OPS.scaled, rows=("x", "w")), "no tensor argument 'w'"),
    (lambda: tgb.declare_row_local(OPS.scaled, dims=0), "dims=0"),
    (lambda: tgb.declare_row_local(torch.softmax), "neither an operator nor a name"),
    (lambda: tgb.declare_row_local("softmax"), "neither an operator nor a name"),
    (lambda: tgb.undeclare_row_local("mylib::op"), "is not declared"),
    (lambda: tgb.declare_indices("not a name"), "is not the name of a parameter"),
    (lambda: tgb.undeclare_indices("never"), "is not declared"),
])  # fmt: skip
def test_what_cannot_be_declared(declare, part) -> None:
    with pytest.raises(DeclarationError, match=part):
        declare()


def test_before_the_library_is_loaded() -> None:
    """A name is enough, and it is checked where it can be."""
    tgb.declare_row_local("not_loaded_yet::op", dims=2)
    assert DECLARED["not_loaded_yet::op"].dims == 2
