"""Intervals and tests against scipy's, and against cases whose answer is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats as scipy_stats

from eval.stats import (
    Interval,
    SampleError,
    bootstrap_mean,
    bootstrap_median,
    is_small,
    paired,
    recovery,
)

RNG = np.random.default_rng(7)
SKEWED = RNG.exponential(size=60)
A, B = RNG.normal(0.3, 1, size=60), RNG.normal(0, 1, size=60)


# --- intervals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "statistic"), [(bootstrap_mean, np.mean), (bootstrap_median, np.median)])
def test_intervals_are_scipys(ours, statistic):
    found = ours(SKEWED.tolist(), draws=20_000)
    theirs = scipy_stats.bootstrap(
        (SKEWED,), statistic, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert found.value == pytest.approx(statistic(SKEWED))
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=0.02)


@pytest.mark.parametrize("bootstrap", [bootstrap_mean, bootstrap_median])
def test_intervals_repeat_and_depend_on_the_seed(bootstrap):
    assert bootstrap(SKEWED) == bootstrap(SKEWED.tolist())
    assert bootstrap(SKEWED, seed=1) != bootstrap(SKEWED, seed=2)
    assert bootstrap([0.25]) == Interval(0.25, 0.25, 0.25)
    assert bootstrap([True, True]) == Interval(1.0, 1.0, 1.0)


def test_a_median_is_not_moved_by_one_wild_value():
    wild = [*SKEWED, 1e6]
    assert bootstrap_median(wild).high < 2
    assert bootstrap_mean(wild).high > 1e4


@pytest.mark.parametrize(
    "take", [bootstrap_mean, bootstrap_median, lambda v: paired(v, v), lambda v: recovery(v, v, v)]
)
def test_no_values_and_values_that_are_no_numbers_are_refused(take):
    with pytest.raises(SampleError, match="no values to take a"):
        take([])
    with pytest.raises(SampleError, match="value 1 is nan"):
        take([1.0, float("nan")])
    with pytest.raises(SampleError, match="value 0 is inf"):
        take([float("inf"), 0.0])


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(SampleError, match="have 2, 3 values"):
        paired([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(SampleError, match="have 2, 2, 1 values"):
        recovery([1.0, 2.0], [1.0, 2.0], [3.0])


def test_small_is_below_thirty():
    assert is_small(29)
    assert not is_small(30)


# --- recovery -----------------------------------------------------------------------------------------


def test_recovery_of_the_ends_and_the_middle():
    reuse, full = SKEWED, SKEWED + 1 + 0.1 * A
    assert recovery(reuse, reuse, full) == Interval(0.0, 0.0, 0.0)
    assert recovery(full, reuse, full) == pytest.approx((1.0, 1.0, 1.0))
    found = recovery((reuse + full) / 2, reuse, full)
    assert found == pytest.approx((0.5, 0.5, 0.5)), "the same share of every example: nothing to be unsure of"


def test_recovery_works_where_less_is_better():
    full, reuse = np.zeros(60), SKEWED
    assert recovery(0.25 * SKEWED, reuse, full).value == pytest.approx(0.75)


def test_recovery_is_of_the_means_and_its_interval_is_of_pairs():
    reuse, full = SKEWED, SKEWED + 2
    x = reuse + 1 + 0.5 * A
    found = recovery(x, reuse, full, draws=20_000)
    assert found.value == pytest.approx((x.mean() - reuse.mean()) / (full.mean() - reuse.mean()))

    def ratio(x, reuse, full):
        return (x.mean() - reuse.mean()) / (full.mean() - reuse.mean())

    theirs = scipy_stats.bootstrap(
        (x, reuse, full), ratio, n_resamples=5_000, method="percentile", paired=True, vectorized=False,
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=0.02)


def test_nothing_is_recovered_where_full_prefill_and_reuse_hardly_differ():
    assert recovery(A, SKEWED, SKEWED) is None
    assert recovery(A, B, B + RNG.normal(0, 1, size=60)) is None


# --- pairs --------------------------------------------------------------------------------------------


def test_differences_are_a_minus_b():
    found = paired([3.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0])
    assert (found.n, found.wins, found.ties, found.losses) == (4, 2, 1, 1)
    assert found.mean == pytest.approx(0.5)
    assert found.median.value == pytest.approx(0.5)
    assert found.low <= found.mean <= found.high


@pytest.mark.parametrize("n", [2, 5, 9, 12])
def test_the_exact_sign_flip_test_is_scipys(n):
    a, b = A[:n], B[:n]
    theirs = scipy_stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf, vectorized=False
    )
    assert paired(a, b).p == pytest.approx(theirs.pvalue)


def test_every_sign_flip_is_tried_up_to_twenty():
    diff = np.array([0.3, -0.1, 0.7, 0.2, 0.25, 0.9])
    sums = [abs(np.dot(signs, diff)) for signs in itertools.product((1, -1), repeat=6)]
    by_hand = np.mean(np.array(sums) >= diff.sum() - 1e-12)
    assert paired(diff, np.zeros(6)).p == by_hand
    twenty, one_more = A[:20], np.append(A[:20], 0.0)
    assert paired(twenty, 0 * twenty).p == paired(one_more, 0 * one_more).p, "an example without a difference adds none"


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_the_random_sign_flip_test_is_scipys(shift):
    a = B + shift + 0.5 * RNG.normal(0, 1, size=60)
    theirs = scipy_stats.permutation_test(
        (a, B), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", n_resamples=50_000,
        vectorized=True, rng=np.random.default_rng(1),
    )  # fmt: skip
    assert paired(a, B).p == pytest.approx(theirs.pvalue, abs=0.02)
    assert paired(a, B) == paired(a, B), "the same for the same seed"
    assert paired(a, B, seed=1).p == pytest.approx(paired(a, B).p, abs=0.02)


@pytest.mark.parametrize(
    ("wins", "ties", "losses"), [(0, 5, 0), (1, 0, 0), (6, 4, 1), (1, 4, 6), (40, 10, 22), (3, 0, 3)]
)
def test_on_yes_or_no_both_tests_are_mcnemars(wins, ties, losses):
    a = [1] * wins + [1] * ties + [0] * losses
    b = [0] * wins + [1] * ties + [1] * losses
    theirs = scipy_stats.binomtest(wins, wins + losses, 0.5).pvalue if wins + losses else 1.0
    found = paired(a, b)
    assert found.p == pytest.approx(theirs)
    assert found.p_sign == pytest.approx(theirs)


def test_the_sign_test_counts_and_does_not_weigh():
    a = np.array([0.1] * 9 + [-50.0])
    found = paired(a, np.zeros(10))
    assert found.p_sign == pytest.approx(scipy_stats.binomtest(9, 10).pvalue)
    assert found.p_sign < 0.05 < found.p
    assert found.mean < 0 < found.median.value


def test_the_same_everywhere_is_no_difference():
    found = paired(A, A)
    assert (found.mean, found.low, found.high, found.p, found.p_sign, found.ties) == (0.0, 0.0, 0.0, 1.0, 1.0, 60)


def test_a_clear_difference_is_found_and_chance_is_not():
    assert paired(B + 1 + 0.3 * A, B).p < 0.001
    ps = [paired(*np.random.default_rng(seed).normal(size=(2, 15))).p for seed in range(200)]
    assert 0.01 < np.mean(np.array(ps) < 0.05) < 0.1, "one in twenty by chance"
