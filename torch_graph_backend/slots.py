"""Static buffers: their real rows, their tails, and how both are filled.

Contract (C4). ``fill`` writes the real rows of every buffer at every replay: they are copied from the source, one
``torch._foreach_copy_`` per pair of dtypes. The tail of each padded dimension becomes a copy of row 0, so that tails
hold values a real row could hold: indices stay in range, no NaN appears. It is hygiene, not the proof of padding
safety. A declared tail (``Tail``) is one value instead, or is left alone, and is something that the proof knows of. All
views are made once per real size; a fill makes no tensor object, and its operations are as many as there are dtypes
(on CUDA a few more, so that each is one kernel: see ``GROUPED``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch

from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.plan import Padding, TensorSpec

Sizes = Mapping[sympy.Symbol, int]


def evaluate(expr: sympy.Expr | int, sizes: Sizes) -> int:
    """A size expression as an int (used once a key or a real size, never in a replay)."""
    if isinstance(expr, int) or expr.is_Integer:
        return int(expr)
    return int(expr.xreplace({s: sympy.Integer(v) for s, v in sizes.items()}))


@dataclass(frozen=True)
class Factor:
    """One factor of a dimension at a bucket: ``size`` entries, of which the first are real, as ``rows`` counts them."""

    size: int
    rows: sympy.Expr | None = None

    def real(self, sizes: Sizes) -> int:
        return self.size if self.rows is None else evaluate(self.rows, sizes)


@dataclass(frozen=True)
class Window:
    """Where the real rows of one buffer are: per padded dimension its factors, outermost first."""

    dims: tuple[tuple[int, tuple[Factor, ...]], ...]

    @staticmethod
    def at(padding: Padding, bucket: Sizes) -> Window:
        dims = []
        for dim, entries in padding:
            # Outermost first: by the symbols outside of it, since a size of 1 makes two outer products equal.
            symbols = frozenset().union(*(rows.free_symbols for rows, _, _ in entries))
            inside_out = sorted(entries, key=lambda e: len(sympy.sympify(e[1]).free_symbols & symbols))
            placed = [(evaluate(o, bucket), rows, evaluate(i, bucket)) for rows, o, i in inside_out]
            factors: list[Factor] = []
            done = 1
            for outer, rows, _ in placed:
                if outer > done:
                    factors.append(Factor(outer // done))
                factors.append(Factor(evaluate(rows, bucket), rows))
                done = max(outer, done) * evaluate(rows, bucket) if outer >= done else done
            inner = placed[-1][2]
            if inner > 1:
                factors.append(Factor(inner))
            dims.append((dim, tuple(factors)))
        return Window(tuple(dims))

    def real_rows(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """A view of the real rows; dimensions with padding inside them come split into their factors."""
        for dim, factors in reversed(self.dims):
            symbols = [f for f in factors if f.rows is not None]
            if len(symbols) == 1 and factors[0] is symbols[0]:
                inner = factors[1].size if len(factors) > 1 else 1
                tensor = tensor.narrow(dim, 0, symbols[0].real(sizes) * inner)
            else:
                tensor = tensor.unflatten(dim, [f.size for f in factors])
                for k, f in enumerate(factors):
                    tensor = tensor.narrow(dim + k, 0, f.real(sizes))
        return tensor

    def split_like(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """An unpadded tensor seen with the same splits as ``real_rows`` gives."""
        for dim, factors in reversed(self.dims):
            symbols = [f for f in factors if f.rows is not None]
            if not (len(symbols) == 1 and factors[0] is symbols[0]):
                tensor = tensor.unflatten(dim, [f.real(sizes) for f in factors])
        return tensor


def buffer_strides(
    spec: TensorSpec, bucket: Sizes, own: frozenset[sympy.Symbol] = frozenset()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a buffer: eager's strides, but dense where entries of eager's tensor share memory.

    Dense too where strides depend on a symbol of ``own`` (exact sizes): those are not the key's to know.
    """
    shape = tuple(evaluate(s, bucket) for s in spec.shape)
    if any(own & sympy.sympify(st).free_symbols for st in spec.stride):
        return shape, tuple(torch.empty(shape, device="meta").stride())
    stride = tuple(evaluate(s, bucket) for s in spec.stride)
    reach = 1  # entries spanned by the dimensions with smaller strides
    for st, n in sorted((st, n) for n, st in zip(shape, stride, strict=True) if n > 1):
        if st < reach:
            return shape, tuple(torch.empty(shape, device="meta").stride())
        reach += (n - 1) * st
    return shape, stride


class Filler:
    """Fills a list of buffers from a list of sources of one real size; of those ``filled`` already only tails.

    ``tails``: what is declared of each buffer's tail (``None``, or nothing given: a copy of row 0). ``numbers``:
    further buffers of one element, and the number that each has to hold. ``dtypes``: those of the sources, where they
    differ from the buffers'.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        windows: Sequence[Window],
        sizes: Sizes,
        filled: Collection[int] = (),
        tails: Sequence[Tail | None] = (),
        numbers: Sequence[tuple[torch.Tensor, int]] = (),
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        self.real = [w.real_rows(b, sizes) for b, w in zip(buffers, windows, strict=True)]
        groups: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], list[int]] = {}
        for i, b in enumerate(buffers):
            if i not in filled:
                key = (b.dtype, b.dtype if dtypes is None else dtypes[i], b.device, _apart(self.real[i]))
                groups.setdefault(key, []).append(i)
        self.groups = [(which, [self.real[i] for i in which]) for which in groups.values()]
        tails = tails or [None] * len(buffers)
        rows = [(b, w) for b, w, tail in zip(buffers, windows, tails, strict=True) if tail is None]
        self.tails = _tails([b for b, _ in rows], [w for _, w in rows], sizes)
        self.constants = _constants(buffers, windows, sizes, tails, numbers)

    @property
    def launches(self) -> int:
        """Operations that one fill issues."""
        return len(self.constants) + len(self.groups) + len(self.tails)

    def fill(self, sources: Sequence[torch.Tensor], between: Callable[[], None] | None = None) -> None:
        """Reset constant tails, copy ``sources`` (real shapes) into the real rows, then row 0 into the other tails.

        ``between`` writes the real rows that no source has.
        """
        for targets, values in self.constants:
            torch._foreach_copy_(targets, values)
        for which, targets in self.groups:
            torch._foreach_copy_(targets, [sources[i] for i in which])
        if between is not None:
            between()
        for targets, rows in self.tails:
            fill_tails(targets, rows)


def fill_tails(targets: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
    """Write row 0 (already expanded) into the tails. One place, so that tests can write poison instead."""
    torch._foreach_copy_(targets, rows)


#: The number of the padded dimension, a tail of it, what that is the end of, and the dimension.
_Part = tuple[int, torch.Tensor, torch.Tensor, int]


def _parts(buffer: torch.Tensor, window: Window, sizes: Sizes) -> list[_Part]:
    """The tails of a buffer, disjoint: of the k-th padded dimension, with the earlier ones whole."""
    found = []
    for k, (dim, factors) in enumerate(window.dims):
        n, size = factors[0].real(sizes), factors[0].size
        if n >= size:
            continue
        part = buffer
        for later, f in window.dims[k + 1 :]:
            part = part.narrow(later, 0, f[0].real(sizes))
        found.append((k, part.narrow(dim, n, size - n), part, dim))
    return found


def _tails(
    buffers: Sequence[torch.Tensor], windows: Sequence[Window], sizes: Sizes
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Tail views and their sources, level by level: a later level copies what an earlier one wrote."""
    levels: dict[tuple[int, torch.dtype, torch.device, int, bool], list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
    for buffer, window in zip(buffers, windows, strict=True):
        for k, tail, part, dim in _parts(buffer, window, sizes):
            # Where grouped copies are one kernel, tails that can be doubled are a group of their own, by their length.
            doubles = _grouped(buffer) and dim == 0 and part.is_contiguous()
            key = (k, buffer.dtype, buffer.device, tail.shape[dim] if doubles else 0, doubles)
            levels.setdefault(key, []).append((tail, part, dim))
    found: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for key in sorted(levels, key=lambda key: key[0]):
        steps = _doublings(levels[key], key[3])
        if not key[4] or len(steps) >= len(levels[key]):
            steps = [([t for t, _, _ in levels[key]], [p.narrow(d, 0, 1).expand_as(t) for t, p, d in levels[key]])]
        found += steps
    return found


def _doublings(
    tails: Sequence[tuple[torch.Tensor, torch.Tensor, int]], length: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Row 0 into the first row of each tail, that one into the next, those two into the next two, and so on.

    Both sides of each copy are dense, so that the copies of all tails are one kernel; a row that is expanded is not.
    """
    steps = [([t.narrow(0, 0, 1) for t, _, _ in tails], [p.narrow(0, 0, 1) for _, p, _ in tails])] if length else []
    done = 1
    while done < length:
        more = min(done, length - done)
        steps.append(([t.narrow(0, done, more) for t, _, _ in tails], [t.narrow(0, 0, more) for t, _, _ in tails]))
        done += more
    return steps


def _grouped(tensor: torch.Tensor) -> bool:
    """Whether copies of many tensors on this device are one kernel, if all of them are dense."""
    return tensor.device.type in GROUPED


def _apart(view: torch.Tensor) -> bool:
    """Whether a view would turn a group's one kernel into one a tensor."""
    return _grouped(view) and not view.is_contiguous()


def _constants(
    buffers: Sequence[torch.Tensor],
    windows: Sequence[Window],
    sizes: Sizes,
    tails: Sequence[Tail | None],
    numbers: Sequence[tuple[torch.Tensor, int]],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Tails of one value and single numbers, with tensors of that value: one group a dtype."""
    groups: dict[tuple[torch.dtype, torch.device, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    found: list[tuple[torch.Tensor, float | int | bool]] = list(numbers)
    for buffer, window, tail in zip(buffers, windows, tails, strict=True):
        if tail is not None and tail.value is not None:
            found += [(part, tail.value) for _, part, _, _ in _parts(buffer, window, sizes)]
    for target, value in found:
        constant = _constant(target, value)
        apart = _apart(target) or _apart(constant)
        targets, values = groups.setdefault((target.dtype, target.device, apart), ([], []))
        targets.append(target)
        values.append(constant)
    return list(groups.values())


#: Kinds of device on which ``_foreach_copy_`` is one kernel, if every pair of tensors is dense and laid out alike.
GROUPED = {"cuda"}
#: Elements of a constant that is laid out in full, for that reason.
_DENSE = 1 << 16


def _constant(target: torch.Tensor, value: float | int | bool) -> torch.Tensor:
    """A tensor like ``target`` that holds one value."""
    with torch.inference_mode(False), torch.no_grad():
        if _grouped(target) and target.is_contiguous() and target.numel() <= _DENSE:
            laid = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
            return laid.fill_(value)
        return torch.full((), value, dtype=target.dtype, device=target.device).expand_as(target)


class CutView:
    """The real rows of one static value for one real size, with eager's strides; ``take`` hands them out."""

    __slots__ = ("compact", "copy", "shape", "source", "stride", "window_split")

    def __init__(self, value: torch.Tensor, spec: TensorSpec, window: Window, private: bool, sizes: Sizes) -> None:
        self.shape = tuple(evaluate(s, sizes) for s in spec.shape)
        self.stride = tuple(evaluate(s, sizes) for s in spec.stride)
        self.source = window.real_rows(value, sizes)
        self.copy = private or not self._fits(self.source)
        self.window_split: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        if not self.copy:
            self.source = value.as_strided(self.shape, self.stride, self.source.storage_offset())
            return
        # An expanded dimension (stride 0) is one entry of memory: copy that one, and expand the copy alike.
        self.compact = tuple(1 if st == 0 else n for n, st in zip(self.shape, self.stride, strict=True))
        if self.compact != self.shape and self.source.shape == self.shape:
            for dim, n in enumerate(self.compact):
                self.source = self.source.narrow(dim, 0, min(n, self.shape[dim]))
        else:
            self.compact = self.shape
        if self.source.shape != self.compact:
            like = window.split_like(torch.empty_strided(self.shape, self.stride, device="meta"), sizes)
            self.window_split = tuple(like.shape), tuple(like.stride())

    def _fits(self, rows: torch.Tensor) -> bool:
        """Whether the view has eager's shape and strides (a dimension of one entry has no stride that matters)."""
        if tuple(rows.shape) != self.shape:
            return False
        return all(n <= 1 or a == b for n, a, b in zip(self.shape, rows.stride(), self.stride, strict=True))

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a copy: what is handed out, and the view of it that ``source`` is copied into."""
        out = torch.empty_strided(self.compact, self.stride, dtype=self.source.dtype, device=self.source.device)
        target = out if self.window_split is None else out.as_strided(*self.window_split)
        return (out if self.compact == self.shape else out.as_strided(self.shape, self.stride)), target

    def take(self) -> torch.Tensor:
        return take_all([self])[0]


def take_all(views: Sequence[CutView]) -> list[torch.Tensor]:
    """What all of these hand out; their copies are one operation."""
    out: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for view in views:
        if view.copy:
            made, target = view.fresh()
            out.append(made)
            targets.append(target)
            sources.append(view.source)
        else:
            out.append(view.source)
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)
    return out
