"""TTFT against the prompt's length: a dot per example, a line per system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eval.report.plots.axes import plain_log
from eval.report.plots.direct import End, column_inches, label_column
from eval.report.plots.missing import NothingToDraw
from eval.report.style import look, marks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from eval.report.run import Row, Run

__all__ = ["CAPTION", "TITLE", "draw", "trend"]

TITLE = "TTFT against the prompt's length"
CAPTION = (
    "A dot per example; lines join the medians of up to six groups of prompts of like length. Systems with a ratio are "
    "at the one nearest to 0.15. Both scales are logarithmic."
)

_GROUPS, _LEAST = 6, 5  # a smaller group would follow every outlier: it joins its neighbour


def draw(run: Run) -> Figure:
    """Raises :class:`NothingToDraw` where no system has a TTFT, or all prompts are equally long."""
    timed = {row.name: (row, _points(run, row)) for row in run.at(run.ratio)}
    timed = {name: (row, points) for name, (row, points) in timed.items() if len(points)}
    if not timed:
        raise NothingToDraw("no system has a TTFT")
    everything = np.concatenate([points for _, points in timed.values()])
    if np.ptp(everything[:, 0]) == 0:
        raise NothingToDraw("all prompts are equally long")
    figure, (axes,) = new_figure(
        8, max(4.8, 0.9 + 0.19 * len(timed)), right=column_inches(row.title for row, _ in timed.values())
    )
    for which, column in (("x", 0), ("y", 1)):
        low, high = everything[:, column].min(), everything[:, column].max()
        plain_log(axes, "x" if which == "x" else "y", low / 1.08, high * 1.08)
    ends = []
    for name, (row, points) in timed.items():
        line = trend(points)
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=5,
            color=look(name).colour,
            alpha=0.22,
            linewidths=0,
            rasterized=True,
            zorder=2,
        )
        axes.plot(line[:, 0], line[:, 1], **marks(name, 5), linewidth=1.4, zorder=3)
        ends.append(End(name, row.title, *line[-1]))
    ratio = "" if run.ratio is None else f", ratio {run.ratio:g}"
    axes.set(title=f"TTFT in seconds{ratio} (lower is better)", xlabel="rows of the prompt")
    label_column(axes, ends)
    return figure


def trend(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median length and TTFT of groups of prompts of like length ``[k, 2]``, short ones first.

    Args:
        points: rows and seconds per example, ``[n, 2]``.
    """
    points = points[np.argsort(points[:, 0], kind="stable")]
    edges = np.geomspace(points[0, 0], points[-1, 0], _GROUPS + 1)[1:-1]
    groups: list[NDArray[np.float64]] = []
    for group in np.split(points, np.searchsorted(points[:, 0], edges)):
        if groups and min(len(groups[-1]), len(group)) < _LEAST:
            groups[-1] = np.concatenate([groups[-1], group])
        else:
            groups.append(group)
    return np.array([np.median(group, axis=0) for group in groups])


def _points(run: Run, row: Row) -> NDArray[np.float64]:
    return np.array([(s.rows, s.ttft_s) for s in run.scores_of(row) if s.ttft_s], dtype=float).reshape(-1, 2)
