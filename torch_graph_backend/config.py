"""Config: the options of one ``torch.compile(..., backend="bcg", options={...})``, parsed and validated once.

Contract: ``Config.parse`` accepts what the docstrings of ``Config`` and ``PhaseConfig`` list and refuses everything
else with an error that names the option, so a typo never silently does nothing. A Config is immutable and hashable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch_graph_backend.buckets import Ladder, decode_ladder, default_ladder, exact_ladder, prefill_ladder
from torch_graph_backend.errors import BadBuckets, BadOption, UnknownOption
from torch_graph_backend.option_checks import (
    Check,
    Without,
    audit_option,
    break_ops_option,
    buckets_option,
    choice,
    flag,
    natural,
    optional,
    phase_backend_option,
    positive,
    sizes_option,
    strict_option,
    trash_rows_option,
)
from torch_graph_backend.passes.reasons import Reason
from torch_graph_backend.policies import GraphSlot, parse_slots

#: Largest size of a phase's ladder when neither ``max_bs`` nor ``bs`` is given: decode in requests, prefill in tokens.
#: Either ladder (36 and 50 sizes) fits the default of ``max_recordings``.
DEFAULT_MAX_BS = {"decode": 256, "prefill": 4096}

#: Largest size of a key whose segments Inductor compiles, unless the option says otherwise. The one place: tests that
#: are not about Inductor set it to 0 (tests/conftest.py).
DEFAULT_INDUCTOR_MAX_SIZE = 32
#: The same of the seconds that compiling a graph may take.
DEFAULT_INDUCTOR_SECONDS = 120

#: Options that ``torch.compile`` takes out of ``options`` itself.
_TORCH_OPTIONS = frozenset({"guard_filter_fn", "use_aoti"})


def _known(options: Any, checks: Mapping[str, Check], scope: str, ignored: Iterable[str] = ()) -> dict[str, Any]:
    """``options`` checked key by key; the first key that ``checks`` lacks raises UnknownOption."""
    if not isinstance(options, Mapping):
        raise BadOption(scope or "options", options, "a dict")
    prefix = f"{scope}." if scope else ""
    parsed = {}
    for key, value in options.items():
        if key in ignored:
            continue
        if key not in checks:
            raise UnknownOption(key, checks, scope=scope, fix=_other_scope(key, scope))
        parsed[key] = checks[key](prefix + key, value)
    return parsed


def _other_scope(key: Any, scope: str) -> str:
    """A fix for an option that exists, but in another dict than ``scope``; else empty."""
    homes = [("", _CHECKS), *((phase, _PHASE_CHECKS[phase]) for phase in _PHASE_CHECKS)]
    names = [f"{home}.{key}" if home else key for home, checks in homes if home != scope and key in checks]
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


@dataclass(frozen=True)
class PhaseConfig:
    """One phase, ``options["decode"]`` or ``options["prefill"]``.

    * ``backend`` ("full" | "breakable" | "disabled"; default "full" for decode, "breakable" for prefill): "disabled"
      records nothing. Between the other two the graph decides: one segment where nothing has to be cut, else several.
    * ``max_bs`` (int >= 1; default 256 for decode, 4096 for prefill): the largest bucket. Unit: requests for decode,
      tokens for prefill.
    * ``bs`` (list of int; default the phase's ladder): the buckets themselves, those above ``max_bs`` dropped.
    """

    backend: str
    max_bs: int | None = None
    bs: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, phase: str, options: Any) -> PhaseConfig:
        """The options of ``phase`` ("decode" or "prefill") on top of its defaults."""
        parsed = _known(options, _PHASE_CHECKS[phase], phase)
        bs, cap = parsed.get("bs"), parsed.get("max_bs")
        if bs and cap:
            parsed["bs"] = tuple(size for size in bs if size <= cap)
            if not parsed["bs"]:
                raise BadBuckets(f"{phase}.bs", bs[0], f"and all other sizes exceed max_bs, {cap}")
        return cls(**{"backend": _PHASE_BACKENDS[phase], **parsed})

    def to_dict(self, phase: str) -> dict[str, Any]:
        """The options that differ from the defaults of ``phase``."""
        default = PhaseConfig(_PHASE_BACKENDS[phase])
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
        if "bs" in changed:
            changed["bs"] = list(changed["bs"])
        return changed


_PHASE_BACKENDS = {"decode": "full", "prefill": "breakable"}
_PHASE_LADDERS = {"decode": decode_ladder, "prefill": prefill_ladder}
_DECODE_CHECKS: dict[str, Check] = {
    "backend": phase_backend_option,
    "max_bs": optional(positive),
    "bs": optional(sizes_option),
}
_PHASE_CHECKS: dict[str, dict[str, Check]] = {
    "decode": _DECODE_CHECKS,
    "prefill": _DECODE_CHECKS,
}

_SIZE_OF = re.compile(r"(?P<base>.*)\.size\(\)\[(?P<dim>\d+)\]")
_ARGUMENT = re.compile(r"L\['(?P<name>[^']+)'\]")
_LEAF = re.compile(r"(?:\['(?P<key>[^']+)'\]|\.(?P<attribute>\w+))$")
_PATH = re.compile(r"\['(?P<key>[^']+)'\]|\[(?P<index>\d+)\]|\.(?P<attribute>\w+)")


def argument_name(source: str) -> str:
    """What the user calls an argument: ``L['batch']['ids']`` is ``batch.ids``, ``L['xs'][0]`` is ``xs.0``.

    A source of another form is its own name.
    """
    argument = _ARGUMENT.match(source)
    if argument is None:
        return source
    parts, at = [argument["name"]], argument.end()
    while at < len(source):
        step = _PATH.match(source, at)
        if step is None:
            return source
        parts.append(step["key"] or step["index"] or step["attribute"])
        at = step.end()
    return ".".join(parts)


def bucket_keys(source: str) -> list[str]:
    """The keys of a ``buckets`` dict that mean the symbol called ``source``, most specific first.

    ``L['batch']['ids'].size()[1]`` answers to itself, ``ids:1``, ``batch:1``, ``ids`` and ``batch``: the tensor's own
    name (the last key or attribute) goes before the argument that holds it, a single dimension before all of them.
    """
    sized = _SIZE_OF.fullmatch(source)
    base = sized["base"] if sized else source
    argument, leaf = _ARGUMENT.match(base), _LEAF.search(base)
    names = [leaf["key"] or leaf["attribute"]] if leaf else []
    names += [argument["name"]] if argument else []
    keys = [source, *(f"{name}:{sized['dim']}" for name in names if sized), *names]
    return list(dict.fromkeys(keys))


@dataclass(frozen=True)
class Config:
    """All options of one compile, each with its type, default and meaning.

    * ``buckets`` (list of int | {name: list of int} | None; default None): the sizes to record. A list serves every
      symbol; a dict serves the symbols it names, by source (``"L['input_ids'].size()[1]"``), by argument and dimension
      (``"input_ids:1"``) or by argument alone (``"input_ids"``, any dimension). Every other symbol has the ladder of
      ``phase``, or the default ladder. (Parsed into ``buckets`` for a list and ``named_buckets`` for a dict.)
    * ``max_size`` (int >= 1; default 8192): the largest size, in rows, of the default ladder.
    * ``padding`` ("buckets" | "exact"; default "buckets"): round sizes up to a bucket, or record exact sizes alone:
      those that are listed, or any size up to the largest where none are.
    * ``max_recordings`` (int >= 1; default 64): the most recordings that one compiled graph keeps.
    * ``max_bytes`` (int >= 1 | None; default None): no key is added once all recordings of the device hold this many
      bytes; None means half of the device's memory (for a CPU, of the machine's).
    * ``decode``, ``prefill`` (dict; default {}): see ``PhaseConfig``.
    * ``phase`` ("decode" | "prefill" | None; default None): which phase this compile serves; its sizes become the
      buckets. Excludes a list of ``buckets``.
    * ``break_ops`` (list of op names, ops or functions, or a dict of them to bool; default []): run eagerly, between
      segments, in this compile. In a dict, False takes a registered one back for this compile.
    * ``min_segment_kernels`` (int >= 1; default 2): a segment with fewer kernels runs eagerly.
    * ``enabled`` (bool; default True): False runs everything eagerly.
    * ``strict`` (bool | "ops"; default False): True raises StrictModeError for a call that would run eagerly, and for a
      graph of which nothing can be captured. "ops" also for a graph in which any operation but a break op is eager.
    * ``outputs`` ("safe" | "view"; default "safe"): a returned tensor stays what it was when the next call replays; or
      it may lie in the recording's own memory, without a copy, and the next call of this key overwrites it.
    * ``record`` ("second" | "never"; default "second"): record on the second call of a key, or always run uncaptured.
    * ``verify_memory`` (bool; default False): replay every segment twice, with other values in all memory that the call
      has not written, and raise MemoryFault if a result differs. For tests: slow.
    * ``audit`` (None | "off" | "capture" | "every:N"; default None): try out, with other contents in padded rows, that
      these change no real row and no memory: when a key is first run and first replayed ("capture"), and at every N-th
      replay too. What fails runs eagerly from then on. None: "capture" for graphs of which the user declared something
      (``declare_row_local``, ``declare_indices``, trash rows, tails of ``slots``), else "off".
    * ``trash_rows`` (dict of argument name to row >= 0; default {}): rows, of dimension 0, that nobody reads: padded
      rows may write there. As ``declare_trash_row``, for one compile.
    * ``slots`` (dict of argument names to dicts or ``GraphSlot``, or list of ``GraphSlot``; default {}): declared
      padding policies and sources of static input buffers, see ``torch_graph_backend.policies.GraphSlot``.
    * ``inductor_max_size`` (int >= 0; default 32): segments of keys of at most this size are compiled by Inductor
      (``max-autotune-no-cudagraphs``) at the bucket's sizes, before the key's first call, and recorded like any other.
      The size of a key is the product of its bucketed sizes (unit: rows); in a graph without any, the most rows that a
      matrix product of a segment takes. 0: no key is small.
    * ``inductor`` ("small" | "all" | "off"; default "small"): "all" has the segments of larger keys compiled too, once
      for all buckets of a structure; "off" compiles nothing.
    * ``inductor_seconds`` (int >= 0; default 120): once a graph's compiles took so many seconds, further segments keep
      plain kernels; so does a segment whose compile would, by its number of kernels, take longer than what is left.
    * ``progress`` (bool; default False): show a progress bar while a key is recorded (a line without a terminal).

    ``guard_filter_fn`` and ``use_aoti`` belong to ``torch.compile`` and are ignored.
    """

    buckets: tuple[int, ...] | None = None
    named_buckets: tuple[tuple[str, tuple[int, ...]], ...] = ()
    max_size: int = 8192
    padding: str = "buckets"
    max_recordings: int = 64
    max_bytes: int | None = None
    decode: PhaseConfig = PhaseConfig("full")
    prefill: PhaseConfig = PhaseConfig("breakable")
    phase: str | None = None
    break_ops: tuple[Any, ...] = ()
    min_segment_kernels: int = 2
    enabled: bool = True
    strict: bool | str = False
    outputs: str = "safe"
    record: str = "second"
    inductor_max_size: int = field(default_factory=lambda: DEFAULT_INDUCTOR_MAX_SIZE)
    inductor: str = "small"
    inductor_seconds: int = field(default_factory=lambda: DEFAULT_INDUCTOR_SECONDS)
    progress: bool = False
    verify_memory: bool = False
    audit: str | None = None
    trash_rows: tuple[tuple[str, int], ...] = ()
    slots: tuple[GraphSlot, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Config:
        """The Config for what ``torch.compile`` was given; ``options`` is not changed.

        Raises UnknownOption, BadOption or BadBuckets.
        """
        if mode not in (None, "default"):
            raise BadOption("mode", mode, "None or 'default'", fix="leave mode out and pass options={...}")
        parsed = _known({} if options is None else options, _CHECKS, "", _TORCH_OPTIONS)
        if isinstance((options or {}).get("buckets"), Mapping):
            parsed["named_buckets"] = parsed.pop("buckets")
        if parsed.get("buckets") and parsed.get("phase"):
            accepted = "None when 'buckets' is a list"
            fix = f"give the sizes as {parsed['phase']}={{'bs': [...]}} or leave phase out"
            raise BadOption("phase", parsed["phase"], accepted, fix=fix)
        return cls(**parsed)

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from the defaults, in the form that ``parse`` takes: parsing them gives this Config.

        Everything but callables in ``break_ops`` can be written as JSON.
        """
        default = Config()
        changed = {name: getattr(self, name) for name in _CHECKS if getattr(self, name) != getattr(default, name)}
        for phase in _PHASE_CHECKS.keys() & changed.keys():
            changed[phase] = changed[phase].to_dict(phase)
        for name in {"buckets", "break_ops"} & changed.keys():
            changed[name] = list(changed[name])
        without = [op for op in changed.get("break_ops", ()) if isinstance(op, Without)]
        if without:
            ops = changed["break_ops"]
            changed["break_ops"] = {op.target if isinstance(op, Without) else op: op not in without for op in ops}
        if self.trash_rows:
            changed["trash_rows"] = dict(self.trash_rows)
        if self.slots:
            changed["slots"] = {slot.name: slot.to_dict() for slot in self.slots}
        if self.named_buckets:
            changed["buckets"] = {name: list(sizes) for name, sizes in self.named_buckets}
        return changed

    @property
    def active(self) -> PhaseConfig | None:
        """The options of the phase that this compile serves, if it was told one."""
        return None if self.phase is None else getattr(self, self.phase)

    def off_reason(self) -> Reason | None:
        """Why this Config allows no recording at all; None if it does."""
        if not self.enabled:
            return Reason("disabled", "the option enabled is False", fix="set enabled=True")
        if self.record == "never":
            return Reason("disabled", "the option record is 'never'", fix="set record='second'")
        phase, active = self.phase, self.active
        if phase is not None and active is not None and active.backend == "disabled":
            fix = f"set {phase}={{'backend': {_PHASE_BACKENDS[phase]!r}}}"
            return Reason("disabled", f"the backend of phase {phase!r} is 'disabled'", fix=fix)
        return None

    def matching_key(self, name: str | None) -> str | None:
        """The key of the ``buckets`` dict that decides the ladder of the symbol called ``name``; None if none does."""
        named = dict(self.named_buckets)
        return next((key for key in bucket_keys(name) if key in named), None) if name else None

    def ladder_for(self, name: str | None) -> Ladder:
        """The ladder of a symbol. ``name``: its source, such as ``L['input_ids'].size()[1]``; None if it has none.

        First that applies: the ``buckets`` dict, the ``buckets`` list, the ``phase``, the default ladder.
        """
        exact = self.padding == "exact"
        key = self.matching_key(name)
        if key is not None:
            return Ladder(dict(self.named_buckets)[key], exact)
        if self.buckets is not None:
            return Ladder(self.buckets, exact)
        phase, active = self.phase, self.active
        if phase is None or active is None:
            return Ladder(exact_ladder(self.max_size) if exact else default_ladder(self.max_size), exact)
        if active.bs is not None:
            return Ladder(active.bs, exact)
        ladder = exact_ladder if exact else _PHASE_LADDERS[phase]
        return Ladder(ladder(active.max_bs or DEFAULT_MAX_BS[phase]), exact)

    def unmatched(self, names: Iterable[str | None]) -> list[str]:
        """The keys of the ``buckets`` dict that decided the ladder of none of ``names`` (all symbols of a compile)."""
        used = {self.matching_key(name) for name in names}
        return [key for key, _ in self.named_buckets if key not in used]


#: Every option with its check. The names are Config's fields (without ``named_buckets``).
_CHECKS: dict[str, Check] = {
    "buckets": buckets_option,
    "max_size": positive,
    "padding": choice("buckets", "exact"),
    "max_recordings": positive,
    "max_bytes": optional(positive),
    "decode": lambda name, value: PhaseConfig.parse("decode", value),
    "prefill": lambda name, value: PhaseConfig.parse("prefill", value),
    "phase": choice("decode", "prefill", None),
    "break_ops": break_ops_option,
    "min_segment_kernels": positive,
    "enabled": flag,
    "strict": strict_option,
    "outputs": choice("safe", "view"),
    "record": choice("second", "never"),
    "inductor_max_size": natural,
    "inductor": choice("small", "all", "off"),
    "inductor_seconds": natural,
    "progress": flag,
    "verify_memory": flag,
    "audit": audit_option,
    "trash_rows": trash_rows_option,
    "slots": parse_slots,
}
