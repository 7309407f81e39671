"""What a plan takes on the user's word: the declared operations and arguments that its captured part relies on.

Contract. Pure. What is declared is no proof, so a plan that relies on it is audited (``torch_graph_backend/audit.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Node

from .padding_rules_declared import TRASH, is_declared, is_promised


def relied_on(captured: Collection[Node]) -> tuple[str, ...]:
    """A text for each declaration that these captured operations rely on."""
    found: dict[str, None] = {}
    for node in captured:
        if is_declared(node.target):
            found[f"{_name(node)} is row-local"] = None
        for value in node.all_input_nodes:
            source = str(value.meta.get("source") or value.name)
            if value.op == "placeholder" and is_promised(source):
                found[f"{source} holds valid indices"] = None
        if node.meta.get(TRASH) is not None:
            written = node.args[0]
            source = written.meta.get("source") or written.name if isinstance(written, Node) else ""
            found[f"nobody reads row {node.meta[TRASH]} of {source}"] = None
    return tuple(found)


def _name(node: Node) -> str:
    target: Any = node.target
    return str(target._schema.name)
