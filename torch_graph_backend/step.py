"""One call of a compiled graph, as breaks see it: host-side work done once, before the first segment.

Contract. ``prepare=`` of a break op is called once a call of every graph that has the op, with the ``Step``, before
anything of the graph runs, whether the call is replayed or not. Inside the op, ``current_step().prepared(op)`` is what
it returned. Outside a compiled call nothing was prepared, so ``prepared`` runs it then: eager code has the same answer.
A graph without such ops does not come here: it costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from torch.fx import GraphModule

from torch_graph_backend.break_define import BreakOp, defined
from torch_graph_backend.errors import BreakOpError

_current: ContextVar[Step | None] = ContextVar("torch_graph_backend_step", default=None)
_LOCAL = re.compile(r"L\['(\w+)'\]")


class Step:
    """One call. ``arguments`` maps the graph's inputs by name to their real values: tensors, and sizes as ints.

    An input is called as the user's argument (``"tokens"``), else as Dynamo calls its source
    (``"L['batch']['tokens']"``, ``"L['tokens'].size()[0]"``). Outside a compiled call there are none.
    """

    __slots__ = ("_prepared", "_values", "names")

    def __init__(self, names: Sequence[str] = (), values: Sequence[Any] = ()) -> None:
        self.names, self._values = names, values
        self._prepared: dict[Callable[..., Any], Any] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs of the graph in this call."""
        return dict(zip(self.names, self._values, strict=True))

    def prepared(self, op: Any) -> Any:
        """What ``prepare`` of a break op (or that function itself) returned for this step; run now if it was not."""
        found = op if isinstance(op, BreakOp) else defined(op)
        prepare = found.prepare if found is not None else op
        if not callable(prepare):
            name = found.name if found is not None else repr(op)
            raise BreakOpError(name, "has no prepare", fix="give one: break_op(prepare=function_of_the_step)")
        if prepare not in self._prepared:
            self._prepared[prepare] = prepare(self)
        return self._prepared[prepare]


def current_step() -> Step:
    """The step of the compiled call that is running in this thread; an empty one if none is."""
    return _current.get() or Step()


def stepped(graph: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
    """``graph``, with the ``prepare`` functions of its break ops run before it; itself if there are none."""
    prepares = tuple(dict.fromkeys(p for p in map(_prepare, _targets(gm)) if p is not None))
    if not prepares:
        return graph
    names = [_name(n) for n in gm.graph.nodes if n.op == "placeholder"]

    def call(*args: Any) -> Any:
        step = Step(names, args)
        token = _current.set(step)
        try:
            for prepare in prepares:
                step.prepared(prepare)
            return graph(*args)
        finally:
            _current.reset(token)

    return call


def _prepare(target: Any) -> Callable[..., Any] | None:
    op = defined(target)
    return None if op is None else op.prepare


def _targets(gm: GraphModule) -> list[Any]:
    """Operations of a graph and of the bodies inside it."""
    return [
        n.target
        for m in gm.modules()
        if isinstance(m, GraphModule)
        for n in m.graph.nodes
        if not isinstance(n.target, str)
    ]


def _name(node: Any) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "") if source is not None else ""
    text = str(name() if callable(name) else name) or str(node.name)
    found = _LOCAL.fullmatch(text)
    return found[1] if found else text
