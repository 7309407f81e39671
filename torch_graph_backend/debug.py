"""``debug_dir``: every graph compiled meanwhile is written to a folder, one stage a file, to read and to compare.

Contract. File names depend on the order of compilation and the functions' names alone, so two runs can be compared with
``diff -r``. Files of an earlier run with the same names are replaced; nothing else in the folder is touched. A failure
to write is logged and noted in ``index.txt``; it never breaks a compile. Nothing of PyTorch is patched: decompiled
bytecode comes from a hook that Dynamo offers.

::

    index.txt           what was compiled, in order, and what could not be written
    00_forward/         one folder a graph
        dynamo.py       the graph as Dynamo made it
        aten.txt        the one IR: ATen operators, with shapes and the user's lines
        verdicts.txt    node, operator, verdict, reason, line
        plan.txt        steps, memory between them, who reads what from where
        replay.py       the generated code that runs at every call
        bytecode.py     what Dynamo runs around the graph, decompiled by depyf (bytecode.txt: disassembled, without it)
"""

from __future__ import annotations

import dis
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from torch_graph_backend.ledger import log
from torch_graph_backend.passes.capturable import name_of
from torch_graph_backend.passes.dynamo_api import compile_id, on_bytecode
from torch_graph_backend.passes.normalize import NormalGraph
from torch_graph_backend.passes.source_lines import where
from torch_graph_backend.plan import CapturedSegment, Plan
from torch_graph_backend.plan_text import flow_text
from torch_graph_backend.runner import CompiledGraph

#: A folder for the whole process; each rank of a distributed job (``RANK``) gets a folder in it.
VARIABLE = "TGB_DEBUG_DIR"

_FILES = ("dynamo.py", "aten.txt", "verdicts.txt", "plan.txt", "replay.py", "bytecode.py", "bytecode.txt")
#: What Dynamo appends to a graph's name differs from run to run.
_UNIQUE = re.compile(r"(__compiled_fn_\d+)_[0-9a-f_]{36}")
_lock = threading.Lock()
_open: list[DebugDir] = []
_from_environment: dict[str, DebugDir | None] = {}


class DebugDir:
    """One folder. ``folders`` maps a graph to its sub-folder, ``lines`` are those of ``index.txt``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.folders: dict[int, str] = {}
        self.compiling: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self.problems: list[str] = []
        self.told: set[str] = set()
        self.hook: Any = None

    def open(self) -> None:
        """Make the folder and ask Dynamo for the bytecode that it makes. Raises ``OSError``."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.hook = on_bytecode(self.bytecode)

    def close(self) -> None:
        self.hook.remove()

    # -- writing -------------------------------------------------------------------------------------------------

    def graph(self, graph: CompiledGraph) -> None:
        """Write all stages of a graph; again, to the same files, when it had to be planned anew."""
        with _lock:
            serial = graph.ledger.serial
            if serial not in self.folders:
                slug = re.sub(r"\W+", "_", graph.name.split(" (")[0]).strip("_") or "graph"
                self.folders[serial] = f"{len(self.folders):02d}_{slug}"
            folder = self.folders[serial]
            self.compiling[compile_id()] = folder
            self.lines[folder] = f"{folder}  {graph.name}: {_summary(graph)}"
            for name in _FILES if compile_id() else ():
                (self.path / folder / name).unlink(missing_ok=True)
            for name, text in _stages(graph).items():
                self.write(f"{folder}/{name}", text)
            self.index()

    def bytecode(self, code: CodeType, new_code: CodeType) -> None:
        """Dynamo's hook: called once a frame, after its graph was compiled, in the same thread."""
        with _lock:
            folder = self.compiling.pop(compile_id(), None)
            if folder is None:  # a frame without a graph of ours
                return
            try:
                name, text = self.decompiled(new_code)
                self.write(f"{folder}/{name}", lambda: text)
                self.index()
            except Exception as error:
                self.problem(f"{folder}: no bytecode: {type(error).__name__}: {error}")

    def decompiled(self, code: CodeType) -> tuple[str, str]:
        """File name and text of a code object."""
        try:
            import depyf
        except Exception as error:
            why = (
                f"depyf cannot be imported ({type(error).__name__}: {error}); pip install 'torch-graph-backend[debug]'"
            )
        else:
            try:
                return "bytecode.py", _UNIQUE.sub(r"\1", str(depyf.decompile(code)))
            except Exception as error:
                why = f"depyf failed on {code.co_name}: {type(error).__name__}: {error}"
        self.problem(why)
        text = io.StringIO()
        dis.dis(code, file=text)
        return "bytecode.txt", _UNIQUE.sub(r"\1", f"# {why}\n# Python's own disassembly:\n{text.getvalue()}")

    def write(self, name: str, text: Callable[[], str]) -> None:
        """Write one file; ``text`` is called here, so that its failure is a failure to write."""
        try:
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text().rstrip() + "\n", encoding="utf-8")
        except Exception as error:
            self.problem(f"{name}: not written: {type(error).__name__}: {error}")

    def problem(self, text: str) -> None:
        """Note a problem; each is logged once."""
        if text not in self.told:
            self.told.add(text)
            self.problems.append(text)
            log.warning("debug directory %s: %s", self.path, text)

    def index(self) -> None:
        lines = [f"torch-graph-backend, torch {torch.__version__}", ""]
        for folder, line in self.lines.items():
            found = [name for name in _FILES if (self.path / folder / name).exists()]
            lines += [line, f"    {' '.join(found)}"]
        if self.problems:
            lines += ["", "Problems:", *(f"    {p}" for p in self.problems)]
        try:
            (self.path / "index.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            self.problem(f"index.txt: not written: {error}")


@contextmanager
def debug_dir(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write every graph that is compiled inside the ``with`` to ``path``; gives the folder as a ``Path``.

    Raises ``OSError`` if the folder cannot be made. Graphs compiled before are not written: call
    ``torch._dynamo.reset()`` first. The variable ``TGB_DEBUG_DIR`` does the same for a whole process.
    """
    folder = DebugDir(path)
    folder.open()
    _open.append(folder)
    try:
        yield folder.path
    finally:
        _open.remove(folder)
        folder.close()


def dump(graph: CompiledGraph) -> None:
    """Write ``graph`` to every folder that is open. Never raises."""
    try:
        for folder in [*_open, *_environment()]:
            folder.graph(graph)
    except Exception as error:
        log.warning("%s could not be written to a debug directory", graph.name, exc_info=error)


def _environment() -> list[DebugDir]:
    """The folder that the environment names, if any, opened at the first graph."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return []
    if os.environ.get("RANK"):
        path = os.path.join(path, f"rank{os.environ['RANK']}")
    if path not in _from_environment:
        folder = DebugDir(path)
        found: DebugDir | None = folder
        try:
            folder.open()
        except Exception as error:  # told once: the variable may be set for many processes and graphs
            log.warning("debug directory %s: cannot be used: %s", path, error)
            found = None
        _from_environment[path] = found
    return [folder for folder in [_from_environment[path]] if folder is not None]


# -- the stages --------------------------------------------------------------------------------------------------------


def _stages(graph: CompiledGraph) -> dict[str, Callable[[], str]]:
    """File name -> its text, for all stages that this graph reached."""
    plan, normal = graph.plan, graph.ir
    found: dict[str, Callable[[], str]] = {
        "dynamo.py": lambda: str(graph.gm.print_readable(print_output=False)),
        "plan.txt": lambda: f"not captured: {graph.reason}" if plan is None else f"{plan}\n\n{flow_text(plan)}",
    }
    if normal is not None:
        found["aten.txt"] = lambda: aten_text(normal)
    if plan is not None and normal is not None:
        found["verdicts.txt"] = lambda: verdicts_text(plan, normal)
    program = getattr(graph, "program", None)
    if program is not None:
        found["replay.py"] = lambda: str(program.source)
    return found


def _summary(graph: CompiledGraph) -> str:
    if graph.plan is None or graph.reason is not None:
        return f"not captured: {graph.reason}"
    return f"{len(graph.plan.segments)} segments, {len(graph.plan.regions)} eager regions"


def aten_text(normal: NormalGraph) -> str:
    """The ATen graph: one node a line, then its value and the user's line."""
    lines = []
    for node in normal.graph.nodes:
        about = [_value(node.meta.get("val")), node.meta.get("source") or "", where(node)]
        lines.append(f"{node.format_node() or node}  # {'; '.join(a for a in about if a)}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value, value))})"
    return "" if value is None else f"{type(value).__name__} {value}"


def verdicts_text(plan: Plan, normal: NormalGraph) -> str:
    """A table of all operations: node, operator, verdict (step), reason, the user's line."""
    verdicts = {
        op.value: (f"{'capture' if isinstance(s, CapturedSegment) else 'eager'} {s.index}", op)
        for s in plan.steps
        for op in s.ops
    }
    table = [("node", "op", "verdict", "reason", "line")]
    for node in normal.graph.nodes:
        if node.op == "call_function":
            verdict, op = verdicts.get(node.name, ("host", None))
            reason = "" if op is None or op.reason is None else f"{op.reason.code}: {op.reason.text}"
            table.append((node.name, name_of(node), verdict, reason, where(node)))
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in table
    )
