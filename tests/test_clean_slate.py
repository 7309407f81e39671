"""What one test leaves behind is gone before the next (``conftest.py``)."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("turn", [1, 2])
def test_sizes_are_static_by_default(turn: int) -> None:
    """Each turn leaves them dynamic, as threads that call something compiled with ``dynamic=True`` do on torch 2.11."""
    assert torch._dynamo.config.assume_static_by_default
    torch._dynamo.config.assume_static_by_default = False
