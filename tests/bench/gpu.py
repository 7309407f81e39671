"""Everything that can be checked and timed on a GPU, in one command; JSON for ``docs/bench``.

    python tests/bench/gpu.py FOLDER [--seconds 580] [--jobs 6] [--only NAME ...] [--also NAME=COMMAND ...]
    python tests/bench/gpu.py FOLDER --list

First the checks, beside each other, because most of their time is the host's: the tests marked ``gpu``, float32 parity
and bfloat16 errors of a Llama, the fill kernel's bits, and what ``--also`` adds. Then the timings, one at a time and
with the GPU to themselves, in an order in which what matters most comes first. Each is a script of this folder in a
process of its own. FOLDER gets their logs and JSON files, named as in ``docs/bench``, and ``gpu.json``: the command,
exit status, seconds and last line of each. Nothing is begun after ``--seconds``, and what runs then is ended and said
to be so: ``--only`` picks what is left for another run. Exit status 1: something failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: Parts of ``cuda_decoder.json`` that are made by different jobs.
DECODER = "cuda_decoder"


@dataclass(frozen=True)
class Job:
    name: str
    command: str  # {out}: FOLDER; {left}: whole seconds until the end; {jobs}: test processes

    def filled(self, out: Path, left: float, jobs: int) -> str:
        return self.command.format(out=shlex.quote(str(out)), left=int(left), jobs=jobs)


@dataclass(frozen=True)
class Done:
    name: str
    command: str
    status: int | None  # None: not begun, or ended for want of time
    seconds: float
    last: str


def script(name: str, arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / name))}.py {arguments}"


def jobs_of(also: list[str]) -> tuple[list[Job], list[Job]]:
    """The checks and the timings."""
    pytest = f"{shlex.quote(sys.executable)} -m pytest -p no:cacheprovider"
    tests = '-n {jobs} -m "gpu and not inductor"'
    decoder = "--json {out}/" + DECODER
    checks = [
        Job("tests", f"{pytest} {tests}"),
        Job("parity", script(DECODER, decoder + ".parity.json --only parity")),
        Job("error", script(DECODER, decoder + ".error.json --only error")),
        Job("inductor tests", f'{pytest} -n 3 -m "gpu and inductor"'),
        Job("fill bits", script("fill_check", "--only bits --seconds 200")),
    ]
    for text in also:
        name, _, command = text.partition("=")
        checks.append(Job(name, command.replace("{", "{{").replace("}", "}}")))
    timings = [
        Job("decoder", script(DECODER, decoder + ".decoder.json --only decoder recording")),
        Job("break_cost", script("break_cost", "{out}/break_cost.json --device cuda")),
        Job("fill times", script("fill_check", "{out}/fill_check.json --only times")),
        Job("fill", script("fill", "{out}/fill.json")),
        Job("audit_cost", script("audit_cost", "{out}/audit_cost_cuda.json --device cuda")),
        Job("generate", script(DECODER, decoder + ".generate.json --only generate")),
        Job("inductor", script("cuda_inductor", "{out}/cuda_inductor.json --seconds {left} --cap 200")),
    ]
    return checks, timings


def run(job: Job, out: Path, end: float, jobs: int) -> Done:
    """One job in a process group of its own, which is ended with all it has begun when time is up."""
    start = time.perf_counter()
    if end - start < 5:
        return Done(job.name, job.command, None, 0.0, "not begun: no time left")
    command = job.filled(out, end - start - 10, jobs)
    log = out / f"{job.name.replace(' ', '_')}.log"
    paths = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, shell=True, cwd=ROOT, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(max(end - time.perf_counter(), 1))
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    return Done(
        job.name, command, status, time.perf_counter() - start, last if status is not None else f"ended: {last}"
    )


def merge(out: Path, names: tuple[str, ...] = ("decoder", "generate", "parity", "error")) -> None:
    """One ``cuda_decoder.json`` of the parts that ran; parts of an older file in FOLDER stay."""
    whole = out / f"{DECODER}.json"
    result: dict[str, Any] = json.loads(whole.read_text(encoding="utf-8")) if whole.exists() else {}
    for name in names:
        part = out / f"{DECODER}.{name}.json"
        if part.exists():
            result.update(json.loads(part.read_text(encoding="utf-8")))
    if result:
        whole.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def show(done: list[Done]) -> None:
    for d in done:
        status = {None: "no time", 0: "ok"}.get(d.status, f"failed ({d.status})")
        print(f"{d.name:16} {status:12} {d.seconds:6.1f} s  {d.last[:150]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME=COMMAND", help="run in the checkout's root")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    checks, timings = jobs_of(args.also)
    known = [j.name for j in (*checks, *timings)]
    if args.list or (unknown := set(args.only or ()) - set(known)):
        print(
            "\n".join(known) if args.list else f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(known)}"
        )
        return 0 if args.list else 2
    args.folder.mkdir(parents=True, exist_ok=True)
    out = args.folder.resolve()
    wanted = set(args.only or known)
    done: list[Done] = []

    def note(result: Done) -> None:
        done.append(result)
        text = json.dumps([asdict(d) for d in done], indent=1)
        (out / "gpu.json").write_text(text + "\n", encoding="utf-8")

    with ThreadPoolExecutor(max_workers=8) as pool:
        for result in pool.map(lambda j: run(j, out, end, args.jobs), [j for j in checks if j.name in wanted]):
            note(result)
    for job in timings:
        if job.name in wanted:
            note(run(job, out, end, args.jobs))
    merge(out)
    show(done)
    return 0 if all(d.status == 0 for d in done) else 1


if __name__ == "__main__":
    sys.exit(main())
