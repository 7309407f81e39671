"""Which repair an operation has: by the name of its functional form."""

from __future__ import annotations

from typing import Any

from . import repair_reductions, repair_rows, repair_statistics  # noqa: F401  (importing one registers its repairs)
from .padding_rules_table import base_name
from .repair_rules import RULES, Rule, size_as_data
from .torch_api import OpOverload


def find_rule(target: Any) -> Rule | None:
    """The repair of an operation; one that has none of its own can be given a size as data."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    return RULES.get(base_name(target), size_as_data)
