"""The runner of the evaluation, on an invented set and a tiny model: sane figures, stops, shards, a cluster."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blend import Blender, BudgetError, KVBlendError, PromptTooLong
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from eval.cli import app
from eval.runner import EvalOptions, Job, Lab, RunFolder, run_eval
from eval.runner.folder import RunExists, read_scores
from eval.runner.jobs import make_jobs
from eval.runner.options import shard_of
from eval.summary import METRIC_NAMES, summarize
from eval.systems.base import UnknownSystem

WORDS = ["pier", "gull", "bread", "lamp", "book", "tide"]
SYSTEMS = ("full", "prefix", "prefix-warm", "reuse", "cacheblend", "epic", "prophetkv", "random")
CLOCKED = ("ttft_s", "full_ttft_s", "seconds", "offline_s")


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    def context(word, gold):
        text = f"The {word} is {len(word)} steps from the bay, and nobody knows who lights its lamps by hand."
        return {"title": f"The {word}", "text": text, "is_gold": gold}

    rows = [
        {
            "id": word,
            "question": f"How far is the {word}?",
            "answers": [str(len(word)), "far"],
            "contexts": [context(other, other == word) for other in WORDS],
            "task": "squad",
        }
        for word in WORDS
    ]
    path = tmp_path_factory.mktemp("data") / "bay.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer(template=CHATML).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama"), tiny_tokenizer(template=CHATML), check=False) as made:
        yield made


@pytest.fixture
def options(jsonl, model, tmp_path):
    return EvalOptions((jsonl,), tmp_path / "run", SYSTEMS, (0.3, 1.0), model=model, limit=4)


def run(options, blender=None, *, report=False, **more):
    console = Console(record=True, width=200)
    return run_eval(options, console, blender=blender, report=report, **more), console.export_text()


def unclocked(scores):
    """What must not depend on the clock, by what identifies it."""
    plain = [score.as_dict() for score in scores]
    keys = [(p["data"], p["example"], p["system"], p["setting"]) for p in plain]
    return {key: {k: v for k, v in p.items() if k not in CLOCKED} for key, p in zip(keys, plain, strict=True)}


# --- the figures ------------------------------------------------------------------------------------


def test_sanity_of_the_figures(options, blender):
    summary, printed = run(options, blender, report=True)
    systems = summary["systems"]
    assert summary["complete"]
    assert list(systems) == list(SYSTEMS)
    for name in ("full", "prefix", "prefix-warm", "reuse"):
        assert len(systems[name]) == 1, f"{name} has no ratio: it runs once"
    assert systems["full"]["1"]["kl_mean"] == systems["full"]["1"]["kl_first_mean"] == 0.0
    assert systems["full"]["1"]["charged_share_mean"] == 1.0
    for name in ("prefix", "prefix-warm"):
        assert systems[name]["1"]["kl_mean"] < 1e-9, f"{name} is exact"
        assert systems[name]["1"]["same_answer"] == 1.0
    for name in ("cacheblend", "epic", "prophetkv", "random"):
        assert set(systems[name]) == {"0.3", "1"}
        assert systems[name]["1"]["kl_mean"] < 1e-9, f"{name} at ratio 1 computes every row"
        assert systems[name]["1"]["recovery"]["kl"] == pytest.approx(1.0)
        assert systems[name]["0.3"]["kl_mean"] > 1e-9
        assert max(systems[name]["1"]["kv_error"]) < 1e-5 < max(systems[name]["0.3"]["kv_error"])
    assert systems["reuse"]["0"]["charged_share_mean"] < systems["random"]["0.3"]["charged_share_mean"] < 1
    assert systems["prefix-warm"]["1"]["charged_share_mean"] < systems["prefix"]["1"]["charged_share_mean"]
    assert all(by["fallbacks"] == 0 for settings in systems.values() for by in settings.values())
    assert "ProphetKV" in printed
    assert (options.out / "report.html").exists()


def test_the_summary_keeps_its_form(options, blender):
    summary, _ = run(replace(options, systems=("full", "reuse"), ratios=(0.3,)), blender)
    assert json.loads((options.out / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert {"model", "dtype", "machine", "data", "systems", "by_data", "complete"} <= set(summary)
    (one,) = summary["data"]
    assert (one["name"], one["n"]) == ("bay", 4)
    entry = summary["systems"]["reuse"]["0"]
    wanted = {"charged_mean", "kl_mean", "kl_median", "kl_first_mean", "kl_first_median", "top1", "same_answer"}
    assert wanted | {"em", "f1", "rouge_l", "ttft_s_median", "speedup_median", "ci"} <= set(entry)
    low, high = entry["ci"]["kl_mean"]
    assert low <= entry["kl_mean"] <= high
    assert summary["by_data"]["bay"]["reuse"]["0"]["kl_mean"] == entry["kl_mean"]
    assert summary["model"] == options.model
    assert summary["machine"]["torch"]


def test_every_example_counts_the_same_over_sets(options, blender):
    run(replace(options, systems=("full", "reuse"), ratios=(0.3,)), blender)
    scores = read_scores(options.out)
    others = [replace(s, data="other", kl=1.0) for s in scores if s.example == scores[0].example]
    summary = summarize([*scores, *others], {})
    kls = [s.kl for s in scores if s.system == "reuse"]
    assert summary["systems"]["reuse"]["0"]["kl_mean"] == pytest.approx((sum(kls) + 1.0) / 5)
    assert [one["n"] for one in summary["data"]] == [4, 1]
    assert set(METRIC_NAMES) <= set(summary["systems"]["reuse"]["0"])


def test_systems_are_summed_up_over_what_all_of_them_have(options, blender):
    run(replace(options, systems=("full", "reuse"), ratios=(0.3,)), blender)
    scores = read_scores(options.out)
    gone = scores[0].example
    some = [s for s in scores if (s.system, s.example) != ("full", gone)]
    summary = summarize(some, {})
    kls = [s.kl for s in some if s.system == "reuse" and s.example != gone]
    assert summary["common"] == [{"name": "bay", "n": 3}]
    assert summary["systems"]["reuse"]["0"]["kl_mean"] == pytest.approx(sum(kls) / 3)
    assert summary["by_data"]["bay"]["reuse"]["0"]["n"] == 4
    apart = summarize([s for s in some if (s.system == "full") != (s.example == gone)], {})
    assert apart["common"] == []
    assert [apart["systems"][name][key]["n"] for name, key in (("full", "1"), ("reuse", "0"))] == [3, 1]


# --- stopping and going on --------------------------------------------------------------------------


class StopAfter:
    """Measures here, and is interrupted behind so many examples."""

    def __init__(self, count, blender):
        self.count, self.blender = count, blender

    def __call__(self, options, every, left, folder):
        lab = Lab(options.model, every.passages, blender=self.blender)
        folder.begin(options.identity, {"model": options.model, **lab.record()})
        for number, job in enumerate(left):
            if number == self.count:
                raise KeyboardInterrupt
            yield lab.measure(job)


def test_a_stopped_run_goes_on_to_the_same_figures(options, blender, tmp_path):
    run(options, blender)
    other = replace(options, out=tmp_path / "stopped")
    summary, printed = run(other, measure=StopAfter(2, blender))
    assert not summary["complete"]
    assert "interrupted" in printed
    assert summary["data"][0]["n"] == 2
    with (other.out / "scores.jsonl").open("a") as file:  # killed in the middle of a line
        file.write('{"data": "bay", "exam')
    summary, _ = run(other, blender)
    assert summary["complete"]
    ours, whole = unclocked(read_scores(other.out)), unclocked(read_scores(options.out))
    assert ours.keys() == whole.keys()
    for key, score in whole.items():
        assert {k: v for k, v in score.items() if ours[key][k] != v} == {}, key


def test_a_finished_run_is_not_measured_again(options, blender):
    run(options, blender)
    before = (options.out / "scores.jsonl").read_bytes()
    summary, _ = run(options, measure=StopAfter(0, blender))
    assert summary["complete"]
    assert (options.out / "scores.jsonl").read_bytes() == before


def test_a_system_may_join_later(options, blender):
    run(replace(options, systems=("full", "reuse")), blender)
    summary, _ = run(replace(options, systems=("full", "reuse", "epic")), blender)
    assert set(summary["systems"]) == {"full", "reuse", "epic"}
    assert len(read_scores(options.out)) == 4 * (1 + 1 + 2)


def test_another_run_in_the_folder_is_refused(options, blender):
    few = replace(options, systems=("full",))
    run(few, blender)
    with pytest.raises(RunExists, match="limit 4, and this one has 2"):
        run(replace(few, limit=2), blender)


def test_shards_make_a_whole(options, blender, tmp_path):
    run(options, blender)
    parts = [replace(options, out=tmp_path / "parts", shard=(i, 3)) for i in range(3)]
    for number, part in enumerate(parts):
        summary, _ = run(part, blender)
        assert summary["complete"] == (number == 2)
    assert unclocked(read_scores(tmp_path / "parts")) == unclocked(read_scores(options.out))


def test_a_damaged_line_is_told(options, blender):
    run(replace(options, systems=("full",)), blender)
    with (options.out / "scores.jsonl").open("a") as file:
        file.write('{"data": "bay"}\n')
    with pytest.raises(KVBlendError, match=r"scores\.jsonl, line 5 is no score"):
        read_scores(options.out)
    with pytest.raises(KVBlendError, match="holds no run"):
        read_scores(options.out / "plots")


@pytest.mark.slow
def test_a_ray_cluster_finds_the_same(options, blender):
    pytest.importorskip("ray", reason="Ray is the extra kvblend[ray]")
    from eval.runner.cluster import RayMeasure

    few = replace(options, systems=("full", "reuse", "epic"), ratios=(0.3,))
    run(few, blender)
    spread = replace(few, out=few.out.with_name("ray"))
    summary, _ = run(spread, measure=RayMeasure("local", workers=2))
    assert summary["complete"]
    here, there = unclocked(read_scores(few.out)), unclocked(read_scores(spread.out))
    assert here.keys() == there.keys()
    for key, score in here.items():
        assert there[key]["kl"] == pytest.approx(score["kl"], abs=1e-9)
        assert there[key]["answer"] == score["answer"]


# --- what is asked ----------------------------------------------------------------------------------


def test_an_example_that_does_not_fit_is_told_first(options, blender, jsonl):
    every = make_jobs(options)
    job = every.jobs[0]
    context = replace(job.example.contexts[0], text="bay " * 5000)
    lab = Lab("", every.passages, blender=blender)
    with pytest.raises(PromptTooLong, match=r"'" + job.example.id + "'.*tokens.*, and the model holds"):
        lab.admit(Job(job.data, job.task, replace(job.example, contexts=(context,)), job.todo))


def test_options_that_cannot_be(options):
    with pytest.raises(BudgetError, match="no data"):
        replace(options, data=())
    with pytest.raises(BudgetError, match=r"ratio is 1\.5"):
        replace(options, ratios=(1.5,))
    with pytest.raises(UnknownSystem, match="'turbo'"):
        replace(options, systems=("full", "turbo"))
    with pytest.raises(UnknownSystem, match="'full' is named twice"):
        replace(options, systems=("full", "full"))
    with pytest.raises(BudgetError, match="2/2"):
        replace(options, shard=(2, 2))
    with pytest.raises(BudgetError, match="'half'"):
        shard_of("half")
    with pytest.raises(BudgetError, match="asks for 'many' passages"):
        make_jobs(replace(options, data=(options.data[0] + "?k=many",)))
    with pytest.raises(BudgetError, match="two sets are called 'bay'"):
        make_jobs(replace(options, data=options.data * 2))


def test_a_set_may_name_its_own_number_of_passages(options):
    jobs = make_jobs(replace(options, data=(options.data[0] + "?k=2",))).jobs
    assert {len(job.example.contexts) for job in jobs} == {2}
    assert all(any(context.gold for context in job.example.contexts) for job in jobs)


def test_without_passages(options, blender):
    heart = replace(options.arrangement, context=False)
    summary, _ = run(replace(options, systems=("full", "reuse"), arrangement=heart), blender)
    assert summary["systems"]["reuse"]["0"]["kl_mean"] < 1e-9


def test_the_command(jsonl, model, tmp_path):
    out = tmp_path / "run"
    command = ["eval", "--data", jsonl, "--model", model, "--systems", "full,reuse,epic", "--ratio", "0.1,0.3"]
    command += ["--limit", "2", "--out", str(out), "--json", str(tmp_path / "f.json"), "--threads", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert set(figures["systems"]["epic"]) == {"0.1", "0.3"}
    again = CliRunner().invoke(app, ["report", str(out), "--short"])
    assert again.exit_code == 0, again.output
    assert "| EPIC |" in again.output
    compared = CliRunner().invoke(app, ["compare", str(out), str(out), "--systems", "reuse,epic"])
    assert compared.exit_code == 0, compared.output
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(refused.exception, KVBlendError)
    assert RunFolder(out).record()["model"] == model
