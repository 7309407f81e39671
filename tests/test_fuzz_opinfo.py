"""A slice of the operator fuzz in CI; all of it with ``FUZZ_OPINFO=full`` (ten minutes on one core).

The stored number of safe verdicts must not drop: a rule that became more cautious shows here. With ``TGB_ACCEPT=1`` the
numbers are stored anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from fuzz_opinfo import BASELINE, Tally

FULL = os.environ.get("FUZZ_OPINFO") == "full"
KIND = "full" if FULL else "slice"


def in_a_process_of_its_own() -> Tally:
    """What is traceable, and so the count of safe verdicts, must not depend on the tests that ran before."""
    script = Path(__file__).with_name("fuzz_opinfo.py")
    done = subprocess.run([sys.executable, str(script), "--tally", *([] if FULL else ["--slice"])], capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:].decode(errors="replace")
    found = json.loads(done.stdout)
    return Tally(Counter(found["counts"]), Counter(found["safe"]), found["violations"])


@pytest.mark.slow
def test_operator_samples() -> None:
    """Nothing that the proof allows is wrong for any sample, and it allows as much as it did."""
    tally = in_a_process_of_its_own()
    assert not tally.violations, "\n".join(tally.violations)
    stored = json.loads(BASELINE.read_text(encoding="utf-8"))
    if os.environ.get("TGB_ACCEPT") == "1":
        stored[KIND] = dict(sorted(tally.safe.items()))
        stored["torch"] = torch.__version__.partition("+")[0]
        BASELINE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    fewer = {name: (tally.safe[name], n) for name, n in stored[KIND].items() if tally.safe[name] < n}
    if torch.__version__.partition("+")[0] == stored["torch"]:  # another version has other samples
        assert not fewer, f"fewer safe verdicts than stored: {fewer}"
    assert tally.counts["safe"] > (3000 if FULL else 150)
    assert tally.counts["refused"] > (3000 if FULL else 150)
