"""Config: parsing, refusals that name the option, round trips, and which ladder serves which symbol."""

from __future__ import annotations

import dataclasses
import json
import operator
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from torch_graph_backend.buckets import decode_ladder, default_ladder, prefill_ladder
from torch_graph_backend.config import DEFAULT_MAX_BS, Config, bucket_keys
from torch_graph_backend.errors import BadBuckets, BadOption, UnknownOption
from torch_graph_backend.policies import GraphSlot, PaddingPolicy

IDS = "L['input_ids'].size()"
TOP = [f.name for f in dataclasses.fields(Config) if f.name != "named_buckets"]
PHASE = dict.fromkeys(("decode", "prefill"), ("backend", "max_bs", "bs"))


def test_defaults():
    config = Config.parse(None)
    assert config == Config() == Config.parse({}) == Config.parse({}, "default")
    assert (config.buckets, config.named_buckets, config.max_size, config.padding) == (None, (), 8192, "buckets")
    assert (config.max_recordings, config.min_segment_kernels) == (64, 2)
    assert (config.decode.backend, config.prefill.backend) == ("full", "breakable")
    assert (config.enabled, config.strict, config.outputs, config.record) == (True, False, "safe", "second")
    assert (config.phase, config.break_ops, config.active) == (None, (), None)


def test_every_option_is_read():
    given_ = {
        "buckets": [8, 4, 8],
        "max_size": 100,
        "padding": "exact",
        "max_recordings": 5,
        "decode": {"backend": "breakable", "max_bs": 32, "bs": [64, 32, 16]},
        "prefill": {"backend": "full", "max_bs": 7},
        "break_ops": ["ns::op", torch.ops.aten.mm.default, operator.add, "ns::op"],
        "min_segment_kernels": 1,
        "enabled": False,
        "strict": True,
        "outputs": "view",
        "max_bytes": 2**30,
        "verify_memory": True,
        "record": "never",
        "progress": True,
        "audit": "every:7",
        "trash_rows": {"cache": 0, "other": 3},
        "slots": {"lens": {"padding": "FILL_SENTINEL", "pad_value": 1}},
    }
    config = Config.parse(given_)
    assert config.buckets == (4, 8)
    assert (config.max_size, config.padding, config.max_recordings, config.min_segment_kernels) == (100, "exact", 5, 1)
    assert (config.decode.backend, config.decode.max_bs, config.decode.bs) == ("breakable", 32, (16, 32))
    assert (config.prefill.backend, config.prefill.max_bs, config.prefill.bs) == ("full", 7, None)
    assert config.break_ops == ("ns::op", torch.ops.aten.mm.default, operator.add)
    assert config.progress is True
    assert (config.audit, config.trash_rows) == ("every:7", (("cache", 0), ("other", 3)))
    assert config.slots == (GraphSlot("lens", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=1),)
    assert (config.outputs, config.max_bytes, config.verify_memory) == ("view", 2**30, True)
    assert (config.enabled, config.strict, config.record) == (False, True, "never")
    assert Config.parse({"phase": "prefill"}).active == Config().prefill
    assert Config.parse({"phase": "decode"}).active == Config().decode


def test_parse_leaves_the_options_alone_and_the_config_is_immutable():
    options = {"buckets": {"x": [8, 4]}, "decode": {"bs": [2, 1]}}
    before = json.dumps(options)
    config = Config.parse(options)
    assert json.dumps(options) == before
    options["buckets"]["x"].append(99)
    assert config.ladder_for("L['x']").sizes == (4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = True
    assert hash(config) == hash(Config.parse({"buckets": {"x": [8, 4]}, "decode": {"bs": [2, 1]}}))


def test_options_of_torch_itself_are_ignored():
    assert Config.parse({"guard_filter_fn": len, "use_aoti": True}) == Config()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "", 1])
def test_mode_is_refused(mode):
    with pytest.raises(BadOption, match=r"'mode' is .*fix: .*options=") as caught:
        Config.parse(None, mode)
    assert caught.value.option == "mode"


BAD = [
    *(("max_size", value) for value in (0, -1, True, 8.0, "8", None)),
    *(("max_recordings", value) for value in (0, False, "64")),
    *(("min_segment_kernels", value) for value in (0, True, 1.5)),
    *(("padding", value) for value in ("none", None, True, ["exact"])),
    *(("phase", value) for value in ("extend", 1, ["decode"])),
    *(("enabled", value) for value in (1, 0, None, "yes")),
    *(("strict", value) for value in (1, None, "False")),
    *(("outputs", value) for value in ("views", None)),
    *(("record", value) for value in ("first", True, None)),
    *(("break_ops", value) for value in ("ns::op", [1], [""], None, {"ns::op": 1})),
    *(("decode", value) for value in (None, "full", [("bs", [1])])),
    *(("prefill", value) for value in (None, 4096)),
    ("buckets", {"": [1]}),
    ("buckets", {3: [1]}),
    ("buckets", {"input_ids:-1": [1]}),
    *(("decode.backend", value) for value in ("piecewise", None, 1)),
    *(("decode.max_bs", value) for value in (0, True, "8", 8.5)),
    *(("prefill.max_bs", value) for value in (-1, [1])),
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_a_bad_value_is_refused_by_name(option, value):
    scope, _, leaf = option.rpartition(".")
    with pytest.raises(BadOption) as caught:
        Config.parse({scope: {leaf: value}} if scope else {option: value})
    assert caught.value.option == option
    assert option in str(caught.value)
    assert caught.value.accepted


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"buckets": []}, "buckets", "[]"),
        ({"buckets": [4, 0]}, "buckets", "0"),
        ({"buckets": 8}, "buckets", "8"),
        ({"buckets": {"x": [True]}}, "buckets['x']", "True"),
        ({"buckets": {"x": 8}}, "buckets['x']", "8"),
        ({"decode": {"bs": [1, -2]}}, "decode.bs", "-2"),
        ({"prefill": {"bs": [64, 32], "max_bs": 16}}, "prefill.bs", "32"),
    ],
)
def test_bad_buckets_are_refused_by_name_and_value(options, name, value):
    with pytest.raises(BadBuckets) as caught:
        Config.parse(options)
    assert (caught.value.name, caught.value.value) == (name, value)


@pytest.mark.parametrize("options", ["strict", 5, [("strict", True)]])
def test_options_must_be_a_dict(options):
    with pytest.raises(BadOption, match="'options'"):
        Config.parse(options)


def test_a_list_of_buckets_excludes_a_phase():
    with pytest.raises(BadOption, match=r"'phase'.*decode=\{'bs'"):
        Config.parse({"buckets": [1, 2], "phase": "decode"})
    Config.parse({"buckets": {"x": [1, 2]}, "phase": "decode"})


def test_a_removed_backend_names_its_successor():
    with pytest.raises(BadOption, match=r"fix: use 'breakable'"):
        Config.parse({"prefill": {"backend": "tc_piecewise"}})


def _edited(name: str, at: int, kind: str, letter: str) -> str:
    """``name`` with one typing error at position ``at``."""
    at %= len(name)
    if kind == "delete":
        return name[:at] + name[at + 1 :]
    if kind == "double":
        return name[: at + 1] + name[at:]
    if kind == "swap":
        return name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    return name[:at] + letter + name[at + 1 :]


EDITS = st.tuples(
    st.integers(0, 50), st.sampled_from(["delete", "double", "swap", "replace"]), st.sampled_from("eqxz_")
)


@given(st.sampled_from(TOP), EDITS)
def test_a_misspelt_option_is_answered_with_the_right_one(name, edit):
    typed = _edited(name, *edit)
    assume(typed not in TOP)
    with pytest.raises(UnknownOption) as caught:
        Config.parse({typed: 1})
    assert caught.value.nearest == name
    assert f"did you mean '{name}'?" in str(caught.value)
    assert set(caught.value.valid) == set(TOP)


@given(st.sampled_from([(phase, name) for phase in PHASE for name in PHASE[phase] if len(name) > 2]), EDITS)
def test_a_misspelt_phase_option_is_answered_with_the_right_one(option, edit):
    phase, name = option
    typed = _edited(name, *edit)
    assume(typed not in PHASE[phase])
    with pytest.raises(UnknownOption) as caught:
        Config.parse({phase: {typed: 1}})
    assert caught.value.nearest == f"{phase}.{name}"
    assert caught.value.option == f"{phase}.{typed}"


def test_an_option_in_the_wrong_dict_is_answered_with_its_place():
    with pytest.raises(UnknownOption, match=r"did you mean 'decode.max_bs' or 'prefill.max_bs'\?"):
        Config.parse({"max_bs": 8})
    with pytest.raises(UnknownOption, match=r"did you mean 'strict'\?"):
        Config.parse({"decode": {"strict": True}})
    with pytest.raises(UnknownOption, match="unknown option '3'"):
        Config.parse({3: 1})


def _typed_error(options):
    with pytest.raises(UnknownOption) as caught:
        Config.parse(options)
    return caught.value


def test_an_internal_field_is_no_option():
    assert _typed_error({"named_buckets": ()}).nearest == "buckets"


SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=6)
COUNT = st.integers(1, 10_000)
BACKEND = st.sampled_from(["full", "breakable", "disabled"])


def _phase_options(phase):
    counts = {name: COUNT for name in PHASE[phase] if name not in ("backend", "bs", "max_bs")}
    # max_bs is at least every size of bs: what it cuts off is tested by example.
    return st.fixed_dictionaries(
        {}, optional={"backend": BACKEND, "bs": SIZES, "max_bs": st.integers(500, 900), **counts}
    )


COMMON = {
    "max_size": COUNT,
    "padding": st.sampled_from(["buckets", "exact"]),
    "max_recordings": COUNT,
    "decode": _phase_options("decode"),
    "prefill": _phase_options("prefill"),
    "break_ops": st.lists(st.sampled_from(["a::b", "c::d", operator.add]), max_size=3),
    "min_segment_kernels": COUNT,
    "enabled": st.booleans(),
    "strict": st.booleans(),
    "outputs": st.sampled_from(["safe", "view"]),
    "max_bytes": st.none() | st.integers(1, 2**40),
    "verify_memory": st.booleans(),
    "record": st.sampled_from(["second", "never"]),
    "audit": st.sampled_from([None, "off", "capture", "every:1", "every:1000"]),
    "trash_rows": st.dictionaries(st.sampled_from(["cache", "x"]), st.integers(0, 99)),
}
NAMED = st.dictionaries(st.sampled_from(["x", "x:1", "y:0", f"{IDS}[1]"]), SIZES, max_size=3)
OPTIONS = st.one_of(
    st.fixed_dictionaries({}, optional={**COMMON, "buckets": st.none() | SIZES}),
    st.fixed_dictionaries(
        {}, optional={**COMMON, "buckets": NAMED, "phase": st.sampled_from(["decode", "prefill", None])}
    ),
)


@given(OPTIONS)
def test_to_dict_round_trips_and_holds_differences_only(options):
    config = Config.parse(options)
    emitted = config.to_dict()
    assert Config.parse(emitted) == config
    assert emitted.keys() <= options.keys()
    for name in emitted:
        assert Config.parse({k: v for k, v in emitted.items() if k != name}) != config


def test_to_dict_examples():
    assert Config().to_dict() == {}
    assert Config.parse({"strict": False, "decode": {"backend": "full"}}).to_dict() == {}
    options = {"buckets": {"x:1": [4, 8]}, "prefill": {"bs": [16]}, "break_ops": ["a::b"], "phase": "prefill"}
    assert Config.parse(options).to_dict() == options
    assert json.loads(json.dumps(Config.parse(options).to_dict())) == options


def test_default_ladders_fit_the_default_cap_on_recordings():
    cap = Config().max_recordings
    assert len(Config().ladder_for(None).sizes) <= cap
    for phase, largest in DEFAULT_MAX_BS.items():
        ladder = Config.parse({"phase": phase}).ladder_for(None)
        assert ladder.largest == largest
        assert len(ladder.sizes) <= cap


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, default_ladder(8192)),
        ({"max_size": 100}, default_ladder(100)),
        ({"buckets": [8, 4]}, (4, 8)),
        ({"phase": "decode"}, decode_ladder(256)),
        ({"phase": "prefill"}, prefill_ladder(4096)),
        ({"phase": "decode", "decode": {"max_bs": 20}, "prefill": {"max_bs": 9}}, decode_ladder(20)),
        ({"phase": "prefill", "prefill": {"max_bs": 100}, "decode": {"bs": [3]}}, prefill_ladder(100)),
        ({"phase": "decode", "decode": {"bs": [3, 1]}}, (1, 3)),
        ({"phase": "decode", "decode": {"bs": [3, 1, 9], "max_bs": 5}}, (1, 3)),
        ({"buckets": {"other": [7]}}, default_ladder(8192)),
        ({"buckets": {"other": [7]}, "phase": "decode"}, decode_ladder(256)),
        ({"buckets": {"input_ids": [7]}, "phase": "decode"}, (7,)),
    ],
)
def test_ladder_for(options, sizes):
    ladder = Config.parse(options).ladder_for(f"{IDS}[1]")
    assert ladder.sizes == sizes
    assert not ladder.exact


def test_exact_padding_serves_exact_sizes_only():
    assert [Config.parse({"padding": "exact"}).ladder_for(None).pick(n) for n in (0, 1, 77, 8192, 8193)] == [
        *(None, 1, 77, 8192, None)
    ]
    listed = Config.parse({"padding": "exact", "buckets": [4, 8]}).ladder_for(None)
    assert [listed.pick(n) for n in (3, 4, 5, 8)] == [None, 4, None, 8]
    named = Config.parse({"padding": "exact", "buckets": {"x": [4, 8]}}).ladder_for("L['x']")
    assert [named.pick(n) for n in (3, 4)] == [None, 4]
    phase = Config.parse({"padding": "exact", "phase": "decode", "decode": {"max_bs": 6}}).ladder_for(None)
    assert [phase.pick(n) for n in (3, 5, 6, 7)] == [3, 5, 6, None]
    chosen = Config.parse({"padding": "exact", "phase": "decode", "decode": {"bs": [2, 6]}}).ladder_for(None)
    assert [chosen.pick(n) for n in (2, 3, 6)] == [2, None, 6]


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("L['x'].size()[1]", ["L['x'].size()[1]", "x:1", "x"]),
        ("L['n']", ["L['n']", "n"]),
        ("L['args'][0].size()[0]", ["L['args'][0].size()[0]", "args:0", "args"]),
        ("L['kwargs']['y'].size()[0]", ["L['kwargs']['y'].size()[0]", "y:0", "kwargs:0", "y", "kwargs"]),
        ("L['obj'].t.size()[12]", ["L['obj'].t.size()[12]", "t:12", "obj:12", "t", "obj"]),
        ("s0", ["s0"]),
    ],
)
def test_bucket_keys(source, keys):
    assert bucket_keys(source) == keys


def test_the_most_specific_key_decides():
    options = {"buckets": {"input_ids": [1], "input_ids:1": [2], f"{IDS}[2]": [3], "input_ids:2": [4]}}
    config = Config.parse(options)
    assert [config.ladder_for(f"{IDS}[{dim}]").sizes for dim in range(3)] == [(1,), (2,), (3,)]
    assert config.matching_key(f"{IDS}[2]") == f"{IDS}[2]"
    assert config.matching_key("L['input_ids_2'].size()[1]") is None
    assert config.matching_key(None) is None


def test_unmatched_reports_entries_without_effect():
    options = {"buckets": {"input_ids": [1], "input_ids:1": [2], "mask": [3]}}
    config = Config.parse(options)
    assert config.unmatched([]) == ["input_ids", "input_ids:1", "mask"]
    assert config.unmatched([f"{IDS}[1]", None]) == ["input_ids", "mask"]
    assert config.unmatched([f"{IDS}[1]", f"{IDS}[0]", "L['mask'].size()[0]"]) == []
    assert Config.parse({"buckets": [1]}).unmatched(["L['x'].size()[0]"]) == []


def test_sources_have_the_form_that_dynamo_gives_them():
    seen = []

    def backend(gm, example_inputs, **kwargs):
        for node in gm.graph.find_nodes(op="placeholder"):
            source = node._dynamo_source.name
            seen.append(source() if callable(source) else source)
        return gm.forward

    def f(x, batch):
        return x.sum() + batch["ids"].sum()

    torch._dynamo.reset()
    torch.compile(f, backend=backend, dynamic=True)(torch.ones(7, 9), {"ids": torch.ones(5)})
    torch._dynamo.reset()
    config = Config.parse({"buckets": {"x:1": [16], "ids": [8]}})
    assert config.unmatched(seen) == []
    largest = {name: config.ladder_for(name).largest for name in seen if re.search(r"size\(\)", name)}
    assert largest == {"L['x'].size()[0]": 8192, "L['x'].size()[1]": 16, "L['batch']['ids'].size()[0]": 8}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"enabled": False}, "enabled"),
        ({"record": "never"}, "record"),
        ({"phase": "decode", "decode": {"backend": "disabled"}}, "'decode'"),
    ],
)
def test_off_reason_names_the_option(options, word):
    reason = Config.parse(options).off_reason()
    assert reason.code == "disabled"
    assert word in reason.text
    assert reason.fix


@pytest.mark.parametrize("options", [{}, {"decode": {"backend": "disabled"}}, {"phase": "prefill"}])
def test_nothing_is_off_by_default(options):
    assert Config.parse(options).off_reason() is None
