"""The short table for a README."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.report.blocks import Cell, Column, Table
from eval.report.markdown import table
from eval.report.results import COLUMNS
from eval.report.run import ReportError, Run

__all__ = ["readme_table"]

# Short: mean KL alone has its interval; the report has them all.
_KEYS = ("kl_mean", "kl_median", "f1", "same_answer", "charged_share_mean", "speedup_median")


def readme_table(summary: Mapping[str, Any], ratio: float | None = None) -> str:
    """A Markdown table of all systems at one ratio, nearest to full prefill first; those without KL at the end.

    Args:
        summary: of ``summary.json``.
        ratio: of those that were run; the one nearest to 0.15 if None.

    Raises:
        ReportError: a ratio that was not run.
    """
    run = Run(summary, (), {})
    if ratio is not None and ratio not in run.ratios:
        raise ReportError(
            f"no system ran at ratio {ratio:g}; there are {', '.join(f'{r:g}' for r in run.ratios) or 'none'}"
        )
    rows = sorted(run.at(run.ratio if ratio is None else ratio), key=lambda row: _or_last(row.get("kl_mean")))
    known = {figure.key: figure for figure in COLUMNS}
    figures = [replace(known[key], interval=key == "kl_mean") for key in _KEYS]
    columns = (Column("system", number=False), *(Column(figure.head) for figure in figures))
    cells = tuple((Cell(_label(row.title, row.setting)), *(figure.cell(row) for figure in figures)) for row in rows)
    return table(Table(columns, cells))


def _label(title: str, setting: str) -> str:
    return title if setting in ("0", "1") else f"{title} ({setting})"


def _or_last(value: float | None) -> float:
    return math.inf if value is None else value
