"""Repairs by row number: rows counted from the end, reversed rows, and writes that padded rows must not make.

Contract. As in ``repair_rules``. A padded row writes again what the last real row writes, to the same place. Not what
row 0 writes: where two real rows write one place, the last one stays the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from .alias import arguments
from .padding_rules_declared import TRASH
from .repair_edit import Editor, UnrepairableError, dimension, dimensions
from .repair_rules import LAST, LOOKED_UP, MASKED, REPEATED, TRASHED, pair, repairs, size_as_data
from .symbols import expr_of
from .torch_api import OpOverload, map_aggregate

aten = torch.ops.aten


def _free_to_copy(e: Editor, node: Node) -> None:
    """A view becomes a copy: nobody may write to its memory, nor see that it is shared."""
    if e.written(node):
        raise UnrepairableError("its memory is changed")
    mine = e.sets.get(node.name)
    members = [n for n, s in e.sets.items() if s == mine]
    seen = [n for n in members if n in e.outputs]
    bases = {n.op for n in e.graph.nodes if n.name in members and not any(a.name in members for a in n.all_input_nodes)}
    if seen and (len(seen) > 1 or bases != {"call_function"}):
        raise UnrepairableError("the caller sees that it is a view")


def _from_end(e: Editor, index: Any, size: Any, symbol: sympy.Symbol) -> int | None:
    """``k`` if an index is ``size - k``: a negative constant, or that very expression."""
    if isinstance(index, int):
        return -index if index < 0 else None
    if index is None or not e.mentions(index):
        return None
    distance = sympy.expand(expr_of(size) - e.expr(index))
    return int(distance) if distance.is_Integer and distance > 0 and expr_of(size) == symbol else None


@repairs("select")
def select(e: Editor, node: Node) -> None:
    """One row counted from the end."""
    named = arguments(node)
    x = named["self"]
    dim = dimension(x, named["dim"])
    symbol = e.carried(x, dim)
    if symbol is None:
        raise UnrepairableError("the dimension is not padded")
    back = _from_end(e, named["index"], x.meta["val"].shape[dim], symbol)
    if back is None:
        raise UnrepairableError("the row is not counted from the end")
    _free_to_copy(e, node)
    rows = _last_rows(e, symbol, back, 1)
    e.put(LAST, aten.squeeze.dim, e.add(aten.index_select.default, x, dim, rows), dim)
    node.meta["aliases"] = (node.args[0],)


@repairs("slice")
def cut(e: Editor, node: Node) -> None:
    """The last ``k`` rows."""
    named = arguments(node)
    x = named["self"]
    dim = dimension(x, named.get("dim", 0))
    symbol, size = e.carried(x, dim), x.meta["val"].shape[dim]
    if symbol is None:
        raise UnrepairableError("the dimension is not padded")
    back = _from_end(e, named.get("start"), size, symbol)
    end, length = named.get("end"), node.meta["val"].shape[dim]
    to_end = (
        end is None or (isinstance(end, int) and end >= 1 << 62) or (not isinstance(end, int) and e.expr(end) == symbol)
    )
    if back is None or not to_end or named.get("step", 1) != 1 or length != back:
        raise UnrepairableError("not the last rows")
    _free_to_copy(e, node)
    e.put(LAST, aten.index_select.default, x, dim, _last_rows(e, symbol, back, back))
    node.meta["aliases"] = ()


def _last_rows(e: Editor, symbol: sympy.Symbol, back: int, length: int) -> Node:
    """The numbers of ``length`` rows from ``n - back`` on. (Dynamo guards that there are so many.)"""
    first = e.last(symbol) if back == 1 else e.add(aten.sub.Tensor, e.count(symbol), back)
    if length == 1 and back == 1:
        return e.add(aten.view.default, first, [1])
    steps = e.add(aten.arange.default, length, dtype=torch.int64, device=e.device)
    return e.add(aten.clamp.default, e.add(aten.add.Tensor, steps, first), 0)


@repairs("flip")
def flip(e: Editor, node: Node) -> None:
    """Rows ``n - 1 - i``; padded rows are row 0."""
    x, dims = arguments(node)["self"], dimensions(arguments(node)["self"], arguments(node)["dims"])
    padded = [(d, s) for d in dims if (s := e.carried(x, d)) is not None]
    if len(padded) != 1:
        raise UnrepairableError("not one padded dimension")
    (dim, symbol), rest = padded[0], [d for d in dims if d != padded[0][0]]
    rows = e.add(aten.sub.Tensor, e.last(symbol), e.positions(symbol))
    if rest:
        x = e.add(aten.flip.default, x, rest)
    e.put(MASKED, aten.index_select.default, x, dim, e.add(aten.clamp.default, rows, 0))


# -- look-ups ----------------------------------------------------------------------------------------------------------


def _valid(e: Editor, index: Any) -> Any:
    """An index that no padded entry may leave the table by: where padded entries count on, they repeat real ones."""
    if not isinstance(index, Node):
        return index
    ndim = index.meta["val"].dim()
    found = [(d, s) for d in range(ndim) if (s := e.carried(index, d)) and e.layout(index, s).bound is not None]
    for dim, symbol in found:
        index = e.repeated(index, dim, symbol)
    return index


@repairs("embedding", "index_select", "gather", "take_along_dim", "index")
def look_up(e: Editor, node: Node) -> None:
    """Entries of a table by indices that may be beyond it in padded rows (``arange``, a slice of a buffer)."""
    assert isinstance(node.target, OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    key = "indices" if "indices" in names else "index"
    given = arguments(node)[key]
    several = isinstance(given, (list, tuple))
    repeated = [_valid(e, i) for i in given] if several else _valid(e, given)
    if repeated == (list(given) if several else given):
        raise UnrepairableError("no index counts on in padded rows")
    args = [repeated if name == key else a for name, a in zip(names, node.args, strict=False)]
    e.put(LOOKED_UP, node.target, *args, **{k: repeated if k == key else v for k, v in node.kwargs.items()})


# -- writes ------------------------------------------------------------------------------------------------------------


def _reads_elsewhere(e: Editor, node: Node) -> None:
    """What a write reads must not lie in the memory that it writes: repeated rows are a copy, so an overlap, which
    eager refuses or on which its result depends, would no longer be one."""
    target, *rest = node.args
    read: list[Node] = []
    map_aggregate((rest, node.kwargs), lambda a: read.append(a) if isinstance(a, Node) else None)
    mine = e.sets.get(target.name) if isinstance(target, Node) else None
    if any(n is target or (mine is not None and e.sets.get(n.name) == mine) for n in read):
        raise UnrepairableError("it reads the memory that it writes")


def _repeated(e: Editor, value: Any, dim: int) -> tuple[Any, bool]:
    """A tensor whose padded rows along ``dim`` repeat the last real one, and whether it has any."""
    symbol = e.carried(value, dim) if isinstance(value, Node) and 0 <= dim < value.meta["val"].dim() else None
    return (value, False) if symbol is None else (e.repeated(value, dim, symbol), True)


def _to_trash(
    e: Editor, node: Node, index: Any, along: Sequence[int], dim: int, rest: Callable[[Node], tuple[Any, ...]]
) -> None:
    """The write with the index of every padded row at the row that nobody reads. ``along``: dimensions of the index;
    ``rest``: the arguments behind the first, of the new index."""
    assert isinstance(node.target, OpOverload)
    _reads_elsewhere(e, node)
    x = node.args[0]
    row = x.meta.get(TRASH) if isinstance(x, Node) else None
    if row is None or dim != 0 or not node.target._schema.is_mutable:
        raise UnrepairableError("rows that are written twice would count twice")
    padded = [(d, s) for d in along if (s := e.carried(index, d)) is not None]
    if not padded or e.carried(x, 0) is not None:
        raise UnrepairableError("the index is not padded, or the memory is")
    for d, symbol in padded:
        index = e.masked(index, d, symbol, row)
    e.put(TRASHED, node.target, x, *rest(index), **node.kwargs)
    node.meta[TRASH] = row


@repairs("index_add", "index_reduce")
def index_accumulate(e: Editor, node: Node) -> None:
    named = arguments(node)
    dim = dimension(named["self"], named["dim"])
    _to_trash(e, node, named["index"], [0], dim, lambda i: (dim, i, *node.args[3:]))


@repairs("scatter_add", "scatter_reduce")
def scatter_accumulate(e: Editor, node: Node) -> None:
    named = arguments(node)
    dim = dimension(named["self"], named["dim"])
    _to_trash(e, node, named["index"], [dim], dim, lambda i: (dim, i, *node.args[3:]))


@repairs("index_copy", "index_fill")
def index_write(e: Editor, node: Node) -> None:
    _reads_elsewhere(e, node)
    named = arguments(node)
    x, key = named["self"], "source" if "source" in named else "value"
    dim = dimension(x, named["dim"])
    index, some = _repeated(e, named["index"], 0)
    source = _repeated(e, named[key], dim)[0] if key == "source" else named[key]
    if not some:
        raise UnrepairableError("the index is not padded")
    e.put(REPEATED, node.target, x, dim, index, source)


@repairs("scatter")
def scatter(e: Editor, node: Node) -> None:
    _reads_elsewhere(e, node)
    named = arguments(node)
    if "reduce" in named:
        return scatter_accumulate(e, node)
    x, dim = named["self"], dimension(named["self"], named["dim"])
    index, some = _repeated(e, named["index"], dim)
    source = _repeated(e, named["src"], dim)[0] if "src" in named else named["value"]
    if not some:
        raise UnrepairableError("the index is not padded")
    e.put(REPEATED, node.target, x, dim, index, source)


@repairs("index_put", "_unsafe_index_put")
def index_put(e: Editor, node: Node) -> None:
    """Index tensors and values, all of them along the dimensions in which an index is padded."""
    _reads_elsewhere(e, node)
    named = arguments(node)
    x, indices, values = named["self"], list(named["indices"]), named["values"]
    if named.get("accumulate"):
        return index_put_accumulate(e, node, indices)
    given = [i for i in indices if i is not None]
    together = max(i.meta["val"].dim() for i in given)
    where = [d for d, i in enumerate(indices) if i is not None]
    first = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    ndim = x.meta["val"].dim() - len(given) + together
    written = False
    for d in range(together):
        for k, i in enumerate(indices):
            if i is not None:
                indices[k], some = _repeated(e, i, d - together + i.meta["val"].dim())
                written |= some
        if isinstance(values, Node) and written:
            values = _repeated(e, values, first + d - ndim + values.meta["val"].dim())[0]
    if not written:
        raise UnrepairableError("no index is padded")
    e.put(
        REPEATED,
        node.target,
        x,
        indices,
        values,
        *node.args[3:],
        **{k: v for k, v in node.kwargs.items() if k == "accumulate"},
    )


def index_put_accumulate(e: Editor, node: Node, indices: list[Any]) -> None:
    """Only the index of dimension 0 is changed: it has to be padded in all dimensions that any index is."""
    first = indices[0]
    if not isinstance(first, Node):
        raise UnrepairableError("rows that are written twice would be added twice")
    along = list(range(first.meta["val"].dim()))
    _to_trash(e, node, first, along, 0, lambda i: ([i, *indices[1:]], *node.args[2:]))


def _slice(e: Editor, node: Node) -> tuple[Node, int, sympy.Symbol, Node]:
    """Memory without padding of which ``node`` writes a slice of the padded size: memory, dim, symbol, row numbers."""
    view = arguments(node)["self"]
    if view.target is not aten.slice.Tensor:
        raise UnrepairableError("the memory is not a slice")
    where = arguments(view)
    x, start, step = where["self"], where.get("start") or 0, where.get("step", 1)
    dim = dimension(x, where.get("dim", 0))
    symbol = e.carried(view, dim)
    if symbol is None or e.carried(x, dim) is not None or not isinstance(start, int) or start < 0 or step != 1:
        raise UnrepairableError("the slice has a form of its own")
    return x, dim, symbol, e.rows(symbol) if start == 0 else e.add(aten.add.Tensor, e.rows(symbol), start)


@repairs("copy")
def slice_write(e: Editor, node: Node) -> None:
    """``memory[:, start : start + s] = rows``: a write by row numbers."""
    _reads_elsewhere(e, node)
    x, dim, symbol, rows = _slice(e, node)
    view, source = pair(node)
    memory = view.meta["val"]
    if source.meta["val"].dtype is not memory.dtype:
        source = e.add(aten.to.dtype, source, memory.dtype)
    if [expr_of(n) for n in source.meta["val"].shape] != [expr_of(n) for n in memory.shape]:
        sizes = [n if isinstance(n, int) else e.add(aten.sym_size.int, view, d) for d, n in enumerate(memory.shape)]
        source = e.add(aten.expand.default, source, sizes)
    e.put(REPEATED, aten.index_copy_.default, x, dim, rows, e.repeated(source, dim, symbol))
    node.meta |= {"val": x.meta["val"], "aliases": (x,)}


@repairs("fill", "zero")
def slice_fill(e: Editor, node: Node) -> None:
    """``memory[:, start : start + s] = number``: the same."""
    named = arguments(node)
    value = named.get("value", 0)
    if named["self"].target is not aten.slice.Tensor or e.mentions(value):
        return size_as_data(e, node)
    if isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor):
        return slice_write(e, node)  # ``index_fill`` would read the tensor on the host
    x, dim, _, rows = _slice(e, node)
    e.put(REPEATED, aten.index_fill_.int_Scalar, x, dim, rows, value)
    node.meta |= {"val": x.meta["val"], "aliases": (x,)}
