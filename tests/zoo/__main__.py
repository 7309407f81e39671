"""``python -m tests.zoo``, from the root of the repository: write ``docs/zoo.md`` and the golden plans anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the tests find each other

from graph_harness import assert_golden

from . import report
from .models import ZOO


def main() -> None:
    torch.set_num_threads(1)
    os.environ["TGB_ACCEPT"] = "1"
    found = []
    missing = [(case, why) for case in ZOO.values() if (why := case.missing())]
    for case in ZOO.values():
        if not case.missing():
            found.append(report.run(case))
            assert_golden(report.golden_name(case), found[-1].plans)
            print(found[-1].row(), flush=True)
    report.PAGE.write_text(report.page(found, missing), encoding="utf-8")


if __name__ == "__main__":
    main()
