"""Attention of selected rows: the specification against a loop, the backends against the specification."""

from __future__ import annotations

import math

import pytest
import torch

from blend.hf.attention import FusionMask, Reach, attend_blocked, attend_eager, attend_gemm
from blend.testing.attention import AttentionTests, failures


class TestEager(AttentionTests):
    attend = staticmethod(attend_eager)


class TestBlocked(AttentionTests):
    attend = staticmethod(attend_blocked)


class TestGemm(AttentionTests):
    attend = staticmethod(attend_gemm)


def by_hand(query, key, value, rows, *, scaling, reach=None, softcap=None, sinks=None):
    """One number at a time, in Python floats."""
    reach = reach or Reach()
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    out = torch.zeros(1, len(rows), heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        for s, row in enumerate(rows):
            seen = [
                t
                for t in range(row + 1)
                if (reach.window is None or row - t < reach.window)
                and (reach.chunk is None or t // reach.chunk == row // reach.chunk)
            ]
            scores = [float(query[0, head, s].double() @ key[0, head // groups, t].double()) * scaling for t in seen]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for weight, t in zip(weights, seen, strict=True):
                out[0, s, head] += weight / total * value[0, head // groups, t].double()
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reach": Reach(window=5)},
        {"reach": Reach(chunk=8)},
        {"softcap": 2.0},
        {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])},
        {"softcap": 2.0, "sinks": torch.tensor([1.0, -2.0, 0.0, 3.0]), "reach": Reach(window=5)},
    ],
    ids=["plain", "window", "chunk", "softcap", "sinks", "all"],
)
def test_the_specification_by_hand(options):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, 20, d, generator=generator) for h, d in ((4, 8), (2, 8), (2, 6)))
    rows = [0, 3, 4, 9, 15, 16, 19]
    mask = FusionMask(torch.tensor(rows), 20, Reach())
    got = attend_eager(query[:, :, rows], key, value, mask, scaling=0.3, **options)
    assert (got - by_hand(query[:, :, rows], key, value, rows, scaling=0.3, **options)).abs().max() < 1e-6


def forgets_the_window(query, key, value, mask, *, reach=None, **options):
    return attend_blocked(query, key, value, mask, reach=Reach(), **options)


def forgets_the_sinks(query, key, value, mask, *, sinks=None, **options):
    return attend_blocked(query, key, value, mask, **options)


def forgets_the_softcap(query, key, value, mask, *, softcap=None, **options):
    return attend_blocked(query, key, value, mask, **options)


def sees_one_row_ahead(query, key, value, mask, **options):
    later = FusionMask((mask.rows_S + 1).clamp(max=mask.total - 1), mask.total, mask.reach)
    return attend_blocked(query, key, value, later, **options)


def takes_the_row_number_for_the_position(query, key, value, mask, **options):
    packed = FusionMask(torch.arange(len(mask.rows_S)), mask.total, mask.reach)
    return attend_blocked(query, key, value, packed, **options)


def deals_out_the_heads_in_turn(query, key, value, mask, **options):
    groups = query.shape[1] // key.shape[1]
    return attend_blocked(query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), mask, **options)


def rounds_in_between(query, key, value, mask, **options):
    return attend_eager(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask, **options).to(query.dtype)


BROKEN = {
    "test_sliding_windows": forgets_the_window,
    "test_chunked_windows": forgets_the_window,
    "test_reach_of_the_call_wins_over_the_masks": forgets_the_window,
    "test_sinks": forgets_the_sinks,
    "test_softcap": forgets_the_softcap,
    "test_no_row_sees_the_future": sees_one_row_ahead,
    "test_runs_and_singles": takes_the_row_number_for_the_position,
    "test_one_row": takes_the_row_number_for_the_position,
    "test_grouped_heads": deals_out_the_heads_in_turn,
    "test_all_rows": rounds_in_between,
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_suite_finds_a_broken_backend(name):
    broken = type("Broken", (AttentionTests,), {"attend": staticmethod(BROKEN[name])})
    with pytest.raises(AssertionError):
        getattr(broken(), name)()


def test_a_suite_can_be_run_without_a_test_runner():
    broken = type("Broken", (AttentionTests,), {"attend": staticmethod(forgets_the_sinks)})
    wrong = failures(broken)
    assert set(wrong) == {"test_sinks", "test_extras_over_many_blocks"}
    assert "off by" in wrong["test_sinks"]
    assert "\n" not in wrong["test_sinks"]


def test_blocks_cover_every_visible_key_once():
    rows = torch.tensor([0, 5, 6, 7, 63, 64, 65, 127, 128, 190])
    for reach in (Reach(), Reach(window=9), Reach(chunk=32)):
        mask = FusionMask(rows, 200, reach)
        rebuilt = torch.zeros(len(rows), 200, dtype=torch.bool)
        for block in mask.blocks(size=3):
            rebuilt[block.q0 : block.q1, block.k0 : block.k1] |= block.seen
            assert block.k1 == int(rows[block.q1 - 1]) + 1, "keys behind a block's last row are cut off"
        assert torch.equal(rebuilt, mask.dense())
