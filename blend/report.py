"""What a request did: per chunk hit or miss and why, moved how far, recomputed how much, seconds per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blend.loading import LoadReport

__all__ = ["ChunkReport", "ChunkSource", "Report", "RowState"]

ChunkSource = Literal["hit", "miss", "prefix", "context"]
RowState = Literal["exact", "moved", "recomputed", "fresh"]


@dataclass(frozen=True)
class ChunkReport:
    """One chunk of the prompt.

    Attributes:
        name: the chunk's name, or its place in the prompt.
        start: row of its first token.
        rows: its length.
        source: ``hit`` (found in the store), ``miss`` (encoded for this request), ``prefix`` (covered by an exact
            prefix), ``context`` (covered by an earlier fused context).
        why: one sentence on the source.
        moved: positions from where it was cached to where it stands now.
        recomputed: rows computed again.
        exact: its KV equals full prefill's without any repair.
        repeated: rows whose text an earlier chunk has said already, and whose KV was taken from behind the same text.
    """

    name: str
    start: int
    rows: int
    source: ChunkSource
    why: str
    moved: int
    recomputed: int
    exact: bool
    repeated: int = 0


@dataclass(frozen=True, repr=False)
class Report:
    """One request, explained. Prints as a table; in a notebook the prompt is shown in colours.

    Attributes:
        method: selector, or ``prefill``.
        rows: rows of the prompt.
        prefix_rows: rows from an exact prefix.
        context_rows: rows from an earlier fused context (approximate).
        chunks: one entry per chunk.
        fallback: why the request was not fused but prefilled in full; None if it was fused.
        rows_per_layer: rows that ran through each layer.
        projected_per_layer: rows whose K/V alone were computed there (checks, last layer).
        probe_per_layer: rows of the probe pass.
        row_layers: all computed rows times layers, projections by their share.
        ideal_speedup: row-layers of full prefill over ``row_layers``.
        kv_bytes: bytes of the prompt's KV.
        load: what reading chunks from a slow store took.
        seconds: per stage.
        ttft: seconds from token ids to the first token's logits.
        states: per row where its KV came from.
        ids: token ids of the prompt.
        decode: turns token ids into text (for the coloured prompt), or None.
        corrector: what was done to the reused rows that were not recomputed; None if nothing.
        choice: why so many rows were recomputed: the target, what is predicted, what it was limited by; None where
            a fixed budget says it all.
    """

    method: str
    rows: int
    prefix_rows: int
    context_rows: int
    chunks: tuple[ChunkReport, ...]
    fallback: str | None
    rows_per_layer: tuple[int, ...]
    projected_per_layer: tuple[int, ...]
    probe_per_layer: tuple[int, ...]
    row_layers: float
    ideal_speedup: float
    kv_bytes: int
    load: LoadReport
    seconds: dict[str, float]
    ttft: float
    states: tuple[RowState, ...]
    ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False)
    corrector: str | None = None
    choice: str | None = None

    @property
    def reused_rows(self) -> int:
        """Rows whose KV was taken over and not computed again."""
        return sum(state in ("exact", "moved") for state in self.states)

    @property
    def recomputed_rows(self) -> int:
        """Rows whose reused KV was computed again."""
        return self.states.count("recomputed")

    @property
    def hit_rate(self) -> float:
        """Share of the prompt's chunks that were not encoded for this request; 1.0 without chunks."""
        hits = sum(chunk.source != "miss" for chunk in self.chunks)
        return hits / len(self.chunks) if self.chunks else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without tokens."""
        chunks = [dict(vars(chunk)) for chunk in self.chunks]
        hidden = ("states", "ids", "decode", "chunks")
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items() if k not in hidden}
        plain["load"] = dict(vars(self.load))
        counts = {name: getattr(self, name) for name in ("reused_rows", "recomputed_rows", "hit_rate")}
        return {**plain, "chunks": chunks, **counts}

    def __repr__(self) -> str:
        from blend.report_view import summary

        return f"<Report {summary(self)}>"

    def __rich__(self) -> Any:
        from blend.report_view import as_table  # drawing is loaded when something is drawn

        return as_table(self)

    def __str__(self) -> str:
        from blend.report_view import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from blend.report_view import as_html

        return as_html(self)
