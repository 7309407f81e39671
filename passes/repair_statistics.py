"""Repairs of means and variances: masked sums, divided by the real number of entries.

Contract. As in ``repair_rules``. What is summed is summed at least as precisely as eager does: half precision in
single, and deviations from the mean in double wherever eager does.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from .alias import arguments
from .repair_edit import Editor, UnrepairableError, dimensions
from .repair_reductions import Lines, lines
from .repair_rules import MASKED, repairs
from .symbols import expr_of
from .torch_api import OpOverload

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def _entries(e: Editor, x: Node, over: Lines) -> Node:
    """The real number of entries that are reduced to one."""
    size = expr_of(1)
    for d in over.given:
        size *= expr_of(x.meta["val"].shape[d])
    return e.number(size)


@repairs("mean")
def mean(e: Editor, node: Node) -> None:
    """The masked sum, divided by the real number of entries; half precision is summed in single, as ``mean`` does."""
    named = arguments(node)
    x, dtype = named["self"], node.meta["val"].dtype
    given = x.meta["val"].dtype
    if not dtype.is_floating_point or given.is_complex or torch.promote_types(given, dtype) is not dtype:
        raise UnrepairableError("its dtype would change")
    over = lines(e, x, dimensions(x, named.get("dim")))
    wide = torch.float32 if dtype in _HALF else dtype
    total = e.add(aten.sum.dim_IntList, over.masked(e, 0), list(over.dims), False, dtype=wide)
    total = over.kept(e, total, bool(named.get("keepdim", False)))
    e.become(MASKED, e.cast(e.add(aten.div.Tensor, total, _entries(e, x, over)), dtype))


# -- variances ---------------------------------------------------------------------------------------------------------


@repairs("var", "std", "var_mean", "std_mean")
def variance(e: Editor, node: Node) -> None:
    """The masked sum of squared deviations from the masked mean, divided by the number of entries less ``correction``.

    A number that is not positive counts as 0, as in eager: then the result is infinite, or NaN if nothing deviates.
    """
    assert isinstance(node.target, OpOverload)
    named = arguments(node)
    x, keepdim = named["self"], bool(named.get("keepdim"))
    correction = named.get("correction", 1 if named.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    if not x.meta["val"].dtype.is_floating_point or e.mentions(correction):
        raise UnrepairableError("not the variance of real numbers")
    name = node.target.overloadpacket.__name__
    several = name.endswith("_mean")
    over = lines(e, x, dimensions(x, named.get("dim")))
    moments = Moments(e, x, over, several)
    dtype = x.meta["val"].dtype
    parts: dict[int, Node] = {}
    wanted = e.parts() if several else {0}
    if 0 in wanted:
        parts[0] = moments.variance(correction)
        parts[0] = e.add(aten.sqrt.default, parts[0]) if name.startswith("std") else parts[0]
    if 1 in wanted:
        parts[1] = moments.welford_mean()
    parts = {k: over.kept(e, e.cast(part, dtype), keepdim) for k, part in parts.items()}
    return e.become_parts(MASKED, parts) if several else e.become(MASKED, parts[0])


class Moments:
    """Mean and variance of the real entries along lines of ``x``, in a dtype as wide as eager's.

    On a CPU eager sums in double, on other devices in single unless ``x`` is double. The mean is rounded to that from
    a sum in double, which is exact for equal entries unless they are double: so are their deviations, all zero.
    """

    def __init__(self, e: Editor, x: Node, over: Lines, several: bool) -> None:
        val = x.meta["val"]
        self.e, self.over, self.dims = e, over, list(over.dims)
        self.entries = _entries(e, x, over)
        self.wide = torch.float64 if val.device.type == "cpu" or val.dtype is torch.float64 else torch.float32
        self.x = e.cast(over.x, self.wide)
        self.first: Node | None = None
        flat = val.device.type == "cpu" and not several and len(over.given) == val.dim()
        if val.dtype is torch.float64 and not flat:
            self._shift()
        total = e.add(aten.sum.dim_IntList, over.masked(e, 0, self.x), self.dims, True, dtype=torch.float64)
        self.mean = e.cast(e.add(aten.div.Tensor, total, self.entries), self.wide)
        if flat and val.dtype is torch.float32:  # eager takes the deviations from the mean in single
            self._overflow()

    def _shift(self) -> None:
        """All entries less the first one: equal entries have a mean of exactly zero then."""
        first = self.x
        for d in self.dims:
            first = self.e.add(aten.narrow.default, first, d, 0, 1)
        self.first = first
        self.x = self.e.like(self.x, self.e.add(aten.sub.Tensor, self.x, first))

    def _overflow(self) -> None:
        """Where a sum in single is infinite, so is the mean."""
        e, single = self.e, torch.float32
        total = e.add(aten.sum.dim_IntList, self.over.masked(e, 0), self.dims, True, dtype=single)
        total = e.cast(e.add(aten.div.Tensor, total, self.entries), self.wide)
        self.mean = e.add(aten.where.self, e.add(aten.isfinite.default, total), self.mean, total)

    def variance(self, correction: float) -> Node:
        e = self.e
        apart = e.like(self.x, e.add(aten.sub.Tensor, self.x, self.mean))
        squares = e.like(self.x, e.add(aten.mul.Tensor, apart, apart))
        total = e.add(aten.sum.dim_IntList, self.over.masked(e, 0, squares), self.dims, False)
        number = e.add(aten.sub.Tensor, e.add(aten.to.dtype, self.entries, torch.float64), correction)
        number = e.cast(e.add(aten.clamp.default, number, 0), self.wide)
        return e.add(aten.div.Tensor, total, number)

    def centre(self) -> Node:
        """The mean, without the dimensions that it is taken over."""
        e = self.e
        mean = self.mean if self.first is None else e.add(aten.add.Tensor, self.mean, self.first)
        for d in reversed(self.dims):
            mean = e.add(aten.squeeze.dim, mean, d)
        return mean

    def welford_mean(self) -> Node:
        """The mean as an update per entry finds it: an infinite entry makes it infinite if it is the last, else NaN.

        Only where entries come in the order that they lie in: on a CPU.
        """
        e, x = self.e, self.over.x
        val = x.meta["val"]
        if val.device.type != "cpu" or (len(self.dims) > 1 and not _in_order(val)):
            raise UnrepairableError("in which order its entries are added up is not known")
        mean = self.centre()
        if self.first is not None:  # which is lost if it is infinite
            plain = e.add(aten.sum.dim_IntList, self.over.masked(e, 0), self.dims, False)
            plain = e.add(aten.div.Tensor, plain, self.entries)
            mean = e.add(aten.where.self, e.add(aten.isfinite.default, mean), mean, plain)
        odd = e.like(x, e.add(aten.logical_not.default, e.add(aten.isfinite.default, x)))
        found = e.add(aten.sum.dim_IntList, self.over.masked(e, False, odd), self.dims, False)
        last, padded = odd, dict(self.over.padded(e))
        for d in reversed(self.dims):
            if d in padded:
                row = e.add(aten.view.default, e.last(padded[d]), [1])
                last = e.add(aten.squeeze.dim, e.add(aten.index_select.default, last, d, row), d)
            else:
                last = e.add(aten.select.int, last, d, -1)
        others = e.add(aten.gt.Tensor, found, last)
        return e.add(aten.masked_fill.Scalar, mean, others, math.nan)


def _in_order(value: torch.Tensor) -> bool:
    """Whether the entries of a tensor lie in the order of its dimensions, without gaps."""
    step = expr_of(1)
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size != 1 and expr_of(stride) != step:
            return False
        step *= expr_of(size)
    return True


@repairs("batch_norm", "instance_norm")
def normalisation(e: Editor, node: Node) -> None:
    """By the statistics of this very batch, or instance, that are kept nowhere."""
    named = arguments(node)
    x, whole = named["input"], node.target is aten.batch_norm.default
    val = x.meta["val"]
    own = named["training" if whole else "use_input_stats"] is True
    if not own or named.get("running_mean") is not None or named.get("running_var") is not None:
        raise UnrepairableError("running statistics")
    if not _in_order(val):  # eager lays its result out anew
        raise UnrepairableError("the result would have other strides")
    over = lines(e, x, [d for d in range(val.dim()) if d > 1 or (whole and d == 0)])
    moments = Moments(e, x, over, True)
    spread = e.add(aten.rsqrt.default, e.add(aten.add.Tensor, moments.variance(0), named["eps"]))
    wide = val.dtype if val.dtype is torch.float64 else torch.float32
    centre, spread = (over.kept(e, e.cast(part, wide), True) for part in (moments.centre(), spread))
    weight, bias = (_each_channel(e, named.get(k), val.dim(), wide) for k in ("weight", "bias"))
    x = e.cast(x, wide)
    if val.device.type == "cpu":  # each as eager rounds it
        scale = spread if weight is None else e.add(aten.mul.Tensor, spread, weight)
        rest = e.add(aten.mul.Tensor, centre, scale)
        rest = e.add(aten.neg.default, rest) if bias is None else e.add(aten.sub.Tensor, bias, rest)
        result = e.add(aten.add.Tensor, e.add(aten.mul.Tensor, x, scale), rest)
    else:
        result = e.add(aten.mul.Tensor, e.add(aten.sub.Tensor, x, centre), spread)
        result = result if weight is None else e.add(aten.mul.Tensor, result, weight)
        result = result if bias is None else e.add(aten.add.Tensor, result, bias)
    e.become(MASKED, e.cast(result, node.meta["val"].dtype))


def _each_channel(e: Editor, value: Node | None, ndim: int, dtype: torch.dtype) -> Node | None:
    """A weight a channel (dimension 1), as it is broadcast."""
    if value is None:
        return None
    value = e.cast(value, dtype)
    for _ in range(ndim - 2):
        value = e.add(aten.unsqueeze.default, value, -1)
    return value
