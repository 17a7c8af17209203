"""Oracles choose by full prefill itself."""

from __future__ import annotations

import pytest
import torch

from blend import Blender, FullReuse
from blend.testing.prompts import tiny_prompt
from blend.testing.selectors import SelectorTests
from blend.testing.tiny import tiny_model
from eval.inside import covered, kv_deviation, question_attention
from eval.systems import Case, make_systems
from eval.systems.exact import full_prefill
from eval.systems.oracle import NoTruth, RowScores

PROMPT = tiny_prompt()
NAMES = ("oracle-kv", "oracle-attention")


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama", torch.float32), check=False) as blender:
        yield blender


@pytest.fixture(scope="module")
def case(blender):
    return Case(PROMPT, full_prefill(blender, PROMPT))


def evidence(blender, case):
    deviation = kv_deviation(blender.fuse(PROMPT, selector=FullReuse()), case.truth)
    return {
        "oracle-kv": deviation.keys_LT.sum(0) + deviation.values_LT.sum(0),
        "oracle-attention": question_attention(case.truth).mean(0),
    }


def test_no_other_choice_covers_more_of_what_an_oracle_knows(blender, case):
    known = evidence(blender, case)
    others = make_systems(["random", "epic", "prophetkv", "cacheblend", *NAMES], 0.2)
    fusions = {system.name: system.run(blender, case).fusion for system in others}
    for name in NAMES:
        shares = {other: covered(fusion, known[name]) for other, fusion in fusions.items()}
        assert max(shares, key=shares.get) == name
        assert shares[name] > shares["random"] + 0.05


def test_the_rows_are_the_highest(blender, case):
    known = evidence(blender, case)
    for system in make_systems(NAMES, 0.1):
        states = system.run(blender, case).fusion.report.states
        rows = [row for row, state in enumerate(states) if state == "recomputed"]
        stale = range(PROMPT.starts[1], 108)
        assert rows == sorted(sorted(stale, key=lambda row: -known[system.name][row].item())[:7])


def test_without_the_truth_an_oracle_says_what_it_needs(blender):
    for system in make_systems(NAMES, 0.1):
        with pytest.raises(NoTruth, match=f"{system.name} chooses by the full prefill: give Case"):
            system.run(blender, Case(PROMPT))


def test_an_oracles_time_means_nothing(blender, case):
    systems = make_systems([*NAMES, "prophetkv"], 0.1)
    assert [system.timed for system in systems] == [False, False, True]
    assert all(system.prepare(blender, case) is None for system in systems)


class TestRowScores(SelectorTests):
    def make(self, ratio):
        return RowScores(ratio, score_T=torch.rand(200, generator=torch.Generator().manual_seed(3)))
