"""Neighbours in the ranking: paired over the right examples, and corrected for their number."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from eval.report import neighbours as neighbours_module
from eval.report import read_run
from eval.report.neighbours import holm, neighbours_table
from tests.made_up_run import few, write_run


def test_holm():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_neighbours(tmp_path):
    run = read_run(write_run(tmp_path, few(["full", "prefix", "fusionrag", "reuse"], n=40, ratios=(0.15,))))
    table = neighbours_table(run, 0.15)
    lines = [[cell.text for cell in row] for row in table.rows]
    assert [line[:2] for line in lines] == [
        ["full prefill (1)", "prefix cache (1)"],
        ["prefix cache (1)", "FusionRAG (0.15)"],
        ["FusionRAG (0.15)", "full reuse (0)"],
    ]
    assert lines[0][3:5] == ["none at any example", "–"]
    assert lines[2][2] == "40"
    assert lines[2][-1].startswith("KL"), "0.03 against 0.19 nats over 40 examples"
    by_hand = {s.example: s.kl for s in run.scores if s.system == "reuse"}
    differences = [by_hand[s.example] - s.kl for s in run.scores if s.system == "fusionrag"]
    assert table.rows[2][3].value == pytest.approx(fmean(differences))


def test_one_system_has_no_neighbours(tmp_path):
    run = read_run(write_run(tmp_path, few(["full"])))
    assert neighbours_table(run, None) is None


def test_only_common_examples_are_paired(tmp_path, monkeypatch):
    scores = [s for s in few(["epic", "reuse"], ratios=(0.15,)) if (s.system, s.example[-1]) != ("epic", "3")]
    seen = []
    real = neighbours_module.paired
    monkeypatch.setattr(neighbours_module, "paired", lambda a, b: seen.append((len(a), len(b))) or real(a, b))
    neighbours_table(read_run(write_run(tmp_path, scores)), 0.15)
    assert seen == [(7, 7), (7, 7)]


def test_a_worse_answer_is_not_called_a_win(tmp_path):
    scores = few(["fusionrag", "reuse"], n=40, ratios=(0.15,))
    scores = [replace(s, metrics={"f1": 0.9 if s.system == "reuse" else 0.1}) for s in scores]
    (line,) = neighbours_table(read_run(write_run(tmp_path, scores)), 0.15).rows
    assert line[5].value == pytest.approx(-0.8)
    assert line[-1].text == "KL and headline (the next one is better)"
