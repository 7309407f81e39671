"""Everything that is measured on a GPU, in one run: a short table last, and a JSON file.

    python tests/bench/cuda_decoder.py --json out.json [--only decoder recording ...] [--seconds 540]
    python tests/bench/cuda_decoder.py --json out.json --device cpu --tiny     # does the script itself work?

* ``decoder``: a decoder of our own (RMSNorm, packed qkv, rotary, causal SDPA on one sequence, SwiGLU), eager,
  ``torch.compile(mode="reduce-overhead", dynamic=True)`` and ``bcg``. Milliseconds a call, and host milliseconds (until
  the call returns, the queue being empty before it), on 24 lengths of 2..512 that were recorded, and on the first calls
  of 48 others. (A length of 1 is a graph of its own in Dynamo, with every backend.)
* ``recording``: seconds and reserved bytes of recording 42 buckets.
* ``generate``: milliseconds a token of greedy Hugging Face ``generate`` after a first run of the same prompt.
  ``DynamicCache``: eager and ``bcg``. ``StaticCache``: HF's own compile (reduce-overhead) and ``bcg``.
* ``parity``: float32 logits against eager over 20 (batch, length) pairs, relative to the largest eager logit.
* ``error``: bfloat16 logits against a float32 reference, eager's and ``bcg``'s, and their ratio.

A part that fails is reported and the others still run; the file is written after every part. A part is not begun after
``--seconds``. Exit status 1: a part failed, or a bound (parity 1e-5, ratio 1.5) does not hold.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import torch_graph_backend as tgb

PARITY_BOUND, ERROR_BOUND = 1e-5, 1.5
#: Plain kernels, whose answers are compared bit for bit; Inductor's are in ``cuda_inductor.py``.
PLAIN = {"inductor": "off"}
#: 42 buckets up to 512.
BUCKETS = (2, 4, *range(8, 129, 8), *range(144, 513, 16))
#: (batch, length): 20 pairs, up and down.
PAIRS = [(1, 9), (1, 10), (3, 37), (5, 50), (2, 17), (3, 40), (4, 64), (2, 21), (5, 33), (3, 12)]
PAIRS += [(1, 90), (2, 9), (4, 11), (1, 33), (5, 8), (3, 64), (2, 50), (4, 24), (1, 48), (5, 71)]


@dataclass
class Setting:
    """The sizes of one run. ``width`` is a multiple of 128."""

    device: str
    layers: int
    width: int
    buckets: tuple[int, ...] = BUCKETS
    recorded: int = 24
    fresh: int = 48
    rounds: int = 5
    prompts: tuple[tuple[int, int], ...] = ((1, 100), (4, 173))
    tokens: int = 64
    pairs: list[tuple[int, int]] = field(default_factory=lambda: list(PAIRS))
    vocabulary: int = 32000
    contenders: tuple[str, ...] = ("dynamic, eager", "dynamic, bcg", "static, reduce-overhead", "static, bcg")
    #: Told of a part that is not finished yet, so that a run that is cut off leaves what it has.
    unfinished: Callable[[str, dict[str, Any]], None] = lambda name, rows: None

    @classmethod
    def tiny(cls, device: str) -> Setting:
        pairs, prompts = [(1, 9), (2, 12), (1, 10), (2, 12)], ((1, 7), (2, 9))
        return cls(device, 2, 128, (2, 8, 16, 32), 3, 4, 2, prompts, 6, pairs, 97)


# -- clocks and memory -------------------------------------------------------------------------------------------------


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reserved(device: str) -> int:
    """Bytes that the CUDA allocator holds (0 elsewhere)."""
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def milliseconds(device: str, work: Callable[[], Any], host: bool = False) -> float:
    """How long ``work`` takes from an empty queue; ``host``: until it returns, with its kernels still in the queue."""
    synchronise(device)
    start = time.perf_counter()
    work()
    if not host:
        synchronise(device)
    return 1000 * (time.perf_counter() - start)


@contextmanager
def clean(device: str) -> Iterator[None]:
    """No compiled graphs and no recordings of another contender, before and after."""
    for last in (False, True):
        torch._dynamo.reset()
        tgb.reset()
        gc.collect()
        if device == "cuda":
            synchronise(device)
            torch.cuda.empty_cache()
        if not last:
            yield


# -- the decoder -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        hidden = width * 11 // 4 // 64 * 64
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(x.shape[0], -1, self.head).transpose(0, 1).chunk(3)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + self.out(a.transpose(0, 1).reshape(x.shape))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Decoder(nn.Module):
    """``(n, width)`` to ``(n, width)``: one sequence of n tokens, without embedding and vocabulary."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, width: int, head: int = 128, longest: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, head) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        angle = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, head, 2) / head)
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin())

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[0]], self.sin[: x.shape[0]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def decoder(s: Setting, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    torch.manual_seed(0)
    return Decoder(s.layers, s.width).to(s.device, dtype).eval()


def hidden(s: Setting, n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(n, s.width, generator=torch.Generator().manual_seed(n)).to(s.device, dtype)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def lengths(s: Setting) -> tuple[list[int], list[int]]:
    """The recorded lengths and the fresh ones: no length twice."""
    chosen = random.Random(0).sample(range(2, max(s.buckets) + 1), s.recorded + s.fresh)
    return chosen[: s.recorded], chosen[s.recorded :]


def record_ahead(s: Setting, fast: Callable[[Tensor], Any]) -> None:
    """Record every bucket, largest first: by ``tgb.capture`` where it exists, else by calling each twice."""
    capture = getattr(tgb, "capture", None)
    if capture is not None:
        capture(fast, hidden(s, s.buckets[-1]), sizes=list(s.buckets))
        return
    for n in reversed(s.buckets):
        for _ in range(2):
            fast(hidden(s, n))


def bcg(s: Setting, model: nn.Module) -> Callable[[Tensor], Any]:
    return torch.compile(model, backend="bcg", options={"buckets": list(s.buckets), **PLAIN})


def time_calls(s: Setting, fast: Callable[[Tensor], Any], passes: int, ahead: bool = False) -> dict[str, Any]:
    """One contender: first passes over the recorded lengths, the timings on them, then the fresh lengths."""
    known, fresh = lengths(s)
    before = reserved(s.device)
    start = time.perf_counter()
    if ahead:
        record_ahead(s, fast)
    for _ in range(passes):
        for n in known:
            fast(hidden(s, n))
    synchronise(s.device)
    first = time.perf_counter() - start
    inputs = [hidden(s, n) for n in known]
    calls = len(inputs) * s.rounds
    total = milliseconds(s.device, lambda: [fast(x) for _ in range(s.rounds) for x in inputs])
    host = [milliseconds(s.device, lambda x=x: fast(x), host=True) for _ in range(s.rounds) for x in inputs]
    new = [hidden(s, n) for n in fresh]
    fresh_ms = [milliseconds(s.device, lambda x=x: fast(x)) for x in new]
    fresh_host = [milliseconds(s.device, lambda x=x: fast(x), host=True) for x in new]  # their second calls
    return {
        "ms": total / calls,
        "host_ms": sum(host) / calls,
        "fresh_ms": sum(fresh_ms) / len(new),
        "fresh_again_host_ms": sum(fresh_host) / len(new),
        "first_seconds": first,
        "reserved_bytes": reserved(s.device) - before,
    }


def part_decoder(s: Setting) -> dict[str, Any]:
    model = decoder(s)

    def compiled() -> dict[str, Any]:
        fast = bcg(s, model)
        row = time_calls(s, fast, passes=2, ahead=True)
        return {**row, "differences": differences(s, model, fast), **counts(model)}

    def reduce_overhead() -> dict[str, Any]:
        return time_calls(s, torch.compile(model, mode="reduce-overhead", dynamic=True), passes=3)

    contenders = {
        "eager": lambda: time_calls(s, model, passes=1),
        "bcg": compiled,
        "reduce-overhead": reduce_overhead,
    }
    rows = {}
    for name, run in contenders.items():
        with clean(s.device):
            rows[name] = guarded(run)
    return {"lengths": dict(zip(("recorded", "fresh"), lengths(s), strict=True)), "rows": rows}


def differences(s: Setting, model: nn.Module, fast: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Against eager: bitwise at bucket sizes, else relative to the largest value."""
    pairs = {n: (model(hidden(s, n)), fast(hidden(s, n))) for n in (*s.buckets, *lengths(s)[1])}
    equal = sum(torch.equal(*pairs[n]) for n in s.buckets)
    worst = max(relative(got, want) for want, got in pairs.values())
    return {"bitwise_equal_buckets": equal, "buckets": len(s.buckets), "worst_relative": worst}


def relative(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest wanted value; infinite if a value is not finite."""
    got, want = got.double(), want.double()
    ratio = float((got - want).abs().max() / want.abs().max())
    return ratio if ratio == ratio else float("inf")


def part_recording(s: Setting) -> dict[str, Any]:
    with clean(s.device):
        model = decoder(s)
        fast = bcg(s, model)
        start = time.perf_counter()
        fast(hidden(s, s.buckets[-1]))  # tracing, planning, and what libraries allocate once
        synchronise(s.device)
        before, middle = reserved(s.device), time.perf_counter()
        record_ahead(s, fast)
        synchronise(s.device)
        end = time.perf_counter()
        return {
            "buckets": len(s.buckets),
            "how": "capture" if hasattr(tgb, "capture") else "two calls each",
            "compile_seconds": middle - start,
            "total_seconds": end - middle,
            "reserved_bytes": reserved(s.device) - before,
            **counts(model),
        }


def counts(model: Any) -> dict[str, Any]:
    """What ``tgb.stats`` says. ``seconds["record"]`` are those of recording alone."""
    stats = tgb.stats(model)
    return {
        "calls": stats.calls,
        "replays": stats.replays,
        "first_calls": stats.first_calls,
        "recordings": stats.recordings,
        "eager": dict(stats.eager),
        "seconds": dict(stats.seconds),
    }


# -- Hugging Face Llama ------------------------------------------------------------------------------------------------


def llama(s: Setting, dtype: torch.dtype) -> Any:
    """Random weights, grouped queries: 4 query heads share one key and value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(s.width // 64, 4)
    config = LlamaConfig(
        hidden_size=s.width,
        intermediate_size=s.width * 11 // 4 // 64 * 64,
        num_hidden_layers=s.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=s.vocabulary,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(s.device, dtype).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # every run has the same number of tokens
    return model


def ids(s: Setting, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * batch + length)
    return torch.randint(1, s.vocabulary, (batch, length), generator=generator).to(s.device)


def decode_ms(s: Setting, model: Any, batch: int, length: int, **kwargs: Any) -> dict[str, Any]:
    """Milliseconds a token of whole ``generate`` calls, prefill included: the median of three after a first one, each
    with a new cache; and milliseconds of a ``generate`` of two tokens, which are mostly the prefill's."""
    prompt = ids(s, batch, length)
    mask = torch.ones_like(prompt)

    def run(new: int) -> Tensor:
        return model.generate(
            prompt, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=False, **kwargs
        )

    tokens: list[Tensor] = []
    # The longer first: a static cache of HF never becomes shorter again.
    runs = [milliseconds(s.device, lambda: tokens.append(run(s.tokens))) for _ in range(4)]
    short = [milliseconds(s.device, lambda: run(2)) for _ in range(3)]
    return {
        "batch": batch,
        "length": length,
        "ms_per_token": statistics.median(runs[1:]) / s.tokens,
        "two_tokens_ms": statistics.median(short),
        "runs_ms": runs,
        "first_seconds": runs[0] / 1000,
        "tokens": tokens[-1][:, length:].tolist(),
    }


def part_generate(s: Setting) -> dict[str, Any]:
    """Contenders: (compile with ``bcg``?, arguments of ``generate``)."""
    static = {"cache_implementation": "static"}
    contenders = {
        "dynamic, eager": (False, {}),
        "dynamic, bcg": (True, {}),
        "static, reduce-overhead": (False, static),
        "static, bcg": (True, {**static, "disable_compile": True}),
    }
    rows: dict[str, Any] = {}
    plain: list[Any] = []  # the first contender's tokens, a prompt each
    for name in s.contenders:
        compiled, kwargs = contenders[name]
        with clean(s.device):
            row = rows[name] = guarded(lambda c=compiled, k=kwargs: generate_row(s, c, k))
        tokens = [p.pop("tokens") for p in row.get("prompts", ())]
        row["tokens_like_eager"] = [share(a, b) for a, b in zip(tokens, plain, strict=False)]
        plain = plain or (tokens if name == "dynamic, eager" else [])
        s.unfinished("generate", rows)
    return rows


def share(got: list[list[int]], want: list[list[int]]) -> float:
    """The share of equal tokens. Bfloat16 decides close calls differently, so it need not be 1."""
    flat = [a == b for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(flat) / len(flat)


def generate_row(s: Setting, compiled: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
    model = llama(s, torch.bfloat16)
    if compiled:
        model.compile(backend="bcg", options=PLAIN)
    prompts = [decode_ms(s, model, batch, length, **kwargs) for batch, length in s.prompts]
    return {"prompts": prompts, **(counts(model) if compiled else {})}


def cached_logits(s: Setting, model: Any, batch: int, length: int, static: bool, steps: int = 3) -> list[Tensor]:
    """Last logits of a prefill and of decode steps fed with given tokens, so that runs stay comparable."""
    from transformers import DynamicCache, StaticCache

    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    longest = max(n for _, n in s.pairs) + steps + 1
    cache = StaticCache(config=model.config, max_cache_len=longest) if static else DynamicCache(config=model.config)
    tokens, at, logits = ids(s, batch, length + steps), 0, []
    for end in range(length, length + steps + 1):
        positions = torch.arange(at, end, device=s.device)[None].expand(batch, -1)
        out = model(tokens[:, at:end], position_ids=positions, use_cache=True, **{name: cache})
        logits.append(out.logits[:, -1].clone())
        at = end
    return logits


def compiled_llama(s: Setting, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same weights twice: to run eagerly, and compiled."""
    plain, fast = llama(s, dtype), llama(s, dtype)
    fast.compile(backend="bcg", options=PLAIN)
    return plain, fast


def part_parity(s: Setting) -> dict[str, Any]:
    found = {}
    for name in ("dynamic", "static"):
        with clean(s.device):
            found[name] = guarded(lambda static=name == "static": parity(s, static))
    return found


def parity(s: Setting, static: bool) -> dict[str, Any]:
    plain, fast = compiled_llama(s, torch.float32)
    pairs = []
    for batch, length in s.pairs:
        want, got = (cached_logits(s, m, batch, length, static) for m in (plain, fast))
        worst = max(relative(a, b) for a, b in zip(got, want, strict=True))
        pairs.append({"batch": batch, "length": length, "relative": worst})
    return {"worst": max(p["relative"] for p in pairs), "pairs": pairs, **counts(fast)}


def part_error(s: Setting) -> dict[str, Any]:
    found = {}
    for name in ("dynamic", "static"):
        with clean(s.device):
            found[name] = guarded(lambda static=name == "static": errors(s, static))
    return found


def errors(s: Setting, static: bool) -> dict[str, Any]:
    """Root of the mean squared error over all logits of the pairs, relative to the root of their mean square."""
    plain, fast = compiled_llama(s, torch.bfloat16)
    exact = llama(s, torch.float32)
    exact.load_state_dict(plain.state_dict())  # the very weights, rounded to bfloat16
    sums = {"eager": 0.0, "bcg": 0.0, "all": 0.0}
    for batch, length in s.pairs[::2]:
        want, eager, got = (cached_logits(s, m, batch, length, static) for m in (exact, plain, fast))
        for w, e, g in zip(want, eager, got, strict=True):
            sums["all"] += float(w.double().square().sum())
            sums["eager"] += float((e.double() - w.double()).square().sum())
            sums["bcg"] += float((g.double() - w.double()).square().sum())
    of = {f"{name}_error": (sums[name] / sums["all"]) ** 0.5 for name in ("eager", "bcg")}
    return {**of, "ratio": of["bcg_error"] / of["eager_error"], **counts(fast)}


# -- the run -----------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "decoder": part_decoder,
    "recording": part_recording,
    "generate": part_generate,
    "parity": part_parity,
    "error": part_error,
}


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` returns, with its seconds; or what it raised, so that the rest of the run is not lost."""
    start = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {**found, "part_seconds": time.perf_counter() - start}


def problems(result: dict[str, Any]) -> list[str]:
    """Failed parts, and bounds that do not hold."""
    found = [f"{where}: {text}" for where, text in failures(result, "")]
    for name, row in result.get("parity", {}).items():
        if isinstance(row, dict) and not row.get("worst", 0.0) <= PARITY_BOUND:
            found.append(f"parity, {name}: {row['worst']:.1e} is above {PARITY_BOUND:.0e}")
    for name, row in result.get("error", {}).items():
        if isinstance(row, dict) and not row.get("ratio", 0.0) <= ERROR_BOUND:
            found.append(f"error, {name}: {row['ratio']:.2f} times eager's is above {ERROR_BOUND}")
    return found


def failures(tree: Any, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(tree, dict):
        return
    if "failed" in tree:
        yield where, tree["failed"]
    for name, value in tree.items():
        yield from failures(value, f"{where}, {name}" if where else name)


def number(row: dict[str, Any], name: str, form: str = "10.2f") -> str:
    return format(row[name], form) if name in row else "-".rjust(10)


def table(result: dict[str, Any]) -> list[str]:
    """The short form, a line a contender."""
    lines = []
    rows = result.get("decoder", {}).get("rows", {})
    if rows:
        lines.append("decoder".ljust(26) + "        ms   host ms  fresh ms  first s   reserved GiB")
    for name, row in rows.items():
        cells = [number(row, k) for k in ("ms", "host_ms", "fresh_ms", "first_seconds")]
        gib = f"{row['reserved_bytes'] / 2**30:10.2f}" if "reserved_bytes" in row else ""
        lines.append(f"  {name}".ljust(26) + "".join(cells) + gib)
    if "differences" in rows.get("bcg", {}):
        d = rows["bcg"]["differences"]
        equal = f"{d['bitwise_equal_buckets']} of {d['buckets']} buckets bitwise equal to eager"
        lines.append(f"  {equal}, worst relative difference {d['worst_relative']:.1e}")
    row = result.get("recording", {})
    if "total_seconds" in row:
        record, mib = row["seconds"]["record"], row["reserved_bytes"] / 2**20
        lines.append(
            f"recording {row['buckets']} buckets ({row['how']}): {row['total_seconds']:.2f} s, "
            f"of which recording {record:.2f} s; {mib:.0f} MiB; compiling before {row['compile_seconds']:.1f} s"
        )
    for name, row in result.get("generate", {}).items():
        for p in row.get("prompts", ()) if isinstance(row, dict) else ():
            what = f"generate {name}, batch {p['batch']}, prompt {p['length']}"
            lines.append(f"{what}: {p['ms_per_token']:.2f} ms a token (first run {p['first_seconds']:.1f} s)")
    for name, row in result.get("parity", {}).items():
        if isinstance(row, dict) and "worst" in row:
            done = f"{row['replays']} of {row['calls']} calls replayed, eager {row['eager']}"
            lines.append(f"parity fp32 {name}: {row['worst']:.1e} over {len(row['pairs'])} pairs; {done}")
    for name, row in result.get("error", {}).items():
        if isinstance(row, dict) and "ratio" in row:
            both = f"eager {row['eager_error']:.2e}, bcg {row['bcg_error']:.2e}"
            lines.append(f"bf16 error {name}: {both}, ratio {row['ratio']:.2f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=540, help="no part is begun after this time")
    parser.add_argument("--prompts", type=int, default=2, help="how many prompts generate is timed with")
    names = Setting.contenders
    parser.add_argument("--contenders", nargs="+", choices=names, default=list(names), help="of generate, eager first")
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script with")
    args = parser.parse_args()
    s = Setting.tiny(args.device) if args.tiny else Setting(args.device, args.layers, args.width)
    s.prompts, s.contenders = s.prompts[: args.prompts], tuple(args.contenders)
    start = time.perf_counter()
    result = about(s)

    def write(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        args.json.write_text(json.dumps(result, indent=1) + "\n")

    s.unfinished = write
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for name in args.only:
            if time.perf_counter() - start > args.seconds:
                result[name] = {"failed": "no time left"}
                continue
            write(name, guarded(lambda part=PARTS[name]: part(s)))
            sys.stdout.write(f"{name}: {result[name]['part_seconds']:.0f} s\n")
            sys.stdout.flush()
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    bad = [f"PROBLEM {text}" for text in problems(result)]
    sys.stdout.write("\n".join(["", *table(result), *bad]) + "\n")
    return 1 if bad else 0


def about(s: Setting) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if s.device == "cuda" else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": device, "layers": s.layers, "width": s.width}
    try:
        import transformers
    except ImportError:
        return found
    return {**found, "transformers": transformers.__version__}


if __name__ == "__main__":
    sys.exit(main())
