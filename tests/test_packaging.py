"""What a user gets from pip: the wheel's contents, the entry point, and an import that needs torch alone."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import torch_graph_backend
import torch_graph_backend.passes

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("transformers", "gguf", "accelerate", "rich", "tqdm", "depyf", "triton", "hypothesis")

WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # None makes the import fail and find_spec answer "absent"
import torch
compiled = torch.compile(torch.nn.Linear(4, 4).eval(), backend="bcg")
with torch.no_grad():
    shape = tuple(compiled(torch.ones(3, 4)).shape)
import torch_graph_backend
from torch_graph_backend import cli, demo, demo_model, demo_report
print(shape)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy: setuptools would otherwise pick up stale files from an older build/ folder."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("torch_graph_backend", "passes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(source),
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
    ]
    subprocess.run(command, check=True)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_the_typing_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {f"torch_graph_backend/passes/{p.relative_to(ROOT / 'passes')}" for p in (ROOT / "passes").rglob("*.py")}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "torch_graph_backend").rglob("*.py")}
    assert shipped == wanted | {"torch_graph_backend/py.typed"}


def test_wheel_metadata_requires_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(required) == 1
    assert required[0].startswith("Requires-Dist: torch")
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra:")}
    assert extras == {"demo", "test", "dev", "debug"}


def test_entry_point_is_listed_and_found_by_name() -> None:
    (entry,) = metadata.entry_points(group="torch_dynamo_backends", name="bcg")
    assert entry.value == "torch_graph_backend.backend:bcg"
    assert callable(entry.load())
    assert "bcg" in torch._dynamo.list_backends()


def test_backend_works_by_name_without_any_extra_and_without_an_import(tmp_path: Path) -> None:
    """In a fresh process outside the repository, with every optional package made unimportable."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(3, 4)"


def test_version_is_the_distributions() -> None:
    assert torch_graph_backend.__version__ == metadata.version("torch-graph-backend")


def test_passes_never_import_the_runtime() -> None:
    """The passes are pure: within the package they may import one another, and nothing else."""
    for path in sorted((ROOT / "passes").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                inside = name == "torch_graph_backend" or name.startswith("torch_graph_backend.")
                assert not inside or name.startswith("torch_graph_backend.passes"), f"{path.name}:{node.lineno}: {name}"
