"""The demo: a real language model generates eagerly and with ``backend="bcg"``, and every token must be equal.

What it must show and what it refuses to gloss over: the model is unmodified, the cache is the ordinary growing one, the
comparison is exact (float32), and a run in which nothing was replayed fails just as a run with a wrong token does.

``model.compile`` changes the model in place, so all eager generations come first, on the same object. The compiled
ones run twice: the first round contains Dynamo's tracing and our planning, the second shows what a running server sees.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_graph_backend import demo_model, demo_report

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea and the ships on it.",
    "Name three colours of the rainbow, in the order in which they appear.",
    "Explain in simple words why the sky looks blue during the day and red in the evening.",
    "A train leaves at nine in the morning and travels for three hours. At what time does it arrive, and what changes "
    "if it leaves an hour later?",
    "Give me a short list of things to pack for a weekend in the mountains: it may rain, the nights are cold, and I "
    "want to travel light.",
)

#: Left-padded batches, as positions in PROMPTS.
BATCHES = ((0, 1, 2, 3),)

#: Dynamo traces a size as fixed until it changes, and anew for a mask, so these prompts and the batch make six graphs
#: of one forward function. Its default limit is eight, beyond which it quietly runs the rest uncompiled; the demo must
#: not depend on how close to that it comes.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Job:
    """One call of ``generate``: a prompt, or a padded batch of them."""

    name: str
    prompts: tuple[str, ...]
    inputs: dict[str, torch.Tensor]

    @property
    def size(self) -> tuple[int, int]:
        batch, length = self.inputs["input_ids"].shape
        return int(batch), int(length)


@dataclass(frozen=True)
class Generated:
    """What one call of ``generate`` gave: the new tokens of every row, and how long it took."""

    tokens: torch.Tensor
    seconds: float


def run(
    *,
    model_dir: Path | None = None,
    max_new_tokens: int = 16,
    prompts: int | None = None,
    json_path: Path | None = None,
) -> int:
    """Run the whole demo, print its report, and return the exit code: 0 if all held, 1 if not."""
    import torch_graph_backend as tgb
    from torch_graph_backend.cli import version_text

    started = time.perf_counter()
    demo_model.check_packages()
    # Two threads on one physical core wait for each other at every operation; a model of this size needs few anyway.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    print(f"{version_text()}, {torch.get_num_threads()} threads", flush=True)
    gguf = demo_model.weights(model_dir)
    with _timed(f"loading {gguf.name}"):
        tokenizer, model = demo_model.load(gguf)
    jobs = make_jobs(tokenizer, PROMPTS[:prompts], BATCHES)

    eager = generate_all("eager", model, jobs, max_new_tokens)
    # Plain kernels: the first decode step of `generate` is a graph of its own, one segment of 30 layers that is called
    # once; a C++ compiler would work on it for minutes.
    model.compile(backend="bcg", options={"progress": True, "inductor": "off"})
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        first = generate_all("bcg, first round", model, jobs, max_new_tokens)
        before = tgb.stats(model).replays
        again = generate_all("bcg, second round", model, jobs, max_new_tokens)
    stats = tgb.stats(model)

    report = demo_report.Report(
        versions=version_text(),
        rows=[row for each in zip(jobs, eager, first, again, strict=True) for row in compare(tokenizer, *each)],
        times=[timing(*each) for each in zip(jobs, eager, first, again, strict=True)],
        counts=demo_report.Counts.of(stats, second_round_replays=stats.replays - before),
        plans=[str(plan) for plan in tgb.plans(model)],
        seconds=time.perf_counter() - started,
    )
    demo_report.show(report)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


def make_jobs(tokenizer: Any, prompts: Sequence[str], batches: Sequence[Sequence[int]]) -> list[Job]:
    """A job for each prompt alone, then one for each batch; ``batches`` index PROMPTS, whatever was left out."""
    groups: list[tuple[str, tuple[str, ...]]] = [
        (f"prompt {number}", (text,)) for number, text in enumerate(prompts, 1)
    ]
    groups += [(f"batch of {len(batch)}", tuple(PROMPTS[i] for i in batch)) for batch in batches]
    return [Job(name, texts, _encode(tokenizer, texts)) for name, texts in groups]


def generate_all(title: str, model: Any, jobs: Sequence[Job], max_new_tokens: int) -> list[Generated]:
    """Greedy generation for every job, in order, with a bar (a line a job where there is no terminal)."""
    results = []
    with _progress(title, len(jobs)) as step:
        for job in jobs:
            start = time.perf_counter()
            tokens = model.generate(**job.inputs, max_new_tokens=max_new_tokens, do_sample=False)
            results.append(Generated(tokens[:, job.size[1] :], time.perf_counter() - start))
            step(f"{job.name}, {job.size[0]} x {job.size[1]} tokens: {results[-1].seconds:.1f} s")
    return results


def compare(
    tokenizer: Any, job: Job, eager: Generated, first: Generated, again: Generated
) -> Iterator[demo_report.Row]:
    """One row of the report for each sequence of the job; equal means that both compiled rounds gave eager's tokens."""
    for i, prompt in enumerate(job.prompts):
        name = job.name if len(job.prompts) == 1 else f"{job.name}, row {i + 1}"
        differing = [other for other in (first, again) if not _same(eager.tokens, other.tokens, i)]
        texts = [tokenizer.decode(run.tokens[i], skip_special_tokens=True) for run in (eager, *differing[:1])]
        length = int(job.inputs["attention_mask"][i].sum())
        yield demo_report.Row(name, length, prompt, texts[0], not differing, texts[1] if differing else None)


def timing(job: Job, eager: Generated, first: Generated, again: Generated) -> demo_report.Timing:
    return demo_report.Timing(job.name, *job.size, eager.seconds, first.seconds, again.seconds)


def _same(left: torch.Tensor, right: torch.Tensor, row: int) -> bool:
    """Row by row, so that one wrong row does not hide the others; a shorter answer is a different answer."""
    return left.shape == right.shape and torch.equal(left[row], right[row])


def _encode(tokenizer: Any, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    return dict(encoded)


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    print(f"{what} ...", flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function to call after each step: a tqdm bar on a terminal, else a printed line (bars garble log files)."""
    if importlib.util.find_spec("tqdm") is None or not sys.stderr.isatty():
        print(f"{title}:", flush=True)
        yield lambda text: print(f"  {text}", flush=True)
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title) as bar:

        def step(text: str) -> None:
            bar.write(f"  {text}")
            bar.update()

        yield step
