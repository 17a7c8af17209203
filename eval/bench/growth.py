"""Time and memory to the first token as the prompt grows: a full prefill, and the default recipe, side by side.

Each length has its own prompt of the demo's text. Lengths beyond the model's context run on the same weights with
squeezed positions (:mod:`eval.bench.squeeze`): what the recipe costs depends on the rows that it chooses (an early row
sees few keys), and a model beyond its context looks anywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blend import Blender
from blend.admission import admit
from blend.errors import BudgetError
from blend.hf.load import Loaded, load
from blend.progress import track
from eval.bench.growth_plot import draw_growth
from eval.bench.memory import peak_of
from eval.bench.squeeze import squeezed
from eval.bench.ttft import BenchOptions, Measured, bench_prompt, full_prefill, recipe
from eval.machine import machine_record
from eval.report.style import style

__all__ = ["GrowthOptions", "run_growth_bench"]


@dataclass(frozen=True)
class GrowthOptions:
    """What is measured.

    Attributes:
        bench: model, ratio, chunk rows, pairs, dtype; its ``rows`` are not used.
        lengths: rows of the prompts, ascending.
        plot: picture file; None draws none.
    """

    bench: BenchOptions = field(default_factory=BenchOptions)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    plot: Path | None = None

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise BudgetError(f"lengths are {self.lengths}: give at least one, each longer than the one before")
        for rows in self.lengths:
            replace(self.bench, rows=rows)  # refuses what is too short
        if self.kind not in ("png", "svg"):
            raise BudgetError(f"the picture is {self.plot}: its name must end in .png or .svg")

    @property
    def kind(self) -> str:
        """What the picture file holds: ``png`` or ``svg``."""
        return self.plot.suffix.removeprefix(".").lower() if self.plot else "png"


def run_growth_bench(options: GrowthOptions, console: Console, loaded: Loaded | None = None) -> dict[str, Any]:
    """Runs the bench, prints its table, draws its picture and returns the figures as plain data.

    Interrupted, it goes on with the lengths that are done.

    Args:
        loaded: model and tokenizer, where they are there already.

    Raises:
        BudgetError: options out of range; a length beyond the context of a model that cannot be squeezed.
        ExtraMissing: a picture is wanted, and matplotlib is not there.
    """
    bench = options.bench
    if options.plot:
        with style():  # before anything is measured: is matplotlib there?
            pass
    model, tokenizer = loaded or load(bench.model, dtype=bench.dtype)
    context = model.config.get_text_config().max_position_embeddings
    fitting = tuple(rows for rows in options.lengths if rows <= context)
    beyond = options.lengths[len(fitting) :]
    holding = [(model, fitting)] if fitting else []
    holding += [(squeezed(model, beyond[-1]), beyond)] if beyond else []
    lines: list[dict[str, Any]] = []
    try:  # whatever ends it, the list has what came before
        lines.extend(track(_lines(holding, tokenizer, bench), total=len(options.lengths), label="measuring"))
    except KeyboardInterrupt:
        if not lines:
            raise
    figures = {
        "model": bench.model,
        "context": context,
        "machine": machine_record(model.dtype),
        "ratio": bench.ratio,
        "pairs": bench.pairs,
        "complete": len(lines) == len(options.lengths),
        "lengths": [{**line, "beyond_context": line["rows"] > context} for line in lines],
        "exponents": _exponents(lines),
    }
    console.print(_table(figures))
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        options.plot.write_bytes(draw_growth(figures, options.kind))
    return figures


def _lines(holding: list[tuple[Any, tuple[int, ...]]], tokenizer: Any, bench: BenchOptions) -> Iterator[dict[str, Any]]:
    for model, lengths in holding:
        with Blender(model, tokenizer, background=None) as blender:
            yield from (_measure(blender, replace(bench, rows=rows)) for rows in lengths)


def _measure(blender: Blender, bench: BenchOptions) -> dict[str, Any]:
    prompt = bench_prompt(blender, bench)
    admit(blender.view, blender.tokenizer, prompt)
    fuse, ids_1T = recipe(blender, prompt, bench.ratio), torch.tensor([prompt.ids])
    fusion, fused_peak = peak_of(fuse, blender.view.device)  # both are warm-ups too
    _, full_peak = peak_of(lambda: blender.view.prefill(ids_1T), blender.view.device)
    report = fusion.report
    timed = Measured()
    before = full_prefill(blender, ids_1T)
    for _ in range(bench.pairs):
        started = time.perf_counter()
        fusion = fuse()
        fusion.logits.argmax().item()  # the first token is there
        seconds = time.perf_counter() - started
        after = full_prefill(blender, ids_1T)
        timed.add(fusion, seconds, (before + after) / 2)
        before = after
    for key in list(blender.store.keys()):  # the next length has chunks of its own
        blender.store.delete(key)
    return {
        "rows": bench.rows,
        **timed.as_dict(),
        "full_peak_bytes": full_peak,
        "peak_bytes": fused_peak,
        "kv_bytes": report.kv_bytes,
    }


def _exponents(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """From each length to the next: by which power of the length time has grown. 1 is linear, 2 quadratic."""

    def power(a: dict[str, Any], b: dict[str, Any], key: str) -> float:
        return math.log(b[key] / a[key]) / math.log(b["rows"] / a["rows"])

    return [
        {"to": b["rows"], "full": power(a, b, "full_s"), "fused": power(a, b, "ttft_s")} for a, b in pairwise(lines)
    ]


def _table(figures: dict[str, Any]) -> Table:
    machine = figures["machine"]
    title = (
        f"{figures['model']} {machine['dtype']}, default recipe, ratio {figures['ratio']}, {machine['threads']} "
        f"thread(s), median of {figures['pairs']} pairs; a context of {figures['context']} rows"
    )
    columns = ("rows", "full prefill s", "TTFT s", "speed-up", "ideal", "of ideal", "full, peak MB", "peak MB", "KV MB")
    table = Table(*columns, title=title)
    for f in figures["lengths"]:
        mark = " *" if f["beyond_context"] else ""
        numbers = f"{f['full_s']:.2f}", f"{f['ttft_s']:.2f}", f"{f['speedup']:.2f}x", f"{f['ideal']:.2f}x"
        memory = (_mb(f[key]) for key in ("full_peak_bytes", "peak_bytes", "kv_bytes"))
        table.add_row(f"{f['rows']:,}{mark}", *numbers, f"{f['speedup'] / f['ideal']:.0%}", *memory)
    if any(f["beyond_context"] for f in figures["lengths"]):
        table.caption = "* beyond the model's context: the same weights, positions squeezed (arXiv:2306.15595)"
    return table


def _mb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.0f}"
