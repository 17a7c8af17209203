"""The tables of figures: a line per system and setting, a column per figure, and what each column means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from eval.report.blocks import Cell, Column, Notes, Table
from eval.report.run import Row

__all__ = ["COLUMNS", "Figure", "column_notes", "nats", "percent", "results_table", "score", "times", "with_interval"]

NOTHING = "–"  # not measured


def nats(value: float) -> str:
    """KL: three decimals, and more digits where those would be zeros."""
    if value == 0:
        return "0"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.0e}".replace("e-0", "e-")


def score(value: float) -> str:
    return f"{value:.3f}"


def percent(value: float) -> str:
    value = 0.0 if abs(value) < 0.0005 else value  # no -0%
    return f"{value:.0%}" if value == 0 or abs(value) >= 0.01 else f"{value:.1%}"


def times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


@dataclass(frozen=True)
class Figure:
    """One column: where its value is, how it is written, and what it means.

    Attributes:
        key: in the entry; ``recovery.f1`` is inside ``recovery``.
        head: of the column.
        show: number to text.
        better: which way is good; None where neither is.
        note: for the footnotes.
        interval: whether the 95 % interval is written too.
    """

    key: str
    head: str
    show: Callable[[float], str]
    better: Literal["high", "low"] | None
    note: str
    interval: bool = False

    def of(self, row: Row) -> float | None:
        outer, _, inner = self.key.partition(".")
        if not inner:
            return row.get(outer)
        value = (row.entry.get(outer) or {}).get(inner)
        return None if value is None else float(value)

    def cell(self, row: Row) -> Cell:
        value = self.of(row)
        if value is None:
            return Cell(NOTHING)
        return Cell(with_interval(self.show, value, row.interval(self.key) if self.interval else None), value)


def with_interval(show: Callable[[float], str], value: float, interval: tuple[float, float] | None) -> str:
    """``0.056 [0.041, 0.073]``; no interval where it has no width."""
    if interval is None or interval[0] == interval[1]:
        return show(value)
    return f"{show(value)} [{show(interval[0])}, {show(interval[1])}]"


COLUMNS: tuple[Figure, ...] = (
    Figure("kl_mean", "KL mean", nats, "low", "nats per token from full prefill's distribution, mean along full "
           "prefill's own greedy answer (teacher-forced), then mean over examples; 0 is full prefill", True),
    Figure("kl_median", "KL median", nats, "low", "the same, median over examples: not moved by a few bad ones", True),
    Figure("kl_first_mean", "KL first", nats, "low", "nats from full prefill at the first token alone, mean"),
    Figure("top1", "top-1", percent, "high", "share of that answer's places where both find the same token likeliest"),
    Figure("same_answer", "same answer", percent, "high", "share of examples where they do at every place"),
    Figure("headline", "headline", score, "high", "mean of the first metric of each example's task", True),
    Figure("em", "EM", score, "high", "exact match with an accepted answer"),
    Figure("f1", "F1", score, "high", "words shared with the best accepted answer (SQuAD normalisation)"),
    Figure("rouge_l", "ROUGE-L", score, "high", "longest common subsequence with the reference, F-measure"),
    Figure("label", "label", score, "high", "the right label was named"),
    Figure("held", "held", score, "high", "an accepted answer stands somewhere in the answer"),
    Figure("charged_share_mean", "charged", percent, "low", "rows times layers that were computed (probe, check and "
           "repair) over those of full prefill"),
    Figure("speedup_median", "speed-up", times, "high", "full prefill's TTFT over the system's, same prompt and "
           "process, median of the examples' ratios; offline work is not in it", True),
    Figure("recovery.kl", "recovery KL", percent, "high", "(system - full reuse) / (full prefill - full reuse) in mean "
           "KL: 0% is full reuse, 100% full prefill; empty where those two do not differ beyond chance"),
    Figure("recovery.headline", "recovery headline", percent, "high", "the same in the headline metric"),
    Figure("recovery.f1", "recovery F1", percent, "high", "the same in F1"),
)  # fmt: skip


def results_table(rows: Sequence[Row], figures: Sequence[Figure] = COLUMNS) -> Table:
    """A line per row. A column that nothing was measured for is left out."""
    shown = [figure for figure in figures if any(figure.of(row) is not None for row in rows)]
    heads = (Column("system", number=False), Column("setting", number=False), Column("n"))
    return Table(
        (*heads, *(Column(figure.head) for figure in shown)),
        tuple((*_head(row), *(figure.cell(row) for figure in shown)) for row in rows),
    )


def column_notes(rows: Sequence[Row], figures: Sequence[Figure] = COLUMNS) -> Notes:
    """What the columns of :func:`results_table` mean, and which were left out."""
    better = {"high": " Higher is better.", "low": " Lower is better.", None: ""}
    known = [figure for figure in figures if any(figure.of(row) is not None for row in rows)]
    absent = [figure.head for figure in figures if figure not in known]
    setting = (
        "share of the reused rows that may be computed again, or the system's own: 0 is full reuse, 1 full prefill"
    )
    items = [("setting", f"{setting}."), *((f.head, f"{f.note}.{better[f.better]}") for f in known)]
    if absent:
        items.append(("left out, as no system of this run has it", f"{', '.join(absent)}."))
    return Notes(tuple(items))


def _head(row: Row) -> tuple[Cell, Cell, Cell]:
    count = row.get("n")
    return (
        Cell(row.title),
        Cell(row.setting, row.ratio),
        Cell(NOTHING if count is None else f"{count:.0f}", count),
    )
