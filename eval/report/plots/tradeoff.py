"""Quality against TTFT speed-up, and the systems that no other beats at both (the Pareto front)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from eval.report.plots.axes import kl_axis, plain_log
from eval.report.plots.direct import label_points
from eval.report.plots.missing import NothingToDraw
from eval.report.run import Row, Run
from eval.report.style import GRID, marks, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CAPTION", "TITLE", "draw", "front"]

TITLE = "Quality against speed"
CAPTION = (
    "Every system at every setting; a larger marker recomputes more. The broad grey line is the Pareto front: no other "
    "system is both faster and better than those on it; the warm prefix cache is not considered, as it needs the same "
    "passages in the same order before. Bars are 95 % intervals. Oracles have no TTFT and are not here; peers that "
    "show no distribution have no KL."
)

_APART = "prefix-warm"  # fast only where another question over the very same prompt came before

_X, _PANELS = "speedup_median", (("headline", "headline metric"), ("kl_mean", "KL mean, nats per answer token"))


def draw(run: Run) -> Figure:
    """Two panels, one above the other: the headline metric, and KL.

    Raises:
        NothingToDraw: no system has both a speed-up and one of the two.
    """
    points = {key: [row for row in run.rows if row.get(_X) and row.get(key) is not None] for key, _ in _PANELS}
    panels = [(key, label) for key, label in _PANELS if points[key]]
    if not panels:
        raise NothingToDraw("no system has both a speed-up and a quality")
    figure, axes = new_figure(8, 0.9 + 4.4 * len(panels), len(panels))
    edges = [edge for rows in points.values() for row in rows for edge in _bar(row, _X)]
    for panel, (key, label) in zip(axes, panels, strict=True):
        low = key == "kl_mean"
        plain_log(panel, "x", min(edges) * 0.86, max(edges) * 1.2, "x")
        if low:
            kl_axis(panel, [edge for row in points[key] for edge in _bar(row, key)])
        panel.set_title(f"{label} ({'lower' if low else 'higher'} is better)")
        _systems(panel, points[key], key)
        if not low:
            _headline_limits(panel)
        _front(panel, points[key], key, low)
        curves = {name: _line(rows, key) for name, rows in _by_name(points[key]).items()}
        label_points(panel, {row.name: row.title for row in points[key]}, curves)
    axes[-1].set_xlabel("TTFT speed-up over full prefill, median")
    return figure


def front(points: Sequence[tuple[float, float]], low: bool) -> list[tuple[float, float]]:
    """The points that no other beats at both, slow ones first.

    Args:
        points: speed-up and quality.
        low: whether a low quality is the better one.
    """
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (-point[0], point[1] if low else -point[1])):
        if not best or (y < best[-1][1] if low else y > best[-1][1]):
            best.append((x, y))
    return best[::-1]


def _systems(axes: Axes, rows: Sequence[Row], key: str) -> None:
    for name, its in _by_name(rows).items():
        look = marks(name)
        line = _line(its, key)
        axes.plot(line[:, 0], line[:, 1], color=look["color"], linestyle=look["linestyle"], linewidth=1.2, zorder=2.5)
        for row, (x, y) in zip(its, line, strict=True):
            (left, right), (low, high) = _bar(row, _X), _bar(row, key)
            axes.plot([left, right], [y, y], color=look["color"], linewidth=1, alpha=0.4, zorder=2)
            axes.plot([x, x], [low, high], color=look["color"], linewidth=1, alpha=0.4, zorder=2)
            size = 6.5 if row.ratio is None else 4.5 + 5 * row.ratio**0.5
            axes.plot([x], [y], **{**marks(name, size), "linestyle": "none"}, zorder=3)


def _headline_limits(axes: Axes) -> None:
    """A metric is never below 0; where every answer is wrong, the axis is that of a metric all the same."""
    axes.autoscale_view(scalex=False)
    top = axes.get_ylim()[1] if axes.dataLim.y1 > 0 else 1.0
    axes.set_ylim(max(axes.get_ylim()[0], -0.03 * top), top)


def _front(axes: Axes, rows: Sequence[Row], key: str, low: bool) -> None:
    best = front([(row.get(_X) or 0, row.get(key) or 0) for row in rows if row.name != _APART], low)
    xs, ys = [x for x, _ in best], [y for _, y in best]
    axes.plot(xs, ys, drawstyle="steps-pre", color=GRID, linewidth=5, zorder=1, solid_joinstyle="round")


def _by_name(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return found


def _line(rows: Sequence[Row], key: str) -> np.ndarray:
    return np.array([(row.get(_X), row.get(key)) for row in rows], dtype=float)


def _bar(row: Row, key: str) -> tuple[float, float]:
    value = row.get(key) or 0.0
    return row.interval(key) or (value, value)
