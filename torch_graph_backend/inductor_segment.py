"""One segment through Inductor: traced at its layouts, compiled without what aliases, put together again.

Contract. ``trace`` runs a segment on fake tensors and says where each output lies: in an input's memory, or in memory
that the segment makes. The compiled code returns the latter alone, one tensor a piece of memory, so that no two of its
results may share any; outputs that are views, of an input or of each other, are made by us (``Traced.outputs``). So the
alias pattern of the outputs is that of the plain segment whatever Inductor does with views. Nothing real runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_graph_backend.passes.alias import written_args
from torch_graph_backend.passes.dedup import InputFacts
from torch_graph_backend.passes.inductor_decisions import deciding
from torch_graph_backend.passes.inductor_exact import EagerKernels, has_halves, on_cpu, rounds_on_purpose
from torch_graph_backend.passes.inductor_twins import keep_eager
from torch_graph_backend.passes.torch_api import (
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    compile_session,
    compile_with_inductor,
    cpp_rounds_halves,
    make_fx,
    symbolic_sizes,
    without_autocast,
)
from torch_graph_backend.recorders.base import OpaqueSegment

#: Options of ``mode="max-autotune-no-cudagraphs"``. The graph is ours alone, whatever the environment says, and weights
#: and buffers are never frozen into the code: they change. Tables of autotuning results are for authors of kernels.
PATCHES: dict[str, Any] = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "fallback_random": True,
    "triton.cudagraphs": False,
    "freezing": False,
    "joint_graph_constant_folding": False,
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
    "post_grad_custom_post_pass": EagerKernels(),
}

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Unsuitable(Exception):  # noqa: N818 (a finding, not an error)
    """Why a segment is left to plain kernels: what Inductor assumes, or what we must know, does not hold."""


@dataclass(frozen=True)
class Decided:
    """On what later steps of a graph decide: positions of a segment's outputs, and whether memory that it writes."""

    outputs: tuple[int, ...] = ()
    writes: bool = False


NOTHING = Decided()


@dataclass(frozen=True)
class Output:
    """One output of a segment. ``source`` is "input" or "made"; ``whole``: it is that very tensor, else a view of it,
    ``offset`` elements behind the tensor's own beginning."""

    source: str
    index: int
    whole: bool
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Traced:
    """A segment as a graph that returns ``made``, and how its outputs are put together. ``written``: positions of the
    inputs that it changes. ``exact``: values that must be eager's to the last bit."""

    gm: GraphModule
    mode: FakeTensorMode
    examples: tuple[Any, ...]
    outputs: tuple[Output, ...]
    layouts: tuple[Layout, ...]
    written: frozenset[int]
    exact: frozenset[Node] = frozenset()


#: Compiled code: takes the sizes (if it serves several) and the inputs.
Code = Callable[..., Sequence[torch.Tensor]]


class CompiledSegment(OpaqueSegment):
    """Compiled code at one bucket. ``sizes`` go before the inputs. ``copied``: results that the code returns on
    memory of an input or of another result (a copy that was optimised away), or with other strides than planned."""

    def __init__(self, code: Code, sizes: tuple[int, ...], traced: Traced) -> None:
        self.code, self.sizes, self.outputs, self.layouts = code, sizes, traced.outputs, traced.layouts
        self.copied: set[int] = set()

    def compute(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        with without_autocast():
            made = list(self.code(*self.sizes, *inputs))
        for i in self.copied:
            made[i] = self.copy(i, made[i])
        return made

    def copy(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """The value on memory of its own, laid out as planned."""
        shape, stride, dtype = self.layouts[index]
        return torch.empty_strided(shape, stride, dtype=dtype, device=value.device).copy_(value)

    def assemble(self, inputs: Sequence[Any], made: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        found = []
        for out in self.outputs:
            base = (inputs if out.source == "input" else made)[out.index]
            whole = out.whole or base.numel() == 0
            found.append(base if whole else base.as_strided(out.shape, out.stride, base.storage_offset() + out.offset))
        return tuple(found)


# -- tracing -----------------------------------------------------------------------------------------------------------


def static_examples(inputs: Sequence[InputFacts]) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    """Fake inputs of these layouts, each with memory of its own, as misaligned as the real ones."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode, [fake_input(mode, f, f.shape, f.stride) for f in inputs]


def fake_input(mode: FakeTensorMode, facts: InputFacts, shape: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
    """A fake tensor; if it is misaligned it lies behind the beginning of its memory, which is how Inductor sees it."""
    with torch.no_grad(), mode:
        fake = torch.empty_strided(shape, stride, dtype=facts.dtype, device=facts.device)
        if facts.misaligned:
            offset, extent = facts.misaligned // facts.dtype.itemsize, 1
            for n, st in zip(shape, stride, strict=True):
                extent += (n - 1) * st
            memory = torch.empty((extent + offset,), dtype=facts.dtype, device=facts.device)
            fake = memory.as_strided(shape, stride, offset)
    return fake


def trace(
    step: Callable[..., tuple[Any, ...]],
    sizes: Sequence[Any],
    mode: FakeTensorMode,
    examples: Sequence[torch.Tensor],
    decided: Decided = NOTHING,
) -> Traced:
    """The graph of ``step(*sizes, *examples)`` below autograd and autocast. ``sizes`` that are symbolic become inputs.

    Raises ``Unsuitable``, or whatever the segment raises.
    """
    symbolic = [s for s in sizes if isinstance(s, torch.SymInt)]

    def run(*args: Any) -> Any:
        given = iter(args[: len(symbolic)])
        at = [next(given) if isinstance(s, torch.SymInt) else s for s in sizes]
        outputs = step(*at, *args[len(symbolic) :])
        if not all(isinstance(o, torch.Tensor) for o in outputs):
            raise Unsuitable("it hands a list of tensors to a later step")
        return tuple(outputs)

    inputs = (*symbolic, *examples)
    with compile_session(), torch.inference_mode(False), torch.no_grad(), mode:
        gm = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"][len(symbolic) :]
    output = next(n for n in gm.graph.nodes if n.op == "output")
    also = [output.args[0][i] for i in decided.outputs]
    if decided.writes:
        also += [a for n in gm.graph.nodes for a in written_args(n)]
    exact = deciding(gm.graph, also)
    outputs, bases = _outputs(gm, placeholders, output.args[0])
    output.args = (tuple(bases),)
    written = _written(gm, placeholders)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    layouts = tuple((tuple(n.meta["val"].shape), tuple(n.meta["val"].stride()), n.meta["val"].dtype) for n in bases)
    return Traced(gm, mode, inputs, tuple(outputs), layouts, written, frozenset(exact))


def _memory(node: Node) -> int | None:
    """Which memory the value of a node lies in; the values in ``meta`` keep it alive."""
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def _outputs(gm: GraphModule, placeholders: list[Node], nodes: Sequence[Node]) -> tuple[list[Output], list[Node]]:
    """How outputs lie in inputs and in made memory, and the nodes that make that memory (the whole of it)."""
    given = {_memory(n): i for i, n in enumerate(placeholders)}
    maker: dict[int | None, Node] = {}
    for node in gm.graph.nodes:
        maker.setdefault(_memory(node), node)
    shared: dict[int | None, int] = {}
    for memory in map(_memory, nodes):
        shared[memory] = shared.get(memory, 0) + 1
    outputs: list[Output] = []
    bases: list[Node] = []
    places: dict[int | None, int] = {}
    for node in nodes:
        memory = _memory(node)
        if memory in given:
            outputs.append(_output("input", given[memory], node, placeholders[given[memory]]))
            continue
        if memory not in places:
            places[memory] = len(bases)
            bases.append(node if shared[memory] == 1 else maker[memory])
        outputs.append(_output("made", places[memory], node, bases[places[memory]]))
    for base in bases:
        if any(st == 0 and n > 1 for n, st in zip(base.meta["val"].shape, base.meta["val"].stride(), strict=True)):
            raise Unsuitable(f"{base.name} is an expanded tensor")
    return outputs, bases


def _output(source: str, index: int, node: Node, base: Node) -> Output:
    value, whole = node.meta["val"], base.meta["val"]
    if value.dtype is not whole.dtype or value.is_conj() or value.is_neg():
        raise Unsuitable(f"{node.name} is a view of memory of another dtype")
    offset = value.storage_offset() - whole.storage_offset()
    same = node is base or (
        value.shape == whole.shape and value.stride() == whole.stride() and isinstance(offset, int) and offset == 0
    )
    return Output(source, index, bool(same), tuple(value.shape), tuple(value.stride()), offset, value.dtype)


def _written(gm: GraphModule, placeholders: list[Node]) -> frozenset[int]:
    """Positions of inputs that some operation changes, through whatever view."""
    given = {_memory(n): i for i, n in enumerate(placeholders)}
    found = set()
    for node in gm.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        for i, spec in enumerate(node.target._schema.arguments):
            if spec.alias_info is not None and spec.alias_info.is_write:
                arg = node.kwargs.get(spec.name, node.args[i] if i < len(node.args) else None)
                nodes = arg if isinstance(arg, (list, tuple)) else [arg]
                found |= {given[_memory(n)] for n in nodes if isinstance(n, Node) and _memory(n) in given}
    return frozenset(found)


# -- compiling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Artefact:
    """Compiled code. ``symbols`` name the sizes it takes (none: one bucket alone); ``assumes`` are conditions on them
    that compiling relied on."""

    code: Code
    symbols: tuple[Any, ...] = ()
    assumes: tuple[Any, ...] = ()

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether the code is right at these sizes."""
        values = dict(zip(self.symbols, sizes, strict=True))
        return all(bool(condition.xreplace(values)) for condition in self.assumes)


def compile_static(traced: Traced) -> Artefact:
    """Code for the layouts that were traced."""
    return Artefact(_compile(traced))


def compile_dynamic(
    step: Callable[..., tuple[Any, ...]],
    sizes: Sequence[int],
    dynamic: Sequence[int],
    inputs: Sequence[tuple[InputFacts, Callable[..., tuple[list[Any], list[Any]]]]],
    decided: Decided = NOTHING,
) -> Artefact:
    """Code for any value of the sizes at positions ``dynamic``. ``inputs``: the facts at ``sizes``, and a function of
    all sizes that gives shape and stride."""
    import sympy

    mode, made = symbolic_sizes([sizes[i] for i in dynamic])
    at: list[Any] = list(sizes)
    for i, s in zip(dynamic, made, strict=True):
        at[i] = s
    examples = [fake_input(mode, facts, *layout(at)) for facts, layout in inputs]
    traced = trace(step, at, mode, examples, decided)
    code = _compile(traced)
    env = mode.shape_env
    assert env is not None
    symbols = tuple(s.node.expr for s in made)
    replaced = [sympy.Eq(s, by) for s, by in env.replacements.items() if s in symbols]
    lower = [sympy.Ge(s, env.var_to_range[s].lower) for s in symbols if s in env.var_to_range]
    return Artefact(code, symbols, (*(g.expr for g in env.guards), *replaced, *lower))


def _compile(traced: Traced) -> Code:
    with compile_session(), torch.inference_mode(False), torch.no_grad(), without_autocast():
        reason = keep_eager(traced.gm.graph, traced.exact)
        if reason:
            raise Unsuitable(reason)
        traced.gm.recompile()
        halves, casts = has_halves(traced.gm.graph), rounds_on_purpose(traced.gm.graph)
        if (halves or casts) and not cpp_rounds_halves() and on_cpu(traced.gm.graph):
            what = "rounds by a cast" if casts else "computes in half precision"
            raise Unsuitable(f"it {what}, and Inductor's C++ of this version of torch does not round there")
        patches = PATCHES | ({"emulate_precision_casts": True} if halves or casts else {})
        return compile_with_inductor(traced.gm, traced.examples, traced.mode, patches)
