"""Higher-order ops that become the operations of their bodies: wrappers, and loops of known length.

Contract. ``expand(op, args, apply, run)`` emits what the op computes without gradients and returns its results, or
``KEPT`` if the op stays as it is (``cond`` and ``while_loop`` ask for data; a loop over a symbolic size has no end
before run time). Padding, capture-safety and repair then see plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .torch_api import HigherOrderOperator

#: Ops that only wrap a body (checkpointing, regional compilation).
_WRAPPERS = {"tag_activation_checkpoint", "wrap", "invoke_subgraph", "wrap_activation_checkpoint"}

#: A longer loop stays one eager step: beyond it, planning would take longer than Dynamo does.
MAX_NODES = 1024

#: ``apply(function, args)`` emits the operations of ``function(*args)``, ``run(body, args)`` those of a subgraph.
Apply = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
Run = Callable[[GraphModule, list[Any]], Any]

KEPT = object()


def expand(op: HigherOrderOperator, args: Sequence[Any], apply: Apply, run: Run) -> Any:
    """Emit the body of ``op``; ``args`` as Dynamo writes them."""
    name = op.name()
    bodies = [i for i, a in enumerate(args) if isinstance(a, Node) and isinstance(a.meta["val"], GraphModule)]
    if len(bodies) != 1:
        return KEPT
    body = args[bodies[0]].meta["val"]
    if name in _WRAPPERS:
        return run(body, [a for a in args[bodies[0] + 1 :] if not isinstance(a, str)])
    if name == "scan" and len(args) == 4:
        return _loop(body, args[1], args[2], args[3], apply, run)
    if name == "map_impl" and len(args) == 3:
        return _loop(body, (), args[1], args[2], apply, run)
    return KEPT


def _loop(body: GraphModule, init: Any, xs: Any, extra: Any, apply: Apply, run: Run) -> Any:
    """The body on row 0, 1, ... of dimension 0 of ``xs``: the last carry, and then the other results, stacked."""
    steps = _steps(body, xs)
    if steps is None:
        return KEPT
    carry, kept = list(init), len(init)
    rows: list[Sequence[Any]] = []
    for step in range(steps):
        found = run(body, [*carry, *(apply(torch.select, (x, 0, step)) for x in xs), *extra])
        carry = list(found[:kept])
        rows.append(found[kept:])
    stacked = [None if column[0] is None else apply(torch.stack, (list(column),)) for column in zip(*rows, strict=True)]
    return (*carry, *stacked)


def _steps(body: GraphModule, xs: Sequence[Any]) -> int | None:
    """How many steps a loop over ``xs`` has, if that is known and not too many."""
    values = [x.meta.get("val") if isinstance(x, Node) else None for x in xs]
    lengths = [v.shape[0] if isinstance(v, torch.Tensor) and v.dim() else None for v in values]
    if not lengths or any(type(n) is not int for n in lengths) or len(set(lengths)) != 1 or not lengths[0]:
        return None
    nodes = sum(n.op not in ("placeholder", "output") for n in body.graph.nodes)
    return lengths[0] if lengths[0] * (nodes + len(xs) + 1) <= MAX_NODES else None
