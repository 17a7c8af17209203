"""The short table for a README."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.report.blocks import Cell, Column, Table
from eval.report.markdown import table
from eval.report.results import COLUMNS, Figure
from eval.report.run import ReportError, Row, Run, rows_of

__all__ = ["readme_table"]

# Short: mean KL alone has its interval; the report has them all.
_KEYS = ("kl_mean", "f1", "held", "charged_share_mean", "speedup_median")


def readme_table(summary: Mapping[str, Any], ratio: float | None = None) -> str:
    """A Markdown table of all systems at one ratio, nearest to full prefill first; those without KL at the end.

    Behind the figures over the examples that all systems have in common stands the mean KL of each set.

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
    rows = sorted(run.at(run.ratio if ratio is None else ratio), key=_rank)
    known = {figure.key: figure for figure in COLUMNS}
    pooled = [replace(known[key], interval=key == "kl_mean") for key in _KEYS]
    alone = replace(known["kl_mean"], interval=False)
    sets = [(one["name"], rows_of(summary["by_data"][one["name"]])) for one in summary["data"]]
    columns = (
        Column("system", number=False),
        *(Column(figure.head) for figure in pooled),
        *(Column(f"KL {name}") for name, _ in sets),
    )
    return table(Table(columns, tuple((*_pooled(row, pooled), *_by_set(row, alone, sets)) for row in rows)))


_Sets = Sequence[tuple[str, Sequence[Row]]]


def _pooled(row: Row, figures: Sequence[Figure]) -> Iterator[Cell]:
    yield Cell(_label(row))
    yield from (figure.cell(row) for figure in figures)


def _by_set(row: Row, figure: Figure, sets: _Sets) -> Iterator[Cell]:
    found = (_find(row, rows) for _, rows in sets)
    yield from (figure.cell(one) if one else Cell("–") for one in found)


def _find(row: Row, rows: Sequence[Row]) -> Row | None:
    return next((one for one in rows if (one.name, one.setting) == (row.name, row.setting)), None)


def _rank(row: Row) -> float:
    kl = row.get("kl_mean")
    return math.inf if kl is None else kl


def _label(row: Row) -> str:
    """The ratio is the same for all that have one; other settings say something."""
    return row.title if row.ratio is not None or row.setting in ("0", "1") else f"{row.title}, {row.setting}"
