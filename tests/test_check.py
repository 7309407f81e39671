"""``bcg check``: what it finds, when it passes, and how it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_graph_backend import check, cli

MODULE = """
import torch
import torch._dynamo
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Cut(Net):
    def forward(self, x):
        h = torch.relu(self.up(x))
        h = h - h.median(0).values
        return self.down(torch.relu(h))

class Broken(Net):
    def forward(self, x):
        h = torch.relu(self.up(x))
        print("in the middle")
        return self.down(torch.relu(h))

class Skipped(Net):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)
    def forward(self, x):
        return self.lstm(x)[0]

net = Net()
number = 3

def scaled(x, *, factor):
    return net(x) * factor

def raises(x):
    raise KeyError("mine")

def rows(n):
    x = torch.randn(n, 8)
    torch._dynamo.mark_dynamic(x, 0)
    return x

def example_inputs():
    return [(rows(5),), (rows(6),), (rows(3),)]
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODULE, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["Net", "net"])
def test_all_captured(module: Path, name: str) -> None:
    found = check.check(f"{module}:{name}")
    assert found.ok, found
    assert found.calls == 3
    assert found.share == 1.0
    assert len(found.explanation.graphs) == 1
    assert "OK: 100.0% captured" in str(found)


def test_an_eager_line_fails_and_is_named(module: Path) -> None:
    """Line, reason, cost and fix; a share that is reached passes."""
    found = check.check(f"{module}:Cut")
    assert not found.ok
    assert 0.5 < found.share < 1.0
    (line,) = [line for line in found.explanation.lines if line.cost.kernels]
    assert line.to_dict()["source"] == "h = h - h.median(0).values"
    text = str(found)
    for part in (
        "mine.py:16 in forward: h = h - h.median(0).values",
        "padding: ",
        "cost: 1 kernel",
        "fix: ",
        "Not captured: ",
    ):
        assert part in text, text
    assert check.check(f"{module}:Cut", min_share=0.5).ok
    assert not check.check(f"{module}:Cut", min_share=0.95).ok


def test_a_registered_break_op_is_meant(module: Path) -> None:
    found = check.check(f"{module}:Cut", options={"break_ops": ["aten::median.dim"]})
    assert found.share == 1.0
    assert found.ok, found


def test_a_graph_break_fails_and_is_named(module: Path) -> None:
    """All kernels of the graphs are captured, and yet not all of the code."""
    found = check.check(f"{module}:Broken")
    assert found.share == 1.0
    (broken,) = found.breaks
    assert broken.where == 'mine.py:22 in forward: print("in the middle")'
    assert "`print`" in broken.text
    assert broken.fix.startswith("Avoid calling")
    assert not found.ok
    assert "1 graph break(s)" in found.failures[0]
    assert f"Graph break: {broken.text}; at {broken.where}; fix: {broken.fix}" in str(found)


def test_nothing_compiled_never_passes(module: Path) -> None:
    """Dynamo skips a function with a recurrent layer, and says nothing."""
    found = check.check(f"{module}:Skipped", min_share=0.0)
    assert not found.ok
    assert found.skipped
    assert "Dynamo made no graph" in found.failures[0]


def test_a_call_that_ran_eagerly_fails(module: Path) -> None:
    found = check.check(f"{module}:Net", options={"buckets": [4]})
    assert not found.ok
    assert found.failures == (
        "2 call(s) ran eagerly: beyond-largest-bucket: L['x'].size()[0] is 5, the largest bucket is 4; "
        "fix: list a larger size in options['buckets']",
    )


def test_what_does_nothing_when_called_is_refused(tmp_path: Path) -> None:
    """A coroutine that nobody awaits, and a generator that nobody asks, would pass with nothing compiled."""
    file = tmp_path / "lazy.py"
    text = "import torch\nasync def a(x):\n    return x * 2\ndef b(x):\n    yield x * 2\nasync def c(x):\n    yield x\n"
    file.write_text(text + "class D(torch.nn.Module):\n    async def forward(self, x):\n        return x\n")
    for name in "abcD":
        with pytest.raises(check.TargetError, match="does nothing when it is called"):
            check.check(f"{file}:{name}", inputs="torch.ones(3)")


@pytest.mark.parametrize(
    "inputs",
    [
        "(rows(5),), {'factor': 2.0}",  # no dict: a tuple of two
        "{'x': rows(5), 'factor': 2.0}",
        "[{'x': rows(n), 'factor': 2.0} for n in (5, 6)]",
    ],
)
def test_inputs(module: Path, inputs: str) -> None:
    """A tuple is positional, a dict by name, a list several calls; the module's names are known."""
    if inputs.startswith("("):
        with pytest.raises(TypeError, match="2 were given"):
            check.check(f"{module}:scaled", inputs=inputs)
        return
    found = check.check(f"{module}:scaled", inputs=inputs)
    assert found.calls == (2 if inputs.startswith("[") else 1)
    assert found.ok, found


def test_one_tensor_is_one_argument(module: Path) -> None:
    assert check.check(f"{module}:net", inputs="torch.randn(4, 8)").ok


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "more", "code", "said"),
    [
        ("{}:Net", [], 0, "OK: 100.0% captured"),
        ("{}:Cut", [], 1, "Not captured: "),
        ("{}:Cut", ["--min-share", "0.5"], 0, "OK: "),
        ("{}:none", [], 2, "has no 'none'"),
        ("{}:number", [], 2, "cannot be called"),
        ("{}", [], 2, "is not MODULE.py:CALLABLE"),
        ("nowhere.py:f", [], 2, "names no file"),
        ("no_such_module_of_mine:f", [], 2, "there is no module"),
        ("{}:Net", ["--inputs", "[]"], 2, "the list is empty"),
        ("{}:raises", [], 3, "raised KeyError"),
    ],
)
def test_exit_codes(
    module: Path, capsys: pytest.CaptureFixture[str], target: str, more: list[str], code: int, said: str
) -> None:
    assert cli.main(["check", target.format(module), *more]) == code
    out, err = capsys.readouterr()
    assert said in (out if code < 2 else err)
    assert not out or code < 2


@pytest.mark.parametrize("more", [["--min-share", "1.5"], ["--options", "[]"], ["--options", "{"]])
def test_usage(module: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", f"{module}:Net", *more])
    assert caught.value.code == 2
    assert "usage: bcg check" in capsys.readouterr().err


@pytest.mark.parametrize("options", ['{"bucket": [8]}', '{"inductor": "sometimes"}'])
def test_an_option_that_there_is_not(module: Path, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The callable did not raise: it was not called."""
    assert cli.main(["check", f"{module}:Net", "--options", options]) == 2
    assert "bcg check" in capsys.readouterr().err


def test_without_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bare.py").write_text("def f(x): return x + 1\n", encoding="utf-8")
    assert cli.main(["check", f"{tmp_path / 'bare.py'}:f"]) == 2
    assert "has no function example_inputs()" in capsys.readouterr().err


def test_json_in_a_process_of_its_own(module: Path) -> None:
    """Standard output is JSON alone, though the callable prints."""
    command = [sys.executable, "-m", "torch_graph_backend", "check", f"{module.name}:Broken", "--json"]
    done = subprocess.run(command, cwd=module.parent, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert found["calls"] == 3
    assert found["captured_share"] == 1.0
    assert found["graph_breaks"][0]["where"].startswith("mine.py:22 in forward")
    assert found["share"]["kernels"] == 1.0
    assert len(found["graphs"]) >= 2
    assert "in the middle" in done.stderr


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/check.md, run as the page says; only the version of torch may differ in what it shows."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "check.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    shown = page.split("```text\n")[1].split("```")[0]
    (tmp_path / "scorer.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = check.check("scorer.py:Scorer")
    assert not found.ok
    assert check.check("scorer.py:Scorer", min_share=0.8).ok
    if torch.__version__.startswith("2.13."):
        assert str(found) == shown.strip()
