"""The debug directory: every stage of every graph in a file of its own, and never a broken compile."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import compiled

import torch_graph_backend as tgb
from torch_graph_backend import debug

W = torch.randn(4, 4)
STAGES = {"dynamo.py", "aten.txt", "verdicts.txt", "plan.txt", "replay.py"}


#: It is optional; only the test extra brings it.
HAS_DEPYF = importlib.util.find_spec("depyf") is not None


def problems(files: dict[str, str]) -> list[str]:
    """What the index lists as problems: the beginning of each line, before the details."""
    _, _, listed = files["index.txt"].partition("\nProblems:\n")
    return [line.strip().partition(" (")[0] for line in listed.splitlines() if line.strip()]


def rows(n: int) -> torch.Tensor:
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.sort(F.linear(x, W) * x.size(0), 0).values @ W


def broken(x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, W).relu()
    torch._dynamo.graph_break()
    return F.linear(y, W).tanh()


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, by relative name."""
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def without_the_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(debug.VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    hooks = dict(torch._dynamo.convert_frame._bytecode_hooks)
    yield
    for folder in debug._from_environment.values():
        if folder is not None:
            folder.close()
    debug._from_environment.clear()
    assert dict(torch._dynamo.convert_frame._bytecode_hooks) == hooks


def written(path: Path, model: Any = function, *args: Any, **options: Any) -> dict[str, str]:
    with compiled(model, **options) as g, tgb.debug_dir(path) as folder:
        assert folder == path
        g(*(args or (rows(5),)))
    return tree(path)


def test_every_stage_is_written(tmp_path: Path) -> None:
    """Each file has what it is for."""
    files = written(tmp_path / "new" / "folder")
    bytecode = {name for name in files if "bytecode" in name}
    assert set(files) - bytecode == {"index.txt", *(f"00_function/{name}" for name in STAGES)}
    assert len(bytecode) == 1
    assert "sort" in files["00_function/dynamo.py"]
    assert "class GraphModule" in files["00_function/dynamo.py"]
    assert "target=torch.ops.aten.linear.default" in files["00_function/aten.txt"]
    assert "L['x'].size()[0]" in files["00_function/aten.txt"]
    assert "float32[s77, 4] on cpu" in files["00_function/aten.txt"]
    assert "test_debug.py:" in files["00_function/aten.txt"]
    assert "def run(A, S, F):" in files["00_function/replay.py"]
    assert str(tgb.plans(function)[0]) in files["00_function/plan.txt"]
    assert "EagerRegion 1: reads" in files["00_function/plan.txt"]


def test_the_verdict_of_every_operation(tmp_path: Path) -> None:
    """Node, operator, verdict with its step, reason, line."""
    table = written(tmp_path)["00_function/verdicts.txt"].splitlines()
    cells = {line.split()[1]: line.split() for line in table[1:]}
    assert table[0].split() == ["node", "op", "verdict", "reason", "line"]
    assert cells["aten.linear"][2:4] == ["capture", "0"]
    ordered = next(line for line in table if " aten.sort " in line)
    assert "eager 1" in ordered
    assert "padding: aten.sort.default: mixes entries along padded dim 0" in ordered
    assert ordered.endswith("return torch.sort(F.linear(x, W) * x.size(0), 0).values @ W")


def test_bytecode_is_decompiled(tmp_path: Path) -> None:
    """By depyf; the name that Dynamo makes anew in every run is cut, so that runs can be compared."""
    pytest.importorskip("depyf")
    code = written(tmp_path)["00_function/bytecode.py"]
    assert "def function(x):" in code
    assert "__compiled_fn_" in code
    assert re.search(r"__compiled_fn_\d+\(", code)


@pytest.mark.parametrize("kind", ["missing", "failing"])
def test_without_depyf(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A disassembly instead, a message that says how to get more, and one warning however many graphs there are."""

    class Failing:
        @staticmethod
        def decompile(_: Any) -> str:
            raise ValueError("cannot decompile this")

    monkeypatch.setitem(sys.modules, "depyf", None if kind == "missing" else Failing)
    with caplog.at_level(logging.WARNING, "torch_graph_backend"):
        files = written(tmp_path, broken)
    wanted = "pip install 'torch-graph-backend[debug]'" if kind == "missing" else "cannot decompile this"
    assert "00_broken/bytecode.py" not in files
    assert wanted in files["00_broken/bytecode.txt"].splitlines()[0]
    assert "RETURN_VALUE" in files["00_broken/bytecode.txt"]
    assert wanted in files["index.txt"]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and wanted in r.getMessage()]
    assert len(warnings) == len(set(warnings)) >= 1


def test_several_graphs_in_the_order_of_compilation(tmp_path: Path) -> None:
    """The index lists them as the folders are named."""
    files = written(tmp_path, broken)
    folders = sorted({name.split("/")[0] for name in files if "/" in name})
    assert folders[0] == "00_broken"
    assert folders[1].startswith("01_torch_dynamo_resume_in_broken")
    index = files["index.txt"].splitlines()
    assert [line.split()[0] for line in index if line.startswith("0")] == folders
    assert "1 segments, 0 eager regions" in files["index.txt"]
    assert problems(files) == ([] if HAS_DEPYF else ["depyf cannot be imported"])


def test_two_runs_write_the_same(tmp_path: Path) -> None:
    """Names and contents: ``diff -r`` of two folders shows what a change changed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nimport torch_graph_backend as tgb\nW = torch.ones(4, 4)\n"
        "def f(x):\n    return (x @ W).softmax(0) @ W\n"
        "with torch.no_grad(), tgb.debug_dir(sys.argv[1]):\n    torch.compile(f, backend='bcg')(torch.ones(3, 4))\n"
    )
    for name in ("one", "two"):
        subprocess.run([sys.executable, str(script), str(tmp_path / name)], check=True)
    assert tree(tmp_path / "one") == tree(tmp_path / "two") != {}


def test_a_graph_that_is_not_captured(tmp_path: Path) -> None:
    """What there is of it is written, with the reason; files of an earlier run do not stay beside it."""

    def unshaped(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.unsqueeze_(0)
        return y @ W

    (tmp_path / "00_unshaped").mkdir()
    (tmp_path / "00_unshaped" / "replay.py").write_text("old")
    (tmp_path / "00_unshaped" / "notes.md").write_text("mine")
    files = written(tmp_path, unshaped)
    assert "not captured: metadata-mutation: " in files["index.txt"]
    assert "not captured: metadata-mutation: " in files["00_unshaped/plan.txt"]
    assert "unsqueeze_" in files["00_unshaped/dynamo.py"]
    assert "00_unshaped/replay.py" not in files
    assert files["00_unshaped/notes.md"] == "mine"


def test_a_graph_that_is_planned_again_is_written_again(tmp_path: Path) -> None:
    """An input that keeps moving: the files show the plan that is in use."""

    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return F.linear(x, W) + cache.sum()

    with compiled(f, buckets=[8]) as g, tgb.debug_dir(tmp_path):
        keep = []
        for _ in range(20):
            keep.append(torch.zeros(4, 4))
            g(rows(5), keep[-1])
    files = tree(tmp_path)
    assert "moving-input" in files["00_f/verdicts.txt"]
    assert any("bytecode" in name for name in files)
    assert len([name for name in files if name.endswith("plan.txt")]) == 1


def test_only_what_is_compiled_inside_is_written(tmp_path: Path) -> None:
    with compiled(function) as g:
        g(rows(5))
        with tgb.debug_dir(tmp_path):
            g(rows(6))
        assert tree(tmp_path) == {}
        with tgb.debug_dir(tmp_path):
            pass
        torch.compile(broken, backend="bcg")(rows(5))
    assert tree(tmp_path) == {}


def test_nested_folders_get_both(tmp_path: Path) -> None:
    with tgb.debug_dir(tmp_path / "outer"):
        inner = written(tmp_path / "inner")
    assert set(tree(tmp_path / "outer")) == set(inner)


def test_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a whole process, with a folder a rank."""
    monkeypatch.setenv(debug.VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    with compiled(function) as g:
        g(rows(5))
    files = tree(tmp_path)
    assert "rank3/00_function/replay.py" in files
    assert any(name.startswith("rank3/00_function/bytecode.") for name in files)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    """The user asked for it in so many words; nothing is compiled yet."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), tgb.debug_dir(tmp_path / "file"):
        pass


@pytest.mark.parametrize("how", ["variable", "files", "stage", "anything"])
def test_a_failure_to_write_breaks_no_compile(how: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """The answer is right, the problem is logged and, where it can be, noted."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("disk full")

    if how == "variable":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(debug.VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "torch_graph_backend"), compiled(function) as g, tgb.debug_dir(tmp_path):
        if how == "files":
            monkeypatch.setattr(Path, "write_text", fail)
        elif how == "stage":
            monkeypatch.setattr(debug, "aten_text", fail)
        elif how == "anything":
            monkeypatch.setattr(debug, "_summary", fail)
        torch.testing.assert_close(g(x := rows(5)), function(x))
    monkeypatch.undo()
    assert any("debug directory" in r.getMessage() for r in caplog.records)
    if how == "stage":
        files = tree(tmp_path)
        assert "00_function/aten.txt: not written: OSError: disk full" in files["index.txt"]
        assert "00_function/replay.py" in files
        assert "00_function/aten.txt" not in files
