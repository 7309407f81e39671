"""Every test starts with no compiled graphs, a fixed seed and a recompile limit that no test reaches by accident."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

import torch_graph_backend as tgb

torch.set_num_threads(1)  # the models are tiny; more threads only compete with other test processes


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Without it a test would see the graphs, counts, break ops and specialisations that an earlier one left behind."""
    registered = sys.modules["torch_graph_backend.break_ops"]._registered  # the package has a function of this name
    before = dict(registered)
    torch.manual_seed(0)
    torch._dynamo.reset()
    tgb.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()
    tgb.reset()
    registered.clear()
    registered.update(before)
