"""A figure against the ratio: a curve per system that has several, a level line for those without a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.report.plots.axes import kl_axis
from eval.report.plots.direct import End, column_inches, label_column
from eval.report.plots.missing import NothingToDraw
from eval.report.run import Row, Run
from eval.report.style import marks, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["against_ratio"]


def against_ratio(run: Run, key: str, title: str, log: bool) -> Figure:
    """One panel, names in a column to its right.

    Args:
        key: of the figure.
        title: over the panel.
        log: whether it is a KL.

    Raises:
        NothingToDraw: fewer than two ratios, or nobody has the figure at them.
    """
    rows = [row for row in run.rows if row.get(key) is not None]
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if row.ratio is not None:
            curves.setdefault(row.name, []).append(row)
    if len(run.ratios) < 2:
        raise NothingToDraw("it takes at least two ratios, and this run has " + ("one" if run.ratios else "none"))
    if not curves:
        raise NothingToDraw(f"no system with a ratio has a {title.split(',')[0]}")
    levels = [row for row in rows if row.ratio is None and not (log and row.exact)]
    levels = [row for row in levels if not row.exact or row.name == "full"]  # exact ones are all at the same height
    titles = [*(its[0].title for its in curves.values()), *map(_label, levels)]
    figure, (axes,) = new_figure(8, max(4.6, 0.9 + 0.19 * len(titles)), right=column_inches(titles))
    width = run.ratios[-1] - run.ratios[0]
    axes.set_xlim(run.ratios[0] - 0.05 * width, run.ratios[-1] + 0.06 * width)
    axes.set_xticks(run.ratios, [f"{ratio:g}" for ratio in run.ratios])
    if log:
        kl_axis(axes, [edge for row in rows for edge in _bar(row, key) if row.ratio is not None or row in levels])
    ends = [_curve(axes, its, key, _nudge(place, len(curves)) * width) for place, its in enumerate(curves.values())]
    ends += [_level(axes, row, key, run) for row in levels]
    axes.set(title=title, xlabel="ratio: share of the reused rows that may be computed again")
    label_column(axes, ends)
    return figure


def _curve(axes: Axes, rows: Sequence[Row], key: str, nudge: float) -> End:
    look = marks(rows[0].name, 5.5)
    xs = [(row.ratio or 0.0) + nudge for row in rows]
    ys = [row.get(key) or 0.0 for row in rows]
    for x, row in zip(xs, rows, strict=True):
        axes.plot([x, x], _bar(row, key), color=look["color"], linewidth=0.9, alpha=0.35, zorder=2)
    axes.plot(xs, ys, **look, linewidth=1.4, zorder=3)
    return End(rows[0].name, rows[0].title, xs[-1], ys[-1])


def _level(axes: Axes, row: Row, key: str, run: Run) -> End:
    look, y = marks(row.name), row.get(key) or 0.0
    left, right = axes.get_xlim()
    axes.plot([left, right], [y, y], color=look["color"], linestyle=look["linestyle"], linewidth=1, alpha=0.8, zorder=2)
    return End(row.name, _label(row), right, y)


def _label(row: Row) -> str:
    return row.title if row.setting in ("0", "1") else f"{row.title} ({row.setting})"


def _nudge(place: int, count: int) -> float:
    """A step aside, so that intervals at one ratio stand beside each other."""
    return 0.055 * (place / max(1, count - 1) - 0.5)


def _bar(row: Row, key: str) -> tuple[float, float]:
    value = row.get(key) or 0.0
    return row.interval(key) or (value, value)
