"""A moved key is the key that the model computes there: every RoPE type, every layer, every tiny family."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from blend.testing.prompts import tiny_ids
from blend.testing.tiny import FAMILIES, tiny_model
from rope import Move, UnsupportedRotation, read_rope

TOKENS = 16
# One of each way in which a cached tensor can carry its position.
KINDS = {
    "llama": "key:half:inv_freq x4",
    "llama_linear": "key:half:inv_freq x4",
    "llama_yarn": "key:half:inv_freq x4",
    "llama_llama3": "key:half:inv_freq x4",
    "llama_dynamic": "key:half:inv_freq x4",
    "phi3_longrope": "key:half:inv_freq x4",
    "gpt_neox": "key:half:inv_freq x4",  # partial
    "cohere": "key:interleaved:inv_freq x4",
    "glm": "key:interleaved:inv_freq x4",  # partial and interleaved
    "gptj": "key:interleaved:embed_positions x4",  # a table of sines instead of frequencies
    "nanochat": "key:half-:inv_freq x4",  # the other way round
    "hunyuan_v1_dense": "key:half+gain:inv_freq x4",
    "deepseek_v2": "value:interleaved:inv_freq x4",  # MLA keeps the rotary part in the value slot
    "deepseek_v3_yarn": "value:half:inv_freq x4",
    "gemma3_text": "key:half:sliding_attention_inv_freq x2, key:half:full_attention_inv_freq x2",
    "gemma4_text": "key:half:sliding_attention_inv_freq x2, key:half:full_attention_inv_freq x2",  # proportional
    "smollm3": "key:half:inv_freq x2, none x2",
    "qwen2_vl": "key:half:inv_freq x4",  # M-RoPE
    "bloom": "none x4",
}


def limit_of(name):
    """Positions that the model takes without changing its frequencies."""
    return {"llama_dynamic": 255, "phi3_longrope": 64}.get(name, 512)


@torch.inference_mode()
def alone_at(model, position, tokens=TOKENS):
    """``(keys, values)`` per layer, ``[H, N, D]``: N sequences of one token at ``position``.

    Such a token sees nothing but itself, so its states do not depend on the place, at any layer.
    """
    ids = torch.tensor(tiny_ids(tokens, seed=7))[:, None]
    cache = DynamicCache()
    model(input_ids=ids, position_ids=torch.full_like(ids, position), cache=cache, use_cache=True)
    return [
        (la.keys[:, :, 0].transpose(0, 1).clone(), la.values[:, :, 0].transpose(0, 1).clone()) for la in cache.layers
    ]


@torch.inference_mode()
def sequence_at(model, position, rows=20, behind=0):
    """Layer 0 of the same ``rows`` tokens behind ``position`` others and before ``behind`` more, in one pass."""
    ids = (*tiny_ids(position, seed=1), *tiny_ids(rows, seed=2), *tiny_ids(behind, seed=3))
    cache = DynamicCache()
    model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
    layer = cache.layers[0]
    return layer.keys[0, :, position : position + rows], layer.values[0, :, position : position + rows]


def run(first, count, step=1):
    return torch.arange(first, first + count) if step else torch.full((count,), first)


def still(old, new, count=TOKENS):
    """Every row from position ``old`` to ``new``, in the shortest passes that hold them."""
    return Move(run(old, count, 0), run(new, count, 0), old + 1, new + 1)


def off(got, truth):
    """Largest difference, relative to the largest entry."""
    return float((got.float() - truth.float()).abs().max() / truth.float().abs().max())


@pytest.mark.parametrize(("name", "described"), KINDS.items())
def test_the_rotation_is_read_right(name, described):
    rope = read_rope(tiny_model(name))
    assert rope.describe() == described
    assert rope.error < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_moved_keys_are_the_keys_computed_there(name):
    """Every layer, forwards and backwards, fp32."""
    model = tiny_model(name)
    rope = read_rope(model)
    places = [p for p in (0, 1, 5, 63, 150, 255, 400, 511) if p < limit_of(name)]
    there = {place: alone_at(model, place) for place in places}
    # A sink outside the softmax lets the rounding of the scores, which do move, into the layers above.
    allowed = 1e-6 if name == "gpt_oss" else 5e-7
    for old in places:
        for new in places:
            for layer, cached in enumerate(there[old]):
                for got, truth in zip(rope.move(layer, *cached, still(old, new)), there[new][layer], strict=True):
                    assert off(got, truth) <= allowed, f"layer {layer}, {old} -> {new}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_moves_as_one(name):
    """Layer 0 of the same tokens at two places of two prompts; fp32."""
    model = tiny_model(name)
    rope = read_rope(model)
    short = name == "phi3_longrope"
    old, new, rows = (3, 40, 20) if short else (17, 140, 40)
    before, after = sequence_at(model, old, rows), sequence_at(model, new, rows)
    for a, b, p, q in ((before, after, old, new), (after, before, new, old)):
        move = Move(run(p, rows), run(q, rows), p + rows, q + rows)
        for got, truth in zip(rope.move(0, *a, move), b, strict=True):
            assert off(got, truth) <= 5e-7
    if rope.layers[0] is not None:
        slot = 0 if rope.layers[0].slot == "key" else 1
        assert off(before[slot], after[slot]) > 0.1, "the keys do move, so the test can fail"


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.endswith(("alibi", "bloom"))])
def test_in_bf16_a_move_costs_one_rounding(name):
    """Against the fp32 truth of the same weights: the error of the stored key, plus one rounding, and no more."""
    model = tiny_model(name, torch.bfloat16)
    rope = read_rope(model)
    slot = 0 if rope.layers[0].slot == "key" else 1
    places = (3, 37, 50, 17)
    cached = {p: alone_at(model, p, 64)[0] for p in places}
    model.float()  # the frequencies were fp32 before
    truth = {p: alone_at(model, p, 64)[0][slot] for p in places}
    for old, new in ((3, 37), (37, 3), (50, 17)):
        moved = rope.move(0, *cached[old], still(old, new, 64))[slot]
        assert moved.dtype == torch.bfloat16
        stored = rms(cached[old][slot].float() - truth[old])
        rounding = rms(truth[new].bfloat16().float() - truth[new])
        assert rms(moved.float() - truth[new]) <= 1.06 * (stored**2 + rounding**2) ** 0.5


def rms(x):
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize(
    ("old", "old_length", "new", "new_length"),
    [
        (0, 20, 44, 64),  # short to short, up to the very switch
        (3, 23, 45, 65),  # across it, by one row
        (100, 120, 300, 330),  # long to long
        (100, 120, 5, 25),  # back across it
        (30, 50, 30, 200),  # the same place in a longer pass is another angle
        (30, 200, 30, 50),
    ],
)
def test_longrope_across_its_switch(old, old_length, new, new_length):
    """The regime is that of the whole pass, so a key's angle depends on the length of its prompt."""
    model = tiny_model("phi3_longrope")
    rope = read_rope(model)
    assert rope.by_length
    before = sequence_at(model, old, behind=old_length - old - 20)
    after = sequence_at(model, new, behind=new_length - new - 20)
    for from_length in (old_length, torch.full((20,), old_length)):
        keys, _ = rope.move(0, *before, Move(run(old, 20), run(new, 20), from_length, new_length))
        assert off(keys, after[0]) <= 5e-7
    assert rope.same_angles(old_length, new_length) == ((old_length <= 64) == (new_length <= 64))
    if not rope.same_angles(old_length, new_length):
        wrong, _ = rope.move(0, *before, Move(run(old, 20), run(new, 20), new_length, new_length))
        assert off(wrong, after[0]) > 1e-2, "the regime matters, so the test can fail"


def test_longrope_rows_of_passes_of_different_lengths():
    """One move of rows that were cached in a short and in a long pass, as a prompt's chunks are."""
    model = tiny_model("phi3_longrope")
    rope = read_rope(model)
    first, second = sequence_at(model, 10, behind=0), sequence_at(model, 10, behind=100)
    target = sequence_at(model, 150)
    keys = torch.cat([first[0], second[0]], dim=1)
    lengths = torch.tensor([30] * 20 + [130] * 20)
    move = Move(run(10, 20).repeat(2), run(150, 20).repeat(2), lengths, 170)
    moved, _ = rope.move(0, keys, torch.zeros_like(keys), move)
    assert off(moved, target[0].repeat(1, 2, 1)) <= 5e-7


def test_dynamic_ntk_is_exact_up_to_its_limit_and_refused_beyond():
    model = tiny_model("llama_dynamic")
    rope = read_rope(model)
    limit = rope.tables["inv_freq"].limit
    assert 250 <= limit <= 256
    before, after = sequence_at(model, 3), sequence_at(model, limit - 20)
    target = run(limit - 20, 20)
    keys, _ = rope.move(0, *before, Move(run(3, 20), target, 23, limit))
    assert off(keys, after[0]) <= 5e-7
    for lengths in ((23, limit + 1), (limit + 1, 23)):
        with pytest.raises(UnsupportedRotation, match=rf"beyond {limit} rows and this pass has {limit + 1}.*yarn or"):
            rope.move(0, *before, Move(run(3, 20), target, *lengths))
    sequence_at(model, limit - 20, behind=60)  # a long call, after which the model must find back to short ones
    assert torch.equal(sequence_at(model, limit - 20)[0], after[0])


def test_dynamic_ntk_is_read_right_after_a_long_call():
    """A long call leaves other frequencies in the model's own buffer."""
    model = tiny_model("llama_dynamic")
    fresh = read_rope(model)
    sequence_at(model, 300)
    assert read_rope(model).digest() == fresh.digest()


def test_a_table_of_sines_ends_where_it_ends():
    rope = read_rope(tiny_model("gptj"))
    x = torch.randn(4, 1, 16)
    with pytest.raises(UnsupportedRotation, match="512 positions and this pass has 513"):
        rope.move(0, x, x, Move(run(0, 1), run(511, 1), 1, 513))


@pytest.mark.parametrize("name", ["llama_yarn", "ministral3", "gpt_oss", "phi3_longrope", "deepseek_v3_yarn"])
def test_attention_scaling_is_not_applied_twice(name):
    """A turn keeps the length of every rotary pair, and so of every key."""
    model = tiny_model(name)
    rope = read_rope(model)
    slot = 0 if rope.layers[0].slot == "key" else 1
    cached = alone_at(model, 3)[0]
    moved = cached
    for _ in range(10):
        moved = rope.move(0, *moved, still(3, 50))
    assert off(moved[slot].norm(dim=-1), cached[slot].norm(dim=-1)) <= 2e-6


# --- algebra of moves -------------------------------------------------------------------------------


@cache
def rope_of(name):
    return read_rope(tiny_model(name))


def random_kv(name, count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    latent = name.startswith(("deepseek", "minicpm3"))
    shapes = ((1, count, 32), (1, count, 8)) if latent else ((2, count, 16), (2, count, 16))
    if name == "gemma4_text":
        shapes = ((2, count, 32), (2, count, 32))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


places = st.integers(0, 60)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(KINDS)), start=places, middle=places, end=places, seed=st.integers(0, 99))
def test_two_moves_are_one(name, start, middle, end, seed):
    rope, kv = rope_of(name), random_kv(name, 5, seed)
    for layer in range(len(rope.layers)):
        halfway = rope.move(layer, *kv, Move(run(start, 5, 0), run(middle, 5, 0), 64, 64))
        twice = rope.move(layer, *halfway, Move(run(middle, 5, 0), run(end, 5, 0), 64, 64))
        once = rope.move(layer, *kv, Move(run(start, 5, 0), run(end, 5, 0), 64, 64))
        for a, b in zip(twice, once, strict=True):
            assert off(a, b) <= 1e-6


@settings(max_examples=25, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(KINDS)), start=places, end=places, seed=st.integers(0, 99))
def test_there_and_back(name, start, end, seed):
    rope, kv = rope_of(name), random_kv(name, 5, seed)
    there, back = (Move(run(a, 5), run(b, 5), 65, 65) for a, b in ((start, end), (end, start)))
    for layer in range(len(rope.layers)):
        for a, b in zip(rope.move(layer, *rope.move(layer, *kv, there), back), kv, strict=True):
            assert off(a, b) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_a_move_by_nothing_changes_no_bit(name, dtype):
    rope, kv = rope_of(name), random_kv(name, 12, 0, dtype)
    kv[0][0, 0, :4] = kv[1][0, 0, :4] = torch.tensor([0.0, -0.0, float("inf"), 1e-40]).to(dtype)
    for layer in range(len(rope.layers)):
        moved = rope.move(layer, *kv, Move(run(9, 12), run(9, 12), 30, 60))
        for a, b in zip(moved, kv, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert a.dtype == dtype


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_stay_keep_their_numbers_among_rows_that_move(name):
    rope, kv = rope_of(name), random_kv(name, 12, 0)
    target = run(9, 12)
    target[6:] += 20
    for layer in range(len(rope.layers)):
        for a, b in zip(rope.move(layer, *kv, Move(run(9, 12), target, 64, 64)), kv, strict=True):
            assert torch.equal(a[:, :6], b[:, :6])


@pytest.mark.parametrize("name", KINDS)
def test_moving_leaves_the_original_alone_and_turns_one_slot(name):
    rope, kv = rope_of(name), random_kv(name, 12, 0)
    before = [x.clone() for x in kv]
    for layer, rotation in enumerate(rope.layers):
        moved = rope.move(layer, *kv, Move(run(9, 12), run(33, 12), 64, 64))
        assert all(torch.equal(a, b) for a, b in zip(kv, before, strict=True))
        changed = [not torch.equal(a, b) for a, b in zip(moved, kv, strict=True)]
        assert changed == [bool(rotation and rotation.slot == slot) for slot in ("key", "value")]
        assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(moved, kv, strict=True))


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "deepseek_v2"])
def test_a_hundred_moves_from_the_stored_original_do_not_drift(name):
    """Each use starts from the stored key, so the hundredth is as exact as the first."""
    model = tiny_model(name)
    rope = read_rope(model)
    stored = alone_at(model, 11)[0]
    draw = torch.Generator().manual_seed(0)
    errors = []
    for place in torch.randint(0, 500, (100,), generator=draw).tolist():
        moved = rope.move(0, *stored, still(11, place))
        errors.append(max(off(a, b) for a, b in zip(moved, alone_at(model, place)[0], strict=True)))
    assert max(errors) <= 5e-7
    assert max(errors[50:]) <= 2 * max(errors[:50])


def test_dims_beyond_the_rotary_part_stay():
    rope, (keys, values) = rope_of("gpt_neox"), random_kv("gpt_neox", 12, 0)
    width = rope.tables["inv_freq"].width
    assert 2 * width < keys.shape[-1]
    moved, _ = rope.move(0, keys, values, Move(run(9, 12), run(33, 12), 64, 64))
    assert torch.equal(moved[..., 2 * width :], keys[..., 2 * width :])
    assert not torch.equal(moved[..., : 2 * width], keys[..., : 2 * width])


def test_turns_are_shared_by_the_layers_of_a_table():
    move = Move(run(0, 3), run(40, 3), 64, 64)
    assert set(rope_of("gemma3_text").turns(move)) == {"sliding_attention_inv_freq", "full_attention_inv_freq"}
    assert set(rope_of("nanochat").turns(move)) == {"-inv_freq"}
    assert rope_of("bloom").turns(move) == {}
