"""One operation at a time, compiled for a CPU, on special values of each dtype: the answer stays eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from inductor_values import HALVES, INF, NAN, compare, pairs, segment, values
from torch import Tensor

from torch_graph_backend.inductor_segment import static_examples, trace
from torch_graph_backend.passes.dedup import InputFacts
from torch_graph_backend.passes.inductor_twins import keep_eager

pytestmark = pytest.mark.inductor

Table = dict[str, Callable[..., Tensor]]


def named(module: object, names: str) -> Table:
    return {name: getattr(module, name) for name in names.split()}


UNARY: Table = {
    **named(
        torch,
        """abs neg exp exp2 log log2 log10 log1p expm1 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sqrt
        rsqrt reciprocal square sigmoid erf erfc erfinv lgamma digamma floor ceil trunc round frac sign signbit isnan
        isinf isfinite nan_to_num relu logit i0 sinc isposinf isneginf sgn rad2deg angle bitwise_not logical_not""",
    ),
    **named(
        F,
        """gelu silu mish softplus elu celu selu hardtanh hardswish hardsigmoid softshrink hardshrink tanhshrink
        logsigmoid relu6 leaky_relu softsign""",
    ),
    **named(torch.special, "entr erfcx log_ndtr ndtri bessel_j0"),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_": lambda x: F.hardtanh(x.clone() + 0, -3, 3, inplace=True),
    "elu_": lambda x: F.elu(x + 0, inplace=True),
    "floor_divide_": lambda x: (x + 0).floor_divide_(3),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "round 1": lambda x: x.round(decimals=1),
    "round -1": lambda x: x.round(decimals=-1),
    **{f"pow {p}": (lambda x, p=p: x**p) for p in (2, 3, 0.5, -1, -0.5, -2, 1.3, 0, 1, 10)},
    "2 pow": lambda x: 2**x,
    "softplus 2": lambda x: F.softplus(x, 2.0, 5.0),
    "threshold": lambda x: F.threshold(x, 0.1, 3.0),
    "+ 0": lambda x: x + 0,
    "- 0": lambda x: x - 0,
    "0 -": lambda x: 0 - x,
    "* 1": lambda x: x * 1,
    "* 0": lambda x: x * 0,
    "* zeros": lambda x: x * torch.zeros_like(x),
    "+ zeros": lambda x: x + torch.zeros_like(x),
    "/ 3": lambda x: x / 3,
    "1 /": lambda x: 1 / x,
    "x - x": lambda x: x - x,
    "x / x": lambda x: x / x,
    "where": lambda x: torch.where(x > 0, x.log(), x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 7),
    "floor of third": lambda x: (x / 3).floor(),
    "alpha": lambda x: torch.add(x, x, alpha=3),
    **{
        f"to {d}": (lambda x, d=d: x.to(d))
        for d in (torch.float64, *HALVES, torch.int64, torch.int8, torch.uint8, torch.bool)
    },
}  # fmt: skip

BINARY: Table = {
    **named(
        torch,
        """add sub mul div maximum minimum fmax fmin atan2 copysign nextafter logaddexp logaddexp2 hypot xlogy eq ne lt
        le gt ge logical_and logical_or logical_xor pow bitwise_and bitwise_or bitwise_xor bitwise_left_shift
        bitwise_right_shift heaviside isclose rsub""",
    ),
    "lerp .3": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp .7": lambda x, y: torch.lerp(x, y, 0.7),
    "lerp": lambda x, y: torch.lerp(x, y, y.abs() / (1 + y.abs())),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "add alpha": lambda x, y: torch.add(x, y, alpha=3),
    "clamp": lambda x, y: torch.clamp(x, min=y, max=y + 1),
    "x y - y": lambda x, y: x * y - y,
    "x y y": lambda x, y: x * y * y,
    "x / y / y": lambda x, y: x / y / y,
    "x + y > x": lambda x, y: x + y > x,
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "kl": lambda x, y: F.kl_div(x, y, reduction="none"),
    "prelu": lambda x, y: F.prelu(x, y[20:21]),
}
#: By zero they raise, and the smallest number over -1 ends the process, in eager code too.
DIVISIONS: Table = {
    **named(torch, "remainder fmod floor_divide gcd"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}

DTYPES = [torch.float32, torch.float64, *HALVES, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def parts(table: Table, size: int = 30) -> Iterator[Table]:
    names = list(table)
    for i in range(0, len(names), size):
        yield {name: table[name] for name in names[i : i + size]}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_operation(dtype: torch.dtype) -> None:
    """Would catch gelu of NaN, lerp's other branch, halves that are not rounded, casts of what is out of range."""
    found = [text for part in parts(UNARY) for text in compare(part, [values(dtype)])]
    found += [text for part in parts(BINARY) for text in compare(part, pairs(dtype))]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_divisions(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    if not dtype.is_floating_point:
        fine = (y != 0) & ~((y == -1) & (x == torch.iinfo(dtype).min))
        x, y = x[fine], y[fine]
    assert not compare(DIVISIONS, [x, y])


REDUCTIONS: Table = {
    "sum": lambda x: x.sum(),
    "sum 0": lambda x: x.sum(0),
    "sum 1": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(),
    "mean 0": lambda x: x.mean(0),
    "mean 1": lambda x: x.mean(-1),
    "var": lambda x: x.var(),
    "var 0": lambda x: x.var(0),
    "var 1": lambda x: x.var(-1, correction=0),
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, -1)),
    "softmax 0": lambda x: x.softmax(0),
    "softmax 1": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "squares": lambda x: (x * x).sum(-1),
    "prod": lambda x: x[:, :8].prod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x[:, :8].cumprod(-1),
    "amax": lambda x: x.amax(-1),
    "min": lambda x: x.min(0).values,
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(0),
    "argmax of all": lambda x: x.argmax(),
    "max": lambda x: x.max(-1).indices,
    "any": lambda x: (x > 2).any(-1),
    "all": lambda x: (x > -2).all(0),
    "median": lambda x: x.median(-1).values,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2 if x.shape[1] % 2 == 0 else 1),
    "batch_norm": lambda x: F.batch_norm(x, x[0] * 0, x[0] * 0 + 1),
    "batch_norm of the batch": lambda x: F.batch_norm(x, None, None, training=True),
    "normalize": F.normalize,
    "products": lambda x: x @ x.t(),
    "batched products": lambda x: x[None] @ x.t()[None],
    "cross_entropy": lambda x: F.cross_entropy(x, x.abs()),
    "sort": lambda x: x.sort(-1).indices,
    "topk": lambda x: x.topk(1).indices,
    "avg_pool": lambda x: F.avg_pool1d(x[None], 1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "floor of mean": lambda x: (x.mean(-1) * 100).floor(),
    "steps of tanh": lambda x: (x.tanh() * 1e5).floor().long(),
    "buckets of softmax": lambda x: (x.softmax(-1) * 1000).long(),
    "argmax of logits": lambda x: (x @ x.t()).log_softmax(-1).argmax(-1),
    "mask of products": lambda x: torch.where(x @ x.t() > x.mean(), 1.0, 2.0),
}


def tables() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    special = randn(8, 64)
    special[1, 5], special[2, 7], special[3, 9], special[4] = NAN, INF, -INF, -INF
    special[5, 1], special[5, 2], special[6] = INF, -INF, NAN
    return {
        "small": randn(8, 64),
        "odd": randn(7, 37),
        "wide": randn(4, 5000),
        "tall": randn(3000, 4),
        "many": torch.rand(20, 10000, generator=g),
        "mean 1e6": randn(8, 64) + 1e6,
        "mean 1e4": randn(8, 640) + 1e4,
        "mean 1e25": randn(8, 64) * 1e22 + 1e25,
        "huge": randn(8, 64) * 1e37,
        "tiny": randn(8, 64) * 1e-38,
        "ties": torch.randint(-2, 3, (8, 64), generator=g).float(),
        "special": special,
        "one column": randn(9, 1),
        "one row": randn(1, 300),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(tables()))
def test_reductions(kind: str) -> None:
    """Would catch sums in float32 one after the other, norms of huge numbers, integers that a last digit decides."""
    x = tables()[kind]
    found = [text for part in parts(REDUCTIONS, 25) for text in compare(part, [x])]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
def test_reductions_of_other_floats(dtype: torch.dtype) -> None:
    for kind in ("odd", "special", "mean 1e4"):
        x = tables()[kind].to(dtype)
        assert not compare(REDUCTIONS, [x])


def test_values_that_decide_nothing_are_fused() -> None:
    """What keeps eager's kernel is what needs it: a tanh that nothing compares is compiled."""

    def targets(function: Callable[[Tensor], Tensor]) -> list[str]:
        mode, examples = static_examples([InputFacts((8, 4), (4, 1), torch.float32, torch.device("cpu"), 0, 0)])
        traced = trace(lambda x: (function(x),), (), mode, examples)
        assert keep_eager(traced.gm.graph, traced.exact) is None
        return [n.target.namespace for n in traced.gm.graph.nodes if n.op == "call_function"]

    assert set(targets(lambda x: (x.tanh() * 2).softmax(-1))) == {"aten"}
    assert "tgb_eager" in targets(lambda x: (x.tanh() * 2).argmax(-1))
    assert "tgb_eager" in targets(lambda x: (x.clone().tanh_()[1] * 2).floor())


def test_a_smaller_check() -> None:
    """A few of the above, which run without being asked for."""
    x = values(torch.float32)
    few = {
        n: UNARY[n]
        for n in ("gelu", "softshrink", "hardtanh", "* 0", "pow -0.5", "to torch.int8", "alpha", "floor_divide_")
    }
    assert not compare(few, [x])
    assert not compare({n: UNARY[n] for n in ("floor of third", "softsign", "silu", "rsqrt")}, [x.to(torch.bfloat16)])
    sums = {n: REDUCTIONS[n] for n in ("sum", "var 1", "layer_norm", "steps of tanh", "argmax of logits")}
    assert not compare(sums, [tables()["mean 1e6"]])
    code = segment(lambda x: [x.sum(-1)], wide := tables()["many"])
    (got,) = code(wide)
    exact = wide.double().sum(-1)
    assert float((got - exact).abs().max()) <= float(exact.max()) * 2**-24
