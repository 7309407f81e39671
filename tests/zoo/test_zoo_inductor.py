"""Models of the zoo with their small keys compiled by Inductor: the error against float64 is at most 1.5 times eager's.

On a CPU a model takes a minute or more of C++ compiler, so that a few calls of a few models run by default;
``TGB_ZOO_INDUCTOR=all`` runs all calls of all models, and a list of names (``llama,vit``) those.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from equality import tensors

import torch_graph_backend as tgb
from torch_graph_backend import registry

from .case import placed
from .models import ZOO
from .test_zoo import squares

pytest.importorskip("transformers")
pytestmark = [pytest.mark.inductor, pytest.mark.slow]
BOUND = 1.5
ASKED = os.environ.get("TGB_ZOO_INDUCTOR", "")
NAMES = list(ZOO) if ASKED == "all" else [n for n in ASKED.split(",") if n] or ["llama", "convnet_eval"]
#: Models that cannot run in float64.
NO_DOUBLE = {"qwen3_moe": "its grouped products take no float64"}
#: Calls of a case that are made when nothing was asked for: two sizes of one bucket, and the first again.
FEW = 2


@pytest.mark.parametrize("name", NAMES)
def test_error_against_float64(name: str, device: str) -> None:
    case = ZOO[name]
    if why := case.missing(device) or NO_DOUBLE.get(name):
        pytest.skip(why)
    dtype = case.dtype(device)
    options = {**case.options, "inductor_seconds": 3600, "inductor_max_size": 128}
    eager, fast = case.model(device, dtype), case.model(device, dtype)
    exact = case.model(device, dtype).double()
    compiled = torch.compile(fast, backend="bcg", options=options)
    calls = case.arguments(device, dtype)
    doubles = placed(case.arguments(device, dtype), device, torch.float64)
    order = list(range(len(calls))) if ASKED else [*range(FEW), 0]
    errors = {"compiled": 0.0, "eager": 0.0}
    with case.around(), torch.no_grad():
        for i in order:
            reference = tensors(exact(*_copy(doubles[i])))
            for side, run in (("compiled", compiled), ("eager", eager)):
                got = tensors(run(*_copy(calls[i])))
                errors[side] += sum(squares(t, r) for t, r in zip(got, reference, strict=True))
    counts = [c for g in registry.all_graphs() for c in g.ledger.keys.values()]
    assert ASKED or sum(c.compiled for c in counts), tgb.stats(fast)
    got, want = (errors[side] ** 0.5 for side in ("compiled", "eager"))
    assert got <= BOUND * want, f"error against float64 {got:.3g}, eager {want:.3g}\n{tgb.stats(fast)}"
    failed = [r for c in counts for r in c.plain if r.code == "inductor-failed"]
    assert not failed, failed


def _copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of one side: a model may change them."""

    def clone(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        made = t.clone()
        for name in ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"):
            if hasattr(t, name):
                setattr(made, name, getattr(t, name))
        return made

    return torch.utils._pytree.tree_map(clone, args)
