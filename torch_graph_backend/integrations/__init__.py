"""What known packages call their operations, and break ops for functions of theirs that are no operations.

Contract. Importing a module of this folder registers names, silently, and imports nothing of the package it is about:
the package may be absent or come later. A function made here imports its package when it first runs, and has the
package's own signature as far as an operation can have it (no options that change how many results there are).
``register_all()`` imports every module. Without any of this, operations of unknown libraries run eagerly all the same;
a registration gives the right reason, and the functions save a graph break.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from torch_graph_backend.break_ops import register_break_op

#: The modules, by the package that each is about.
MODULES = {
    "torch": "torch_ops",
    "flash_attn": "flash_attn",
    "flashinfer": "flashinfer",
    "xformers": "xformers",
    "mamba_ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
    "fla": "fla",
}


def register_all() -> None:
    """Register the operations of every package known here."""
    for name in MODULES.values():
        module = importlib.import_module(f"{__name__}.{name}")
        register(module.OPERATIONS)


def register(operations: Iterable[str]) -> None:
    """Register names without a report of those that match nothing."""
    for name in operations:
        register_break_op(name, by="integration")
