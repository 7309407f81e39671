"""Take Dynamo's graphs from ``torch.compile``, run the passes on them, and execute the normalised graph."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from torch_graph_backend.break_ops import break_predicate
from torch_graph_backend.passes.capturable import name_of
from torch_graph_backend.passes.classify import Classified, classify
from torch_graph_backend.passes.normalize import NormalGraph, NormaliseError, normalise
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.plan import Plan
from torch_graph_backend.plan_build import build_plan

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parent / "golden"


@dataclass
class Seen:
    """One Dynamo graph with its real arguments and what ``normalise`` made of it (a graph, or the error)."""

    gm: GraphModule
    normal: NormalGraph | None
    error: NormaliseError | None
    args: list[Any] = field(default_factory=list, repr=False)

    @property
    def graph(self) -> torch.fx.Graph:
        """The normalised graph; raises what ``normalise`` raised."""
        if self.error is not None:
            raise self.error
        assert self.normal is not None
        return self.normal.graph

    def calls(self, name: str | None = None) -> list[Node]:
        """Operations in order; ``name`` as ``name_of`` writes it."""
        found = [n for n in self.graph.nodes if n.op == "call_function"]
        return [n for n in found if name is None or name_of(n) == name]

    def names(self) -> list[str]:
        """Operations by name, in order."""
        return [name_of(n) for n in self.calls()]

    def one(self, name: str) -> Node:
        """The only operation of this name."""
        (node,) = self.calls(name)
        return node

    def classify(self, *breaks: Any, min_kernels: int = 1, **kwargs: Any) -> Classified:
        """Verdicts, with ``breaks`` as this compile's break ops."""
        assert self.normal is not None, self.error
        return classify(self.normal, CPU, break_predicate(breaks), min_kernels=min_kernels, **kwargs)

    def plan(self, *breaks: Any, min_kernels: int = 1, **kwargs: Any) -> Plan:
        """The plan, with ``breaks`` as this compile's break ops."""
        assert self.normal is not None, self.error
        return build_plan("graph", CPU, self.normal, self.classify(*breaks, min_kernels=min_kernels, **kwargs))


def take(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> list[Seen]:
    """Compile ``function``, call it once without gradients, and return its graphs, normalised as Dynamo made them."""
    found: list[Seen] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        seen = Seen(gm, None, None)
        try:
            seen.normal = normalise(gm)
        except NormaliseError as error:
            seen.error = error
        found.append(seen)

        def call(*real: Any) -> Any:
            seen.args = copy.deepcopy(list(real))
            return gm.forward(*real)

        return call

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return found


def take_one(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Seen:
    """``take`` for a function that is one graph."""
    (seen,) = take(function, *args, dynamic=dynamic, **kwargs)
    return seen


class Annotated(Interpreter):
    """Runs a normalised graph, each operation under the autocast regions that its node is annotated with."""

    def run_node(self, n: Node) -> Any:
        with ExitStack() as stack:
            for region in n.meta.get("autocast", ()):
                device, dtype, enabled, cache = (*region, None, None, None)[:4]
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            return super().run_node(n)


def execute(seen: Seen, args: Sequence[Any]) -> Any:
    """The normalised graph on real arguments."""
    assert seen.normal is not None, seen.error
    gm = GraphModule(dict(seen.normal.constants), seen.normal.graph)
    with torch.no_grad():
        return Annotated(gm).run(*args)


def assert_same(got: Any, want: Any) -> None:
    """Same structure; tensors equal bit for bit (any NaN equals any other), with dtype, shape and strides."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        if want.is_floating_point():  # -0.0 == 0.0
            assert torch.equal(torch.signbit(got) & ~got.isnan(), torch.signbit(want) & ~want.isnan())
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
    else:
        assert type(got) is type(want)
        assert got == want


def assert_equal_run(seen: Seen) -> None:
    """The normalised graph answers as the Dynamo graph does and changes its arguments as that does, called twice."""
    ours, theirs = copy.deepcopy(seen.args), copy.deepcopy(seen.args)
    for _ in range(2):
        torch.manual_seed(0)
        got = execute(seen, ours)
        torch.manual_seed(0)
        with torch.no_grad():
            want = seen.gm.forward(*theirs)
        assert_same(list(got), list(want))
        assert_same(ours, theirs)


@contextmanager
def compiled(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Iterator[Callable[..., Any]]:
    """``function`` compiled with ``backend="bcg"``, from a clean state, without gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield torch.compile(function, backend="bcg", dynamic=dynamic, options=options or None)


def reason_of(classified: Classified, node: Node) -> Reason:
    """Why a node is eager."""
    reason = classified.verdicts[node].reason
    assert reason is not None, f"{node.name} is {classified.verdicts[node].kind}"
    return reason


def stable(text: str) -> str:
    """``text`` without what differs between machines and torch versions: line numbers and the names of symbols.

    Symbols are numbered by first appearance; products of symbols, which sympy orders by name, are sorted again.
    """
    text = re.sub(r"(\w+\.py):\d+", r"\1:N", text)
    for letter in "su":
        numbers: dict[str, str] = {}
        text = re.sub(rf"\b{letter}\d+\b", lambda m: numbers.setdefault(m[0], f"{m[0][0]}{len(numbers)}"), text)  # noqa: B023
    text = re.sub(r"\bs\d+(\*s\d+)+\b", lambda m: "*".join(sorted(m[0].split("*"))), text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def assert_golden(name: str, text: str) -> None:
    """``text`` equals ``golden/NAME.txt``; with ``TGB_ACCEPT=1`` in the environment it is written there instead."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("TGB_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stable(text), encoding="utf-8")
    assert path.exists(), f"no {path.name}: run once with TGB_ACCEPT=1, and read what it wrote"
    assert stable(text) == path.read_text(encoding="utf-8"), "if the change is meant, run with TGB_ACCEPT=1"


class Ops(TorchDispatchMode):
    """The operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
