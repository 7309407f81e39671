"""The user's line behind a node: the innermost stack frame that is not PyTorch's own code."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<func>\S+)\n\s*(?P<code>[^\n]*)')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def user_line(stack_trace: str | None) -> str:
    """``"model.py:12 in forward: y = x.sum()"`` from a node's ``stack_trace``; empty if there is none."""
    frames = list(_FRAME.finditer(stack_trace or ""))
    if not frames:
        return ""
    frame = next((f for f in reversed(frames) if not f["file"].startswith(_TORCH)), frames[-1])
    return f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['func']}: {frame['code'].strip()}"


def function_name(stack_trace: str | None) -> str:
    """``"forward (model.py:10)"``: the outermost ``forward`` in a stack trace, else its outermost frame."""
    frames = list(_FRAME.finditer(stack_trace or ""))
    if not frames:
        return ""
    frame = next((f for f in frames if f["func"] == "forward"), frames[0])
    return f"{frame['func']} ({os.path.basename(frame['file'])}:{frame['line']})"


def where(node: Node) -> str:
    """The user's line of a normalised node (cached in ``meta["where"]``)."""
    found = node.meta.get("where")
    if found is None:
        found = node.meta["where"] = user_line(node.meta.get("stack_trace"))
    return found
