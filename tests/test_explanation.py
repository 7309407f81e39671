"""What ``explain`` returns: golden text and JSON of a few models, and what must hold whatever the text says.

``TGB_ACCEPT=1`` writes the files anew.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import GOLDEN, assert_golden, compiled
from test_plan_golden import ZOO as PLANS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_graph_backend as tgb
from torch_graph_backend.explanation import Cost

W = torch.randn(4, 4)


def rows(n: int) -> torch.Tensor:
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def two_graphs(x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, W).softmax(0)
    torch._dynamo.graph_break()
    return F.linear(y, W).cumsum(0)


def as_it_came(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.unsqueeze_(0)
    return y @ W


ZOO: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "attention_growing_cache": PLANS["attention_growing_cache"],
    "experts": PLANS["experts"],
    "cond": PLANS["cond"],
    "two_graphs": lambda: (two_graphs, (rows(5),)),
    "as_it_came": lambda: (as_it_came, (torch.randn(5, 4),)),
}


def explained(name: str) -> tgb.Explanation:
    model, args = ZOO[name]()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return tgb.explain(model, *args)


@pytest.mark.parametrize("name", ZOO)
def test_golden(name: str) -> None:
    """Text, and the dict as JSON, which is what ``to_dict`` gives."""
    found = explained(name)
    assert json.loads(found.to_json()) == found.to_dict()
    data = re.sub(r'"line": \d+', '"line": N', found.to_json())
    assert_golden(f"explain/{name}", f"{found}\n\n{data}")


def test_every_golden_file_belongs_to_a_model() -> None:
    assert {p.stem for p in (GOLDEN / "explain").glob("*.txt")} == set(ZOO)


# --- what must hold whatever the text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_costs_add_up(name: str) -> None:
    """Captured and the lines together are all there is: nothing is left out and nothing counted twice."""
    found = explained(name)
    left = Cost.total(line.cost for line in found.lines)
    assert found.captured + left == found.total
    for line in found.to_dict()["lines"]:
        for count in ("kernels", "flops", "unknown_flops"):
            assert line[count] == sum(c[count] for c in line["causes"])


@pytest.mark.parametrize("name", ["attention_growing_cache", "two_graphs"])
def test_the_total_is_what_torch_counts(name: str) -> None:
    """The FLOPs of a model by node are those of a run of it, attention as its two products."""
    model, args = ZOO[name]()
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as mode:
            model(*args)
        found = tgb.explain(model, *args)
    assert found.total.unknown == 0
    assert found.total.flops == mode.get_total_flops()


def test_lines_say_what_where_and_what_changes_it() -> None:
    """What a tool that checks a model needs of each line."""
    data = explained("attention_growing_cache").to_dict()
    assert data["ran_model"] is True
    attention = data["lines"][0]  # the costliest first
    assert attention["file"] == "test_plan_golden.py"
    assert attention["function"] == "forward"
    assert attention["source"] == "y = F.scaled_dot_product_attention(q, k, v)"
    assert attention["line"] > 0
    (cause,) = attention["causes"]
    assert cause["ops"] == {"aten.scaled_dot_product_attention": 2}
    assert cause["flops"] == 2 * (2 * 3 * 2 * 5 * 12 * (4 + 4))
    assert (cause["code"], cause["soft"], cause["graphs"]) == ("exact-symbol", False, [0])
    assert cause["fix"]
    assert 0 < data["share"]["flops"] < 1
    assert data["share"]["kernels"] == data["captured"]["kernels"] / data["total"]["kernels"]


def test_it_is_a_string() -> None:
    """As it always was: it prints, contains, compares; and it carries its data through a pickle."""
    found = explained("two_graphs")
    assert isinstance(found, str)
    assert "2 graphs." in found
    assert found.startswith("The model was compiled and called once to find this out.")
    back = pickle.loads(pickle.dumps(found))
    assert back == found
    assert back.to_dict() == found.to_dict()


def test_it_says_whether_it_ran_the_model() -> None:
    with compiled(two_graphs) as g:
        g(rows(3))
        found = tgb.explain(g)
    assert found.ran is found.to_dict()["ran_model"] is False
    assert found.startswith("From the graphs compiled so far. 2 graphs.")
    torch._dynamo.reset()
    assert tgb.explain(two_graphs, rows(3)).ran is True


def test_a_wrapper_that_was_not_called_is_called_with_its_options() -> None:
    """To explain another compile than the user's would be an answer to another question."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, W).relu() @ W

    plain = tgb.explain(torch.compile(f, backend="bcg"), rows(3))
    torch._dynamo.reset()
    asked = tgb.explain(torch.compile(f, backend="bcg", options={"break_ops": ["aten::relu"]}), rows(3))
    assert "break-op" not in plain
    assert "break-op: aten.relu is registered as a break" in asked
    torch._dynamo.reset()
    other = tgb.explain(torch.compile(f, backend="eager"), rows(3))
    assert "1 graph." in other


def test_a_graph_that_runs_eagerly_has_captured_nothing() -> None:
    """The plan is there, but the line of the function says what is lost, and why."""
    with compiled(two_graphs, enabled=False) as g:
        g(rows(5))
    found = tgb.explain(g)
    assert found.captured == Cost()
    assert found.total.flops == 2 * (2 * 5 * 4 * 4)
    whole = [line for line in found.lines if line.causes[0].reason.code == "disabled"]
    assert sum(line.cost.flops for line in whole) == found.total.flops
    assert whole[0].to_dict()["file"] == "test_explanation.py"
    assert "fix: set enabled=True" in found


def test_eager_calls_are_told() -> None:
    """Calls that the plan did not serve are part of the answer to "why is it slow"."""
    with compiled(lambda x: F.linear(x, W), buckets=[4]) as g:
        for n in (3, 9, 10):
            g(rows(n))
    found = tgb.explain(g)
    assert "eager calls so far: 2 x beyond-largest-bucket: L['x'].size()[0] is 9" in found
    (call,) = found.to_dict()["graphs"][0]["eager_calls"]
    assert (call["count"], call["code"], call["soft"]) == (2, "beyond-largest-bucket", True)


def test_unknown_flops_are_shown_as_unknown() -> None:
    """An operator of the user may be the costliest of all."""

    @torch.library.custom_op("tgb_explanation_test::heavy", mutates_args=())
    def heavy(x: torch.Tensor) -> torch.Tensor:
        return x @ x.t() @ x

    heavy.register_fake(torch.empty_like)
    found = tgb.explain(lambda x: heavy(F.linear(x, W)) @ W, rows(5))
    assert found.total == Cost(3, 2 * (2 * 5 * 4 * 4), 1)
    assert "1 kernel of unknown FLOPs" in found
    assert "cost: 1 kernel, 1 of unknown FLOPs; fix: " in found
    assert found.lines[0].cost == Cost(1, 0, 1)


def test_a_long_list_is_cut_and_counted() -> None:
    """The text shows the costliest lines; the dict has them all."""
    body = "\n".join(f"    x = x.sort(0).values @ w + {i}.5" for i in range(20))
    scope: dict[str, Any] = {}
    exec(compile(f"def many(x, w):\n{body}\n    return x", "many.py", "exec"), scope)
    found = tgb.explain(scope["many"], rows(5), W)
    assert len(found.lines) == 20
    assert len(found.to_dict()["lines"]) == 20
    assert re.search(r"  and \d+ more lines: \d+ kernels", found)


def test_numbers_are_short() -> None:
    found = tgb.explain(nn.Linear(1000, 1000), torch.randn(1000, 1000))
    assert "2 G of 2 G FLOPs (100.0%)" in found
