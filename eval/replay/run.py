"""``kvblend replay``: hit rates of a recorded trace, by exact prefix and by chunk, for each policy and capacity."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from blend.errors import BudgetError
from blend.progress import track
from blend.stores.eviction import policy_by_name
from eval.machine import machine_record
from eval.replay.capacity import Capacity, read_capacity
from eval.replay.paths import PREFIX_CACHES, ChunkPath, PrefixPath, percentiles
from eval.replay.plot import plot_replay
from eval.replay.show import table
from eval.replay.traces import Trace, find_trace, read_trace

__all__ = ["DEFAULT_CAPACITIES", "DEFAULT_POLICIES", "ReplayOptions", "run_replay"]

DEFAULT_POLICIES = ("lru", "hotness", "gdsf", "random")
"""``priority`` is not among them: the traces name no priorities, and without any it is ``lru``."""

DEFAULT_CAPACITIES = ("2%", "5%", "10%", "25%", "50%", "unbounded")

SMOLLM2_ROW = 30 * 2 * 3 * 64 * 2
"""Bytes of a row of SmolLM2-135M in bf16: layers, keys and values, kv heads, head dim, bytes of a number."""


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed.

    Attributes:
        trace: path of a JSONL trace, or a name of :data:`~eval.replay.traces.KNOWN_TRACES`.
        policies: names of eviction policies.
        capacities: each ``10GiB``, ``25%`` or ``0.25`` of the bytes of all distinct chunks, or ``unbounded``.
        bytes_per_row: of keys and values over all layers.
        prefix: kind of prefix cache: ``radix`` or ``block``.
        limit: only the first requests; None for all.
        plot: file for a plot of hit rate against capacity.

    Raises:
        BudgetError: a number out of range, no policy, no capacity, or an unknown kind of prefix cache.
        StoreError: a policy that does not exist.
    """

    trace: str
    policies: tuple[str, ...] = DEFAULT_POLICIES
    capacities: tuple[str, ...] = DEFAULT_CAPACITIES
    bytes_per_row: int = SMOLLM2_ROW
    prefix: str = "radix"
    limit: int | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_row < 1:
            raise BudgetError(f"bytes-per-row is {self.bytes_per_row}: it must be 1 or more")
        if self.limit is not None and self.limit < 1:
            raise BudgetError(f"limit is {self.limit}: it must be 1 or more")
        if not self.policies or not self.capacities:
            raise BudgetError("a replay needs at least one policy and one capacity")
        if self.prefix not in PREFIX_CACHES:
            raise BudgetError(f"prefix is {self.prefix!r}: choose from {', '.join(PREFIX_CACHES)}")
        for name in self.policies:
            policy_by_name(name)  # raises when there is none


def run_replay(options: ReplayOptions, console: Console) -> dict[str, Any]:
    """Replays a trace, prints its table and returns the figures as plain data.

    A hit rate is a share of input rows: those of the longest exact prefix found (``prefix_hit_rate``), and those of
    chunks found wherever they stand (``chunk_hit_rate``). After Ctrl-C what was finished is shown and returned, with
    ``complete`` False.

    Returns:
        What was replayed, and under ``results`` one dict per capacity and policy: ``policy``, ``capacity``,
        ``capacity_bytes`` (or None), ``requests``, ``prefix_hit_rate``, ``chunk_hit_rate``, ``prefix_bytes``,
        ``chunk_bytes``, ``prefix_dedup_ratio`` (rows of the sequences held per row stored), ``chunk_dedup_ratio``
        (how often a byte held was asked for), ``prefix_evicted_rows``, ``chunk_evictions``, ``chunk_refused`` (larger
        than the capacity), ``seconds``, and ``lookup_us`` with p50, p90 and p99 in microseconds, of a request's prefix
        under ``prefix`` and of one chunk under ``chunk``.

    Raises:
        BudgetError: a capacity that cannot be read.
        PlotMissing: a plot is wanted and matplotlib is not installed.
        TraceError: the trace is not there, or cannot be read.
    """
    trace = read_trace(find_trace(options.trace), options.limit)
    capacities = [read_capacity(text, trace.distinct_rows * options.bytes_per_row) for text in options.capacities]
    figures: dict[str, Any] = {
        "trace": trace.name,
        "format": trace.format,
        "requests": len(trace.requests),
        "input_rows": trace.input_rows,
        "distinct_rows": trace.distinct_rows,
        "page_rows": trace.page,
        "bytes_per_row": options.bytes_per_row,
        "prefix": options.prefix,
        "complete": False,
        "machine": {name: value for name, value in machine_record(torch.uint8).items() if name != "dtype"},
        "results": [],
    }
    total = len(capacities) * len(options.policies)
    try:
        for result in track(_results(trace, capacities, options), total=total, label="replaying"):
            figures["results"].append(result)
        figures["complete"] = True
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted[/] after {len(figures['results'])} of {total} runs")
    if figures["results"]:
        console.print(table(figures))
        if options.plot is not None:
            plot_replay(figures, options.plot)
            console.print(f"plot written to {options.plot}", highlight=False)
    return figures


def _results(trace: Trace, capacities: list[Capacity], options: ReplayOptions) -> Iterator[dict[str, Any]]:
    for capacity in capacities:
        for policy in options.policies:
            yield _replay(trace, capacity, policy, options)


def _replay(trace: Trace, capacity: Capacity, policy: str, options: ReplayOptions) -> dict[str, Any]:
    """All requests, in order, under one policy and capacity."""
    begin, now = time.perf_counter(), 0.0
    pages = None if capacity.nbytes is None else capacity.nbytes // (options.bytes_per_row * trace.page)
    prefix = PrefixPath(trace, options.prefix, policy, pages, lambda: now)
    chunks = ChunkPath(trace, policy, pages, lambda: now)
    for request in trace.requests:
        now = request.seconds
        prefix.serve(request)
        chunks.serve(request)
    return {
        "policy": policy,
        "capacity": capacity.label,
        "capacity_bytes": capacity.nbytes,
        "requests": len(trace.requests),
        **prefix.figures(options.bytes_per_row),
        **chunks.figures(options.bytes_per_row),
        "lookup_us": {"prefix": percentiles(prefix.nanoseconds), "chunk": percentiles(chunks.nanoseconds)},
        "seconds": time.perf_counter() - begin,
    }
