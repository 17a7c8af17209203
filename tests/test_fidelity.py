"""Divergences against values worked out by hand, and against a model's own full prefill."""

from __future__ import annotations

import math

import pytest
import torch

from blend import Blender, BudgetError, FullRecompute, FullReuse, Random
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from eval.bench.ratio import RatioOptions, rises
from eval.fidelity import compare, kl_divergence, make_reference
from eval.machine import machine_record
from eval.systems import SYSTEMS, Case, UnknownSystem, make_systems
from eval.systems.base import GREEDY, forced_logits

TOKENS = 6


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        yield blender


# --- divergence ---------------------------------------------------------------------------------------


def test_kl_of_two_coins():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    by_hand = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert kl_divergence(p, q).item() == pytest.approx(by_hand, rel=1e-6)
    assert kl_divergence(q, p).item() != pytest.approx(by_hand, rel=1e-2), "the order matters"


def test_kl_ignores_a_shift_of_all_logits_and_is_never_negative():
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    kl = kl_divergence(logits, logits + 3)
    assert kl.shape == (50,)
    assert kl.min() >= 0
    assert kl.max() < 1e-9


def test_kl_of_identical_logits_is_exactly_zero():
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kl_divergence(logits, logits), torch.zeros(3, 4, dtype=torch.float64))


def test_kl_with_a_token_ruled_out():
    p = torch.tensor([0.0, -math.inf, 0.0])
    assert kl_divergence(p, torch.tensor([0.0, -math.inf, 0.0])).item() == 0.0
    assert kl_divergence(p, torch.zeros(3)).item() == pytest.approx(math.log(1.5))
    assert kl_divergence(torch.zeros(3), p).item() == math.inf


def test_kl_refuses_different_shapes():
    with pytest.raises(ValueError, match="shapes"):
        kl_divergence(torch.zeros(2, 3), torch.zeros(3))


# --- along an answer ----------------------------------------------------------------------------------


@torch.inference_mode()
def test_forced_logits_are_the_models_own(blender):
    prompt = tiny_prompt()
    answer = (5, 9, 3)
    fusion = make_systems(["full"], 0.0)[0].run(blender, Case(prompt)).fusion
    whole = blender.model(torch.tensor([[*prompt.ids, *answer]])).logits[0, len(prompt) - 1 : -1]
    forced = forced_logits(fusion, answer)
    assert forced.shape == (3, whole.shape[-1])
    assert (forced - whole).abs().max() < 1e-4
    assert (forced[0] - fusion.logits).abs().max() < 1e-4


def test_forced_logits_leave_the_fusion_as_it_was(blender):
    fusion = blender.fuse(tiny_prompt())
    before = [(keys.clone(), values.clone()) for keys, values in fusion.layers]
    first = forced_logits(fusion, (5, 9, 3))
    assert torch.equal(forced_logits(fusion, (5, 9, 3)), first)
    assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(before, fusion.layers, strict=True))


def test_forced_logits_need_an_answer(blender):
    with pytest.raises(ValueError, match="empty"):
        forced_logits(blender.fuse(tiny_prompt()), ())


def test_full_prefill_is_no_distance_from_itself(blender):
    full = make_systems(["full"], 0.0)[0].run(blender, Case(tiny_prompt())).fusion
    reference = make_reference(blender, full, TOKENS)
    fidelity = compare(reference, full)
    assert (fidelity.kl_first, fidelity.kl, fidelity.same_first_token) == (0.0, 0.0, True)
    assert fidelity.greedy == reference.answer
    assert fidelity.agrees == len(reference.answer) == TOKENS


def test_recomputing_everything_is_no_distance_and_reuse_is_some(blender):
    prompt = tiny_prompt()
    reference = make_reference(blender, make_systems(["full"], 0.0)[0].run(blender, Case(prompt)).fusion, TOKENS)
    assert compare(reference, blender.fuse(prompt, selector=FullRecompute())).kl < 1e-9
    assert compare(reference, blender.fuse(prompt, selector=FullReuse())).kl > 1e-7


def test_the_answer_is_what_generate_says(blender):
    full = make_systems(["full"], 0.0)[0].run(blender, Case(tiny_prompt())).fusion
    out = blender.model.generate(**full.inputs(), max_new_tokens=TOKENS, **GREEDY)
    assert make_reference(blender, full, TOKENS).answer == tuple(out[0, len(full.prompt) :].tolist())


# --- ratios -------------------------------------------------------------------------------------------


def test_rises_beyond_chance_are_found():
    falling = {0.0: [3.0, 3.1, 2.9], 0.5: [1.0, 1.1, 0.9], 1.0: [0.0, 0.0, 0.0]}
    assert rises(falling) == []
    assert rises({0.0: [1.0, 1.1, 0.9], 0.5: [3.0, 3.1, 2.9], 1.0: [0.0, 0.0, 0.0]}) == [[0.0, 0.5]]
    assert rises({0.0: [1.0, 2.0, 3.0], 1.0: [2.0, 0.9, 3.2]}) == [], "up and down: chance"


# --- systems ------------------------------------------------------------------------------------------


def test_an_unknown_system_is_named_and_the_known_ones_listed():
    with pytest.raises(UnknownSystem, match=f"'turbo'.*{', '.join(SYSTEMS)}"):
        make_systems(["full", "turbo"], 0.15)


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_a_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(BudgetError, match="ratio"):
        make_systems(tuple(SYSTEMS), ratio)


@pytest.mark.parametrize("change", [{"ratios": ()}, {"ratios": (0.5, 0.1)}, {"ratios": (0.0, 2.0)}, {"limit": 0}])
def test_bad_bench_options_are_refused(change):
    with pytest.raises(BudgetError):
        RatioOptions(**change)


def test_full_reuses_nothing_and_builds_no_mask(blender):
    prompt = tiny_prompt()
    blender.prefill(prompt)  # now the Blender's own prefix cache knows the whole prompt
    masks = []
    hook = blender.view.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    try:
        fusion = make_systems(["full"], 0.0)[0].run(blender, Case(prompt)).fusion
    finally:
        hook.remove()
    assert masks == [None]
    assert fusion.report.prefix_rows == 0
    assert fusion.exact


def test_prefixes_know_what_they_were_prepared_with_and_nobody_else_does(blender):
    case = Case(prompt := tiny_prompt(system=40))  # long enough to be worth knowing
    full, cold, warm, reuse = make_systems(["full", "prefix", "prefix-warm", "reuse"], 0.0)
    for system in (cold, warm):
        assert system.run(blender, case).fusion.report.prefix_rows == 0
        system.prepare(blender, case)
    for system, rows in ((cold, len(prompt.system)), (warm, len(prompt) - len(prompt.question))):
        for _ in range(2):  # running it teaches it nothing
            answered = system.run(blender, case).fusion
            assert answered.report.prefix_rows == rows
            assert (answered.logits - full.run(blender, case).fusion.logits).abs().max() < 1e-4
    with Blender(tiny_model("llama", torch.float32), check=False) as other:
        cold.run(other, Case(prompt))
        assert reuse.run(other, Case(prompt)).fusion.report.prefix_rows <= len(prompt.system)


def test_each_system_spends_its_ratio(blender):
    prompt = tiny_prompt()
    for system in make_systems(["cacheblend", "epic", "prophetkv"], 0.5):
        report = system.run(blender, Case(prompt)).fusion.report
        stale = sum(chunk.rows for chunk in report.chunks if not chunk.exact)
        assert report.recomputed_rows == Random(0.5).budget(stale), system.name


# --- machine ------------------------------------------------------------------------------------------


def test_the_machine_record_is_plain_data():
    record = machine_record(torch.bfloat16)
    assert record["dtype"] == "bfloat16"
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["cpu"]
    assert set(record) == {
        "python",
        "torch",
        "transformers",
        "kvblend",
        "cpu",
        "cores",
        "threads",
        "gpu",
        "dtype",
        "commit",
    }


def test_the_machine_record_does_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine_record(torch.float32)["commit"] is None
