"""How far the reused rows' KV is from full prefill's, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eval.report.plots.direct import End, column_inches, label_column
from eval.report.plots.missing import NothingToDraw
from eval.report.style import marks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.report.run import Run

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE = "Deviation of KV per layer"
CAPTION = (
    "Mean relative distance of keys and values of the reused rows from full prefill's. Systems with a ratio are at the "
    "one nearest to 0.15; exact ones are at 0 and not drawn. A system may be far from full prefill here and near to it "
    "in KL: what counts is the rows that the question looks at."
)


def draw(run: Run) -> Figure:
    """Raises :class:`NothingToDraw` where nothing was measured per layer."""
    rows = [row for row in run.at(run.ratio) if row.entry.get("kv_error") and not row.exact]
    if not rows:
        raise NothingToDraw("no system has a deviation per layer")
    figure, (axes,) = new_figure(8, max(4.6, 0.9 + 0.19 * len(rows)), right=column_inches(row.title for row in rows))
    layers = max(len(row.entry["kv_error"]) for row in rows)
    axes.set_xlim(-0.5, layers - 1 + 0.02 * layers)
    top = 1.05 * max(max(row.entry["kv_error"]) for row in rows) or 1.0
    axes.set_ylim(-0.02 * top, top)
    ends = []
    for place, row in enumerate(rows):
        errors = np.array(row.entry["kv_error"], dtype=float)
        every = max(1, layers // 7)
        first = place * every // len(rows)  # so that markers of like curves do not cover each other
        axes.plot(errors, **marks(row.name, 5), markevery=(first, every), linewidth=1.3, zorder=3)
        ends.append(End(row.name, row.title, len(errors) - 1, float(errors[-1])))
    ratio = "" if run.ratio is None else f", ratio {run.ratio:g}"
    axes.set(title=f"relative distance of KV from full prefill's{ratio} (lower is nearer)", xlabel="layer")
    axes.locator_params(axis="x", integer=True)
    label_column(axes, ends)
    return figure
