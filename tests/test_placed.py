"""Chunk keys at positions of their own: against cached KV put together by hand, full reuse and full prefill."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from blend import Blender, FullReuse, Prompt, UnsupportedModel
from blend.readings import means
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from eval.systems import SYSTEMS, Case
from eval.systems.exact import full_prefill
from eval.systems.placed import place
from rope.hf import cache_argument


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama"), check=False) as blender:
        yield blender


def unrotated(blender, prompt):
    blender.encode(prompt.chunks, system=prompt.system)
    return SYSTEMS["reuse-unrotated"](0.0).run(blender, Case(prompt))


@torch.inference_mode()
def test_unrotated_keys_are_the_cached_ones_side_by_side(blender):
    prompt = tiny_prompt()
    fusion = unrotated(blender, prompt).fusion
    _, system = blender.view.prefill(torch.tensor([prompt.system]))
    stored = blender.setup.fetch(means(prompt.chunks), prompt.system)
    past = DynamicCache()
    for layer, (keys, values) in enumerate(system):
        parts = [(keys[0], values[0]), *(kv.layers[layer] for kv in stored.values())]
        keys, values = (torch.cat([part[slot] for part in parts], dim=1) for slot in (0, 1))
        rows = keys.shape[1]
        assert torch.equal(fusion.layers[layer][0][:, :rows], keys)
        assert torch.equal(fusion.layers[layer][1][:, :rows], values)
        past.update(keys[None], values[None], layer)
    out = blender.model(torch.tensor([prompt.question]), logits_to_keep=1, **cache_argument(blender.model, past))
    assert torch.equal(fusion.logits, out.logits[0, -1])


def test_not_rotating_costs_more_than_rotating(blender):
    prompt = tiny_prompt()
    full = full_prefill(blender, prompt).logits.softmax(-1)
    apart = unrotated(blender, prompt).logits
    moved = blender.fuse(prompt, selector=FullReuse()).logits
    assert (apart.softmax(-1) - full).abs().sum() > (moved.softmax(-1) - full).abs().sum()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "smollm3", "gptj", "gemma3n_text"])
def test_turned_to_its_own_rows_it_is_full_reuse(family):
    prompt = tiny_prompt()
    with Blender(tiny_model(family), check=False) as blender:
        reuse = blender.fuse(prompt, selector=FullReuse())
        placed = place(blender, prompt, "here", prompt.starts)
    for (keys, values), (other_keys, other_values) in zip(placed.layers, reuse.layers, strict=True):
        assert (keys - other_keys).abs().max() < 1e-4
        assert (values - other_values).abs().max() < 1e-4
    assert (placed.logits - reuse.logits).abs().max() < 1e-3


def test_one_chunk_right_behind_its_prelude_is_exact(blender):
    prompt = tiny_prompt(chunks=(30,))
    outcome = unrotated(blender, prompt)
    assert outcome.fusion.exact
    assert (outcome.logits - full_prefill(blender, prompt).logits).abs().max() < 1e-4


def test_its_report_tells_what_was_done(blender):
    prompt = tiny_prompt(seed=1)
    outcome = unrotated(blender, prompt)
    report = outcome.fusion.report
    assert report.method == "reuse-unrotated"
    assert report.fallback is None
    assert [(c.source, c.moved, c.exact) for c in report.chunks] == [("hit", 0, i == 0) for i in range(3)]
    assert report.prefix_rows == len(prompt.system)
    assert report.reused_rows == len(prompt) - len(prompt.question)
    assert outcome.row_layers == len(prompt.question) * len(blender.view.layers)
    assert set(outcome.seconds) == {"lookup", "assemble", "prefill"}
    assert sum(outcome.seconds.values()) <= outcome.ttft
    assert not outcome.fusion.exact


def test_what_is_missing_is_encoded_and_told(blender):
    prompt = tiny_prompt(seed=2)
    first, again = (SYSTEMS["reuse-unrotated"](0.0).run(blender, Case(prompt)) for _ in range(2))
    assert {chunk.source for chunk in first.fusion.report.chunks} == {"miss"}
    assert "encode" in first.seconds
    assert {chunk.source for chunk in again.fusion.report.chunks} == {"hit"}
    assert torch.equal(first.logits, again.logits)


@pytest.mark.parametrize("prelude", ["none", "system"])
def test_a_system_part_that_nobody_knows_is_computed_once_and_charged(prelude):
    prompt = tiny_prompt()
    with Blender(tiny_model("llama"), check=False, prelude=prelude) as blender:
        blender.encode(prompt.chunks, system=prompt.system)
        blender.setup.prefix.evict(1 << 30)
        outcomes = [SYSTEMS["reuse-unrotated"](0.0).run(blender, Case(prompt)) for _ in range(2)]
        layers = len(blender.view.layers)
    fresh = [outcome.row_layers / layers for outcome in outcomes]
    assert fresh == [len(prompt.system) + len(prompt.question), len(prompt.question)]
    assert (outcomes[0].logits - outcomes[1].logits).abs().max() < 1e-5


@pytest.mark.parametrize("system", [0, 12])
def test_it_answers(blender, system):
    prompt = tiny_prompt(seed=3, system=system)
    outcome = unrotated(blender, prompt)
    answer = outcome.decode((), 5)
    assert 1 <= len(answer) <= 5
    assert outcome.forced(answer).argmax(-1).tolist() == list(answer)


def test_without_chunks_it_prefills_and_says_so(blender):
    prompt = Prompt(tiny_prompt().system, (), tiny_prompt().question)
    fusion = SYSTEMS["reuse-unrotated"](0.0).run(blender, Case(prompt)).fusion
    assert "no chunks" in fusion.report.fallback


def test_angles_that_depend_on_the_length_are_refused():
    refused = pytest.raises(UnsupportedModel, match=r"reuse-unrotated.*length of the pass.*leave this system out")
    with Blender(tiny_model("phi3_longrope"), check=False) as blender, refused:
        SYSTEMS["reuse-unrotated"](0.0).run(blender, Case(tiny_prompt()))
