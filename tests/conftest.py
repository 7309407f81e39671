"""Every test starts with no compiled graphs, a fixed seed and a recompile limit that no test reaches by accident."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch._dynamo

import torch_graph_backend as tgb
from torch_graph_backend import config

# The same examples in every run, so that a change is what makes a test fail; others with TGB_RANDOM=1.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile("random" if os.environ.get("TGB_RANDOM") else "same")

torch.set_num_threads(1)  # the models are tiny; more threads only compete with other test processes


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Without it a test would see graphs, counts, break ops, settings and specialisations that an earlier one left."""
    registered = sys.modules["torch_graph_backend.break_ops"]._registered  # the package has a function of this name
    before = dict(registered)
    torch.manual_seed(0)
    torch._dynamo.reset()
    tgb.reset()
    # Threads that call a function compiled with ``dynamic=True`` at once leave torch 2.11 (whose settings are not a
    # thread's own) with sizes dynamic by default, for the whole process.
    with torch._dynamo.config.patch(recompile_limit=64, assume_static_by_default=True, automatic_dynamic_shapes=True):
        yield
    torch._dynamo.reset()
    tgb.reset()
    registered.clear()
    registered.update(before)


@pytest.fixture(autouse=True)
def plain_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key counts as small unless a test (or its module) is marked ``inductor`` or passes the option.

    The sizes of these tests are small, so with the users' default nearly every one would wait for a C++ compiler, and
    could not compare bit for bit with eager. That default (32) is tested in ``test_inductor.py``.
    """
    if request.node.get_closest_marker("inductor") is None:
        monkeypatch.setattr(config, "DEFAULT_INDUCTOR_MAX_SIZE", 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device; a CUDA test is skipped on a machine without one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Without gradients, as calls are captured."""
    with torch.no_grad():
        yield
