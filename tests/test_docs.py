"""The documentation is true: its code runs and prints what it shows, its tables list what exists, its links lead on.

A page's ```python blocks form one script, run in a process of its own as a user would run it. A block after
``<!-- not run: reason -->`` is skipped. A ```text block after ``<!-- output -->`` is what the last block printed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from torch_graph_backend import errors
from torch_graph_backend.config import Config
from torch_graph_backend.passes.reasons import CODES, SOFT
from torch_graph_backend.passes.torch_api import cpp_compiler_error
from torch_graph_backend.recorders import fill_choice

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Page -> the name of the script that it forms.
SCRIPTS = {
    "README.md": "readme.py",
    "docs/audit.md": "audit_page.py",
    "docs/break-ops.md": "break_ops_page.py",
    "docs/explain.md": "explain_page.py",
    "docs/getting-started.md": "getting_started.py",
    "docs/inductor.md": "inductor_page.py",
    "docs/padding.md": "padding_page.py",
    "docs/repair.md": "repair_page.py",
    "docs/slots.md": "slots_page.py",
}
#: Symbol names are torch's, and the number of graphs is the model code's: the shown output is that of these versions.
SHOWN_WITH = {"torch": "2.13.", "transformers": "5.24."}

_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)

#: Pages that wait for a C++ compiler. (All run with the users' defaults: the others turn Inductor off themselves.)
COMPILES = {"README.md", "docs/inductor.md"}

#: The users' defaults, but Inductor may take its time: on a slow machine the pages would show ``inductor-time``.
RUNNER = """
import json, sys
from pathlib import Path
from torch_graph_backend import config
config.DEFAULT_INDUCTOR_SECONDS = 3600
path, spans, mark = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
scope = {"__name__": "__main__", "__file__": path}
for first, last in spans:  # leading newlines keep the line numbers of the whole script
    exec(compile("\\n" * first + "".join(lines[first:last]), path, "exec"), scope)
    print(mark, flush=True)
"""
MARK = "--- end of block ---"


@dataclass(frozen=True)
class Block:
    """A block to run, and what it must print (``None``: the page does not say)."""

    code: str
    output: str | None


def blocks(text: str) -> list[Block]:
    """The runnable blocks of a page, each with the output that the page shows for it."""
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        mark = match["mark"] or ""
        if match["language"] == "python" and not mark.startswith("not run: "):
            found.append(Block(match["body"], None))
        elif mark == "output":
            found[-1] = Block(found[-1].code, match["body"])
    return found


def run(code: list[str], script: Path) -> list[str]:
    """What each block prints, when all of them run one after the other."""
    spans, at, text = [], 0, ""
    for block in code:
        text += ("\n\n" if text else "") + block
        end = text.count("\n")
        spans.append((at, end))
        at = end
    script.write_text(text, encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_LOGS", None)
    command = [sys.executable, "-c", RUNNER, script.name, json.dumps(spans), MARK]
    done = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, f"{script.name} fails\n{done.stdout}\n{done.stderr}"
    return done.stdout.split(MARK + "\n")[:-1]


def stable(output: str) -> str:
    """Output without what differs from run to run: seconds, bytes, and line numbers of other packages."""
    output = re.sub(r"\b(normalise|plan|record|audit|inductor) \d+\.\d\d", r"\1 N", output)
    output = re.sub(r"\bmemory of keys: \d+\.\d\d MiB", "memory of keys: N MiB", output)
    return re.sub(r"\b(modeling_\w+\.py):\d+", r"\1:N", output).strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS)
def test_code_runs_and_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    """Would catch an example that fails, and a plan, a count or a source line that is no longer so."""
    packages = ["torch", "transformers"] if page == "README.md" else ["torch"]
    for name in packages:
        pytest.importorskip(name)
    comparable = all(metadata.version(name).startswith(SHOWN_WITH[name]) for name in packages)
    shown = blocks((ROOT / page).read_text(encoding="utf-8"))
    assert shown
    if page in COMPILES and (lacks := cpp_compiler_error()):
        pytest.skip(lacks)
    printed = run([b.code for b in shown], tmp_path / SCRIPTS[page])
    assert len(printed) == len(shown)
    for block, output in zip(shown, printed, strict=True):
        if block.output is None:
            assert not output, f"{page} does not show what this block prints\n{block.code}\n{output}"
        elif comparable:
            assert stable(output) == stable(block.output), f"{page} shows something else\n{output}"


def test_a_failing_example_fails_the_test(tmp_path: Path) -> None:
    """The runner itself: later blocks see earlier ones, output is told apart by block, an exception is not lost."""
    assert run(["x = 1\nprint(x)\n", "print(x + 1)\n"], tmp_path / "good.py") == ["1\n", "2\n"]
    with pytest.raises(AssertionError, match=r"bad\.py fails"):
        run(["x = 1\n", "assert x == 2\n"], tmp_path / "bad.py")


def rows(text: str, heading: str) -> Iterator[list[str]]:
    """The cells of the first table below a heading, without its two head rows."""
    lines = f"\n{text}"[f"\n{text}".index(f"\n{heading}\n") :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.inductor
def test_options_in_the_readme_are_those_of_config() -> None:
    """Names and defaults; ``Config.parse`` is asked, so that a field that is no option does not count."""
    table = {
        cells[0].strip("`"): cells for cells in rows((ROOT / "README.md").read_text(encoding="utf-8"), "## Options")
    }
    accepted = {name for name in Config.__dataclass_fields__ if name != "named_buckets"}
    assert set(table) == accepted
    for name, cells in table.items():
        default = {name: ast.literal_eval(cells[2].strip("`"))}
        assert Config.parse(default) == Config(), f"{name}: {cells[2]} is not the default"


def test_gpu_numbers_in_the_readme_are_those_of_the_benchmark() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n  ", " ").replace("\n", " ")
    measured = json.loads((ROOT / "docs" / "bench" / "cuda_decoder.json").read_text(encoding="utf-8"))
    facts = [
        f"torch {measured['torch']}, transformers {measured['transformers']}",
        measured["device"],
        f"{measured['layers']} layers, {measured['width']} wide",
    ]
    for kind, cache in (("dynamic", "DynamicCache"), ("static", "StaticCache")):
        parity, error = measured["parity"][kind], measured["error"][kind]
        assert not parity["eager"]
        assert not error["eager"]
        facts.append(f"at {len(parity['pairs'])} (batch, length) pairs")
        facts.append(f"{parity['worst']:.1e} with `{cache}` ({parity['replays']} of {parity['calls']}")
        facts.append(f"with `{cache}` the error is {error['ratio']:.2f} times eager's")
    for fact in facts:
        assert fact in text, fact


@pytest.mark.parametrize("work", ["small", "wide"])
def test_inductor_numbers_are_those_of_the_benchmark(work: str) -> None:
    text = (ROOT / "docs" / "inductor.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "docs" / "bench" / "cuda_inductor.json").read_text(encoding="utf-8"))[work]
    wanted = []
    for name, r in measured.items():
        spent = f"{r['compile_seconds']:.1f}" if r.get("compile_seconds") else ""
        times = (f"{r['ms']:.2f}", f"{r['host_ms']:.2f}", f"{r['first_seconds']:.1f}")
        wanted.append([name, *times, spent, f"{r['error']:.2f}"])
    assert list(rows(text, {"small": "### 8 to 32 tokens", "wide": "### 1 to 512 tokens"}[work])) == wanted


def test_decoder_numbers_in_the_readme_are_those_of_the_benchmark() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "docs" / "bench" / "cuda_decoder.json").read_text(encoding="utf-8"))
    named = {"eager": "eager", "bcg": "bcg", "reduce-overhead": "reduce-overhead, dynamic"}
    wanted = [
        [
            name,
            f"{r['ms']:.2f}",
            f"{r['host_ms']:.2f}",
            f"{r['fresh_again_host_ms']:.2f}",
            f"{r['reserved_bytes'] / 2**20:.0f}",
        ]
        for name, r in ((named[k], r) for k, r in measured["decoder"]["rows"].items())
    ]
    assert list(rows(text, "### Beside other modes on a GPU")) == wanted
    for run, heading in (
        ("generate", "### Generation beside other modes on a GPU"),
        ("generate_later", "#### The same after the repair of `StaticCache` graphs"),
    ):
        found = [row for row in measured[run].values() if isinstance(row, dict)]
        tokens = [[f"{p['ms_per_token']:.2f}" for p in row["prompts"]] for row in found]
        shares = [", ".join(f"{n:.0%}".replace("%", " %") for n in row["tokens_like_eager"]) for row in found]
        cells = list(rows(text, heading))
        assert [c[2:4] for c in cells] == tokens
        assert [c[4] for c in cells] == shares
    recording, same = measured["recording"], measured["decoder"]["rows"]["bcg"]["differences"]
    for fact in (
        f"took {recording['total_seconds']:.1f} s beside {recording['compile_seconds']:.1f} s of compiling",
        f"and {recording['reserved_bytes'] / 2**20:.0f} MiB",
        f"At all {same['bitwise_equal_buckets']} buckets",
    ):
        assert fact in text.replace("\n", " "), fact


def test_break_numbers_in_the_readme_are_those_of_the_benchmark() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "docs" / "bench" / "break_cost.json").read_text(encoding="utf-8"))["breaks"]
    found = list(rows(text, "### What a break costs"))
    assert [cells[1:3] for cells in found] == [[f"{b['host']:.1f}", f"{b['cut']:.1f}"] for b in measured]
    assert [cells[4] for cells in found] == [f"{b['bridge']:.1f}" for b in measured]


def test_audit_numbers_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "docs" / "bench" / "audit_cost.json").read_text(encoding="utf-8"))
    wanted = [[f"{r['ms']:.2f}", f"{r['audited_ms']:.2f}", f"{r['ratio']:.1f}"] for r in measured["rows"]]
    assert [cells[1:] for cells in rows(text, "## Cost")] == wanted
    assert f"torch {measured['torch']}" in text
    measured = json.loads((ROOT / "docs" / "bench" / "audit_cost_cuda.json").read_text(encoding="utf-8"))
    for r in measured["rows"]:
        assert f"{r['ms']:.2f} and {r['audited_ms']:.2f} ms, {r['ratio']:.1f} times" in text


def test_fill_numbers_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "slots.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "docs" / "bench" / "fill_check.json").read_text(encoding="utf-8"))
    assert found["verdict"] == f"yes, from {fill_choice.FUSED_FROM} slots on"
    assert fill_choice.ENABLED
    measured, wanted = found["rows"], []
    for grouped, fused in zip(measured[::2], measured[1::2], strict=True):
        cells = [f"{r[k]:.1f}" for k in ("same_total_us", "new_total_us") for r in (grouped, fused)]
        wanted.append([str(grouped["slots"]), *cells])
    assert list(rows(text, "## What a fill costs"))[: len(wanted)] == wanted


def test_reasons_lists_every_code_with_its_meaning() -> None:
    text = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    listed: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            code, meaning, advice = (cell.strip() for cell in line.strip("|").split("|"))
            assert code.strip("`") not in listed, f"{code} is listed twice"
            listed[code.strip("`")] = [meaning, advice]
    assert set(listed) == set(CODES), set(listed) ^ set(CODES)
    for code, (meaning, advice) in listed.items():
        assert meaning == CODES[code], code
        assert advice, f"{code}: nothing says what to do"


def test_reasons_lists_the_soft_codes() -> None:
    text = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    section = text.split("## Soft and hard")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z-]+)`", section)) == SOFT


def test_errors_lists_every_class() -> None:
    """In the order of their codes."""
    listed = list(rows((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), "# Errors"))
    ours = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TorchGraphBackendError)]
    assert [cells[:2] for cells in listed] == sorted([f"`{c.code}`", f"`{c.__name__}`"] for c in ours)
    assert all(len(cells) == 4 and all(cells) for cells in listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    for target in targets:
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


def test_design_names_every_file_and_contract() -> None:
    """Would catch a room that was added, renamed or dropped while the map stayed as it was."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:recorders/)?(\w+\.py)`", text))
    files = {p for folder in ("passes", "torch_graph_backend") for p in (ROOT / folder).rglob("*.py")}
    names = {p.name for p in files if p.name != "__main__.py" and not p.name.startswith("padding_rules_")}
    assert names <= named, f"not on the page: {names - named}"
    assert named <= names, f"no such file: {named - names}"
    for i in range(1, 9):
        assert f"**C{i} " in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_path_of_a_machine(page: Path) -> None:
    found = re.search(r"(?<![\w~.])/(home|root|tmp|work|opt|Users)/\S*", page.read_text(encoding="utf-8"))
    assert found is None, f"{page.name} has {found and found[0]}"
