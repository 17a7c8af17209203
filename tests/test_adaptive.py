"""The adaptive selector: how many rows it spends, under which limit, and what it says of it; and a Blender with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blend import (
    Adaptive,
    Blender,
    BudgetError,
    Calibration,
    FirstK,
    FullRecompute,
    MeanShift,
    QueryAttention,
    UnsupportedModel,
)
from blend.calibration import Line
from blend.calibration_files import calibration_file, calibration_key, keep_calibration
from blend.selectors import Candidates, Outlook
from blend.testing.prompts import tiny_prompt
from blend.testing.selectors import SelectorTests, evidence, layouts, select
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer

# A prefill takes 1 ms a row; a fusion 2 ms, a fifth of a ms a row of the prompt, and 1 ms a row that runs.
KNOWN = Calibration(
    key="k",
    model="tiny",
    questions=20,
    level=0.1,
    slope=1.0,
    quantile=0.8,
    full=Line(0.0, 1e-3),
    before=Line(2e-3, 2e-4),
    repair=Line(0.0, 1e-3),
    encode=5e-3,
    slack=1.0,
)
TINY, HUGE = 1e-9, 1e9


class TestMass(SelectorTests):
    def make(self, ratio):
        return Adaptive(mass=1.0, most=ratio)


class TestMaxKL(SelectorTests):
    def make(self, ratio):
        return Adaptive(max_kl=TINY, most=ratio, calibration=KNOWN)


class TestBudget(SelectorTests):
    def make(self, ratio):
        return Adaptive(ttft_budget=HUGE, most=ratio, calibration=KNOWN)


def counts(selectors, layout, seed):
    return [select(selector, layout, seed=seed).numel() for selector in selectors]


def seen(layout, seed=0, elapsed=0.0):
    return Candidates(layout.stale, layout, evidence(layout, seed=seed).attention_T, elapsed=elapsed)


# --- how many ---------------------------------------------------------------------------------------------


@given(st.sampled_from(layouts()), st.integers(0, 50), st.lists(st.floats(0, 1), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_covering_more_takes_more_rows_and_never_one_too_many(layout, seed, masses):
    masses.sort()
    found = counts([Adaptive(mass=mass, most=1.0) for mass in masses], layout, seed)
    assert found == sorted(found)
    at_stale = evidence(layout, seed=seed).attention_T[layout.stale].double().sort(descending=True).values
    for mass, count in zip(masses, found, strict=True):
        assert at_stale[:count].sum() >= mass * at_stale.sum() - 1e-9
        assert count == 0 or at_stale[: count - 1].sum() < mass * at_stale.sum() + 1e-9


@given(st.sampled_from(layouts()), st.integers(0, 50), st.lists(st.floats(1e-5, 1), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_lower_target_never_takes_fewer_rows(layout, seed, targets):
    targets.sort(reverse=True)
    for most in (None, 0.4):
        found = counts([Adaptive(max_kl=t, most=most, calibration=KNOWN) for t in targets], layout, seed)
        assert found == sorted(found)


@given(st.sampled_from(layouts()), st.integers(0, 50), st.lists(st.floats(1e-4, 1), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_larger_budget_never_takes_fewer_rows(layout, seed, budgets):
    budgets.sort()
    found = counts([Adaptive(ttft_budget=b, calibration=KNOWN) for b in budgets], layout, seed)
    assert found == sorted(found)


def test_the_rows_are_those_that_the_question_attends_to_most():
    for layout in layouts():
        for selector in (Adaptive(mass=0.5), Adaptive(max_kl=0.04, calibration=KNOWN)):
            rows = select(selector, layout)
            assert torch.equal(rows, select(QueryAttention(rows=rows.numel()), layout))


def test_without_a_target_no_more_than_fifteen_in_a_hundred():
    for layout in layouts():
        stale = layout.stale.numel()
        assert select(Adaptive(mass=1.0), layout).numel() == round(0.15 * stale)
        assert "the most of" in Adaptive(mass=1.0).explain(seen(layout))


def test_the_fewest_rows_that_are_predicted_to_reach_a_target():
    layout = layouts()[0]
    free = replace(KNOWN, full=Line(HUGE))
    at_stale = evidence(layout).attention_T[layout.stale].double().sort(descending=True).values
    for target in (0.06, 0.03, 0.01):
        count = select(Adaptive(max_kl=target, calibration=free), layout).numel()
        assert free.kl(at_stale[count:].sum().item()) <= target + 1e-12
        assert count == 0 or free.kl(at_stale[count - 1 :].sum().item()) > target
        said = Adaptive(max_kl=target, calibration=free).explain(seen(layout))
        assert said.startswith(f"max_kl {target:g}, predicted 0.0")


def test_a_target_that_takes_more_rows_than_pay_takes_them_all():
    layout = layouts()[0]
    selector = Adaptive(max_kl=1e-3, calibration=replace(KNOWN, full=Line(0.0, 5e-4)))
    assert select(selector, layout).numel() == layout.stale.numel()
    assert "more than pays" in selector.explain(seen(layout))


def test_a_target_out_of_reach_of_the_most_is_told():
    layout = layouts()[0]
    selector = Adaptive(max_kl=1e-3, most=0.1, calibration=KNOWN)
    assert select(selector, layout).numel() == round(0.1 * layout.stale.numel())
    assert "max_kl 0.001 is not met" in selector.explain(seen(layout))


def test_a_budget_counts_what_has_gone_already():
    layout = layouts()[0]
    forced = layout.forced.numel()
    selector = Adaptive(ttft_budget=0.1, calibration=KNOWN)
    assert selector.choose(seen(layout, elapsed=0.06)).numel() == pytest.approx(40 - forced, abs=1)
    assert selector.choose(seen(layout, elapsed=0.2)).numel() == 0
    assert "cannot be met: nothing computed again, predicted 0.2" in selector.explain(seen(layout, elapsed=0.2))
    assert "cannot" not in selector.explain(seen(layout, elapsed=0.06))
    assert "leaves no margin" in Adaptive(ttft_budget=0.1, calibration=replace(KNOWN, slack=50.0)).explain(seen(layout))
    slow = Adaptive(ttft_budget=0.1, calibration=replace(KNOWN, slack=1.5))
    assert slow.choose(seen(layout)).numel() < selector.choose(seen(layout)).numel()


def test_no_attention_to_stale_rows_needs_none():
    layout = layouts()[0]
    nothing = Candidates(layout.stale, layout, torch.zeros(layout.rows))
    for selector in (Adaptive(), Adaptive(max_kl=0.01, calibration=KNOWN)):
        assert selector.choose(nothing).numel() == 0
        assert selector.explain(nothing)


def test_it_would_rather_prefill_where_fusing_takes_longer():
    selector = Adaptive(calibration=KNOWN)
    assert selector.rather_prefill(Outlook(rows=500, prefix=20, fresh=20, missing=0)) is None
    assert "takes about 0.021 s here by its calibration" in selector.rather_prefill(Outlook(25, 12, 14, 0))
    assert "with 400 rows to encode first, fusing" in selector.rather_prefill(Outlook(500, 20, 20, 400))
    assert Adaptive().rather_prefill(Outlook(25, 12, 14, 0)) is None, "without a calibration nothing is known"
    in_time = Adaptive(ttft_budget=1.0, calibration=KNOWN).rather_prefill(Outlook(500, 20, 20, 0))
    assert in_time == "a full prefill takes about 0.480 s here, within the budget of 1 s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": 1.2}, "mass is 1.2"),
        ({"most": -0.1}, "most is -0.1"),
        ({"max_kl": 0.0, "calibration": KNOWN}, "max_kl is 0.0"),
        ({"ttft_budget": float("inf"), "calibration": KNOWN}, "ttft_budget is inf"),
        ({"ttft_budget": 1.0, "max_kl": 1.0, "calibration": KNOWN}, "held to one of them"),
        ({"max_kl": 0.1}, "kvblend calibrate MODEL"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(BudgetError, match=message):
        Adaptive(**options)


# --- in a Blender -----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_HOME", str(tmp_path))
    return tmp_path


def make(**options):
    return Blender(tiny_model("llama"), check=False, **options)


def calibrate(blender, **changes):
    """Leaves a calibration for Blenders like this one."""
    keep_calibration(
        blender.setup,
        blender.corrector,
        replace(KNOWN, key=calibration_key(blender.setup, blender.corrector), **changes),
    )


def test_the_default_is_as_it_was(home):
    assert make().selector.ratio == 0.15
    assert make(ratio=0.3).selector == replace(make().selector, ratio=0.3)
    assert Blender(tiny_model("bloom"), check=False, ratio=0.3).selector.ratio == 0.3


def test_auto_needs_no_calibration_and_says_what_it_covers(home):
    blender, prompt = make(ratio="auto"), tiny_prompt()
    report = blender.fuse(prompt).report
    assert blender.selector == Adaptive()
    assert report.method == "adaptive"
    assert "of the expected error covered (70% wanted" in report.choice
    assert report.choice in repr(report)
    assert report.as_dict()["choice"] == report.choice
    assert 0 < report.recomputed_rows <= round(0.15 * 66)
    assert blender.fuse(prompt, selector=QueryAttention()).report.choice is None


def test_a_target_without_a_calibration_names_the_command(home):
    for options in ({"max_kl": 0.1}, {"ttft_budget": 0.1, "ratio": "auto"}):
        with pytest.raises(BudgetError, match="there is none: run `kvblend calibrate MODEL`"):
            make(**options)


def test_targets_of_a_blender_and_of_a_request(home):
    calibrate(make(), full=Line(10.0))
    blender, prompt = make(max_kl=0.02), tiny_prompt()
    assert blender.selector.calibration.key == calibration_key(blender.setup, blender.corrector)
    report = blender.fuse(prompt).report
    assert report.choice.startswith("max_kl 0.02, predicted 0.0")
    tight = blender.fuse(prompt, selector=blender.adaptive(max_kl=1e-6)).report
    assert tight.recomputed_rows > report.recomputed_rows
    timed = blender.fuse(prompt, selector=blender.adaptive(ttft_budget=1e-6)).report
    assert timed.recomputed_rows == 0
    assert "ttft_budget 1e-06 s cannot be met" in timed.choice


def test_all_rows_computed_again_are_full_prefill(home):
    calibrate(make(), full=Line(0.06))
    blender, prompt = make(), tiny_prompt()
    blender.encode(prompt.chunks, system=prompt.system)
    fusion = blender.fuse(prompt, selector=blender.adaptive(max_kl=1e-7))
    assert "more than pays" in fusion.report.choice
    whole = blender.fuse(prompt, selector=FullRecompute())
    assert torch.equal(fusion.logits, whole.logits)


def test_from_the_first_request_on_a_prefill_where_that_is_quicker(home):
    calibrate(make(), full=Line(1e-6))
    blender, prompt = make(ratio="auto"), tiny_prompt()
    first = blender.fuse(replace(prompt, chunks=prompt.chunks[::-1])).report
    assert "with 96 rows to encode first, fusing takes about" in first.fallback
    assert "encoded afterwards" in first.chunks[0].why
    blender.drain()
    second = blender.fuse(prompt).report
    assert second.fallback.startswith("fusing takes about")
    assert "in the store, but not used" in second.chunks[0].why
    named = blender.fuse(prompt, selector=blender.adaptive(max_kl=0.02)).report
    assert named.fallback, "to weigh a prefill is what it is asked for"
    assert blender.fuse(prompt, selector=QueryAttention()).report.fallback is None
    assert make(ratio="auto", bypass=False).fuse(prompt).report.fallback is None


def test_a_budget_that_a_full_prefill_meets_is_answered_by_one(home):
    calibrate(make())
    report = make(ttft_budget=60.0).fuse(tiny_prompt()).report
    assert "within the budget of 60 s" in report.fallback


def test_another_background_is_another_calibration(home):
    plain = Blender(tiny_model("llama"), tiny_tokenizer(template=CHATML), background=None, check=False)
    calibrate(plain)
    blender = Blender(plain.model, plain.tokenizer, background=None, max_kl=0.05, check=False)
    with pytest.raises(BudgetError, match="kvblend calibrate"):
        blender.averaged(["The pier is old.", "The gulls are grey."])
    calibrate(replaced := plain.averaged(["The pier is old.", "The gulls are grey."]))
    assert blender.averaged(["The pier is old.", "The gulls are grey."]).selector.max_kl == 0.05
    assert calibration_file(replaced.setup, None) != calibration_file(plain.setup, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "car"}, "ratio is 'car': give a number from 0 to 1, or 'auto'"),
        ({"ratio": 1.5}, "ratio is 1.5"),
        ({"ratio": 0.1, "max_kl": 0.1}, "a target sets the ratio"),
        ({"ratio": "auto", "selector": FirstK()}, "a selector and ratio are both given"),
        ({"max_kl": 0.1, "selector": FirstK()}, "a selector and max_kl are both given"),
        ({"max_kl": -1.0, "ratio": "auto"}, "max_kl"),
    ],
)
def test_options_that_exclude_each_other_are_refused(home, options, message):
    with pytest.raises(BudgetError, match=message):
        make(**options)


def test_a_refused_model_goes_back_as_it_came(home):
    model = tiny_model("llama")
    calibrate(make())
    with pytest.raises(BudgetError, match="max_kl is -1"):
        Blender(model, check=False, max_kl=-1.0)
    assert Blender(model, check=False).fuse(tiny_prompt()).report.fallback is None
    with pytest.raises(UnsupportedModel, match="adaptive"):
        Blender(tiny_model("bloom"), check=False, ratio="auto")


def test_it_goes_with_a_corrector(home):
    calibrate(make(corrector=MeanShift(weight=0.25)), full=Line(10.0))
    report = make(max_kl=0.02, corrector=MeanShift(weight=0.25)).fuse(tiny_prompt()).report
    assert report.corrector
    assert report.choice
