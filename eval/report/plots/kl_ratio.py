"""KL against the ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.report.plots.curves import against_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.report.run import Run

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE = "KL against the ratio"
CAPTION = (
    "Mean KL from full prefill along its own answer, on a logarithmic scale, with 95 % intervals; points of one ratio "
    "stand a little beside each other. Level lines are systems without a ratio. Exact systems have KL 0 and are not "
    "drawn."
)


def draw(run: Run) -> Figure:
    """Raises :class:`NothingToDraw` for fewer than two ratios."""
    return against_ratio(run, "kl_mean", "KL mean, nats per answer token (lower is better)", log=True)
