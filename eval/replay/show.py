"""What a replay prints: one table. Measures nothing."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.replay.capacity import show_bytes

__all__ = ["table"]

_CAPTION = (
    "Hit: share of input rows found, by exact prefix and by chunk wherever it stands. Held: bytes at the end. Dedup: "
    "rows of the sequences held per row stored. Look-ups: p50 / p99, of a request's prefix and of a chunk."
)


def table(figures: dict[str, Any]) -> Table:
    """One line per capacity and policy."""
    whole = show_bytes(figures["distinct_rows"] * figures["bytes_per_row"])
    title = (
        f"{figures['trace']}: {figures['requests']:,} requests, {figures['input_rows']:,} rows; all distinct chunks "
        f"take {whole} at {figures['bytes_per_row']:,} bytes a row"
    )
    out = Table(title=title, caption=_CAPTION, box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("capacity", no_wrap=True)
    out.add_column("policy", no_wrap=True)
    for name in ("prefix hit", "chunk hit", "prefix held", "chunk held", "dedup", "rows evicted", "chunks evicted"):
        out.add_column(name, justify="right")
    out.add_column("prefix µs", justify="right")
    out.add_column("chunk µs", justify="right")
    before = None
    for result in figures["results"]:
        first = result["capacity"] != before
        before = result["capacity"]
        out.add_row(_capacity(result) if first else "", result["policy"], *_cells(result))
    return out


def _capacity(result: dict[str, Any]) -> str:
    label, nbytes = result["capacity"], result["capacity_bytes"]
    return label if nbytes is None or label.lower().endswith("b") else f"{label} = {show_bytes(nbytes)}"


def _cells(result: dict[str, Any]) -> list[str]:
    return [
        f"{result['prefix_hit_rate']:.1%}",
        f"{result['chunk_hit_rate']:.1%}",
        show_bytes(result["prefix_bytes"]),
        show_bytes(result["chunk_bytes"]),
        f"{result['prefix_dedup_ratio']:.2f}",
        f"{result['prefix_evicted_rows']:,}",
        f"{result['chunk_evictions']:,}",
        *(_micros(result["lookup_us"][path]) for path in ("prefix", "chunk")),
    ]


def _micros(lookup: dict[str, float]) -> str:
    return f"{lookup['p50']:.1f} / {lookup['p99']:.1f}" if lookup else "–"
