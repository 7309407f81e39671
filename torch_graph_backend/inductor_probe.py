"""A compiled segment and the plain one, run once each on scratch memory, before anything trusts the compiled one.

Contract. Nothing of a caller's is changed and no random number of a caller's is drawn: what a segment writes, and every
static buffer, is replaced by scratch; weights and constants are read where they lie. The probe tells layouts, dtypes
and memory of the results (a result on memory of an input or of another result is a copy that was optimised away), and
that the values are those of the plain kernels, within what rounding explains. It is also where Triton loads and tunes
its kernels: outside of the pool, and outside of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_graph_backend.inductor_segment import CompiledSegment, Unsuitable
from torch_graph_backend.passes.dedup import InputFacts
from torch_graph_backend.recorders.base import SHORTAGE

#: Largest error of all values of a result, relative to their size, that rounding may explain on random inputs.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
COARSE = 0.1
_SPECIAL = (float("nan"), float("inf"), float("-inf"))

#: Bounds of random integers, the upper one not included: any, positions in a small table, and its two first rows.
_SPANS = ((-100, 101), (0, 12), (0, 2))

#: Parts of names: operations of ATen that trust their integers, and writes, whose winner at equal indices is any.
_UNCHECKED = ("_unsafe_", "embedding_bag", "segment_reduce", "index_put", "index_copy", "scatter", "::put")

Plain = Callable[..., tuple[Any, ...]]


#: One input: its facts, a real tensor that may be read (or None), and what an integer scratch is filled with.
Given = tuple[InputFacts, Any, int]


class Raises(Unsuitable):
    """Plain kernels raise on the values that the probe made up."""


def probe(segment: CompiledSegment, plain: Plain, inputs: Sequence[Given], any_integer: bool = False) -> None:
    """Compare on random values, then with NaN and infinities among them (Inductor takes ``x * 0`` for 0). Notes in
    ``segment.copied`` which results must be copied; raises ``Unsuitable``.

    Integers are zeros then, which hide what is computed from them. ``any_integer`` says that others are at worst an
    exception (``indices_are_checked``): the widest of ``_SPANS`` that the plain kernels take is compared as well.
    """
    with torch.inference_mode(False), torch.no_grad():
        for special in (False, True):
            _compare(segment, plain, inputs, special)
        if not any_integer or not any(real is None and _is_free_integer(f, fill) for f, real, fill in inputs):
            return
        for span in _SPANS:
            try:
                return _compare(segment, plain, inputs, False, span)
            except Raises:
                continue


def indices_are_checked(gm: torch.fx.GraphModule) -> bool:
    """Whether the graph's operations check their indices (on a CPU, nearly all of ATen's do), and random ones that are
    equal do not make its answer depend on the order of writes."""
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    named = [t for t in targets if isinstance(t, torch._ops.OpOverload)]
    trusting = [part for t in named for part in _UNCHECKED if part in t._schema.name]
    return not trusting and all(t.namespace in ("aten", "prims") for t in named)


def _is_free_integer(facts: InputFacts, fill: int) -> bool:
    kind = facts.dtype
    return not (fill or kind is torch.bool or kind.is_floating_point or kind.is_complex)


def _compare(
    segment: CompiledSegment, plain: Plain, inputs: Sequence[Given], special: bool, span: tuple[int, int] | None = None
) -> None:
    generators: dict[torch.device, torch.Generator] = {}
    ours = [
        real if real is not None else scratch(facts, fill, generators, special, span) for facts, real, fill in inputs
    ]
    theirs = [t if real is not None else _twin(t) for t, (_, real, _) in zip(ours, inputs, strict=True)]
    try:
        want = plain(*theirs)
    except SHORTAGE:
        raise
    except Exception as error:  # eager code checks values (a divisor of zero), and scratch holds none of the caller's
        raise Raises(f"it cannot be tried out: {type(error).__name__}: {error}".splitlines()[0]) from error
    made = segment.compute(ours)
    segment.copied |= check_layouts(segment, made) | shared(made, ours)
    made = [segment.copy(i, t) if i in segment.copied else t for i, t in enumerate(made)]
    got = segment.assemble(ours, made)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        check_output(a, b, f"output {i}")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is not b:
            check_values(a, b, f"input {i} after the call")


def scratch(
    facts: InputFacts,
    fill: int,
    generators: dict[torch.device, torch.Generator],
    special: bool = False,
    span: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Random floats and booleans, integers of ``fill`` (an index must be in range), laid out and aligned as the input.
    ``special``: a quarter of the floats, in front, is no finite number. ``span``: bounds of random integers instead."""
    generator = generators.setdefault(facts.device, torch.Generator(facts.device).manual_seed(0))
    offset = facts.misaligned // facts.dtype.itemsize
    extent = 0 if 0 in facts.shape else 1 + sum((n - 1) * st for n, st in zip(facts.shape, facts.stride, strict=True))
    where: dict[str, Any] = {"device": facts.device}
    if facts.dtype is torch.bool:
        memory = torch.randint(0, 2, (offset + extent,), generator=generator, **where).bool()
    elif facts.dtype.is_floating_point or facts.dtype.is_complex:
        memory = torch.randn(offset + extent, generator=generator, **where)
        for i, value in enumerate(_SPECIAL if special else ()):
            memory[offset + i : offset + extent // 4 : len(_SPECIAL)] = value
        memory = memory.to(facts.dtype)
    elif span is not None and _is_free_integer(facts, fill):
        low = 0 if facts.dtype is torch.uint8 else span[0]
        memory = torch.randint(low, span[1], (offset + extent,), generator=generator, dtype=facts.dtype, **where)
    else:
        memory = torch.full((offset + extent,), fill, dtype=facts.dtype, **where)
    return memory.as_strided(facts.shape, facts.stride, offset)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and layout on other memory."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    memory.set_(tensor.untyped_storage().clone(), 0, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check_layouts(segment: CompiledSegment, made: Sequence[torch.Tensor]) -> set[int]:
    """What segments and cuts rely on: shape and dtype, and strides where they matter. Returns the results whose strides
    are others (Inductor's decompositions may lay out an intermediate result in their own way)."""
    strange = set()
    if len(made) != len(segment.layouts):
        raise Unsuitable(f"Inductor returns {len(made)} results for {len(segment.layouts)}")
    for i, (t, (shape, stride, dtype)) in enumerate(zip(made, segment.layouts, strict=True)):
        if not isinstance(t, torch.Tensor) or tuple(t.shape) != shape or t.dtype is not dtype:
            got = f"{t.dtype} {list(t.shape)}" if isinstance(t, torch.Tensor) else repr(t)
            raise Unsuitable(f"result {i} is {got}, planned {dtype} {list(shape)}")
        if any(n > 1 and a != b for n, a, b in zip(shape, t.stride(), stride, strict=True)):
            strange.add(i)
    return strange


def shared(made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> set[int]:
    """Results on memory that is an input's or an earlier result's."""
    seen = {t.untyped_storage().data_ptr() for t in inputs} - {0}
    found = set()
    for i, t in enumerate(made):
        address = t.untyped_storage().data_ptr()
        if address in seen:
            found.add(i)
        elif address:
            seen.add(address)
    return found


def check_output(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if got.shape != want.shape or got.dtype is not want.dtype or got.device != want.device:
        expected = f"{want.dtype} {list(want.shape)} on {want.device}"
        raise Unsuitable(f"{what} is {got.dtype} {list(got.shape)} on {got.device}, plain kernels give {expected}")
    if any(n > 1 and a != b for n, a, b in zip(got.shape, got.stride(), want.stride(), strict=True)):
        raise Unsuitable(f"{what} has strides {got.stride()}, plain kernels give {want.stride()}")
    check_values(got, want, what)


def check_values(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal but for rounding. Where rounding decides an integer (argmax), a few may differ."""
    if not got.numel():
        return
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        wrong = float((got != want).double().mean())
        if wrong > 0.01:
            raise Unsuitable(f"{what}: {wrong:.0%} of its values are not those of plain kernels")
        return
    kind = torch.complex128 if got.dtype.is_complex else torch.float64
    a, b = got.to(kind), want.to(kind)
    finite = a.isfinite() & b.isfinite()
    if float((a.isfinite() != b.isfinite()).double().mean()) > 0.01:
        raise Unsuitable(f"{what}: NaN or infinity where plain kernels have none, or the reverse")
    zero = torch.zeros((), dtype=kind, device=a.device)
    size = float(torch.where(finite, b, zero).abs().square().sum().sqrt())
    error = float(torch.where(finite, a - b, zero).abs().square().sum().sqrt())
    bound = TOLERANCE.get(got.dtype, COARSE)
    if error > bound * size + bound:
        raise Unsuitable(f"{what}: its values differ from those of plain kernels by {error / (size + 1e-30):.1e}")
