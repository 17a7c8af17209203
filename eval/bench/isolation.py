"""Can a tenant tell, by the clock, what another tenant has asked about? Measured as an attacker would (CVE-2025-46570).

The victim has encoded a passage, or has not; the attacker then asks about it once, and keeps the time. AUC is the
chance that a passage the victim knows was answered faster than one nobody knows: 1.0 is a sure guess, 0.5 a coin.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blend import Blender, BudgetError, Chunk, Prompt
from blend.progress import track
from eval.machine import machine_record
from eval.stats import bootstrap_mean

__all__ = ["IsolationOptions", "auc", "run_isolation_bench"]

WAYS = {
    "one tenant": "attacker and victim share everything: the leak",
    "one tenant, jitter": "the same, with as much jitter as encoding the passage takes",
    "two tenants": "a salt each",
}


@dataclass(frozen=True)
class IsolationOptions:
    """What is measured.

    Attributes:
        model: name of the model.
        rows: rows of the passage asked about.
        samples: passages that the victim knows, and as many that it does not, for each way.
        seed: of the passages' tokens and their order.
        dtype: of weights and KV; None for bf16.

    Raises:
        BudgetError: a number out of range.
    """

    model: str = "smollm2"
    rows: int = 128
    samples: int = 20
    seed: int = 0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.samples < 2:
            raise BudgetError(f"rows is {self.rows} and samples {self.samples}: at least 1 and 2 are needed")


def auc(known: Sequence[float], unknown: Sequence[float]) -> float:
    """Share of pairs in which the known passage was faster; ties count half (Mann-Whitney U over its maximum)."""
    won = sum((k < u) + 0.5 * (k == u) for k in known for u in unknown)
    return won / (len(known) * len(unknown))


def run_isolation_bench(options: IsolationOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Runs the bench, prints its table and returns the figures as plain data."""
    own = blender is None
    blender = blender or Blender.from_pretrained(options.model, dtype=options.dtype, background=None)
    times: dict[str, dict[bool, list[float]]] = {way: {True: [], False: []} for way in WAYS}
    complete = True
    try:
        for way, known, seconds in track(
            _attacks(blender, options), total=2 * options.samples * len(WAYS), label="attacking"
        ):
            times[way][known].append(seconds)
    except KeyboardInterrupt:
        complete = False
    ways = {way: _figures(found[True], found[False]) for way, found in times.items() if found[True] and found[False]}
    figures = {
        "model": options.model,
        "machine": machine_record(blender.view.dtype),
        "rows": options.rows,
        "samples": options.samples,
        "complete": complete,
        "ways": ways,
    }
    console.print(_table(figures))
    if own:
        blender.close()
    return figures


def _attacks(blender: Blender, options: IsolationOptions) -> Iterator[tuple[str, bool, float]]:
    draw = random.Random(options.seed)
    frame = _passage(blender, draw, 16), _passage(blender, draw, 16)
    jitter = _encode_seconds(blender, frame, draw, options.rows)
    cases = [(way, known) for way in WAYS for known in (True, False)] * options.samples
    draw.shuffle(cases)
    for number, (way, known) in enumerate(cases):
        victim = blender.tenant(f"victim {way}", jitter=jitter if "jitter" in way else 0.0)
        attacker = blender.tenant(f"attacker {number}") if way == "two tenants" else victim
        prompt = Prompt(frame[0], (Chunk(_passage(blender, draw, options.rows)),), frame[1])
        attacker.encode([Chunk(_passage(blender, draw, 8))], system=prompt.system)  # the attacker knows the prelude
        if known:
            victim.encode(prompt.chunks, system=prompt.system)
        started = time.perf_counter()
        attacker.fuse(prompt)
        yield way, known, time.perf_counter() - started


def _encode_seconds(blender: Blender, frame: tuple[tuple[int, ...], ...], draw: random.Random, rows: int) -> float:
    """Median of three, after one for warming up."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        blender.encode([Chunk(_passage(blender, draw, rows))], system=frame[0])
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _passage(blender: Blender, draw: random.Random, rows: int) -> tuple[int, ...]:
    """Random tokens behind the special ones: nobody has seen them before."""
    return tuple(draw.randrange(blender.view.vocabulary // 4, blender.view.vocabulary) for _ in range(rows))


def _figures(known: Sequence[float], unknown: Sequence[float]) -> dict[str, Any]:
    shares = [auc([seconds], unknown) for seconds in known]
    return {
        "auc": auc(known, unknown),
        "interval": list(bootstrap_mean(shares)[1:]),
        "known_s": statistics.median(known),
        "unknown_s": statistics.median(unknown),
    }


def _table(figures: dict[str, Any]) -> Table:
    title = f"{figures['model']}, a passage of {figures['rows']} rows, {figures['samples']} of each kind"
    table = Table("attacker and victim", "AUC", "95 %", "known ms", "unknown ms", "", title=title)
    for way, f in figures["ways"].items():
        low, high = f["interval"]
        times = f"{f['known_s'] * 1e3:.0f}", f"{f['unknown_s'] * 1e3:.0f}"
        table.add_row(way, f"{f['auc']:.2f}", f"{low:.2f} to {high:.2f}", *times, WAYS[way])
    return table
