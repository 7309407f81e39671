"""What exists already and is made a break: functions, module classes, libraries; and telling what did not match."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from graph_harness import assert_same, compiled
from torch import Tensor, nn

import torch_graph_backend as tgb
from torch_graph_backend.errors import BadOption, BreakOpError

aten = torch.ops.aten
break_ops_module = sys.modules["torch_graph_backend.break_ops"]


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(break_ops_module, "_registered", {})
    yield
    for op in tgb.break_ops():
        tgb.unregister_break_op(op)


def helper(x: Tensor, n: int = 2) -> Tensor:
    return x.sin() * n


def fake(x: Tensor, n: int = 2) -> Tensor:
    return torch.empty_like(x)


def uses(x: Tensor, w: Tensor) -> Tensor:
    return helper(x @ w, n=3) @ w


def eager_ops(f: Any, *args: Any, **options: Any) -> dict[str, int]:
    """What runs eagerly of ``f``, which must answer as eager code does, three times."""
    with compiled(f, **options) as g:
        for _ in range(3):
            assert_same(g(*args), f(*args))
        (plan,) = tgb.plans(g)
        return dict(plan.eager_ops())


X, W = torch.randn(3, 4), torch.randn(4, 4)


def test_a_python_function_is_kept_out_of_tracing() -> None:
    """Registered, undone and registered again; graphs compiled in between keep what they have."""
    name = "tgb.test_break_adopt_helper"
    assert eager_ops(uses, X, W) == {}
    assert tgb.register_break_op(helper, fake=fake) is helper
    assert eager_ops(uses, X, W) == {name: 1}
    (registered,) = tgb.break_ops()
    assert (registered, registered.by, registered.matches) == (helper, "call", 1)
    tgb.unregister_break_op(helper)
    assert eager_ops(uses, X, W) == {}
    tgb.register_break_op(helper, fake=fake)
    assert eager_ops(uses, X, W) == {name: 1}
    assert helper(X, 2) is not None


def test_a_python_function_needs_a_fake() -> None:
    def other(x: Tensor, k: int) -> Tensor:
        return x

    with pytest.raises(BreakOpError, match=r"other.*needs a fake.*fake=lambda x, k: torch\.empty_like\(x\)"):
        tgb.register_break_op(other)
    with pytest.raises(BreakOpError, match="takes no fake"):
        tgb.register_break_op(aten.tanh, fake=fake)
    assert tgb.break_ops() == ()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).sin()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.lin = Inner(), Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.b(self.lin(self.a(self.lin(x)))))


def test_a_module_class_is_one_operation_with_its_weights_read_when_it_runs() -> None:
    own = Inner.forward
    tgb.register_break_op(Inner, fake=lambda self, x: torch.empty_like(x))
    model = Outer()
    with compiled(model) as g:
        for _ in range(3):
            assert_same(g(X), model(X))
        with torch.no_grad():
            model.a.lin.weight.mul_(2)
        model.b.lin = nn.Linear(4, 4)
        assert_same(g(X), model(X))
        assert [dict(p.eager_ops()) for p in tgb.plans(g)] == [{"tgb.test_break_adopt_Inner_forward": 2}] * len(
            tgb.plans(g)
        )
    tgb.unregister_break_op(Inner)
    assert Inner.forward is own
    assert eager_ops(model, X) == {}


def test_a_method_is_refused() -> None:
    """Dynamo takes methods from their class without asking, so a registration would never match."""
    with pytest.raises(BreakOpError, match=r"Inner\.forward.*is a method.*decorate it"):
        tgb.register_break_op(Inner.forward, fake=fake)
    assert tgb.break_ops() == ()


def test_module_classes_of_pytorch_stay_as_they_are() -> None:
    with pytest.raises(BreakOpError, match="PyTorch's own class"):
        tgb.register_break_op(nn.Linear, fake=fake)


def test_a_whole_library() -> None:
    with torch.library._scoped_library("tgb_whole", "FRAGMENT") as lib:
        for name in ("a", "b"):
            lib.define(f"{name}(Tensor x) -> Tensor")
            lib.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
        tgb.register_break_op("tgb_whole::*")

        def f(x: Tensor, w: Tensor) -> Tensor:
            return torch.ops.tgb_whole.b(torch.ops.tgb_whole.a(x @ w)) @ w

        with compiled(f) as g:
            g(X, W)
            reasons = {op.op: op.reason.code for s in tgb.plans(g)[0].steps for op in s.ops if op.reason}
        assert reasons == {"tgb_whole.a": "break-op", "tgb_whole.b": "break-op"}
        assert tgb.break_ops()[0].matches == 2


@pytest.mark.parametrize(
    ("function", "name"),
    [(torch.cond, "cond"), (torch._higher_order_ops.while_loop, "while_loop")],
    ids=["cond", "loop"],
)
def test_functions_that_make_a_higher_order_op(function: Any, name: str) -> None:
    tgb.register_break_op(function)
    assert tgb.break_ops() == (f"higher_order::{name}",)
    tgb.unregister_break_op(f"higher_order::{name}")


def tanh(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() @ w


def test_the_option_of_one_compile_takes_a_registration_back() -> None:
    tgb.register_break_op(aten.tanh)
    assert eager_ops(tanh, X, W) == {"aten.tanh": 1}
    assert eager_ops(tanh, X, W, break_ops={"aten::tanh": False}) == {}
    assert eager_ops(tanh, X, W) == {"aten.tanh": 1}
    with pytest.raises(BadOption, match="True or False"):
        tgb.backend.Config.parse({"break_ops": {"aten::tanh": 1}})


def test_the_dict_form_survives_a_round_trip() -> None:
    from torch_graph_backend.config import Config

    config = Config.parse({"break_ops": {"aten::tanh": False, "aten::sin": True}})
    assert config.to_dict() == {"break_ops": {"aten::tanh": False, "aten::sin": True}}
    assert Config.parse(config.to_dict()) == config
    assert hash(config) is not None


def test_what_matched_nothing_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """A typo names its neighbour; what matched is not mentioned."""
    tgb.register_break_op("aten::tahn")
    tgb.register_break_op("aten::tanh")
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        for _ in range(2):
            eager_ops(tanh, X, W)
        eager_ops(tanh, X, W, break_ops=["nolib::op", uses])
    texts = [r.getMessage() for r in caplog.records if "matched nothing" in r.getMessage()]
    assert len(texts) == 3
    assert "aten::tahn" in texts[0]
    assert "did you mean 'aten::tanh'?" in texts[0]
    assert "nolib::op" in texts[1]
    assert "register it with a fake" in texts[2]
    assert [r.matches for r in tgb.break_ops()] == [0, 3]
