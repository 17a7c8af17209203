"""Codecs: the shipped suite on every one of them, their formats by hand, and their way through an entry."""

from __future__ import annotations

import pytest
import torch

from blend.chunk import ChunkKV
from blend.errors import StoreError
from blend.stores.codecs import CODECS, LayerSpec, Zstd, codec_by_name
from blend.stores.entry import pack, read_head
from blend.testing.codecs import CodecTests, key_like, relative, value_like

NAMES = ("none", "bf16", "fp16", "zstd", "int8", "int8+zstd", "int4", "int4+zstd", "dct", "bf16+zstd")


class Named(CodecTests):
    name = "none"

    def make(self):
        return codec_by_name(self.name)


class TestNone(Named):
    pass


class TestBFloat16(Named):
    name, error = "bf16", 0.003


class TestFloat16(Named):
    name, error = "fp16", 0.0004


class TestZstd(Named):
    name, ratio = "zstd", 1.35


class TestInt8(Named):
    name, error, ratio = "int8", 0.01, 1.9


class TestInt8Zstd(Named):
    name, error, ratio = "int8+zstd", 0.01, 1.95


class TestInt4(Named):
    name, error, ratio = "int4", 0.12, 3.5


class TestInt4Zstd(Named):
    name, error, ratio = "int4+zstd", 0.12, 3.5


class TestDct(Named):
    name, error, ratio = "dct", 0.14, 4.3


# --- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_bears_the_name_it_is_found_by(name):
    codec = codec_by_name(name)
    assert codec.name == name
    assert codec.lossless == (name in ("none", "zstd"))


@pytest.mark.parametrize("name", ["gzip", "", "+zstd", "none+zstd", "zstd+zstd", "int4+zstd+zstd", "int4+gzip"])
def test_an_unknown_codec_is_refused_and_the_known_ones_listed(name):
    with pytest.raises(StoreError, match=r"there is no codec '.*': choose from none, bf16, .*int4\+zstd"):
        codec_by_name(name)


def test_the_registry_hands_out_new_codecs():
    for name, make in CODECS.items():
        assert make().name == name


# --- through an entry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_gives_back_what_the_codec_gives(name, dtype):
    codec = codec_by_name(name)
    layers = tuple((x.to(dtype), y.to(dtype)) for x, y in ((key_like(), value_like()), (value_like(), key_like(1))))
    kv = ChunkKV("key", "model", tuple(range(130)), (1, 2), 140, layers)
    packed = pack(kv, codec)
    head = read_head(packed.head, "key")
    assert head.codec.name == name
    back = head.whole(lambda layer: packed.layers[layer])
    for layer, found in zip(layers, back.layers, strict=True):
        direct = codec.decode(codec.encode(*layer), LayerSpec.of(*layer))
        assert all(torch.equal(x, y) for x, y in zip(direct, found, strict=True))


# --- formats by hand ----------------------------------------------------------------------------------


def test_int4_by_hand():
    """Channel 0 runs from 0 to 15, channel 1 from -1 to 0.5 in steps of 0.1; values the other way round."""
    ramp = torch.arange(16.0)
    keys = torch.stack([ramp, ramp / 10 - 1], 1)[None]
    parts = codec_by_name("int4").encode(keys, keys.mT.contiguous())
    assert parts["key.codes"].tolist() == [low | low + 1 << 4 for low in range(0, 16, 2)] * 2
    assert parts["key.scales"].shape == (2, 2, 1)
    assert parts["key.scales"].flatten().tolist() == pytest.approx([0, -1, 1, 0.1], rel=2**-8)
    assert torch.equal(parts["key.codes"], parts["value.codes"])


def test_the_axes_are_those_of_kivi():
    """A large channel does not disturb the other keys, nor a large row the other values."""
    keys, values = key_like(), value_like()
    keys[:, :, 3] *= 1000
    values[:, 9, :] *= 1000
    found = codec_by_name("int4")
    back = found.decode(found.encode(keys, values), LayerSpec.of(keys, values))
    others = [i for i in range(64) if i != 3], [i for i in range(130) if i != 9]
    assert relative(keys[:, :, others[0]], back[0][:, :, others[0]]) < 0.12
    assert relative(values[:, others[1]], back[1][:, others[1]]) < 0.12


def test_integers_are_at_most_a_spacing_off():
    for name, levels in (("int8", 255), ("int4", 15)):
        x = value_like().bfloat16()
        codec = codec_by_name(name)
        _, back = codec.decode(codec.encode(x, x), LayerSpec.of(x, x))
        rows, found = (y.float().transpose(0, 1).flatten(1) for y in (x, back))
        spacing = (rows.amax(1) - rows.amin(1)) / levels
        rounding = rows.abs().amax(1) * 2**-8  # the result is bf16 again
        assert ((rows - found).abs().amax(1) <= spacing + rounding).all(), name


def test_dct_needs_fewer_bytes_than_int4_for_better_keys():
    def measured(name):
        codec, layer = codec_by_name(name), (key_like(4).bfloat16(), value_like(4).bfloat16())
        parts = codec.encode(*layer)
        back = codec.decode(parts, LayerSpec.of(*layer))
        return sum(part.nbytes for part in parts.values()), *map(relative, layer, back)

    dct, int4 = measured("dct"), measured("int4")
    assert dct[0] < 0.85 * int4[0]
    assert dct[1] < int4[1]
    assert dct[2] < 1.5 * int4[2], "values, whose errors count less"


def test_dct_knows_slow_waves():
    """Means turned slowly take next to no bytes: the same noise without them is hardly smaller."""
    noise = torch.randn(2, 130, 64, generator=torch.Generator().manual_seed(0))
    slow = 5 * torch.sin(torch.arange(130) / 20)[:, None] + 10
    codec = codec_by_name("dct")
    plain, waved = (codec.encode(x, x)["key.stream"].nbytes for x in (noise, noise + slow))
    assert waved < 1.15 * plain


def test_large_coefficients_are_kept_apart_and_come_back():
    keys = torch.randn(1, 64, 4, generator=torch.Generator().manual_seed(0))
    keys[0, :, 0] += 200  # a mean of 200, gathered in one coefficient of 1600
    codec = codec_by_name("dct")
    back, _ = codec.decode(codec.encode(keys, keys), LayerSpec.of(keys, keys))
    assert relative(keys[..., 1:], back[..., 1:]) < 0.4
    assert (back[..., 0] - keys[..., 0]).abs().max() < 1.5


def test_a_cast_beyond_its_range_is_not_made():
    big = torch.full((1, 4, 4), 70000.0)
    parts = codec_by_name("fp16").encode(big, torch.ones(1, 4, 4))
    assert parts["key"].dtype == torch.float32, "stored as it is"
    assert parts["value.cast"].dtype == torch.float16


def test_a_side_that_cannot_be_coded_does_not_keep_the_other_from_it():
    keys, values = key_like(), value_like()
    keys[0, 0, 0] = torch.nan
    for name in ("int8", "int4", "dct", "fp16"):
        parts = codec_by_name(name).encode(keys, values)
        assert "key" in parts, name
        assert "value" not in parts, name


def test_numbers_that_are_no_floats_are_stored_as_they_are():
    keys = torch.arange(12, dtype=torch.int8).reshape(1, 3, 4)
    codec = codec_by_name("int4+zstd")
    back = codec.decode(codec.encode(keys, keys), LayerSpec.of(keys, keys))
    assert torch.equal(back[0], keys)


def test_zstd_takes_planes_apart():
    """The exponents of numbers of one size are alike, and the second byte of fp32 that was bf16 is zero."""
    x = torch.randn(2, 130, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide, narrow = (sum(p.nbytes for p in Zstd().encode(y, y).values()) for y in (x.float(), x))
    assert narrow < 0.75 * 2 * x.nbytes
    assert wide < narrow * 1.02
