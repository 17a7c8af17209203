"""Error against full prefill as more rows are computed again: ratios times selectors, over the demo's questions.

At ratio 0 every selector is full reuse, at ratio 1 every row is computed again. There the rows behind the exact
prefix see the KV that full prefill sees, but for how that prefix was computed: in a pass of its own, whose matrix
products the machine may add up in another order. So the last divergence is zero up to rounding of the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blend import Blender, BudgetError, FirstK, KVDeviation, QueryAttention, Random, Selector
from blend.progress import track
from eval.demo import load_passages
from eval.demo.cases import DemoCase
from eval.demo.run import demo_cases
from eval.fidelity import compare, make_reference
from eval.machine import machine_record
from eval.stats import bootstrap_mean
from eval.systems.exact import full_prefill

__all__ = ["SELECTORS", "Point", "RatioOptions", "rises", "run_ratio_bench"]

SELECTORS: dict[str, Callable[[float], Selector]] = {
    "cacheblend": KVDeviation,
    "epic": FirstK,
    "prophetkv": QueryAttention,
    "random": Random,
}
"""Selectors by name, given the ratio."""


@dataclass(frozen=True)
class RatioOptions:
    """What is measured.

    Attributes:
        model: name of the model.
        ratios: shares of the reused rows computed again, ascending, in [0, 1].
        limit: only the first questions; None for all.
        k: passages per question.
        seed: of the passages' order.
        tokens: the longest answer that divergences are taken along.
        dtype: of weights and KV; None for bf16.

    Raises:
        BudgetError: a number out of range.
    """

    model: str = "smollm2"
    ratios: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)
    limit: int | None = None
    k: int = 6
    seed: int = 0
    tokens: int = 12
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.ratios or list(self.ratios) != sorted(set(self.ratios)):
            raise BudgetError(f"ratios are {self.ratios}: give at least one, ascending")
        for name in ("limit", "k", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BudgetError(f"{name} is {value}: it must be 1 or more")
        for ratio in self.ratios:
            Random(ratio)  # raises when out of range


@dataclass
class Point:
    """One selector at one ratio; an entry per question: nats along the answer, nats at the first token, row-layers."""

    kl: list[float] = field(default_factory=list)
    kl_first: list[float] = field(default_factory=list)
    charged: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Means, and the bootstrap interval of the divergence along the answer."""
        kl = bootstrap_mean(self.kl)
        return {
            "kl_mean": kl.value,
            "kl_ci": [kl.low, kl.high],
            "kl_first_mean": fmean(self.kl_first),
            "charged_mean": fmean(self.charged),
            "kl": self.kl,
        }


def run_ratio_bench(options: RatioOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Runs the bench, prints its table and returns the figures as plain data.

    After Ctrl-C the finished questions are shown and returned, with ``complete`` False.

    Args:
        blender: in place of loading ``options.model``; it is left open.

    Raises:
        BudgetError: options out of range.
        EmbedderMissing: the packaged embedder is not installed.
    """
    cases = demo_cases(options.k, options.seed, options.limit)
    own = blender is None
    blender = blender or Blender.from_pretrained(options.model, dtype=options.dtype, background=None)
    points: dict[str, dict[float, Point]] = {name: {ratio: Point() for ratio in options.ratios} for name in SELECTORS}
    n, complete = 0, False
    try:
        blender.encode([blender.chunk(passage.text) for passage in load_passages()], progress=True)
        for row in track(_rows(blender, cases, options), total=len(cases), label="measuring"):
            _book(row, points)
            n += 1
        complete = True
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted[/] after {n} finished question(s)")
    finally:
        if own:
            blender.close()
    figures = {
        "model": options.model,
        "dtype": str(blender.view.dtype).removeprefix("torch."),
        "complete": complete,
        "machine": machine_record(blender.view.dtype),
        "n": n,
        "ratios": list(options.ratios),
        "systems": {name: {f"{r:g}": p.as_dict() for r, p in by.items()} for name, by in points.items()} if n else {},
        "rises": {name: rises({r: p.kl for r, p in by.items()}) for name, by in points.items()} if n else {},
    }
    if n:
        console.print(_table(figures))
        console.print(_verdict(figures), highlight=False)
    return figures


def rises(kl: Mapping[float, Sequence[float]]) -> list[list[float]]:
    """Neighbouring ratios ``[lower, higher]`` between which the mean rises beyond chance.

    Args:
        kl: by ratio, ascending: one number per question, the same questions everywhere.

    Returns:
        The pairs whose mean difference has a bootstrap interval wholly above zero.
    """
    found = []
    for low, high in pairwise(kl):
        change = [b - a for a, b in zip(kl[low], kl[high], strict=True)]
        if bootstrap_mean(change).low > 0:
            found.append([low, high])
    return found


Row = dict[tuple[str, float], tuple[float, float, float]]
"""One question: by selector and ratio, nats along the answer, nats at the first token, row-layers."""


def _rows(blender: Blender, cases: Sequence[DemoCase], options: RatioOptions) -> Iterator[Row]:
    for case in cases:
        prompt = case.prompt(blender)
        reference = make_reference(blender, full_prefill(blender, prompt), options.tokens)
        row: Row = {}
        for name, selector in SELECTORS.items():
            for ratio in options.ratios:
                fusion = blender.fuse(prompt, selector=selector(ratio))
                fidelity = compare(reference, fusion)
                row[name, ratio] = fidelity.kl, fidelity.kl_first, fusion.report.row_layers
        yield row


def _book(row: Row, points: dict[str, dict[float, Point]]) -> None:
    """Adds a finished question; a question counts under all selectors and ratios or not at all."""
    for (name, ratio), (kl, kl_first, charged) in row.items():
        point = points[name][ratio]
        point.kl.append(kl)
        point.kl_first.append(kl_first)
        point.charged.append(charged)


def _table(figures: dict[str, Any]) -> Table:
    title = (
        f"{figures['model']} {figures['dtype']}, {figures['n']} questions: mean KL to full prefill along its answer, "
        "nats per token [95 % interval]"
    )
    table = Table("selector", *(f"{ratio:g}" for ratio in figures["ratios"]), title=title)
    for name, by in figures["systems"].items():
        cells = (f"{p['kl_mean']:.4f}\n[dim]{p['kl_ci'][0]:.4f} – {p['kl_ci'][1]:.4f}[/]" for p in by.values())
        table.add_row(name, *cells)
    return table


def _verdict(figures: dict[str, Any]) -> str:
    found = [f"{name} from {a:g} to {b:g}" for name, pairs in figures["rises"].items() for a, b in pairs]
    if found:
        return "The divergence rises beyond its interval: " + ", ".join(found) + "."
    return "For no selector does the divergence rise with the ratio beyond its bootstrap interval."
