"""What is measured inside a fusion, against cases where the answer is known, and what is drawn of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from matplotlib.figure import Figure

from blend import (
    Blender,
    FirstK,
    ForeignKV,
    FullRecompute,
    FullReuse,
    KVDeviation,
    PromptError,
    QueryAttention,
    Random,
    UnsupportedModel,
)
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from eval.inside import covered, kv_deviation, picked_rows, question_attention, reused_rows
from eval.inside_plot import STATE_COLOURS, draw_rows, draw_states, name_tokens

PROMPT = tiny_prompt()  # 12 rows, chunks of 30, 41 and 25, 9 rows
CHUNK_B, QUESTION = PROMPT.starts[1], 108
FAMILIES = ("llama", "gemma3_text", "gemma3n_text", "deepseek_v3", "cohere")


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        yield blender


@pytest.fixture(scope="module")
def reuse(blender):
    return blender.fuse(PROMPT, selector=FullReuse())


@pytest.fixture(scope="module")
def full(blender):
    return blender.prefill(PROMPT, remember=False)


# --- KV deviation -------------------------------------------------------------------------------------


def test_reused_rows_deviate_from_the_second_layer_on_and_exact_ones_do_not(reuse, full):
    deviation = kv_deviation(reuse, full)
    for values_LT in deviation:
        assert values_LT.shape == (4, len(PROMPT))
        assert values_LT.dtype == torch.float32
        assert values_LT[:, :CHUNK_B].max() < 1e-5, "system and first chunk stand where they were encoded"
        assert values_LT[0].max() < 1e-5, "layer 0 sees tokens and positions only"
        assert values_LT[1:, CHUNK_B:QUESTION].min() > 1e-3
        assert values_LT[1, QUESTION:].max() < 1e-5, "the question's layer 1 has seen layer 0 only"
        assert values_LT[2:, QUESTION:].min() > 1e-3, "it inherits what it sees"


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_deviates_when_every_row_is_recomputed(family):
    with Blender(tiny_model(family, torch.float32), check=False) as blender:
        full = blender.prefill(PROMPT, remember=False)
        repaired = kv_deviation(blender.fuse(PROMPT, selector=FullRecompute()), full)
        reused = kv_deviation(blender.fuse(PROMPT, selector=FullReuse()), full)
    assert max(values_LT.max() for values_LT in repaired) < 1e-5
    assert min(values_LT.max() for values_LT in reused) > 1e-2


def test_deviation_is_the_norm_over_all_heads(reuse, full):
    layer, row = 2, len(PROMPT) - 20
    for slot, values_LT in enumerate(kv_deviation(reuse, full)):
        a, b = reuse.layers[layer][slot][:, row].flatten(), full.layers[layer][slot][:, row].flatten()
        by_hand = (a - b).square().sum().sqrt() / b.square().sum().sqrt()
        assert values_LT[layer, row].item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_a_fusion_does_not_deviate_from_itself_and_zeros_deviate_by_one(full):
    assert torch.equal(kv_deviation(full, full).keys_LT, torch.zeros(4, len(PROMPT)))
    zeros = Zeros(full)
    assert kv_deviation(zeros, full).values_LT.sub(1).abs().max() < 1e-6
    assert kv_deviation(zeros, zeros).values_LT.max() == 0, "nothing is divided by zero"


def test_deviation_of_two_prompts_or_two_models_is_refused(blender, full):
    other = blender.prefill(tiny_prompt(1, question=11), remember=False)
    with pytest.raises(PromptError, match="117 and 119 rows"):
        kv_deviation(full, other)
    with (
        Blender(tiny_model("deepseek_v3", torch.float32), check=False) as foreign,
        pytest.raises(ForeignKV, match="the same model"),
    ):
        kv_deviation(foreign.prefill(PROMPT, remember=False), full)


# --- question attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layers_attention_sums_to_one(family):
    with Blender(tiny_model(family, torch.float32), check=False) as blender:
        attention_LT = question_attention(blender.fuse(PROMPT, selector=FullReuse()))
    assert attention_LT.shape == (len(blender.view.layers), len(PROMPT))
    assert attention_LT.min() >= 0
    assert attention_LT.sum(1).sub(1).abs().max() < 1e-5


def test_full_prefills_attention_is_the_models_own(full):
    model = tiny_model("llama", torch.float32)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([PROMPT.ids]), output_attentions=True).attentions
    own = torch.stack([w[0, :, -len(PROMPT.question) :].mean(dim=(0, 1)) for w in weights])
    assert (question_attention(full) - own).abs().max() < 1e-6


@dataclass(frozen=True)
class Watched(QueryAttention):
    """Keeps what it is told and what it answers."""

    told: list = field(default_factory=list, compare=False)
    answered: list = field(default_factory=list, compare=False)

    def choose(self, candidates):
        self.told.append(candidates.attention_T)
        self.answered.append(super().choose(candidates))
        return self.answered[-1]


def test_attention_over_reused_kv_is_what_the_selector_ranks_by(blender, reuse):
    watched = Watched(0.2)
    blender.fuse(PROMPT, selector=watched)
    assert (question_attention(reuse).mean(0) - watched.told[0]).abs().max() < 1e-6


def test_looking_leaves_the_fusion_as_it_was(blender):
    fusion = blender.fuse(PROMPT)
    before = [(keys.clone(), values.clone()) for keys, values in fusion.layers]
    once, twice = question_attention(fusion), question_attention(fusion)
    assert torch.equal(once, twice)
    for pair, kept in zip(fusion.layers, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, kept, strict=True))


def test_attention_that_cannot_be_watched_is_refused():
    with Blender(tiny_model("bloom", torch.float32), check=False) as blender:
        fusion = blender.prefill(PROMPT)
        with pytest.raises(UnsupportedModel, match="attention cannot be read"):
            question_attention(fusion)


def test_a_closed_blender_is_named():
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        fusion = blender.prefill(PROMPT)
    with pytest.raises(UnsupportedModel, match="closed"):
        question_attention(fusion)


# --- picks --------------------------------------------------------------------------------------------


def test_picks_are_what_the_selector_has_answered(blender):
    watched = Watched(0.2)
    fusion = blender.fuse(PROMPT, selector=watched)
    assert torch.equal(picked_rows(fusion).nonzero()[:, 0], watched.answered[0])
    assert fusion.report.states.count("recomputed") == picked_rows(fusion).sum() == len(watched.answered[0])


@pytest.mark.parametrize("selector", [FirstK(0.3), KVDeviation(0.3), QueryAttention(0.3), Random(0.3)])
def test_picks_are_of_the_reused_rows_and_as_many_as_the_budget(blender, selector):
    fusion = blender.fuse(PROMPT, selector=selector)
    reused = reused_rows(fusion)
    assert reused.nonzero()[:, 0].tolist() == list(range(CHUNK_B, QUESTION))
    assert not (picked_rows(fusion) & ~reused).any()
    assert picked_rows(fusion).sum() == round(0.3 * 66)


def test_first_k_picks_the_heads(blender):
    picked = picked_rows(blender.fuse(PROMPT, selector=FirstK(k=3))).nonzero()[:, 0].tolist()
    assert picked == [start + offset for start in PROMPT.starts[1:] for offset in range(3)]


def test_covered_is_the_share_of_what_could_be_picked(blender, reuse, full):
    heads = blender.fuse(PROMPT, selector=FirstK(k=3))
    even_T = torch.ones(len(PROMPT))
    assert covered(heads, even_T) == pytest.approx(6 / 66)
    assert covered(heads, torch.eye(len(PROMPT))[CHUNK_B]) == 1.0
    assert covered(heads, torch.eye(len(PROMPT))[0]) == 0.0, "exact rows do not count"
    assert covered(reuse, even_T) == 0.0
    assert covered(blender.fuse(PROMPT, selector=FullRecompute()), even_T) == 1.0
    assert covered(full, even_T) == 0.0, "nothing was reused"
    with pytest.raises(PromptError, match="117"):
        covered(heads, torch.ones(5))


def test_a_selector_covers_what_it_ranks_by_better_than_chance(blender, reuse, full):
    """KVDeviation ranks by layer 1's values and QueryAttention by attention: no other set of that size has more."""
    checked_T = kv_deviation(reuse, full).values_LT[1].square()
    looked_at_T = question_attention(reuse).mean(0)
    others = [blender.fuse(PROMPT, selector=Random(0.2, seed=seed)) for seed in range(3)]
    watched = blender.fuse(PROMPT, selector=QueryAttention(0.2))
    assert covered(watched, looked_at_T) > max(covered(other, looked_at_T) for other in others)
    checked = blender.fuse(PROMPT, selector=KVDeviation(0.2))
    assert covered(checked, checked_T) > max(covered(other, checked_T) for other in others)


# --- drawing ------------------------------------------------------------------------------------------


def test_rows_are_drawn_as_they_are(reuse, full):
    axes = Figure().subplots()
    values_LT = kv_deviation(reuse, full).values_LT
    image = draw_rows(axes, values_LT, PROMPT, "values", vmax=1.0)
    assert torch.equal(torch.from_numpy(image.get_array().data), values_LT)
    assert image.get_clim()[1] == 1.0
    assert [text.get_text() for text in axes.get_xticklabels()] == ["system", "a", "b", "c", "question"]
    assert [line.get_xdata()[0] for line in axes.lines] == [11.5, 41.5, 82.5, 107.5]


def test_states_are_drawn_in_their_colours(blender, reuse):
    axes = Figure().subplots()
    draw_states(axes, {"reuse": reuse, "heads": blender.fuse(PROMPT, selector=FirstK(k=3))})
    strips = axes.images[0].get_array()
    assert strips.shape == (2, len(PROMPT), 3)
    orange = tuple(bytes.fromhex(STATE_COLOURS["recomputed"][1:]))
    assert tuple(strips[1, CHUNK_B]) == orange
    assert tuple(strips[0, CHUNK_B]) == tuple(bytes.fromhex(STATE_COLOURS["moved"][1:]))
    assert tuple(strips[0, -1]) == tuple(bytes.fromhex(STATE_COLOURS["fresh"][1:]))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["reuse", "heads"]


def test_a_zoom_names_its_tokens(reuse, full):
    figure = Figure()
    axes = figure.subplots()
    draw_rows(axes, kv_deviation(reuse, full).keys_LT, PROMPT)
    name_tokens(axes, PROMPT, lambda token: f"${token}\n", CHUNK_B, CHUNK_B + 4)
    assert axes.get_xlim() == (41.5, 45.5)
    texts = [text.get_text() for text in axes.get_xticklabels()]
    assert texts == [rf"\${token}⏎" for token in PROMPT.ids[CHUNK_B : CHUNK_B + 4]]
    figure.canvas.draw()  # no token is taken for a formula, no sign lacks a glyph


def test_drawing_refuses_what_is_not_of_the_prompt(blender, full):
    axes = Figure().subplots()
    with pytest.raises(PromptError, match=r"\(4, 5\)"):
        draw_rows(axes, torch.zeros(4, 5), PROMPT)
    with pytest.raises(PromptError, match="rows 100 to 118"):
        name_tokens(axes, PROMPT, str, 100, 118)
    with pytest.raises(PromptError, match="0 fusions"):
        draw_states(axes, {})
    with pytest.raises(PromptError, match="2 fusions"):
        draw_states(axes, {"one": full, "other": blender.prefill(tiny_prompt(1), remember=False)})


class Zeros:
    """A fusion's prompt with KV of zeros."""

    def __init__(self, fusion):
        self.prompt = fusion.prompt
        self.layers = tuple((torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in fusion.layers)
