"""Which neighbours in the ranking differ by more than chance: paired tests over the examples that both have run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from eval.report.blocks import Cell, Column, Table
from eval.report.results import NOTHING, nats, score, with_interval
from eval.report.run import Row, Run
from eval.stats import paired
from eval.vocabulary import Score

__all__ = ["Difference", "holm", "neighbours_table"]

_LEVEL = 0.05

Value = Callable[[Score], "float | None"]


@dataclass(frozen=True)
class Difference:
    """Second minus first over ``n`` common examples, with its 95 % interval and p; None: the same at every example."""

    n: int
    mean: float
    interval: tuple[float, float] | None
    p: float | None


def neighbours_table(run: Run, ratio: float | None) -> Table | None:
    """Systems at one ratio in the order of their mean KL, each tested against the next one.

    p is Holm's: corrected for the number of tests in its column, so that one test in twenty does not look beyond chance
    by chance. None where fewer than two systems show a KL.
    """
    ranked = sorted(
        (row for row in run.at(ratio) if row.get("kl_mean") is not None), key=lambda row: row.get("kl_mean") or 0
    )
    pairs = list(pairwise(ranked))
    if not pairs:
        return None
    kl = _adjusted([_differ(run, *pair, lambda s: s.kl) for pair in pairs])
    headline = _adjusted([_differ(run, *pair, _headline) for pair in pairs])
    names = ("nearer to full prefill", "next one")
    figures = ("n", "KL: next - nearer", "p", "headline: nearer - next", "p")
    columns = (
        *(Column(name, number=False) for name in names),
        *map(Column, figures),
        Column("beyond chance", number=False),
    )
    rows = [_line(pair, *both) for pair, *both in zip(pairs, kl, headline, strict=True)]
    return Table(columns, tuple(rows))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number (Holm 1979); None is no test."""
    tests = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for rank, (p, place) in enumerate(tests):
        least = max(least, min(1.0, p * (len(tests) - rank)))
        corrected[place] = least
    return corrected


def _headline(score: Score) -> float | None:
    return next(iter(score.metrics.values()), None)


def _differ(run: Run, near: Row, far: Row, value: Value) -> Difference | None:
    """None where they have no two examples in common."""
    first, second = _values(run, near, value), _values(run, far, value)
    common = [key for key in first if key in second]
    if len(common) < 2:
        return None
    a, b = [second[key] for key in common], [first[key] for key in common]
    if a == b:
        return Difference(len(common), 0.0, None, None)
    tested = paired(a, b)
    return Difference(len(common), tested.mean, (tested.low, tested.high), tested.p)


def _values(run: Run, row: Row, value: Value) -> dict[tuple[str, str], float]:
    found = {(s.data, s.example): value(s) for s in run.scores_of(row)}
    return {key: number for key, number in found.items() if number is not None and math.isfinite(number)}


def _adjusted(found: Sequence[Difference | None]) -> list[Difference | None]:
    ps = holm([None if difference is None else difference.p for difference in found])
    return [d and Difference(d.n, d.mean, d.interval, p) for d, p in zip(found, ps, strict=True)]


def _line(pair: tuple[Row, Row], kl: Difference | None, headline: Difference | None) -> tuple[Cell, ...]:
    names = [Cell(f"{row.title} ({row.setting})") for row in pair]
    count = Cell(NOTHING) if kl is None else Cell(str(kl.n), kl.n)
    flipped = headline and Difference(
        headline.n,
        -headline.mean + 0.0,
        headline.interval and (-headline.interval[1], -headline.interval[0]),
        headline.p,
    )
    return (*names, count, *_cells(kl, nats), *_cells(flipped, score), Cell(_verdict(kl, headline)))


def _cells(difference: Difference | None, show: Callable[[float], str]) -> tuple[Cell, Cell]:
    if difference is None:
        return Cell(NOTHING), Cell(NOTHING)
    if difference.p is None:
        return Cell("none at any example", 0.0), Cell(NOTHING)
    written = with_interval(show, difference.mean, difference.interval)
    return Cell(written, difference.mean), Cell(_p(difference.p), difference.p)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _verdict(kl: Difference | None, headline: Difference | None) -> str:
    found = []
    for name, difference in (("KL", kl), ("headline", headline)):
        if difference is not None and difference.p is not None and difference.p < _LEVEL:
            found.append(name if (difference.mean > 0) == (name == "KL") else f"{name} (the next one is better)")
    return " and ".join(found) or "no"
