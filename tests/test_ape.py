"""APE: its attention against two softmaxes written out, its positions against explicit ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from blend import Blender, BudgetError, PromptError, QueryAttention, UnsupportedModel
from blend.hf.attention import attending
from blend.readings import means
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from eval.fidelity import judge, make_reference
from eval.systems import SYSTEMS, Case, Fused
from eval.systems.ape import ape_with, attend_apart
from eval.systems.exact import full_prefill
from rope.hf import cache_argument

ROWS, FRESH, CONTEXT = 40, 6, slice(5, 33)


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama"), check=False) as blender:
        yield blender


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, n, 16, generator=generator).to(dtype) for h, n in ((4, FRESH), (2, ROWS), (2, ROWS)))


# --- the attention ------------------------------------------------------------------------------------


def test_at_one_and_one_it_is_attention():
    query, key, value = drawn()
    ours, _ = attend_apart(None, query, key, value, None, context=CONTEXT, temperature=1.0, scale=1.0, scaling=0.3)
    seen = torch.ones(FRESH, ROWS, dtype=torch.bool).tril(ROWS - FRESH)
    stock = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    assert (ours - stock.transpose(1, 2)).abs().max() < 1e-6


@pytest.mark.parametrize(("temperature", "scale"), [(0.9, 0.9), (0.2, 1.0), (1.0, 0.5), (1.5, 1.2)])
def test_two_softmaxes_merged_as_the_paper_has_it(temperature, scale):
    query, key, value = drawn()
    ours, _ = attend_apart(None, query, key, value, None, context=CONTEXT, temperature=temperature, scale=scale)
    for head in range(4):
        for row in range(FRESH):
            scores = key[0, head // 2] @ query[0, head, row] / 4
            others = [i for i in range(ROWS - FRESH + row + 1) if not CONTEXT.start <= i < CONTEXT.stop]
            context, other = scores[CONTEXT] / temperature, scores[others]
            lses = torch.stack([scale * temperature * context.logsumexp(0), other.logsumexp(0)])
            shares = lses.softmax(0)
            within = context.softmax(0) @ value[0, head // 2, CONTEXT]
            beside = other.softmax(0) @ value[0, head // 2, others]
            assert (ours[0, row, head] - shares[0] * within - shares[1] * beside).abs().max() < 1e-6


def test_bf16_is_fp32_rounded():
    query, key, value = drawn(torch.bfloat16)
    options = {"context": CONTEXT, "temperature": 0.9, "scale": 0.9}
    half, _ = attend_apart(None, query, key, value, None, **options)
    whole, _ = attend_apart(None, query.float(), key.float(), value.float(), None, **options)
    assert half.dtype == torch.bfloat16
    assert (half.float() - whole).abs().max() < 0.02


def test_what_it_does_not_know_is_refused():
    query, key, value = drawn()
    attend = partial(attend_apart, None, query, key, value, None, temperature=0.9, scale=0.9)
    with pytest.raises(UnsupportedModel, match="softcap"):
        attend(context=CONTEXT, softcap=30.0)
    with pytest.raises(PromptError, match="rows from 34 on run, and the context ends at 35"):
        attend(context=slice(5, 35))


# --- the positions ------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama_yarn", "smollm3"])
def test_turned_keys_are_the_papers_positions(family):
    """Against the model itself, given positions: chunks as they were encoded, the question behind the longest."""
    prompt = tiny_prompt()
    with Blender(tiny_model(family), check=False) as blender:
        outcome = ape_with(1.0, 1.0).run(blender, Case(prompt))
        _, system = blender.view.prefill(torch.tensor([prompt.system]))
        stored = blender.setup.fetch(means(prompt.chunks), prompt.system)
        past = DynamicCache()
        for layer, (keys, values) in enumerate(system):
            parts = [(keys[0], values[0]), *(kv.layers[layer] for kv in stored.values())]
            past.update(*(torch.cat([part[slot] for part in parts], dim=1)[None] for slot in (0, 1)), layer)
        behind = len(prompt.system) + max(map(len, prompt.chunks))
        answer = outcome.decode((), 4)
        ids = torch.tensor([[*prompt.question, *answer[:-1]]])
        out = blender.model(
            ids,
            **cache_argument(blender.model, past),
            position_ids=torch.arange(behind, behind + ids.shape[1])[None],
            attention_mask=torch.ones(1, len(prompt) + len(answer) - 1, dtype=torch.long),
        )
    theirs = out.logits[0, len(prompt.question) - 1 :]
    assert (outcome.logits - theirs[0]).abs().max() < 1e-3
    assert (outcome.forced(answer) - theirs).abs().max() < 1e-3
    assert theirs.argmax(-1).tolist() == list(answer)


def test_every_chunk_begins_at_one_place_and_the_question_behind_the_longest(blender):
    prompt = tiny_prompt(chunks=(30, 41, 25))
    report = ape_with(1.0, 1.0).run(blender, Case(prompt)).fusion.report
    question = len(prompt) - len(prompt.question)
    assert [chunk.moved for chunk in report.chunks] == [question - 41 - len(prompt.system)] * 3
    assert not any(chunk.exact for chunk in report.chunks)


# --- the system ---------------------------------------------------------------------------------------


def test_the_demo_s_t_and_s_are_the_default(blender):
    system = SYSTEMS["ape"](0.15)
    assert (system.name, system.setting) == ("ape", "T=0.9,S=0.9")
    outcome, same = (s.run(blender, Case(tiny_prompt())) for s in (system, ape_with(0.9, 0.9)))
    assert torch.equal(outcome.logits, same.logits)
    assert outcome.row_layers == 9 * 4


def test_question_and_answer_attend_by_it(blender):
    outcome = ape_with(0.5, 0.5).run(blender, Case(tiny_prompt()))
    plain = ape_with(1.0, 1.0).run(blender, Case(tiny_prompt()))
    answer = outcome.decode((), 6)
    forced = outcome.forced(answer)
    assert (outcome.logits - plain.logits).abs().max() > 0.05
    assert (forced[0] - outcome.logits).abs().max() < 1e-4
    assert forced.argmax(-1).tolist() == list(answer)
    assert outcome.decode(answer[:2], 6) == answer
    with_stock = Fused(outcome.fusion).forced(answer)
    assert (forced - with_stock).abs().max() > 0.05, "decoding attends by it too"


def test_the_attention_of_an_eager_model_is_replaced_too(blender):
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with Blender(model, check=False) as other:
        eager, sdpa = (SYSTEMS["ape"](0.0).run(b, Case(tiny_prompt())) for b in (other, blender))
    assert (eager.logits - sdpa.logits).abs().max() < 1e-4


def test_the_model_is_as_it_was_afterwards(blender):
    prompt = tiny_prompt(seed=4)
    before = blender.fuse(prompt), full_prefill(blender, prompt)
    SYSTEMS["ape"](0.0).run(blender, Case(prompt)).decode((), 3)
    after = blender.fuse(prompt), full_prefill(blender, prompt)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(before, after, strict=True))


def test_one_chunk_is_not_said_to_be_exact(blender):
    assert not SYSTEMS["ape"](0.0).run(blender, Case(tiny_prompt(chunks=(30,)))).fusion.exact


@pytest.mark.parametrize(("family", "why"), [("gemma3_text", "window"), ("falcon", "cannot be replaced")])
def test_models_that_it_does_not_fit_are_refused(family, why):
    refused = pytest.raises(UnsupportedModel, match=f"{why}.*leave ape out")
    with Blender(tiny_model(family), check=False) as blender, refused:
        SYSTEMS["ape"](0.0).run(blender, Case(tiny_prompt()))


def test_it_wants_the_prelude_that_the_paper_has():
    refused = pytest.raises(PromptError, match=r"prelude='none'.*prelude='system'")
    with Blender(tiny_model("llama"), check=False, prelude="none") as blender, refused:
        SYSTEMS["ape"](0.0).run(blender, Case(tiny_prompt()))


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, -0.5), (float("nan"), 1.0)])
def test_a_temperature_and_a_scale_are_positive(bad):
    with pytest.raises(BudgetError, match=r"(temperature|scale) of APE is .*above 0"):
        ape_with(*bad)


# --- the way into the model ---------------------------------------------------------------------------


def test_another_thread_keeps_the_stock_attention(blender):
    prompt = tiny_prompt(seed=5)
    stock = full_prefill(blender, prompt).logits

    def broken(*args, **kwargs):
        raise AssertionError("this thread has its own")

    with ThreadPoolExecutor(1) as other, attending(broken):
        assert torch.equal(other.submit(full_prefill, blender, prompt).result().logits, stock)
        with pytest.raises(AssertionError, match="its own"):
            full_prefill(blender, prompt)
    assert torch.equal(full_prefill(blender, prompt).logits, stock)


def test_passes_over_a_fusion_cache_keep_their_own(blender):
    prompt = tiny_prompt()
    blender.fuse(prompt)
    fused = blender.fuse(prompt, selector=QueryAttention(0.3)).logits

    def broken(*args, **kwargs):
        raise AssertionError("not for fusion masks")

    with attending(broken):
        assert torch.equal(blender.fuse(prompt, selector=QueryAttention(0.3)).logits, fused)


@pytest.mark.slow
def test_on_a_real_model_t_and_s_matter_and_help(smollm2):
    model, tokenizer = smollm2
    passages = [
        "The Otterbeck ferry is steered by Mira Tolle, who took it over from her aunt.",
        "The market hall of Drenn has a roof of green copper and eleven clocks.",
        "Bread in Marrow Bay is baked with sea water, and visitors call it grey bread.",
    ]
    with Blender(model, tokenizer, background=None, check=False) as blender:
        prompt = blender.prompt("Who steers the Otterbeck ferry?", passages)
        reference = make_reference(blender, full_prefill(blender, prompt), 12)
        kl = {}
        for system in (ape_with(1.0, 1.0), SYSTEMS["ape"](0.0)):
            outcome = system.run(blender, Case(prompt))
            kl[system.setting] = judge(reference, outcome.logits, outcome.forced(reference.answer)).kl
    assert kl["T=0.9,S=0.9"] < kl["T=1,S=1"]
    assert max(kl.values()) < 2.0
