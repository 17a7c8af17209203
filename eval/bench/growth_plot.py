"""Draws how time and memory to the first token grow with the prompt. Measures nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from eval.report.plots.axes import plain_log
from eval.report.plots.direct import End, column_inches, label_column
from eval.report.style import MUTED, SMALL_PT, marks, new_figure, save, style

__all__ = ["draw_growth"]

_TITLES = {"full": "full prefill", "kvblend": "kvblend"}


def draw_growth(figures: dict[str, Any], kind: str) -> bytes:
    """The picture's bytes: seconds above; below, the most memory held at once, where that is known.

    Args:
        figures: of :func:`eval.bench.growth.run_growth_bench`.
        kind: ``png`` or ``svg``.

    Raises:
        ExtraMissing: matplotlib is not installed.
    """
    lengths = figures["lengths"]
    seconds = {"full": "full_s", "kvblend": "ttft_s"}
    panels = [("TTFT in seconds (lower is better)", seconds, 1.0)]
    if all(line["peak_bytes"] for line in lengths):
        memory = {"full": "full_peak_bytes", "kvblend": "peak_bytes"}
        panels.append(("Memory held at most, MB, the prompt's KV included", memory, 1e6))
    with style():
        figure, all_axes = new_figure(
            6.4, 2.9 * len(panels), len(panels), right=column_inches(_TITLES.values()), gap=0.6
        )
        for axes, (title, keys, unit) in zip(all_axes, panels, strict=True):
            _panel(axes, lengths, title, {name: [line[key] / unit for line in lengths] for name, key in keys.items()})
            if figures["context"] < lengths[-1]["rows"]:
                _end_of_context(axes, figures["context"])
        all_axes[-1].set_xlabel("rows of the prompt")
        return save(figure, kind)


def _panel(axes: Any, lengths: list[dict[str, Any]], title: str, values: dict[str, list[float]]) -> None:
    rows = np.array([line["rows"] for line in lengths], dtype=float)
    everything = np.concatenate([*map(np.array, values.values())])
    plain_log(axes, "x", rows[0] / 1.15, rows[-1] * 1.15)
    axes.set_xticks(rows, [f"{row:,.0f}" for row in rows])
    plain_log(axes, "y", everything.min() / 1.3, everything.max() * 1.3)
    for name, numbers in values.items():
        axes.plot(rows, numbers, **marks(name), linewidth=1.6, zorder=3)
    axes.set_title(title)
    label_column(axes, [End(name, _TITLES[name], rows[-1], numbers[-1]) for name, numbers in values.items()])


def _end_of_context(axes: Any, rows: int) -> None:
    """Beyond it positions are squeezed."""
    axes.axvline(rows, color=MUTED, linestyle=":", linewidth=1.2, zorder=1)
    axes.annotate("positions squeezed", (rows, 0.02), (4, 0), xycoords=("data", "axes fraction"),
                  textcoords="offset points", fontsize=SMALL_PT, color=MUTED)  # fmt: skip
