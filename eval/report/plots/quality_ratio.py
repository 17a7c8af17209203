"""The headline metric against the ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.report.plots.curves import against_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.report.run import Run

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE = "Quality against the ratio"
CAPTION = (
    "Mean of the first metric of each example's task, all sets together, with 95 % intervals; points of one ratio "
    "stand a little beside each other. Level lines are systems without a ratio; of the exact ones only full prefill is "
    "drawn."
)


def draw(run: Run) -> Figure:
    """Raises :class:`NothingToDraw` for fewer than two ratios."""
    return against_ratio(run, "headline", "headline metric, mean (higher is better)", log=False)
