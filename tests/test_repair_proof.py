"""The proof does not trust a repair: each fact that it derives is needed, and what is nearly a repair is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_repair import LAST, LOOKED_UP, MASKED, ROOM, H, index_copy, index_put, scatter
from test_repair_limits import repaired
from torch import Tensor

from torch_graph_backend.passes.classify import classify


def test_without_the_mask_the_proof_refuses() -> None:
    """The proof does not trust the repair: take away what makes it safe, and the node is refused again."""
    for op, position, args in (
        (MASKED["sum"], 0, (torch.randn(5, H),)),
        (MASKED["gram"], 1, (torch.randn(5, H),)),
        (index_copy, 2, (torch.randn(5, H), torch.randn(24, H), torch.arange(5))),
        (index_copy, 3, (torch.randn(5, H), torch.randn(24, H), torch.arange(5))),
        (LAST["last"], 0, (torch.randn(5, H),)),
    ):
        _, graph, seen = repaired(op, *args)
        node = next(n for n in graph.graph.nodes if n.meta.get("repaired"))
        helper = node.args[position]
        if op is LAST["last"]:  # row n - 1 becomes row n
            helper = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.sub.Tensor)
            helper.replace_all_uses_with(helper.args[0])
        else:
            node.replace_input_with(helper, helper.args[0])
        again = classify(graph, torch.device("cpu"), lambda n: None)
        assert seen.verdicts[node].kind == "capture"
        broken = [n for n, v in again.verdicts.items() if v.reason is not None and v.reason.code == "padding"]
        assert broken, f"{node.target} is called safe without {helper}"


def find(graph: Any, name: str) -> Any:
    return next(n for n in graph.graph.nodes if getattr(n.target, "overloadpacket", None) is getattr(aten, name))


def set_argument(name: str, position: int, value: Any) -> Callable[[Any], None]:
    """A change of one argument of the first operation of that name."""

    def change(graph: Any) -> None:
        find(graph, name).update_arg(position, value)

    return change


def set_target(name: str, target: Any) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        find(graph, name).target = target

    return change


def add_one(name: str) -> Callable[[Any], None]:
    """What the operation returns, plus one."""

    def change(graph: Any) -> None:
        node = find(graph, name)
        with graph.graph.inserting_after(node):
            new = graph.graph.call_function(aten.add.Tensor, (node, 1))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return change


def skip(name: str) -> Callable[[Any], None]:
    """The first operation of that name does nothing."""

    def change(graph: Any) -> None:
        node = find(graph, name)
        node.replace_all_uses_with(node.args[0])

    return change


def skip_second(name: str) -> Callable[[Any], None]:
    """The second operation of that name does nothing."""

    def change(graph: Any) -> None:
        found = [n for n in graph.graph.nodes if getattr(n.target, "overloadpacket", None) is getattr(aten, name)]
        found[1].replace_all_uses_with(found[1].args[0])

    return change


aten = torch.ops.aten
NEARLY: dict[str, tuple[Callable[..., Tensor], Callable[[Any], None]]] = {
    "a mask that leaves one padded row": (MASKED["sum"], set_target("ge", aten.gt.Tensor)),
    "a mask of the real rows": (MASKED["sum"], set_target("ge", aten.lt.Tensor)),
    "a count too high": (MASKED["sum"], lambda g: find(g, "ge").update_arg(1, 9)),
    "one in a sum": (MASKED["sum"], set_argument("masked_fill", 2, 1)),
    "zero in a product": (MASKED["prod"], set_argument("masked_fill", 2, 0)),
    "zero in a maximum": (MASKED["amax"], set_argument("masked_fill", 2, 0)),
    "zero in a softmax": (MASKED["softmax"], set_argument("masked_fill", 2, 0)),
    "zero in a logsumexp": (MASKED["logsumexp"], set_argument("masked_fill", 2, 0)),
    "zero in a mean that skips NaN": (MASKED["nanmean"], set_argument("masked_fill", 2, 0)),
    "infinity in a mean that skips NaN": (MASKED["nanmean"], set_argument("masked_fill", 2, float("inf"))),
    "one in a norm": (MASKED["norm"], set_argument("masked_fill", 2, 1)),
    "infinity in a norm": (MASKED["norm"], set_argument("masked_fill", 2, float("inf"))),
    "a norm of a negative order": (MASKED["norm"], set_argument("linalg_vector_norm", 1, -1)),
    "a norm of no order": (MASKED["norm"], set_argument("linalg_vector_norm", 1, float("nan"))),
    "zero in the smallest norm": (MASKED["smallest norm"], set_argument("masked_fill", 2, 0)),
    "a norm of a positive order": (MASKED["smallest norm"], set_argument("linalg_vector_norm", 1, 2)),
    "a position that counts padded columns": (MASKED["max of columns"], set_target("max", aten.argmax.default)),
    "squares that are not masked": (MASKED["variance"], skip_second("masked_fill")),
    "a mean that is not masked": (MASKED["variance"], skip("masked_fill")),
    "a large number in a softmax": (MASKED["softmax"], set_argument("masked_fill", 2, -1e30)),
    "positions that start at one": (MASKED["sum"], add_one("arange")),
    "the row behind the last": (LAST["last"], set_argument("sub", 1, 0)),
    "a row in front of the first": (LAST["last three"], set_argument("clamp", 1, -1)),
    "one row too far": (LAST["last three"], add_one("clamp")),
    "a reversal by one too many": (MASKED["flip"], set_argument("sub", 1, 0)),
    "a padded row as the last": (index_copy, set_argument("sub", 1, 0)),
    "rows that are not cut": (index_put, set_target("minimum", aten.maximum.default)),
    "a write that adds": (
        index_put,
        lambda g: setattr(find(g, "index_put_"), "args", (*find(g, "index_put_").args, True)),
    ),
    "a scatter that adds": (scatter, set_target("scatter_", aten.scatter_add_.default)),
    "a look-up by rows that are not cut": (LOOKED_UP["gathered"], set_target("minimum", aten.maximum.default)),
    "a look-up by one row too many": (LOOKED_UP["selected"], set_argument("sub", 1, 0)),
    "a look-up that is cut along one of two dimensions": (LOOKED_UP["both dimensions"], skip("index_select")),
    "a copy that adds": (index_copy, set_target("index_copy_", aten.index_add_.default)),
}


@pytest.mark.parametrize("name", NEARLY)
def test_the_proof_refuses_what_is_nearly_a_repair(name: str) -> None:
    """Each fact that the proof derives is needed: changed a little, the rewritten graph is not called safe."""
    op, change = NEARLY[name]
    args = (torch.randn(5, H),) if op not in (index_copy, index_put, scatter) else ()
    _, graph, seen = repaired(op, *(args or (torch.randn(5, H), torch.randn(ROOM, H), torch.arange(5))))
    assert not any(v.reason for v in seen.verdicts.values())
    change(graph)
    again = classify(graph, torch.device("cpu"), lambda n: None)
    broken = [n.name for n, v in again.verdicts.items() if v.reason is not None and v.reason.code == "padding"]
    assert broken, "still called safe"
