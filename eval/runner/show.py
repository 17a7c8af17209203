"""The table that ``kvblend eval`` prints. The report says more."""

from __future__ import annotations

from typing import Any

from rich.table import Table

__all__ = ["summary_table"]


def summary_table(summary: dict[str, Any]) -> Table:
    """A line per system and setting, over all sets."""
    sets = ", ".join(f"{one['name']} ({one['n']})" for one in summary["common"] or summary["data"])
    title = f"{summary['model']} {summary['dtype']}, {sets}: KL from full prefill in nats per token"
    table = Table("system", "KL", "median", "first", "same", "score", "charged", "speed-up", title=title)
    for by_setting in summary["systems"].values():
        for setting, entry in by_setting.items():
            table.add_row(_name(entry["title"], setting), *_cells(entry))
    return table


def _name(title: str, setting: str) -> str:
    """Systems that have no ratio need none named."""
    return title if setting in ("0", "1") else f"{title} {setting}"


def _cells(entry: dict[str, Any]) -> list[str]:
    speed = entry["speedup_median"]
    return [
        _number(entry["kl_mean"]),
        _number(entry["kl_median"]),
        _number(entry["kl_first_mean"]),
        _number(entry["same_answer"], 2),
        _number(entry["headline"]),
        _number(entry["charged_share_mean"], 2),
        "–" if speed is None else f"{speed:.2f}x",
    ]


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
