"""From measurements to a :class:`~blend.calibration.Calibration`. Knows no models; it is handed numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blend.calibration import Calibration, Line
from blend.errors import BudgetError

__all__ = ["Observed", "Point", "fit"]

_LEAST_KL = 1e-6  # below it a divergence is rounding, and its logarithm says nothing


class Point(NamedTuple):
    """One fusion of a question.

    Attributes:
        chosen: stale rows computed again.
        run: rows that ran, the question's included.
        left: expected error of the stale rows that stayed as they were, in all.
        kl: nats per token from full prefill, along full prefill's own answer.
        before: seconds until the first of the rows ran again.
        repair: seconds of that pass.
    """

    chosen: int
    run: int
    left: float
    kl: float
    before: float
    repair: float


@dataclass(frozen=True)
class Observed:
    """One question.

    Attributes:
        rows: of its prompt.
        full: seconds of a full prefill.
        encoded: rows of the chunks that were encoded for it.
        encode: seconds that this took.
        points: its fusions.
    """

    rows: int
    full: float
    encoded: int
    encode: float
    points: tuple[Point, ...]


def fit(key: str, model: str, observed: Sequence[Observed], quantile: float = 0.8) -> Calibration:
    """The calibration that explains the measurements.

    The slope is that *within* questions: how divergence falls as more of one question's error is covered. What
    questions differ in besides goes into the level, at ``quantile``.

    Raises:
        BudgetError: no question, or none with two fusions that leave different amounts.
    """
    points = [point for one in observed for point in one.points]
    if not points:
        raise BudgetError("nothing was measured: a calibration takes at least one question")
    level, slope = _divergence(observed, quantile)
    full = line([(one.rows, one.rows, one.full) for one in observed])
    before = line([(one.rows, one.rows, p.before) for one in observed for p in one.points], paired=False)
    repair = line([(p.run, one.rows, p.repair) for one in observed for p in one.points])
    ratios = [
        (p.before + p.repair) / max(before.seconds(one.rows, one.rows) + repair.seconds(p.run, one.rows), 1e-9)
        for one in observed
        for p in one.points
    ]
    encoded = sum(one.encoded for one in observed)
    encode = sum(one.encode for one in observed) / encoded if encoded else 0.0
    slack = max(1.0, _quantile(ratios, 0.9))
    return Calibration(key, model, len(observed), level, slope, quantile, full, before, repair, encode, slack)


def line(measured: Sequence[tuple[float, float, float]], paired: bool = True) -> Line:
    """The line with no negative number that fits (rows that run, rows of the prompt, seconds) best.

    Least absolute relative error: a moment in which the machine was busy does not bend it.

    Args:
        paired: whether there is a part that grows with both.
    """
    run_n, rows_n, seconds_n = torch.tensor(measured, dtype=torch.float64).T
    columns = [torch.ones_like(run_n), run_n] + ([run_n * rows_n] if paired else [])
    return Line(*_no_negatives(torch.stack(columns, 1), seconds_n.clamp_min(1e-9)).tolist())


def _no_negatives(table_nc: Tensor, value_n: Tensor) -> Tensor:
    """Coefficients, 0 or more; a column that would get a negative one is left out, the most negative first."""
    table_nc = table_nc / value_n[:, None]
    scale_c = table_nc.abs().max(0).values
    used = list(range(table_nc.shape[1]))
    found_c = torch.zeros(table_nc.shape[1], dtype=torch.float64)
    while used:
        part_c = _least_absolute(table_nc[:, used] / scale_c[used])
        if part_c.min() >= 0.0:
            found_c[used] = part_c / scale_c[used]
            break
        used.pop(int(part_c.argmin()))
    return found_c


def _least_absolute(table_nc: Tensor) -> Tensor:
    """Coefficients with which the rows add up to 1, by least squares weighted anew: the L1 solution, nearly."""
    one_n = torch.ones(table_nc.shape[0], 1, dtype=torch.float64)
    weight_n1 = one_n.clone()
    for _ in range(12):
        found_c1: Tensor = torch.linalg.lstsq(table_nc * weight_n1, one_n * weight_n1, driver="gelsd").solution
        weight_n1 = (table_nc @ found_c1 - one_n).abs().clamp_min(1e-3).rsqrt()
    return found_c1[:, 0]


def _divergence(observed: Sequence[Observed], quantile: float) -> tuple[float, float]:
    """Level and slope of KL over the expected error left."""
    logs = [
        [(math.log(p.left), math.log(max(p.kl, _LEAST_KL))) for p in one.points if p.left > 0.0] for one in observed
    ]
    moved, together = 0.0, 0.0
    for one in logs:
        mean_x, mean_y = (sum(values) / len(one) for values in zip(*one, strict=True)) if one else (0.0, 0.0)
        moved += sum((x - mean_x) ** 2 for x, _ in one)
        together += sum((x - mean_x) * (y - mean_y) for x, y in one)
    if moved <= 0.0:
        raise BudgetError("every fusion left as much expected error as the others: give at least two ratios")
    slope = max(together / moved, 0.0)
    return math.exp(_quantile([y - slope * x for one in logs for x, y in one], quantile)), slope


def _quantile(values: Sequence[float], q: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))
