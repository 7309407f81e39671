"""Errors: codes, one-line messages with the user's line and the fix, suggestions, and pickling."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from torch_graph_backend import errors
from torch_graph_backend.errors import (
    BadBuckets,
    BadOption,
    BreakOpError,
    BridgeMismatch,
    CaptureError,
    DeclarationError,
    KeptArgument,
    MemoryFault,
    MissingFake,
    NothingToRecord,
    ReplayError,
    SlotError,
    StatsMismatch,
    StrictModeError,
    TorchGraphBackendError,
    UnknownOption,
    nearest,
)
from torch_graph_backend.passes.reasons import Reason

REASON = Reason("data-dependent", where="model.py:7 in forward: n = x.sum().item()", fix="keep n on the device")

#: One example of every class with its code and what its text must contain.
EXAMPLES = [
    (TorchGraphBackendError("something broke"), "BCG001", ["something broke"]),
    (UnknownOption("bukets", ["buckets", "padding"]), "BCG101", ["'bukets'", "valid: buckets, padding", "'buckets'?"]),
    (BadOption("strict", "yes", "True or False"), "BCG102", ["'strict'", "'yes'", "True or False"]),
    (BadBuckets("decode.bs", -3, "is not positive"), "BCG103", ["decode.bs", "-3", "is not positive"]),
    (StrictModeError(REASON, "forward"), "BCG201", ["forward", "data-dependent", "at model.py:7", "keep n on"]),
    (BreakOpError("ns::op", "it has no fake", fix="register one"), "BCG301", ["'ns::op'", "no fake", "register one"]),
    (
        MissingFake("ns::op", ["@op.register_fake", "def _(q):", "    return q"]),
        "BCG302",
        ["'ns::op'", "no fake", "def _"],
    ),
    (KeptArgument("ns::attend", "q"), "BCG303", ["ns::attend", "'q'", "keeps_args=False", "clone"]),
    (DeclarationError("ns::op", "changes an argument"), "BCG311", ["ns::op", "it changes an argument"]),
    (ReplayError("bucket 8"), "BCG401", ["bucket 8", "cleaned up"]),
    (CaptureError("aten.item", "it waits for the device"), "BCG402", ["aten.item", "it waits", "fix: "]),
    (NothingToRecord(["f 8: grad: x"]), "BCG404", ["nothing was recorded", "f 8: grad: x"]),
    (SlotError("ids", "source_fn returned None"), "BCG312", ["'ids'", "source_fn returned None"]),
    (MemoryFault(2, "8"), "BCG405", ["segment 2", "key 8", "report it"]),
    (BridgeMismatch("ns::op", "float32[8]", "float16[8]"), "BCG403", ["ns::op", "float32[8]", "float16[8]"]),
    (StatsMismatch(["replays: expected 3, got 2"], "1 graphs"), "BCG501", ["replays: expected 3, got 2", "fix: "]),
]
IDS = [type(error).__name__ for error, _, _ in EXAMPLES]


def _subclasses(cls: type) -> list[type]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _subclasses(child))]


def test_every_class_has_an_example_and_a_code_of_its_own():
    ours = [cls for cls in _subclasses(TorchGraphBackendError) if cls.__module__ == errors.__name__]
    assert {type(error) for error, _, _ in EXAMPLES} == set(ours)
    assert len({cls.code for cls in ours}) == len(ours)


@pytest.mark.parametrize(("error", "code", "parts"), EXAMPLES, ids=IDS)
def test_text(error, code, parts):
    assert error.code == code
    assert str(error).startswith(f"[{code}] ")
    assert ("\n" in str(error)) <= isinstance(error, (StatsMismatch, MissingFake))
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize(("error", "code", "parts"), EXAMPLES, ids=IDS)
@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_pickle_and_copy_keep_everything(error, code, parts, copied):
    back = copied(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__
    assert back.args == error.args


def test_pickle_does_not_need_a_picklable_value():
    error = BadOption("phase", lambda: None, "'decode'")
    assert "<function" in str(pickle.loads(pickle.dumps(error)))


def test_where_and_fix_appear_only_when_known():
    assert str(TorchGraphBackendError("m")) == "[BCG001] m"
    assert str(TorchGraphBackendError("m", where="a.py:1", fix="do b")) == "[BCG001] m; at a.py:1; fix: do b"


def test_at_fills_in_the_line_once():
    error = CaptureError("op", "why").at("a.py:1").at("b.py:2")
    assert isinstance(error, CaptureError)
    assert error.where == "a.py:1"


def test_builtin_bases_users_catch():
    builtin = {
        type(error): (isinstance(error, ValueError), isinstance(error, RuntimeError)) for error, _, _ in EXAMPLES
    }
    assert {cls for cls, (value, _) in builtin.items() if value} == {UnknownOption, BadOption, BadBuckets}
    assert {cls for cls, (_, runtime) in builtin.items() if runtime} == {ReplayError, CaptureError}


def test_strict_mode_error_carries_the_reason_and_has_a_fix():
    assert StrictModeError(REASON).reason is REASON
    text = str(StrictModeError(Reason("grad")))
    assert "fix: call the model under torch.no_grad() or torch.inference_mode(); or set strict=False" in text


def test_a_stats_mismatch_is_an_assertion_and_shows_the_stats_below():
    error = StatsMismatch(["replays: expected 3, got 2", "eager: expected 0, got 1"], "the\nstats")
    assert isinstance(error, AssertionError)
    first, *rest = str(error).splitlines()
    assert "replays: expected 3, got 2; eager: expected 0, got 1" in first
    assert rest == ["the", "stats"]


def test_unknown_option_in_a_scope():
    error = UnknownOption("max_b", ["backend", "max_bs", "bs"], scope="decode")
    assert error.nearest == "decode.max_bs"
    assert "'decode.max_b'" in str(error)
    assert "decode.backend, decode.max_bs, decode.bs" in str(error)


@pytest.mark.parametrize("option", ["zzzz", 7, ""])
def test_unknown_option_without_a_neighbour_suggests_none(option):
    error = UnknownOption(option, ["buckets", "padding"])
    assert error.nearest is None
    assert "did you mean" not in str(error)
    assert "buckets, padding" in str(error)


def test_nearest_overlooks_case():
    assert nearest("MAX-SIZE", ["max_recordings", "max_size"]) == "max_size"


def test_long_values_are_cut():
    text = str(BadOption("phase", "x" * 10_000, "'decode'"))
    assert len(text) < 300
    assert re.search(r"'x+\.\.\.x+'", text)
