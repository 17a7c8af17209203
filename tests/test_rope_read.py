"""Reading a rotation off a model: what is refused, and with which words."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rope
from blend import Blender
from blend.testing.tiny import FAMILIES, REFUSED, tiny_model
from rope import BoundedTable, FrequencyTable, LayerRotation, RegimeTable, SampledTable, UnsupportedRotation, read_rope
from rope.probe import LayerSample, fit_layer, fit_rope

MESSAGES = {
    "gpt2": "keys and values both depend on the position",
    "opt": "keys and values both depend on the position",
    "gpt_bigcode": "keys and values both depend on the position",
    "qwen3_next": "recurrent or convolutional layers",
    "lfm2": "recurrent or convolutional layers",
    "jamba": "recurrent or convolutional layers",
    "bamba": "recurrent or convolutional layers",
    "mamba": "recurrent or convolutional layers",
    "minimax": "recurrent or convolutional layers",
    "deepseek_v32": "indexed attention",
}


def test_this_is_our_rope():
    """PyPI has another package of this name."""
    assert Path(rope.__file__).resolve().is_relative_to(Path(__file__).resolve().parent.parent)
    with pytest.raises(PackageNotFoundError):
        version("rope")


def test_every_refused_family_has_its_message():
    assert set(MESSAGES) == set(REFUSED)


@pytest.mark.parametrize(("name", "message"), MESSAGES.items())
def test_refused_families(name, message):
    model = tiny_model(name)
    with pytest.raises(UnsupportedRotation, match=message) as refusal:
        read_rope(model)
    assert "Use full prefill" in str(refusal.value) or "Use a model with rotary" in str(refusal.value)


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next", "deepseek_v32"])
def test_a_refused_model_is_left_as_it_was(name):
    model = tiny_model(name)
    before = str(model.config._attn_implementation)
    with pytest.raises(UnsupportedRotation):
        Blender(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "phi3_longrope", "llama_dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_cast_after_loading_is_refused(name, dtype):
    model = tiny_model(name).to(dtype)
    with pytest.raises(
        UnsupportedRotation, match=rf"inv_freq is {dtype}.*cast after loading.*from_pretrained\(.*dtype="
    ):
        read_rope(model)


def test_a_model_loaded_in_bf16_is_not():
    assert read_rope(tiny_model("llama", torch.bfloat16)).error < 3e-2


def test_reading_leaves_the_model_as_it_was():
    model = tiny_model("llama_dynamic")
    before = {name: x.clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
    read_rope(model)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(torch.equal(before[name], x) for name, x in after.items())


def test_a_digest_tells_rotations_apart():
    """Entries of a model with other angles must not be found."""
    kinds = ("llama", "llama_linear", "llama_dynamic", "llama_yarn", "llama_llama3", "gpt_neox", "gptj", "smollm3")
    digests = {read_rope(tiny_model(name)).digest() for name in kinds}
    assert len(digests) == len(kinds)
    assert read_rope(tiny_model("llama")).digest() == read_rope(tiny_model("llama", seed=5)).digest()


# --- the fit, on keys made up here -------------------------------------------------------------------


def sample(rotation, table, noise=0.0, dim=16, seed=0):
    """Keys and values of 16 tokens at positions 0 and 37, turned with complex numbers in fp64."""
    generator = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(16, 2, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    gain = torch.ones(dim, dtype=torch.float64) if rotation.gain_D is None else rotation.gain_D.double()

    def at(position):
        angle_F = table.angles(torch.tensor([position]), position + 1)[0] * rotation.sign
        width, y = angle_F.numel(), x / gain
        first, second = (slice(0, width), slice(width, 2 * width)) if rotation.pairing == "half" else (
            slice(0, 2 * width, 2), slice(1, 2 * width, 2)
        )  # fmt: skip
        pairs = torch.complex(y[..., first], y[..., second]) * torch.polar(torch.ones_like(angle_F), angle_F)
        y = y.clone()
        y[..., first], y[..., second] = pairs.real, pairs.imag
        return (y * gain).float()

    wobble = noise * torch.randn(x.shape, generator=generator)
    turned, still = (at(0), at(37) + wobble), (other.float(), other.float())
    gains = [] if rotation.gain_D is None else [torch.ones(dim), rotation.gain_D]
    return LayerSample(*((turned, still) if rotation.slot == "key" else (still, turned)), gains)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    slot=st.sampled_from(["key", "value"]),
    pairing=st.sampled_from(["half", "interleaved"]),
    sign=st.sampled_from([1, -1]),
    width=st.integers(2, 8),
    theta=st.sampled_from([100.0, 10_000.0, 1e6]),
    gain=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_rotation_is_recognised(slot, pairing, sign, width, theta, gain, seed):
    table = FrequencyTable(theta ** -(torch.arange(width) / width))
    decoys = {"slower": FrequencyTable(table.inv_freq_F / 3), "wider": FrequencyTable(torch.rand(9))}
    gain_D = 0.5 + torch.rand(16, generator=torch.Generator().manual_seed(seed)) if gain else None
    wanted = LayerRotation(slot, pairing, "right", sign, gain_D)
    found, error = fit_layer(sample(wanted, table, seed=seed), {**decoys, "right": table}, (0, 37))
    assert error < 2e-6
    assert found.describe() == wanted.describe()
    assert gain_D is None or torch.equal(found.gain_D, gain_D)


def test_what_does_not_move_has_no_rotation():
    table = FrequencyTable(torch.zeros(8))
    found, error = fit_layer(sample(LayerRotation("key", "half", "t"), table), {"t": table}, (0, 37))
    assert found is None
    assert error == 0.0


def test_what_is_no_rotation_is_refused_with_its_misfit():
    table = FrequencyTable(torch.rand(8, generator=torch.Generator().manual_seed(0)))
    noisy = sample(LayerRotation("key", "half", "t"), table, noise=0.01)
    with pytest.raises(UnsupportedRotation, match=r"layer 3: no rotation explains .*keys.*tables tried: t"):
        fit_layer(noisy, {"t": table}, (0, 37), index=3)
    with pytest.raises(UnsupportedRotation, match="tables tried: none"):
        fit_layer(noisy, {}, (0, 37))


def test_two_moving_slots_are_refused():
    table = FrequencyTable(torch.rand(8))
    one = sample(LayerRotation("key", "half", "t"), table)
    with pytest.raises(UnsupportedRotation, match="both depend on the position"):
        fit_rope([LayerSample(one.keys, one.keys)], {"t": table}, (0, 37))


# --- angle tables -------------------------------------------------------------------------------------


def test_angles_are_rounded_as_the_model_rounds_them():
    inv_freq = 10_000.0 ** -(torch.arange(8) / 8)
    positions = torch.tensor([0, 1, 4097, 100_003])
    angles = FrequencyTable(inv_freq).angles(positions, 1)
    assert angles.dtype == torch.float64
    assert torch.equal(angles, (positions.float()[:, None] * inv_freq).double())
    assert not torch.equal(angles, positions.double()[:, None] * inv_freq.double()), (
        "rounding shows, so the test can fail"
    )


def test_longrope_switches_behind_its_original_length():
    short, long = FrequencyTable(torch.ones(2)), FrequencyTable(torch.full((2,), 0.5))
    table = RegimeTable(short, long, switch=64)
    assert table.angles(torch.tensor([10]), 64).tolist() == [[10.0, 10.0]]
    assert table.angles(torch.tensor([10]), 65).tolist() == [[5.0, 5.0]]


def test_digests_differ_with_every_number():
    a, b = FrequencyTable(torch.ones(2)), FrequencyTable(torch.full((2,), 0.5))
    tables = [a, b, RegimeTable(a, b, 64), RegimeTable(b, a, 64), RegimeTable(a, b, 65)]
    tables += [BoundedTable(a, 64), BoundedTable(a, 65), SampledTable(torch.ones(2, 2, dtype=torch.float64))]
    assert len({table.digest() for table in tables}) == len(tables)


def test_the_families_are_many():
    assert len(FAMILIES) >= 40
