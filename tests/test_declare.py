"""Declarations: what they let through, what they promise, and what cannot be declared."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from equality import poisoned

import torch_graph_backend as tgb
from torch_graph_backend.errors import DeclarationError
from torch_graph_backend.passes.padding_rules_declared import CAPTURE_SAFE, DECLARED, PROMISED, is_promised

LIBRARY = torch.library.Library("declare_tests", "DEF")
LIBRARY.define("scaled(Tensor x, Tensor weight) -> Tensor")
LIBRARY.define("grown(Tensor(a!) x) -> ()")
LIBRARY.define("noisy(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.define("counted(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
LIBRARY.define("total(Tensor x) -> Tensor")
LIBRARY.define("length(Tensor x) -> int")
LIBRARY.impl("total", lambda x: x.sum(0), "CPU")
LIBRARY.impl("total", lambda x: x.new_empty(x.shape[1:]), "Meta")
LIBRARY.impl("grown", lambda x: None if x.add_(1) is x else x, "CPU")
LIBRARY.impl("grown", lambda x: None, "Meta")
LIBRARY.impl("scaled", lambda x, weight: torch.tanh(x * weight.sum(0)), "CPU")
LIBRARY.impl("scaled", lambda x, weight: torch.empty_like(x), "Meta")
OPS = torch.ops.declare_tests


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    kept = [(table, dict(table)) for table in (DECLARED, PROMISED, CAPTURE_SAFE)]
    yield
    for table, before in kept:
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


def summed(x, weight):
    return (x @ weight + OPS.total(x @ weight)) @ weight


def test_capture_safe_alone_is_captured_at_a_fixed_size() -> None:
    """Would catch: a promise about recording that is taken for one about padding, and one that has no effect."""

    def fixed(n):
        return torch.randn(5, 8), WEIGHT

    def static(make):
        compiled = torch.compile(summed, backend="bcg", dynamic=False)
        with torch.no_grad():
            for _ in range(3):
                args = make(5)
                torch.testing.assert_close(compiled(*args), summed(*args))
        return tgb.plans(compiled)[-1]

    assert static(fixed).reasons()["unknown-op"] == 1
    torch._dynamo.reset()
    tgb.declare_capture_safe(OPS.total)
    plan = static(fixed)
    assert len(plan.steps) == 1
    assert plan.captured_ops()["declare_tests.total"] == 1
    torch._dynamo.reset()
    padded = run(summed, lambda n: (torch.randn(n, 8), WEIGHT))
    (op,) = [op for region in padded.regions for op in region.ops if op.op == "declare_tests.total"]
    assert op.reason.code == "padding"
    assert "declare_row_local" in op.reason.advice


def test_capture_safe_and_row_local() -> None:
    tgb.declare_capture_safe("declare_tests::scaled")
    tgb.declare_row_local("declare_tests::scaled.default", rows="x")
    plan = run(custom, lambda n: (torch.randn(n, 8), WEIGHT))
    assert len(plan.segments) == 1
    assert plan.captured_ops()["declare_tests.scaled"] == 1


def test_a_capture_safe_operation_may_change_what_its_schema_says() -> None:
    """A cache that the caller holds is changed once a call, by the recording."""

    def step(x, weight, cache):
        OPS.grown(cache)
        return (x @ weight + cache) @ weight

    tgb.declare_capture_safe(OPS.grown)
    compiled = torch.compile(step, backend="bcg", options={"min_segment_kernels": 1})
    ours, theirs = torch.zeros(8), torch.zeros(8)
    with torch.no_grad(), poisoned():
        for n in (5, 7, 5, 6, 7, 5):
            x = torch.randn(n, 8)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x, WEIGHT, ours), step(x, WEIGHT, theirs))
            assert torch.equal(ours, theirs)
    plan = tgb.plans(compiled)[-1]
    assert plan.captured_ops()["declare_tests.grown"] == 1
    assert tgb.stats(compiled).replays > 0


def test_a_break_op_stays_one() -> None:
    """Would catch a promise that overrides what the user wants to run eagerly."""
    tgb.declare_row_local(OPS.scaled, rows="x")
    tgb.declare_capture_safe(OPS.scaled)
    tgb.register_break_op(OPS.scaled)
    plan = run(custom, lambda n: (torch.randn(n, 8), WEIGHT))
    assert plan.reasons()["break-op"] == 1


def test_a_name_without_an_operation_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not that of a library that may be imported later."""
    tgb.declare_capture_safe("declare_tests::totl")
    tgb.declare_row_local("declare_tests::scalled")
    tgb.declare_capture_safe("imported_later::op")
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        for _ in range(2):
            torch._dynamo.reset()
            run(custom, lambda n: (torch.randn(n, 8), WEIGHT))
    said = [r.getMessage() for r in caplog.records if "was declared" in r.getMessage()]
    assert len(said) == 2
    assert "did you mean 'declare_tests::total'?" in said[1]
    assert "did you mean 'declare_tests::scaled'?" in said[0]


def test_undone() -> None:
    tgb.declare_capture_safe(OPS.total)
    assert "declare_tests::total" in CAPTURE_SAFE
    tgb.undeclare_capture_safe("declare_tests::total")
    assert "declare_tests::total" not in CAPTURE_SAFE
    tgb.declare_row_local("declare_tests::scaled")
    tgb.undeclare_row_local(OPS.scaled)
    tgb.declare_indices("last", "first")
    tgb.undeclare_indices("last")
    assert "declare_tests::scaled" not in DECLARED
    assert is_promised("L['first']")
    assert is_promised("L['self'].first")
    assert is_promised("L['self']._buffers['first']")
    assert not is_promised("L['self']._buffers['first'][0]")
    assert not is_promised("L['last']")
    assert not is_promised("L['x_first']")


@pytest.mark.parametrize(("declare", "part"), [
    (lambda: tgb.declare_row_local(torch.ops.aten.softmax), "its rule cannot be overridden"),
    (lambda: tgb.declare_row_local("aten::softmax"), "its rule cannot be overridden"),
    (lambda: tgb.declare_row_local(OPS.grown), "changes an argument"),
    (lambda: tgb.declare_row_local(OPS.noisy), "draws random numbers"),
    (lambda: tgb.declare_row_local(OPS.scaled, rows=("x", "w")), "no tensor argument 'w'"),
    (lambda: tgb.declare_row_local(OPS.scaled, dims=0), "dims=0"),
    (lambda: tgb.declare_row_local(OPS.counted), "data dependent"),
    (lambda: tgb.declare_capture_safe(OPS.counted), "data dependent"),
    (lambda: tgb.declare_capture_safe("declare_tests::counted"), "data dependent"),
    (lambda: tgb.declare_capture_safe(OPS.noisy), "draws random numbers"),
    (lambda: tgb.declare_capture_safe(torch.ops.aten.nonzero), "cannot be overridden"),
    (lambda: tgb.declare_capture_safe("_c10d_functional::all_reduce"), "is a collective"),
    (lambda: tgb.undeclare_capture_safe(OPS.total), "is not declared"),
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
