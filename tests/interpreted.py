"""Test files whose kernels run under Triton's interpreter on a machine without a GPU.

The interpreter has to be turned on before a kernel is defined: such a file runs itself once more, in a process of its
own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: There is a GPU, and kernels run on it.
CUDA = torch.cuda.is_available() and not INTERPRETED


def run_again(path: str, skipped: str, timeout: float) -> None:
    """The tests of a file, which must all pass but for ``skipped`` (a pattern for their number)."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(rf"^\d+ passed, {skipped} skipped", done.stdout, re.M), done.stdout[-500:]
