"""Hit rate against capacity, a line per policy and path. Needs matplotlib, and no display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blend.errors import KVBlendError
from eval.replay.capacity import show_bytes

__all__ = ["PlotMissing", "plot_replay"]

_PATHS = {"chunk_hit_rate": ("chunk", "-"), "prefix_hit_rate": ("prefix", "--")}


class PlotMissing(KVBlendError):
    """matplotlib is not installed; the message says how to get it."""


def plot_replay(figures: dict[str, Any], path: Path) -> None:
    """Draws the figures of a replay; what no limit reaches is a grey line across.

    Args:
        figures: of :func:`~eval.replay.run.run_replay`.
        path: the file; its ending is the format, such as .svg or .png.

    Raises:
        PlotMissing: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotMissing("a plot needs matplotlib: pip install 'kvblend[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    axes = figure.add_subplot()
    results = figures["results"]
    for number, policy in enumerate(dict.fromkeys(result["policy"] for result in results)):
        for key, (label, style) in _PATHS.items():
            points = sorted(
                (r["capacity_bytes"], r[key]) for r in results if r["policy"] == policy and r["capacity_bytes"]
            )
            if points:
                axes.plot(*zip(*points, strict=True), style, marker="o", color=f"C{number}", label=f"{policy}, {label}")
    for result in [r for r in results if r["capacity_bytes"] is None][:1]:
        for key, (label, style) in _PATHS.items():
            axes.axhline(result[key], linestyle=style, color="0.6", label=f"no limit, {label}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: show_bytes(nbytes))
    axes.set(xlabel="capacity", ylabel="share of input rows found", title=figures["trace"])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
