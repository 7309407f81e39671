"""The user's line behind a node: the innermost stack frame that is neither PyTorch's own code nor a break op's."""

from __future__ import annotations

import linecache
import os
import re
import sys
from types import FrameType

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<func>\S+)\n\s*(?P<code>[^\n]*)')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
#: Files of this package that stand between the user's call of a break op and the operation.
_OURS = ("break_define.py", "break_adopt.py")


def _is_users(file: str) -> bool:
    return not file.startswith(_TORCH) and not (file.endswith(_OURS) and f"torch_graph_backend{os.sep}" in file)


def user_line(stack_trace: str | None) -> str:
    """``"model.py:12 in forward: y = x.sum()"`` from a node's ``stack_trace``; empty if there is none."""
    frames = list(_FRAME.finditer(stack_trace or ""))
    if not frames:
        return ""
    frame = next((f for f in reversed(frames) if _is_users(f["file"])), frames[-1])
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


def caller_line() -> str:
    """``"serve.py:12 in step: y = model(x)"``: the user's line that called the compiled function we are inside of.

    Inwards of that call lie PyTorch's wrapper and the compiled function's own frame, which is named if nobody called
    it through the wrapper.
    """
    frame, own, wrapped = sys._getframe(1).f_back, None, False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH):
            wrapped = wrapped or own is not None
        elif not name.startswith("<") and not frame.f_globals.get("__name__", "").startswith("torch_graph_backend"):
            own = own or frame
            if wrapped or own.f_back is None:
                return _line_of(frame)
        frame = frame.f_back
    return "" if own is None else _line_of(own)


def _line_of(frame: FrameType) -> str:
    return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def line_of(file: str, number: int, function: str) -> str:
    """``"serve.py:12 in step: y = model(x)"``; the text is empty if there is no such file."""
    return f"{os.path.basename(file)}:{number} in {function}: {linecache.getline(file, number).strip()}"
