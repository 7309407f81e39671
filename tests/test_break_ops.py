"""Break ops: every form of registration finds its nodes, no other nodes, and only in graphs compiled afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import Seen, assert_same, compiled, take_one
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import torch_graph_backend as tgb
from torch_graph_backend.break_ops import break_predicate
from torch_graph_backend.errors import BreakOpError

aten = torch.ops.aten
break_ops_module = sys.modules["torch_graph_backend.break_ops"]  # the package has a function of this name


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations are process-wide: start from none, and leave none behind."""
    monkeypatch.setattr(break_ops_module, "_registered", {})


def attention(x: torch.Tensor) -> torch.Tensor:
    """Two softmaxes by different names, an attention, and pointwise work."""
    q = x.sin()
    y = F.scaled_dot_product_attention(q, q, q)
    z = F.softmax(y, -1) + torch.softmax(y, -1) + y.softmax(-1)
    return z.tanh() * 2


@pytest.fixture(scope="module")
def seen() -> Seen:
    return take_one(attention, torch.randn(1, 2, 4, 8))


def broken(seen: Seen, *extra: Any) -> list[str]:
    """Names of the operations that are breaks by registration or by ``extra``."""
    is_break = break_predicate(extra)
    from torch_graph_backend.passes.capturable import name_of

    found = [(n, is_break(n)) for n in seen.calls()]
    assert all(reason.code == "break-op" and name_of(n) in reason.text for n, reason in found if reason is not None)
    return [name_of(n) for n, reason in found if reason is not None]


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (aten.tanh.default, ["aten.tanh"]),
        (aten.tanh, ["aten.tanh"]),
        (aten.softmax, ["aten.softmax.int"] * 3),
        (aten.softmax.int, ["aten.softmax.int"] * 3),
        (aten.softmax.int_out, []),
        (aten.tanh_, []),
        ("aten::tanh", ["aten.tanh"]),
        ("aten.tanh", ["aten.tanh"]),
        (" aten::tanh ", ["aten.tanh"]),
        ("aten::softmax.int", ["aten.softmax.int"] * 3),
        ("aten::softmax.Dimname", []),
        ("aten::tan", []),
        ("other::tanh", []),
        (F.scaled_dot_product_attention, ["aten.scaled_dot_product_attention"]),
        (F.softmax, ["aten.softmax.int"]),
        (torch.softmax, ["aten.softmax.int"]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_forms_of_a_target(seen: Seen, target: Any, names: list[str]) -> None:
    """Registered and as an option of one compile, each form finds exactly its operations."""
    assert broken(seen) == []
    assert broken(seen, target) == names
    assert broken(seen) == []
    assert tgb.register_break_op(target) is target
    assert broken(seen) == names
    tgb.unregister_break_op(target)
    assert broken(seen) == []


def test_a_torch_function_inside_a_module() -> None:
    """``nn.Softmax`` calls ``F.softmax``: that is the function the graph shows."""
    found = take_one(nn.Sequential(nn.Softmax(-1), nn.Tanh()), torch.randn(2, 3))
    assert broken(found, F.softmax) == ["aten.softmax.int"]


def test_a_name_before_the_library_exists() -> None:
    """Models register their attention at import, before the kernel package is imported."""
    tgb.register_break_op("tgb_late_library::attention")
    with torch.library._scoped_library("tgb_late_library", "FRAGMENT") as lib:
        lib.define("attention(Tensor x) -> Tensor")
        lib.impl("attention", lambda x: x * 2, "CompositeExplicitAutograd")

        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.tgb_late_library.attention(x.sin()).cos()

        assert broken(take_one(f, torch.randn(3))) == ["tgb_late_library.attention"]


def test_a_custom_operation_object() -> None:
    """The object that ``torch.library.custom_op`` returns is how a user names an operation."""

    @torch.library.custom_op("tgb_break_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def f(x: torch.Tensor) -> torch.Tensor:
        return double(x.sin()).cos()

    found = take_one(f, torch.randn(3))
    assert broken(found, "tgb_break_test::double") == ["tgb_break_test.double"]
    assert broken(found, torch.ops.tgb_break_test.double) == ["tgb_break_test.double"]
    assert broken(found, double) == ["tgb_break_test.double"]


@pytest.mark.parametrize("target", [torch.ops.higher_order.flex_attention, "higher_order::flex_attention"], ids=str)
def test_a_higher_order_op(target: Any) -> None:
    """``flex_attention`` is a higher-order op: registered, the reason says so, and it is the user's doing."""

    def f(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, q, q).sin()

    found = take_one(f, torch.randn(1, 2, 16, 16))
    assert broken(found) == []
    assert set(broken(found, target)) == {"flex_attention"}
    node = found.one("flex_attention")
    reason = found.classify(target).verdicts[node].reason
    assert reason is not None
    assert reason.code == "break-op"


def test_the_option_of_one_compile() -> None:
    """It breaks this compile's graph, is not registered, and leaves another compile alone."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh() @ w

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    for options, segments in (({"break_ops": [torch.tanh, "aten::tanh"]}, 2), ({}, 1)):
        with compiled(f, **options) as g:
            for _ in range(3):
                assert_same(g(x, w), f(x, w))
            (plan,) = tgb.plans(g)
            assert len(plan.segments) == segments
            assert dict(plan.eager_ops()) == ({"aten.tanh": 1} if options else {})
    assert tgb.break_ops() == ()


def test_a_registration_reaches_later_graphs_alone() -> None:
    """A graph keeps the registrations of its compilation: a plan never changes under a running model."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh() @ w

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with compiled(f) as g:
        g(x, w)
        tgb.register_break_op(aten.tanh)
        g(x, w)
        assert [len(p.segments) for p in tgb.plans(g)] == [1]
    with compiled(f) as g:
        g(x, w)
        assert [len(p.segments) for p in tgb.plans(g)] == [2]


def test_a_break_runs_on_real_rows(device: str) -> None:
    """What a break is for: it sees the real size with eager's strides, at the first call and at replays."""
    shapes: list[tuple[Any, ...]] = []

    @torch.library.custom_op("tgb_break_test::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(x.shape), x.stride()))
        return x + 1

    @look.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return look(x @ w) @ w

    w = torch.randn(4, 4).to(device)
    with compiled(f, buckets=[8], break_ops=["tgb_break_test::look"]) as g:
        for n in (5, 6, 7):
            x = torch.randn(n, 4).to(device)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(g(x, w), f(x, w))
        assert tgb.stats(g).replays == 2
    assert shapes[::2] == [((n, 4), (4, 1)) for n in (5, 6, 7)] == shapes[1::2]


# --- the registry -----------------------------------------------------------------------------------------------------


def test_registrations_are_listed_in_order_and_once() -> None:
    """The list is what ``explain`` and bug reports show."""
    for target in ("aten::tanh", F.softmax, aten.tanh, aten.tanh.default, "aten::tanh"):
        tgb.register_break_op(target)
    assert tgb.break_ops() == ("aten::tanh", F.softmax, "aten::tanh.default")


def test_one_operation_under_its_names() -> None:
    """A packet and its name are one registration, and either undoes the other."""
    tgb.register_break_op(aten.tanh)
    tgb.unregister_break_op("aten::tanh")
    tgb.register_break_op("aten::tanh.default")
    tgb.unregister_break_op(aten.tanh.default)
    assert tgb.break_ops() == ()


def test_what_is_listed_can_be_unregistered() -> None:
    """``for op in break_ops(): unregister_break_op(op)`` is how a test cleans up."""
    for target in (aten.tanh, F.softmax, "lib::op", torch.ops.higher_order.flex_attention, aten.add.Tensor):
        tgb.register_break_op(target)
    for target in tgb.break_ops():
        tgb.unregister_break_op(target)
    assert tgb.break_ops() == ()


def test_unregistering_what_is_not_registered() -> None:
    """A typo in a clean-up must not pass."""
    with pytest.raises(BreakOpError, match=r"BCG301.*aten::tanh.*is not registered"):
        tgb.unregister_break_op("aten::tanh")


class Unhashable:
    """A callable that cannot be a dictionary key."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "target",
    ["tanh", "", "::", "aten::", "::tanh", nn.Linear, 3, None, b"aten::tanh", ["aten::tanh"], Unhashable()],
    ids=["no-namespace", "empty", "colons", "no-name", "no-library", "module-class", "int", "none", "bytes", "list",
         "unhashable"],
)  # fmt: skip
@pytest.mark.parametrize("call", [tgb.register_break_op, tgb.unregister_break_op])
def test_bad_targets(target: Any, call: Callable[[Any], Any]) -> None:
    """Anything that could never match is refused with the package's own error, and leaves nothing behind."""
    with pytest.raises(BreakOpError, match="BCG301"):
        call(target)
    assert tgb.break_ops() == ()


def test_a_module_instance_is_refused() -> None:
    """No node of any graph has a module as its operation, so it would silently never match."""
    with pytest.raises(BreakOpError, match="module"):
        tgb.register_break_op(nn.Linear(2, 2))
