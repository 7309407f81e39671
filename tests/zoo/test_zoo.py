"""Every model of the zoo: eager's answer at every shape, graphs that do the work, and the plan that reviewers saw.

On a CPU in float32; on CUDA in bfloat16, where padded calls have the error of eager ones against float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from equality import Report, check_calls, tensors
from graph_harness import GOLDEN, assert_golden

import torch_graph_backend as tgb
from torch_graph_backend import registry
from torch_graph_backend.recorders.host import HostRecorder

from . import report
from .case import Case, placed
from .models import ZOO

pytest.importorskip("transformers")
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
#: bfloat16 has three digits, and errors add up over layers; the check against float64 is the sharp one.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str, device: str) -> None:
    """Would catch: a wrong row at any shape, a call that silently runs eagerly, less captured than before, a plan that
    changed, a page that shows something else."""
    case = ZOO[name]
    if why := case.missing(device):
        pytest.skip(why)
    dtype = case.dtype(device)
    model = case.model(device, dtype)
    with case.around():
        result = check_calls(
            model,
            case.arguments(device, dtype),
            compiled_kwargs={"options": dict(case.options)},
            floor=case.kernels,
            padded=case.padded,
            tolerate=case.eager,
            tolerance=TOLERANCE[dtype],
            bitwise=device == "cpu" or case.exact_on_cuda,
        )
    found = report.Found.of(case, model)
    assert found.flops >= case.flops, f"{found.flops:.1%} of the FLOPs captured\n{tgb.explain(model)}"
    if device == "cpu" or not case.static_on_cuda:
        assert result.stats.replays >= case.replays, result.stats
    if device == "cuda" and dtype is torch.bfloat16:
        check_against_double(case, device, dtype, result)
    if device == "cpu":
        check_text(found)


def check_against_double(case: Case, device: str, dtype: torch.dtype, result: Report) -> None:
    """The error of all outputs against float64 from the same rounded weights and arguments: at most 1.5x eager's."""
    model = case.model(device, dtype).double()
    errors = [0.0, 0.0]
    with torch.no_grad():
        for i, args in enumerate(placed(case.arguments(device, dtype), device, torch.float64)):
            reference = tensors(model(*args))
            for k, side in enumerate((result.got[i], result.want[i])):
                errors[k] += sum(squares(t, r) for t, r in zip(tensors(side), reference, strict=True))
    got, want = (e**0.5 for e in errors)
    assert got <= 1.5 * want, f"error against float64 {got:.3g}, eager {want:.3g}"


def squares(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The sum of squared errors."""
    return float((value.double() - reference).square().sum())


def check_text(found: report.Found) -> None:
    """The golden plan and the page, if they were made with these versions."""
    name = report.golden_name(found.case)
    text = report.PAGE.read_text(encoding="utf-8")
    if (GOLDEN / name).parent.exists():
        assert_golden(name, found.plans)
    if ", ".join(f"{k} {v}" for k, v in report.versions().items()) + "." in text.splitlines():
        for part in (found.row(), found.section()):
            assert part in text, f"docs/zoo.md shows something else, write it anew: python -m tests.zoo\n{part}"


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", ["dit", "convnet_eval", "convnet_train", "unet", "lstm", "cond"])
def test_unmarked(name: str, dynamic: bool | None) -> None:
    """Sizes as ``torch.compile`` finds them: all (numbers of modules are arguments then), or those that change."""
    case = replace(ZOO[name], dims={})
    kwargs = {"options": dict(case.options), "dynamic": dynamic}
    with case.around():
        result = check_calls(case.model(), case.arguments(), compiled_kwargs=kwargs)
    assert result.stats.replays >= case.replays, result.stats


@pytest.mark.parametrize("name", ZOO)
def test_shapes(name: str) -> None:
    """Would catch a case that no longer tests what it says: at least six shapes, out of order, one of them twice."""
    case = ZOO[name]
    if case.needs not in (None, "cuda") and (why := case.missing()):
        pytest.skip(why)
    shapes: list[Any] = [tuple(t.shape for t in tensors(args)) for args in case.arguments()]
    assert len(set(shapes)) >= 6
    assert shapes != sorted(shapes)
    assert shapes != sorted(shapes, reverse=True)


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo itself can fail: replays that read an argument wrongly are seen."""
    case = ZOO["cond"]
    real = HostRecorder.replay

    def wrong(self: Any, recording: Any) -> None:
        for graph in registry.all_graphs():
            for slot in (s for entry in graph.entries.values() for s in entry.slots):
                slot.add_(1)
        real(self, recording)

    monkeypatch.setattr(HostRecorder, "replay", wrong)
    with pytest.raises(AssertionError, match="call 3: output"):
        check_calls(case.model(), case.arguments(), compiled_kwargs={"options": dict(case.options)})
