"""ShapeKey: identity, canonical form, text, and recording order."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_graph_backend.shape_key import ShapeKey, recording_order

SIZES = st.lists(st.integers(1, 64), max_size=3)
KEYS = st.builds(
    lambda sizes, pinned, stream, variant, attention: ShapeKey(
        ShapeKey.of(sizes).size, stream, variant, attention, tuple(pinned)
    ),
    SIZES,
    SIZES,
    st.none() | st.integers(0, 3),
    st.none() | st.sampled_from(["", "lora", "nolora"]),
    st.none() | st.sampled_from(["", "sparse", "dense"]),
)


def test_every_field_distinguishes():
    keys = {
        ShapeKey(8),
        ShapeKey(16),
        ShapeKey((8, 16)),
        ShapeKey(8, stream_idx=0),
        ShapeKey(8, variant_label="a"),
        ShapeKey(8, attention_variant="a"),
        ShapeKey(8, pinned=(16,)),
    }
    assert len(keys) == 7
    assert ShapeKey(8, 1, "lora", "sparse", (3,)) in {ShapeKey(8, 1, "lora", "sparse", (3,))}


def test_frozen_and_picklable():
    key = ShapeKey((8, 16), pinned=(3,))
    with pytest.raises(AttributeError):
        key.size = 9
    assert pickle.loads(pickle.dumps(key)) == key


def test_of_makes_the_canonical_form():
    assert ShapeKey.of([8]) == ShapeKey(8)
    assert ShapeKey.of([8, 16], [3]) == ShapeKey((8, 16), pinned=(3,))
    assert ShapeKey.of([]) == ShapeKey(())
    assert [ShapeKey.of(sizes).sizes for sizes in ([], [8], [8, 16])] == [(), (8,), (8, 16)]


def test_text():
    assert str(ShapeKey(8)) == "8"
    assert str(ShapeKey((8, 128))) == "8x128"
    assert str(ShapeKey(())) == "static"
    text = str(ShapeKey((8, 128), 1, "lora", "sparse", (2048, 4)))
    assert text == "8x128 pinned=2048x4 stream=1 variant=lora attention=sparse"


@given(KEYS, KEYS)
def test_text_is_as_distinct_as_the_keys(a, b):
    assert (str(a) == str(b)) == (a == b)


def test_recording_order_examples():
    keys = [ShapeKey(8), ShapeKey((4, 64)), ShapeKey(32), ShapeKey(32, pinned=(9,)), ShapeKey((64, 4))]
    expected = [ShapeKey((64, 4)), ShapeKey((4, 64)), ShapeKey(32, pinned=(9,)), ShapeKey(32), ShapeKey(8)]
    assert recording_order(keys) == expected


@given(st.lists(KEYS, max_size=12), st.randoms(use_true_random=False))
def test_recording_order_is_largest_first_and_independent_of_the_input_order(keys, random):
    ordered = recording_order(keys)
    volumes = [math.prod(key.sizes) for key in ordered]
    assert volumes == sorted(volumes, reverse=True)
    shuffled = list(keys)
    random.shuffle(shuffled)
    assert recording_order(shuffled) == ordered


def test_settings_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of them is seen when it changes, and when it changes back."""
    # torch's own test helpers, which other tests import, forbid setting them.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    from torch_graph_backend.passes.torch_api import cuda_settings

    b = torch.backends
    places = [(b.cudnn, "enabled"), (b.cudnn, "deterministic"), (b.cuda.matmul, "allow_fp16_accumulation")]
    places += [(b.cudnn.conv, "fp32_precision"), (b.cudnn.rnn, "fp32_precision"), (b.cudnn, "allow_tf32")]
    for owner, name in places:
        before, old = cuda_settings(), getattr(owner, name)
        setattr(owner, name, not old if isinstance(old, bool) else "ieee" if old != "ieee" else "tf32")
        try:
            assert cuda_settings() != before, name
        finally:
            setattr(owner, name, old)
        assert name == "allow_tf32" or cuda_settings() == before, name
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        enable = getattr(b.cuda, f"enable_{kind}_sdp")
        before, old = cuda_settings(), getattr(b.cuda, f"{kind}_sdp_enabled")()
        enable(not old)
        try:
            assert cuda_settings() != before, kind
        finally:
            enable(old)
        assert cuda_settings() == before, kind
