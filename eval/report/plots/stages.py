"""Where the time to the first token goes: a bar per system, a piece per stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.report.plots.missing import NothingToDraw
from eval.report.style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, PINK, RED, SKY, SMALL_PT, new_figure, text_inches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.report.run import Run

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE = "Stages of TTFT"
CAPTION = (
    "Median seconds of each stage, slowest system first; the upright mark is the median TTFT, which need not be the "
    "sum of medians. Systems with a ratio are at the one nearest to 0.15. Oracles have no TTFT and are not here."
)

# Stages in the order in which they happen; others follow, in spare colours.
_COLOURS = {
    "lookup": INK, "encode": PINK, "load": SKY, "assemble": GREEN, "probe": BLUE, "check": ORANGE, "repair": RED,
    "prefill": GREY,
}  # fmt: skip
_HATCHES = ("////", "....", "xxxx", "\\\\\\\\")


def draw(run: Run) -> Figure:
    """Raises :class:`NothingToDraw` where no system has stages."""
    rows = [row for row in run.at(run.ratio) if row.get("ttft_s_median") is not None and row.entry.get("seconds")]
    if not rows:
        raise NothingToDraw("no system has told the stages of its TTFT")
    rows.sort(key=lambda row: row.get("ttft_s_median") or 0.0)
    told = {stage for row in rows for stage, seconds in row.entry["seconds"].items() if seconds}
    stages = [*(stage for stage in _COLOURS if stage in told), *sorted(told - _COLOURS.keys())]
    figure, (axes,) = new_figure(8, 1.0 + 0.26 * len(rows), left=text_inches(row.title for row in rows) + 0.2, top=0.4)
    starts = [0.0] * len(rows)
    for number, stage in enumerate(stages):
        widths = [float(row.entry["seconds"].get(stage) or 0.0) for row in rows]
        spare = stage not in _COLOURS
        axes.barh(
            range(len(rows)), widths, 0.66, left=starts, label=stage, color=_COLOURS.get(stage, PAPER),
            edgecolor=GREY if spare else PAPER, linewidth=0.6, hatch=_HATCHES[number % 4] if spare else None,
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, row in enumerate(rows):
        ttft = row.get("ttft_s_median") or 0.0
        axes.plot([ttft, ttft], [place - 0.42, place + 0.42], color=INK, linewidth=1.4)
        axes.annotate(f"{ttft:.3f}", (max(ttft, starts[place]), place), (5, 0), textcoords="offset points",
                      va="center", fontsize=SMALL_PT)  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(*starts, *(row.get("ttft_s_median") or 0.0 for row in rows)) * 1.09)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("seconds" + ("" if run.ratio is None else f" (ratio {run.ratio:g})"))
    figure.legend(loc="upper left", bbox_to_anchor=(0.01, 0.995), ncols=len(stages), frameon=False, fontsize=SMALL_PT,
                  handlelength=1.1, columnspacing=1.4)  # fmt: skip
    return figure
