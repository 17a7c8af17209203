"""Intervals and tests over the examples of a set. Knows nothing of what the numbers are.

Examples are drawn again with replacement, whole: what two systems did on one example stays together (Efron and
Tibshirani 1993; Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004). The same seed
gives the same figures.

Shape suffixes: ``n`` examples, ``D`` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.errors import KVBlendError

__all__ = [
    "Interval",
    "Paired",
    "SampleError",
    "bootstrap_mean",
    "bootstrap_median",
    "is_small",
    "paired",
    "recovery",
]

Array = NDArray[np.float64]

DRAWS = 2000
"""Bootstrap samples."""

SIGNS = 10_000
"""Random sign flips, where there are too many to try them all."""

ALL_SIGNS = 20
"""Up to so many differing examples every sign flip is tried: 2 ** 20 sums."""

SMALL = 30


class SampleError(KVBlendError, ValueError):
    """Values that no statistic can be taken of: none, not finite, or not as many in one list as in the other."""


class Interval(NamedTuple):
    """A figure, and the range it would fall in for 95 % of samples like this one."""

    value: float
    low: float
    high: float


class Paired(NamedTuple):
    """Differences a - b over the examples of a set.

    Attributes:
        n: examples.
        mean: of the differences.
        low: of its 95 % bootstrap interval.
        high: of it.
        median: of the differences, with its interval.
        p: of the two-sided sign-flip test: how often a mean as far from zero would come about if a and b were the same
            and only chance gave each difference its sign. On 0/1 values it is McNemar's exact test.
        p_sign: of the exact two-sided sign test, which asks that of wins against losses, and so of the median.
        wins: examples where a is higher.
        ties: where both are the same.
        losses: where a is lower.
    """

    n: int
    mean: float
    low: float
    high: float
    median: Interval
    p: float
    p_sign: float
    wins: int
    ties: int
    losses: int


def is_small(n: int) -> bool:
    """Whether a set has fewer than 30 examples: too few for percentile intervals to be more than a hint."""
    return n < SMALL


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Interval:
    """The mean of ``values`` and its 95 % percentile-bootstrap interval; the same for the same seed.

    Raises:
        SampleError: no values, or one that is not finite.
    """
    return _interval(_sample(values, "a mean"), np.mean, seed, draws)


def bootstrap_median(values: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Interval:
    """The median of ``values`` and its 95 % percentile-bootstrap interval; the same for the same seed.

    Raises:
        SampleError: no values, or one that is not finite.
    """
    return _interval(_sample(values, "a median"), np.median, seed, draws)


def recovery(
    x: Sequence[float], reuse: Sequence[float], full: Sequence[float], *, seed: int = 0, draws: int = DRAWS
) -> Interval | None:
    """How much of what full reuse loses a system wins back: (x - reuse) / (full - reuse) of the means.

    0 is no better than full reuse, 1 as good as full prefill; it may be below or above. The interval draws examples
    anew, for all three at once.

    Args:
        x: the system's values.
        reuse: full reuse's, of the same examples.
        full: full prefill's, of the same examples.

    Returns:
        None where full prefill and full reuse do not differ beyond chance (the 95 % interval of full - reuse holds 0):
        nothing is lost there that could be won back, and the ratio would be noise over noise.

    Raises:
        SampleError: no values, one that is not finite, or lists of different lengths.
    """
    x_n, reuse_n, full_n = _samples("a recovery", x, reuse, full)
    gap = _interval(full_n - reuse_n, np.mean, seed, draws)
    if gap.low <= 0 <= gap.high:
        return None
    picks_Dn = _picks(len(x_n), seed, draws)
    won_D, gap_D = (x_n - reuse_n)[picks_Dn].mean(axis=1), (full_n - reuse_n)[picks_Dn].mean(axis=1)
    lost_D = gap_D != 0  # of the few draws on the far side of zero, one may hit it
    low, high = np.quantile(won_D[lost_D] / gap_D[lost_D], [0.025, 0.975])
    return Interval(float((x_n - reuse_n).mean() / gap.value), float(low), float(high))


def paired(a: Sequence[float], b: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Paired:
    """Compares two systems by what they did on the same examples, a - b.

    Signs of differences are flipped (Fisher 1935) in all ways where up to 20 examples differ, else in 10,000 random
    ones; where all differences are equally large, as on 0/1 values, their number is counted exactly (McNemar 1947).
    Both p are 1.0 where a and b are the same at every example.

    Raises:
        SampleError: no values, one that is not finite, or lists of different lengths.
    """
    a_n, b_n = _samples("a difference", a, b)
    diff_n = a_n - b_n
    mean = _interval(diff_n, np.mean, seed, draws)
    wins, losses = int((diff_n > 0).sum()), int((diff_n < 0).sum())
    p_sign = _sign_test(wins, losses)
    return Paired(
        n=len(diff_n),
        mean=mean.value,
        low=mean.low,
        high=mean.high,
        median=_interval(diff_n, np.median, seed, draws),
        p=p_sign if len(np.unique(np.abs(diff_n[diff_n != 0]))) <= 1 else _sign_flips(diff_n[diff_n != 0], seed),
        p_sign=p_sign,
        wins=wins,
        ties=len(diff_n) - wins - losses,
        losses=losses,
    )


def _sign_flips(diff_n: Array, seed: int) -> float:
    """Share of sign flips whose sum is as far from zero as the differences' own; those of zeros change nothing."""
    least = abs(diff_n.sum()) - 1e-9 * np.abs(diff_n).sum()  # sums that are the same but for their rounding
    if len(diff_n) <= ALL_SIGNS:
        sums = diff_n[:1]  # turning all signs round changes no distance: the first may keep its own
        for diff in diff_n[1:]:
            sums = np.concatenate([sums + diff, sums - diff])
        return float((np.abs(sums) >= least).mean())
    rng = np.random.default_rng(seed)
    batches = (rng.integers(0, 2, size=(SIGNS // 10, len(diff_n)), dtype=np.int8) * 2 - 1 for _ in range(10))
    found = sum(int((np.abs(signs_Dn @ diff_n) >= least).sum()) for signs_Dn in batches)
    return (1 + found) / (1 + SIGNS)  # the differences' own signs are one flip of them all


def _sign_test(wins: int, losses: int) -> float:
    """Two-sided p of so lopsided a split, if either side were as likely to win as the other."""
    differ = wins + losses
    tail = sum(comb(differ, count) for count in range(min(wins, losses) + 1))
    return float(min(1.0, 2 * tail / 2**differ))


def _interval(values_n: Array, statistic: Callable[..., Any], seed: int, draws: int) -> Interval:
    drawn_D = statistic(values_n[_picks(len(values_n), seed, draws)], axis=1)
    low, high = np.quantile(drawn_D, [0.025, 0.975])
    return Interval(float(statistic(values_n)), float(low), float(high))


def _picks(n: int, seed: int, draws: int) -> NDArray[np.int64]:
    """Examples of each bootstrap sample, ``[D, n]``."""
    return np.random.default_rng(seed).integers(0, n, size=(draws, n))


def _samples(what: str, *lists: Sequence[float]) -> list[Array]:
    lengths = [len(values) for values in lists]
    if len(set(lengths)) > 1:
        raise SampleError(f"the lists have {', '.join(map(str, lengths))} values: give one of each for every example")
    return [_sample(values, what) for values in lists]


def _sample(values: Sequence[float], what: str) -> Array:
    if not len(values):
        raise SampleError(f"there are no values to take {what} of")
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        place = int(np.flatnonzero(~np.isfinite(sample))[0])
        raise SampleError(f"value {place} is {sample[place]}: {what} needs finite numbers")
    return sample
