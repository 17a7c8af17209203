"""Two runs side by side: what is paired, tested, and told of the rest; and the error of a fusion's KV."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from blend import Blender, FirstK, FullRecompute, FullReuse
from blend.errors import KVBlendError
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model
from eval.comparing.compare import MEASURES, CompareError, run_compare
from eval.inside import kv_deviation
from eval.kv_error import kv_error
from eval.stats import paired
from eval.vocabulary import Score

RNG = np.random.default_rng(3)
KL = RNG.exponential(0.1, size=40)


def score(index=0, *, system="epic", setting="0.15", data="set", **changes):
    plain = Score(
        data=data, task="squad", example=f"q{index}", system=system, setting=setting, rows=900 + index, chunks=8,
        charged=2000.0, full_charged=10_000.0, ttft_s=0.5, full_ttft_s=2.0, seconds={"repair": 0.4}, offline_s=0.0,
        kl_first=0.1, kl=float(KL[index % 40]), top1=0.9, same_answer=False, answer="Drenn",
        metrics={"f1": 0.5, "em": 0.0},
    )  # fmt: skip
    return replace(plain, **changes)


def write(folder, scores, model="smollm2", tail=b"", name="scores.jsonl"):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(one.as_dict(), ensure_ascii=False) + "\n" for one in scores)
    (folder / name).write_bytes(lines.encode() + tail)
    if model:
        (folder / "run.json").write_text(json.dumps({"model": model}))
    return folder


def compared(a, b, **systems):
    console = Console(record=True, width=200)
    figures = run_compare(a, b, console, **systems)
    assert json.loads(json.dumps(figures)) == figures, "plain data"
    return figures, console.export_text()


# --- what changed -------------------------------------------------------------------------------------


def test_a_run_and_itself_do_not_differ(tmp_path):
    run = write(tmp_path / "a", [score(i) for i in range(40)])
    figures, text = compared(run, run)
    (group,) = figures["groups"]
    assert (group["title"], group["n"], group["small"], group["data"]) == ("epic at 0.15", 40, False, {"set": 40})
    assert set(group["measures"]) == {"kl", "same_answer", "f1", "em", "speedup", "charged"}, "only what there is"
    for measure in group["measures"].values():
        assert (measure["change"], measure["ci"], measure["p"], measure["same"]) == (0.0, [0.0, 0.0], 1.0, 40)
        assert measure["verdict"] is None
    assert figures["only_a"] == figures["only_b"] == {"systems": [], "data": [], "examples": []}
    assert "only in" not in text
    assert "better" not in text


def test_the_figures_are_those_of_the_paired_examples(tmp_path):
    better = [score(i, kl=0.5 * float(KL[i]), ttft_s=0.4, same_answer=i % 3 == 0) for i in range(40)]
    a = write(tmp_path / "a", [score(i) for i in range(40)])
    b = write(tmp_path / "b", better[::-1])
    figures, text = compared(a, b)
    kl, same, speed, f1 = (figures["groups"][0]["measures"][n] for n in ("kl", "same_answer", "speedup", "f1"))
    by_hand = paired(0.5 * KL, KL)
    assert (kl["a"], kl["b"]) == pytest.approx((KL.mean(), KL.mean() / 2))
    assert (kl["change"], *kl["ci"], kl["p"]) == pytest.approx((by_hand.mean, by_hand.low, by_hand.high, by_hand.p))
    assert (kl["higher"], kl["same"], kl["lower"], kl["verdict"]) == (0, 0, 40, "better")
    assert (same["a"], same["b"], same["higher"]) == (0.0, 14 / 40, 14)
    assert same["p"] == pytest.approx(2 / 2**14), "McNemar"
    assert (speed["a"], speed["b"], speed["change"]) == pytest.approx((4.0, 5.0, 1.0))
    assert speed["verdict"] == "better"
    assert f1["verdict"] is None
    assert "epic at 0.15: 40 pairs (set 40)" in text
    assert "KL, nats a token" in text
    assert "of these 6 tests about 0.3" in text
    back, _ = compared(b, a)
    assert back["groups"][0]["measures"]["kl"]["verdict"] == "worse"
    assert back["groups"][0]["measures"]["kl"]["change"] == pytest.approx(-kl["change"])


def test_every_metric_that_both_have_is_compared_and_what_is_missing_is_not(tmp_path):
    metrics = {"f1": 0.5, "em": 0.0, "rouge_l": 0.4, "label": 1.0, "held": 1.0}
    a = write(tmp_path / "a", [score(i, metrics=metrics) for i in range(3)])
    b = write(
        tmp_path / "b", [score(0, metrics=metrics), score(1, metrics={"f1": 1.0}, kl=None), score(2, ttft_s=None)]
    )
    measures = compared(a, b)[0]["groups"][0]["measures"]
    assert set(measures) == set(MEASURES)
    assert {name: m["n"] for name, m in measures.items()} == {
        "kl": 2, "same_answer": 3, "f1": 3, "em": 2, "rouge_l": 1, "label": 1, "held": 1, "speedup": 2, "charged": 3,
    }  # fmt: skip


def test_medians_are_tested_as_medians(tmp_path):
    """One prompt that was interrupted by another process does not decide."""
    a = write(tmp_path / "a", [score(i, ttft_s=0.5) for i in range(12)])
    b = write(tmp_path / "b", [score(i, ttft_s=0.45 if i else 50.0) for i in range(12)])
    speed = compared(a, b)[0]["groups"][0]["measures"]["speedup"]
    assert speed["change"] == pytest.approx(2 / 0.45 - 4)
    assert speed["p"] == pytest.approx(2 * 13 / 2**12)


def test_small_sets_are_called_small(tmp_path):
    run = write(tmp_path / "a", [score(i) for i in range(29)])
    figures, text = compared(run, run)
    assert figures["groups"][0]["small"]
    assert "29 pairs; a small set" in text


# --- what goes with what ------------------------------------------------------------------------------


def test_what_only_one_run_has_is_told(tmp_path):
    a = [score(i, data=data) for data in ("set", "other") for i in range(5)] + [score(0, system="reuse", setting="0")]
    b = [score(i) for i in range(3, 8)] + [score(3, setting="0.3")]
    figures, text = compared(write(tmp_path / "a", a), write(tmp_path / "b", b))
    (group,) = figures["groups"]
    assert (group["n"], group["only_a"], group["only_b"]) == (2, 8, 3)
    assert figures["only_a"]["systems"] == ["reuse at 0"]
    assert figures["only_a"]["data"] == ["other"]
    assert sorted(figures["only_a"]["examples"]) == ["set: q0", "set: q1", "set: q2"]
    assert figures["only_b"] == {
        "systems": ["epic at 0.3"],
        "data": [],
        "examples": ["set: q5", "set: q6", "set: q7"],
    }
    assert "only in a: systems reuse at 0" in text
    assert "only in b: examples set: q5, set: q6, set: q7" in text


def test_many_examples_are_counted(tmp_path):
    a = write(tmp_path / "a", [score(i) for i in range(30)])
    b = write(tmp_path / "b", [score(0)])
    assert "only in a: examples set: q1, set: q2, set: q3 and 26 more" in compared(a, b)[1]


def test_the_same_example_of_two_sets_is_two(tmp_path):
    run = write(tmp_path / "a", [score(0, data="one"), score(0, data="two")])
    assert compared(run, run)[0]["groups"][0]["data"] == {"one": 1, "two": 1}


def test_two_systems_of_one_run(tmp_path):
    epic = [score(i, setting=setting) for i in range(6) for setting in ("0.15", "0.3")]
    blend = [score(i, system="cacheblend", setting=s, kl=2.0) for i in range(6) for s in ("0.05", "0.15", "0.3")]
    reuse = [score(i, system="reuse", setting="0", kl=3.0) for i in range(6)]
    run = write(tmp_path / "a", [*epic, *blend, *reuse])
    figures, text = compared(run, run, system_a="epic", system_b="cacheblend")
    assert [group["title"] for group in figures["groups"]] == [
        "epic at 0.15 to cacheblend at 0.15",
        "epic at 0.3 to cacheblend at 0.3",
    ]
    assert figures["groups"][0]["measures"]["kl"]["b"] == 2.0
    assert figures["only_b"]["systems"] == ["cacheblend at 0.05"]
    assert "only in b: systems cacheblend at 0.05" in text
    figures, _ = compared(run, run, system_a="reuse", system_b="epic")
    assert [group["title"] for group in figures["groups"]] == [
        "reuse at 0 to epic at 0.15",
        "reuse at 0 to epic at 0.3",
    ]


def test_the_scores_of_shards_belong_together(tmp_path):
    whole = write(tmp_path / "a", [score(i) for i in range(4)])
    write(tmp_path / "b", [score(0), score(2)], name="scores.0-of-2.jsonl")
    shards = write(tmp_path / "b", [score(1), score(3)], name="scores.1-of-2.jsonl")
    assert compared(whole, shards)[0]["groups"][0]["n"] == 4


# --- what is not as it should be ----------------------------------------------------------------------


def test_an_unfinished_last_line_is_left_out(tmp_path):
    line = (json.dumps(score(1, answer="北京").as_dict(), ensure_ascii=False) + "\n").encode()
    within = line.index("京".encode()) + 1  # a character of three bytes, cut after its first
    for cut in (1, within, len(line) - 1):
        run = write(tmp_path / "a", [score(0)], tail=line[:cut])
        assert compared(run, run)[0]["groups"][0]["n"] == 1


def test_an_answer_may_hold_any_character(tmp_path):
    run = write(tmp_path / "a", [score(0, answer="one\u2028two\x85three\nfour"), score(1)])
    assert compared(run, run)[0]["groups"][0]["n"] == 2


def test_a_broken_line_elsewhere_is_named(tmp_path):
    run = write(tmp_path / "a", [score(0)], tail=b'{"data": "se\n')
    with pytest.raises(KVBlendError, match=r"scores\.jsonl, line 2 is no score"):
        compared(run, run)


def test_different_models_and_prompts_are_told(tmp_path):
    a = write(tmp_path / "a", [score(i) for i in range(4)])
    b = write(tmp_path / "b", [score(0), score(1), score(2, rows=5), score(3, chunks=5)], model="gemma")
    figures, text = compared(a, b)
    assert (figures["a"]["model"], figures["b"]["model"]) == ("smollm2", "gemma")
    assert "different models, smollm2 and gemma" in text
    assert figures["prompts_differ"] == 2
    assert "2 pairs have prompts of different lengths" in text
    untold, text = compared(a, write(tmp_path / "c", [score(0)], model=None))
    assert untold["b"]["model"] is None
    assert "model not told" in text
    assert "different models" not in text


def test_what_cannot_be_compared_is_refused(tmp_path):
    a = write(tmp_path / "a", [score(0), score(0, system="reuse", setting="0")])
    with pytest.raises(KVBlendError, match="nowhere holds no run"):
        compared(a, tmp_path / "nowhere")
    with pytest.raises(CompareError, match=r"no example in common.*a has epic at 0.15, reuse at 0 on set; .*on other"):
        compared(a, write(tmp_path / "b", [score(0, data="other")]))
    with pytest.raises(CompareError, match="no example in common"):
        compared(a, write(tmp_path / "c", [score(0, setting="0.3")]))
    with pytest.raises(CompareError, match="has no scores of the system 'turbo'"):
        compared(a, a, system_a="epic", system_b="turbo")
    with pytest.raises(CompareError, match="only the system 'epic' is named"):
        compared(a, a, system_a="epic")
    with pytest.raises(CompareError, match="has no scores yet"):
        compared(a, write(tmp_path / "d", []))


# --- KV error -----------------------------------------------------------------------------------------


PROMPT = tiny_prompt()


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        yield blender


def test_kv_error_is_the_mean_over_reused_rows_recomputed_ones_included(blender):
    full = blender.prefill(PROMPT, remember=False)
    fusion = blender.fuse(PROMPT, selector=FirstK(0.3))
    states = fusion.report.states
    assert {"moved", "recomputed"} < set(states), "and exact ones"
    rows = [row for row, state in enumerate(states) if state in ("moved", "recomputed")]
    keys_LT, values_LT = kv_deviation(fusion, full)
    found = kv_error(fusion, full)
    assert len(found) == len(fusion.layers)
    for layer, error in enumerate(found):
        by_hand = (keys_LT[layer, rows].mean() + values_LT[layer, rows].mean()) / 2
        assert error == pytest.approx(by_hand.item(), rel=1e-5)


def test_kv_error_falls_with_repair_and_is_none_where_nothing_is_reused(blender):
    full = blender.prefill(PROMPT, remember=False)
    reuse, repaired, all_rows = (
        kv_error(blender.fuse(PROMPT, selector=selector), full)
        for selector in (FullReuse(), FirstK(0.3), FullRecompute())
    )
    assert reuse[0] < 1e-5, "layer 0 sees tokens and positions only"
    assert min(reuse[1:]) > 1e-3
    assert all(less < more for less, more in zip(repaired[1:], reuse[1:], strict=True))
    assert max(all_rows) < 1e-5
    assert kv_error(full, full) == (0.0,) * len(full.layers)
