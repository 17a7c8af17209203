"""Systems over averaged chunk KV, against what a Blender does by itself and against the same systems over plain KV."""

from __future__ import annotations

import pytest
import torch

from blend import Background, Blender, BudgetError, ExpectedError, FullReuse, MeanShift
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import tiny_tokenizer
from eval.fidelity import kl_divergence
from eval.systems import DEMO, SYSTEMS, Case, make_systems
from eval.systems.averaged import fused_averaged
from eval.systems.exact import full_prefill

PASSAGES = ("The pier was built in spring.", "Salt is sold on the market.", "The ferry takes two hours.")
AVERAGED = ("kvblend", "reuse-averaged", "epic-averaged", "cacheblend-averaged", "prophetkv-averaged")


@pytest.fixture(scope="module")
def parts():
    return tiny_model("llama", torch.float32), tiny_tokenizer()


@pytest.fixture
def blender(parts):
    with Blender(*parts, check=False, background=None) as blender:
        yield blender


@pytest.fixture
def case(blender):
    prompt = blender.prompt("Who built the pier?", PASSAGES)
    blender.encode(prompt.chunks, system=prompt.system)
    return Case(prompt, full_prefill(blender, prompt))


def answered(blender, name, ratio, case):
    (system,) = make_systems([name], ratio)
    system.prepare(blender, case)
    return system.run(blender, case).fusion


def test_kvblend_is_what_a_blender_does_that_is_told_nothing(parts, blender, case):
    ours = answered(blender, "kvblend", 0.15, case)
    with Blender(*parts, check=False, bypass=False) as other:
        assert (other.selector, other.corrector) == (ExpectedError(0.15), MeanShift(weight=0.25))
        other.encode(case.prompt.chunks, system=case.prompt.system)
        theirs = other.fuse(case.prompt)
    assert torch.equal(ours.logits, theirs.logits)
    assert (ours.report.method, ours.report.corrector) == ("expected-error", "mean-shift")


@pytest.mark.parametrize("name", AVERAGED)
def test_they_answer_from_means(blender, case, name):
    report = answered(blender, name, 0.15, case).report
    first, *others = report.chunks
    assert first.exact
    assert "contexts" not in first.why
    assert all("the mean over 4 contexts" in chunk.why and chunk.source == "hit" for chunk in others)
    assert report.fallback is None


@pytest.mark.parametrize("name", ["kvblend", "epic-averaged", "cacheblend-averaged", "prophetkv-averaged"])
def test_all_rows_computed_again_is_full_prefill(blender, case, name):
    fusion = answered(blender, name, 1.0, case)
    assert float(kl_divergence(case.truth.logits, fusion.logits)) < 1e-8


def test_systems_over_plain_kv_do_not_change(blender, case):
    before = answered(blender, "prophetkv", 0.15, case).logits
    averaged = answered(blender, "prophetkv-averaged", 0.15, case).logits
    after = answered(blender, "prophetkv", 0.15, case).logits
    assert torch.equal(before, after)
    assert not torch.equal(before, averaged)


def test_preparing_again_encodes_nothing(blender, case):
    (system,) = make_systems(["kvblend"], 0.15)
    system.prepare(blender, case)
    keys, misses = set(blender.store.keys()), blender.store.stats.misses
    system.prepare(blender, case)
    assert (set(blender.store.keys()), blender.store.stats.misses) == (keys, misses)
    assert len(keys) == 2 * len(PASSAGES)


def test_a_system_may_go_from_one_blender_to_another(parts, blender, case):
    system = fused_averaged("mine", "mine", "0", FullReuse())
    system.prepare(blender, case)
    with Blender(*parts, check=False, background=None) as other:
        system.prepare(other, case)
        assert len(list(other.store.keys())) == 2 * len(PASSAGES)
        assert torch.equal(system.run(other, case).fusion.logits, system.run(blender, case).fusion.logits)


def test_without_a_tokenizer_there_is_nothing_to_average_over():
    prompt = tiny_prompt()
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        case = Case(prompt, full_prefill(blender, prompt))
        plain = answered(blender, "prophetkv", 0.15, case)
        assert torch.equal(answered(blender, "prophetkv-averaged", 0.15, case).logits, plain.logits)
        other = blender.averaged(Background((tiny_ids(9, 3), tiny_ids(14, 4))))
        assert not torch.equal(other.fuse(prompt, selector=FullReuse()).logits, plain.logits)


def test_they_are_on_the_list():
    assert set(AVERAGED) <= set(SYSTEMS)
    assert DEMO[-1] == "kvblend"
    with pytest.raises(BudgetError, match=r"ratio is 1\.5"):
        make_systems(["kvblend"], 1.5)
