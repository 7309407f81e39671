"""Operations that Inductor's C++ code answers otherwise than eager: they keep eager's kernels in a compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.inductor_probe import Given, indices_are_checked, probe
from torch_graph_backend.inductor_segment import CompiledSegment, Unsuitable, static_examples, trace
from torch_graph_backend.passes.dedup import InputFacts
from torch_graph_backend.passes.torch_api import cpp_rounds_halves

pytestmark = pytest.mark.inductor


def check(function: Callable[..., object], *args: Tensor) -> None:
    """First call and replay agree with eager code, to a few last digits, and Inductor compiled the segment."""
    fast = torch.compile(function, backend="bcg", dynamic=False)
    want = function(*args)
    for _ in range(3):
        torch.testing.assert_close(fast(*args), want, rtol=1e-6, atol=0, equal_nan=True)
    counts = [c for graph in registry.all_graphs() for c in graph.ledger.keys.values()]
    assert [c.compiled for c in counts] == [1], [c.plain for c in counts]


OUT_OF_RANGE = """
import sys, torch
torch.set_num_threads(2)  # an exception that leaves a parallel loop ends the process
table = torch.randn(100, 2048)
ids, bad = torch.arange(32), torch.arange(32)
bad[7] = {bad}
def step(ids):
    wide = ids[:, None].expand(-1, 2048)
    return torch.tanh({expression}) * 2 + 1
fast = torch.compile(step, backend="bcg", dynamic=False, options={{"inductor_max_size": 4096}})
for _ in range(3):
    torch.testing.assert_close(fast(ids), step(ids))
errors = []
for function in (step, fast):
    try:
        function(bad)
    except Exception as error:
        errors.append((type(error), str(error)))
assert len(errors) == 2 and errors[0] == errors[1], errors
torch.testing.assert_close(fast(ids), step(ids))
import torch_graph_backend as tgb
assert tgb.stats(fast).seconds["inductor"] > 0 and "segments of keys static: 1" in str(tgb.stats(fast))
"""


@pytest.mark.parametrize(
    ("expression", "bad"),
    [
        ("torch.nn.functional.embedding(ids, table)", 100),
        ("table[ids]", -101),
        ("table.gather(0, wide)", 100),
        ("torch.zeros(100, 2048).scatter(0, wide, table[:32])", 100),
        # (Equal rows: the probe writes all of them to row 0, and which one stays there is anybody's guess.)
        ("torch.zeros(100, 2048).index_put((ids,), table[:1].expand(32, -1))", 100),
        ("(wide // (wide + 1)).float()", -1),
    ],
)
def test_a_bad_value_raises_what_eager_code_raises(expression: str, bad: int) -> None:
    """Inductor checks inside of a parallel loop: the exception ended the process."""
    script = OUT_OF_RANGE.format(expression=expression, bad=bad)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_functions_of_tiny_and_huge_numbers(no_grad: None) -> None:
    """Would catch: exp(x) - 1 for expm1, a square that overflows in asinh, a - floor(a / b) * b for a remainder."""
    tiny = torch.tensor([1e-8, -1e-8, 3e-9, 1e-3, 0.5, -0.5, 1e-20, 0.0] * 4)
    huge = torch.tensor([1e10, -1e10, 1e30, 7.5, -7.5, 1e25, float("inf"), 2.5] * 4)

    def functions(tiny: Tensor, huge: Tensor) -> list[Tensor]:
        small = [tiny.expm1(), tiny.atanh(), tiny.asinh(), tiny.erf(), F.elu(tiny), F.celu(tiny)]
        return [*small, huge.asinh(), huge.acosh(), huge % 3, huge.remainder(-2.5), huge // 3, huge % (huge + 1)]

    check(functions, tiny, huge)


ROUNDED: dict[str, tuple[Callable[[Tensor], object], torch.dtype]] = {
    "float16": (lambda x: (x - x.half().float(), x.half().view(-1).float() * 3), torch.float32),
    "bfloat16": (lambda x: (x - x.bfloat16().float(), x.bfloat16().view(-1).float() * 3), torch.float32),
    "promoted": (lambda x: (x - x.half(), (x.half() == x).float() + 1), torch.float32),
    "half to half": (lambda x: ((x * 70000).half().bfloat16() * 1, x.bfloat16().half() * 1), torch.float32),
    "double": (lambda x: ((x + 1e-9) - (x + 1e-9).float().double(), x * 2), torch.float64),
    "whole numbers": (lambda x: (x.bfloat16().float() * 3, x.half().double() + 1), torch.int64),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_casts_that_round_on_purpose(name: str, no_grad: None) -> None:
    """The part of a number that a half does not hold: zero, if the casts are dropped."""
    function, dtype = ROUNDED[name]
    x = torch.randn(16, 16) * (1 if dtype.is_floating_point else 1000)
    fast = torch.compile(function, backend="bcg", dynamic=False)
    for _ in range(3):
        torch.testing.assert_close(fast(x.to(dtype)), function(x.to(dtype)), rtol=1e-6, atol=0, equal_nan=True)
    (count,) = (c for graph in registry.all_graphs() for c in graph.ledger.keys.values())
    if torch.__version__ >= "2.13":
        assert count.compiled == 1, count.plain
    else:  # Inductor drops the casts whatever it is told
        assert [r.code for r in count.plain] == ["inductor-unsuitable"]
        assert "rounds by a cast" in count.plain[0].text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_mixed_precision_are_compiled(dtype: torch.dtype, no_grad: None) -> None:
    """A norm in float32 in the middle of a half model rounds its result once, and nothing reads it in float32."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    fast, args = torch.compile(norm, backend="bcg", dynamic=False), (torch.randn(8, 16), torch.randn(16))
    for _ in range(3):
        x, weight = (a.to(dtype) for a in args)
        torch.testing.assert_close(fast(x, weight), norm(x, weight), rtol=2e-2, atol=0)
    (count,) = (c for graph in registry.all_graphs() for c in graph.ledger.keys.values())
    assert count.compiled == cpp_rounds_halves(), count.plain


def test_what_raises_on_scratch_values_is_no_failure(caplog: pytest.LogCaptureFixture, no_grad: None) -> None:
    """The probe's integers are zeros. A division by them says nothing about the compile and warns nobody."""
    fast = torch.compile(lambda a, b: (a // b) * 2 + 1, backend="bcg")
    a, b = torch.arange(16), torch.arange(1, 17)
    for _ in range(3):
        assert torch.equal(fast(a, b), (a // b) * 2 + 1)
    (count,) = (c for graph in registry.all_graphs() for c in graph.ledger.keys.values())
    assert [r.code for r in count.plain] == ["inductor-unsuitable"]
    assert not [r for r in caplog.records if r.exc_info]
    tgb.stats(fast).expect(replays=2, eager=0)


def wrong_segment(
    code: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> tuple[CompiledSegment, list[Given]]:
    """A segment whose compiled code is ``code``, made for 20 integers."""
    facts = InputFacts((20,), (1,), torch.int64, torch.device("cpu"), 0, 0)
    mode, examples = static_examples([facts])
    traced = trace(lambda x: (plain(x),), (), mode, examples)
    assert indices_are_checked(traced.gm)
    return CompiledSegment(lambda x: [code(x)], (), traced), [(facts, None, 0)]


def test_the_probe_sees_integers_that_are_not_zero() -> None:
    """Zeros hide it: -7 // 2 is -4, and C++ gives -3."""

    def floor(x: Tensor) -> Tensor:
        return x // 2

    segment, inputs = wrong_segment(lambda x: torch.div(x, 2, rounding_mode="trunc"), floor)
    probe(segment, lambda x: (floor(x),), inputs)
    with pytest.raises(Unsuitable, match="of its values are not"):
        probe(segment, lambda x: (floor(x),), inputs, any_integer=True)


def test_the_probe_stays_in_the_range_of_an_index() -> None:
    """What plain kernels raise on is no finding; a smaller range is tried, in which wrong rows show."""
    table = torch.arange(12.0)

    def plain(x: Tensor) -> Tensor:
        return torch.arange(12.0)[x]

    segment, inputs = wrong_segment(lambda x: table[x], plain)
    probe(segment, lambda x: (plain(x),), inputs, any_integer=True)
    segment, inputs = wrong_segment(lambda x: table[(x * 2) % 12], plain)
    with pytest.raises(Unsuitable, match="values differ"):
        probe(segment, lambda x: (plain(x),), inputs, any_integer=True)
