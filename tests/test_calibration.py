"""Calibrations: their laws, their file, how they are fitted, and the command that makes them, on a tiny model."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import eval.calibrating as calibrating
from blend import Blender, BudgetError, Calibration, UnsupportedModel
from blend.calibration import Line
from blend.calibration_files import (
    calibration_file,
    calibration_key,
    find_calibration,
    keep_calibration,
    require_calibration,
)
from blend.calibration_fit import Observed, Point, fit, line
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from eval.calibrating import CalibrateOptions, calibration_jobs, run_calibrate
from eval.calibration_check import CheckOptions, run_calibration_check
from eval.cli import app

WORDS = ["pier", "gull", "bread", "lamp", "book", "tide"]
KNOWN = Calibration(
    key="k",
    model="tiny",
    questions=9,
    level=0.2,
    slope=0.8,
    quantile=0.8,
    full=Line(1e-3, 1e-3, 1e-6),
    before=Line(1e-3, 1e-4),
    repair=Line(1e-3, 5e-4, 1e-6),
    encode=4e-3,
    slack=1.2,
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# --- the laws ---------------------------------------------------------------------------------------------


@given(st.floats(0, 2), st.floats(0, 2))
@settings(max_examples=50, deadline=None)
def test_what_is_predicted_rises_with_what_is_left(a, b):
    low, high = sorted((a, b))
    assert 0.0 <= KNOWN.kl(low) <= KNOWN.kl(high)
    assert KNOWN.kl(0.0) == 0.0


def test_as_many_rows_pay_as_take_as_long_as_a_prefill():
    run = KNOWN.paying(800, 780)
    assert KNOWN.fuse_seconds(800, run) == pytest.approx(KNOWN.full.seconds(780, 800))
    assert KNOWN.fuse_seconds(800, run, missing=10) == pytest.approx(KNOWN.full.seconds(780, 800) + 0.04)
    assert Line(1.0, 0.5).most(3.0, 10) == 4.0
    assert (Line(1.0).most(3.0, 10), Line(1.0).most(0.5, 10)) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "changes",
    [{"level": math.nan}, {"slope": -1.0}, {"full": (0.1, -1e-3, 0.0)}, {"slack": 0.5}, {"questions": 0}],
)
def test_numbers_out_of_range_are_refused(changes):
    with pytest.raises(BudgetError, match="calibration"):
        replace(KNOWN, **changes)


# --- the file ---------------------------------------------------------------------------------------------


def test_json_there_and_back():
    assert Calibration.from_json(KNOWN.as_json()) == KNOWN
    assert Calibration.from_json(KNOWN.as_json(), key="k") == KNOWN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no calibration"),
        ("[1, 2]", "it is no calibration"),
        (KNOWN.as_json()[:-40], "it is no calibration"),
        (KNOWN.as_json().replace('"slope"', '"slop"'), "it is no calibration: .*slop"),
        (KNOWN.as_json().replace('"level": 0.2', '"level": "much"'), "it is no calibration"),
        (KNOWN.as_json().replace('"version": 1', '"version": 7'), "of version 7"),
        (KNOWN.as_json().replace('"level": 0.2', '"level": -1'), "must be finite, and 0 or more"),
        (b"\xff\xfe", "it is no calibration"),
    ],
)
def test_a_damaged_text_is_told_from_a_calibration(text, message):
    with pytest.raises(BudgetError, match=message):
        Calibration.from_json(text)


def test_a_file_that_cannot_be_used_is_named_with_the_way_out(home):
    with Blender(tiny_model("llama"), check=False) as blender:
        assert find_calibration(blender.setup, None) is None
        with pytest.raises(BudgetError, match=r"max_kl needs a calibration .* run `kvblend calibrate MODEL`"):
            require_calibration(blender.setup, None, "max_kl")
        file = calibration_file(blender.setup, None)
        mine = replace(KNOWN, key=calibration_key(blender.setup, None))
        assert keep_calibration(blender.setup, None, mine) == file
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        assert file.is_relative_to(home)
        assert blender.adaptive(max_kl=0.1).calibration == mine
        file.write_text(KNOWN.as_json())
        with pytest.raises(BudgetError, match=rf"{file.name} cannot be used: it is a calibration of another model"):
            blender.adaptive()
        file.write_text("half a fi")
        with pytest.raises(BudgetError, match=r"delete it, and run `kvblend calibrate MODEL`"):
            blender.adaptive(ttft_budget=1.0)


def test_each_recipe_has_a_key_of_its_own(home):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(template=CHATML)
    recipes = [{}, {"background": None}, {"prelude": "none"}, {"adapter": "a"}, {"background": ["The pier is old."]}]
    keys = set()
    for recipe in recipes:
        with Blender(model, tokenizer, check=False, **recipe) as blender:
            keys |= {calibration_key(blender.setup, blender.corrector), calibration_key(blender.setup, "other")}
            salted = blender.tenant("t")
            assert calibration_key(salted.setup, None) == calibration_key(blender.setup, None)
    assert len(keys) == 2 * len(recipes)


# --- the fit ----------------------------------------------------------------------------------------------


def test_the_fit_finds_the_laws_that_measurements_follow():
    draw = random.Random(1)
    observed = []
    for number in range(40):
        rows, hard = 300 + 40 * number, math.exp(draw.gauss(0.0, 0.5))
        points = []
        for chosen in (0, 20, 60, 150):
            left, run = 0.3 * hard**0.5 * math.exp(-chosen / 100), chosen + 30
            kl = 0.1 * hard * left**0.9
            points.append(
                Point(chosen, run, left, kl, KNOWN.before.seconds(rows, rows), KNOWN.repair.seconds(run, rows))
            )
        observed.append(Observed(rows, KNOWN.full.seconds(rows, rows), 100, 0.4, tuple(points)))
    # One question in a moment in which the machine was busy must not bend the lines.
    busy = [p._replace(before=9 * p.before, repair=9 * p.repair) for p in observed[7].points]
    observed[7] = replace(observed[7], full=9 * observed[7].full, points=tuple(busy))
    found = fit("k", "tiny", observed, 0.8)
    assert found.slope == pytest.approx(0.9)
    above = [p.kl > found.kl(p.left) for one in observed for p in one.points]
    assert sum(above) / len(above) == pytest.approx(0.2, abs=0.03)
    for name in ("full", "before", "repair"):
        for rows in (400, 1600):
            wanted = getattr(KNOWN, name).seconds(100, rows)
            assert getattr(found, name).seconds(100, rows) == pytest.approx(wanted, rel=0.05), name
    assert found.encode == pytest.approx(4e-3)
    assert 1.0 <= found.slack < 1.1


def test_a_line_has_no_negative_number():
    falling = [(run, 100.0, 1.0 - run / 200) for run in (10.0, 50.0, 90.0)]
    assert line(falling).row == line(falling).pair == 0.0
    assert 0.5 < line(falling).base < 1.0
    assert line([(10.0, 100.0, 0.5)]).seconds(10, 100) == pytest.approx(0.5)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(BudgetError, match="nothing was measured"):
        fit("k", "tiny", [])
    one = Observed(100, 1.0, 0, 0.0, (Point(0, 10, 0.3, 0.1, 0.1, 0.1),))
    with pytest.raises(BudgetError, match="at least two ratios"):
        fit("k", "tiny", [one, one])


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    def context(word, gold):
        text = f"The {word} is {len(word)} steps from the bay, and nobody knows who lights its lamps."
        return {"title": f"The {word}", "text": text, "is_gold": gold}

    rows = [
        {
            "id": word,
            "question": f"How far is the {word}?",
            "answers": [str(len(word))],
            "contexts": [context(other, other == word) for other in WORDS[:4] + [word] * (word not in WORDS[:4])],
            "task": "squad",
        }
        for word in WORDS
    ]
    path = tmp_path_factory.mktemp("data") / "bay.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make():
    return Blender(tiny_model("llama"), tiny_tokenizer(template=CHATML), background=["The pier is old."], check=False)


@pytest.fixture
def options(jsonl):
    return CalibrateOptions("tiny", (jsonl,), questions=4, passages=(2, 3), ratios=(0.0, 0.3))


def run(options, blender):
    console = Console(record=True, width=200)
    return run_calibrate(options, console, blender), console.export_text()


def test_a_calibration_is_made_and_found(home, options):
    with make() as blender:
        figures, printed = run(options, blender)
        assert figures["complete"]
        assert figures["questions"] == 4
        found = find_calibration(blender.setup, blender.corrector)
        assert found.questions == 4
        assert found.encode > 0.0
        assert found.full.seconds(200, 200) > 0.0
        assert str(calibration_file(blender.setup, blender.corrector)) in printed
        assert json.loads(json.dumps(figures))["calibration"]["level"] == found.level
        for one in figures["observed"]:
            nothing, some = (Point(*point) for point in one["points"])
            assert nothing.chosen == 0 < some.chosen
            assert nothing.left > some.left > 0.0
            assert nothing.run < some.run
        checked = run_calibration_check(
            CheckOptions(options.data, "tiny", 2, 3, max_kl=(1e9, 1e-12), budgets=(1e-9, 1e9)), Console(), blender
        )
        loose, tight, short, long = checked["targets"]
        assert loose["met"] == tight["met"] == long["met"] == 1.0, "all rows computed again are full prefill"
        assert tight["everything"] == long["everything"] == 1.0
        assert short["met"] == 0.0
        assert all(answer["why"] for answer in checked["answers"]), "a target is told, or why there is none to keep"


def test_an_interrupted_calibration_goes_on_where_it_stopped(home, options, monkeypatch):
    measured = []
    observe = calibrating.observe

    def until_interrupted(blender, job, ratios):
        if len(ratios) > 1:
            if len(measured) == 3:
                raise KeyboardInterrupt
            measured.append(job.example.id)
        return observe(blender, job, ratios)

    with make() as blender:
        monkeypatch.setattr(calibrating, "observe", until_interrupted)
        figures, printed = run(options, blender)
        assert not figures["complete"]
        assert "goes on where it stopped" in printed
        assert "3 questions are measured, and it takes 4" in printed
        notes = calibration_file(blender.setup, blender.corrector).with_suffix(".jsonl")
        with notes.open("ab") as file:
            file.write(b'{"half a line')
        monkeypatch.setattr(calibrating, "observe", lambda b, j, r: measured.append(j.example.id) or observe(b, j, r))
        assert run(options, blender)[0]["questions"] == 4
        # The last question, and the short one that does not count before it.
        assert len(measured) == 5
        assert not notes.exists(), "what is complete is measured anew the next time"


def test_notes_that_are_none_are_refused(home, options):
    with make() as blender:
        notes = calibration_file(blender.setup, blender.corrector).with_suffix(".jsonl")
        notes.parent.mkdir(parents=True)
        notes.write_text('{"asked": 1}\n')
        with pytest.raises(BudgetError, match="cannot be gone on with"):
            run(options, blender)


def test_questions_take_turns_in_sets_and_lengths(jsonl, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(Path(jsonl).read_text())
    jobs = calibration_jobs(CalibrateOptions("tiny", (jsonl, str(other)), questions=6, passages=(2, 3)))
    assert [job.data for job in jobs] == ["bay", "other"] * 3
    assert [len(job.example.contexts) for job in jobs] == [2, 3] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": 3}, "questions is 3"),
        ({"passages": (1,)}, "passages is"),
        ({"ratios": (0.1,)}, "at least two"),
        ({"ratios": (0.1, 2.0)}, "ratio is 2.0"),
        ({"quantile": 1.0}, "quantile is 1.0"),
    ],
)
def test_options_out_of_range_are_refused(options, changes, message):
    with pytest.raises(BudgetError, match=message):
        replace(options, **changes)


def test_a_model_whose_attention_cannot_be_seen_is_refused(home, options):
    with (
        Blender(tiny_model("bloom"), tiny_tokenizer(template=CHATML), background=None, check=False) as blender,
        pytest.raises(UnsupportedModel, match="question's attention cannot be read"),
    ):
        run(options, blender)


def test_the_command(home, jsonl, tmp_path):
    folder, figures = tmp_path / "model", tmp_path / "f.json"
    tiny_model("llama", torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(template=CHATML).save_pretrained(folder)
    common = ["calibrate", str(folder), "--threads", "1", "--json", str(figures)]
    unready = CliRunner().invoke(app, [*common, "--check", jsonl])
    assert isinstance(unready.exception, BudgetError)
    made = CliRunner().invoke(app, [*common, "--data", jsonl, "--questions", "4", "--ratio", "0,0.3"])
    assert made.exit_code == 0, made.output
    assert json.loads(figures.read_text())["calibration"]["questions"] == 4
    assert list(home.rglob("*.json"))
    checked = CliRunner().invoke(app, [*common, "--check", jsonl, "--questions", "1"])
    assert checked.exit_code == 0, checked.output
    assert "max_kl 0.02" in checked.output
    assert len(json.loads(figures.read_text())["targets"]) == 5
