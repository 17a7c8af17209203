"""The report of a request, from what was done. Nothing here decides or computes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blend.chunk import kv_bytes
from blend.clock import Clock
from blend.hf.fusion_cache import FusionCache
from blend.layout import Layout
from blend.loading import LoadReport
from blend.prompt import Prompt
from blend.repair import Repaired
from blend.report import ChunkReport, ChunkSource, Report, RowState
from blend.setup import Found

__all__ = ["Decode", "fused_report", "prefilled_report"]

Decode = Callable[[Sequence[int]], str]


def fused_report(
    method: str,
    prompt: Prompt,
    layout: Layout,
    found: Sequence[Sequence[Found]],
    repaired: Repaired,
    cache: FusionCache,
    clock: Clock,
    load: LoadReport,
    decode: Decode | None,
    corrector: str | None = None,
) -> Report:
    """What fusing a prompt took.

    Args:
        found: per chunk what its rows were taken from; nothing where a prefix or context covers it.
    """
    ttft = clock.total  # before anything that only the report needs
    chosen = set(repaired.chosen.tolist())
    states: list[RowState] = []
    for piece in layout.pieces:
        if piece.origin == "fresh":
            states += ["fresh"] * (piece.stop - piece.start)
        else:
            kept: RowState = "exact" if piece.exact else "moved"
            states += ["recomputed" if row in chosen else kept for row in range(piece.start, piece.stop)]
    charge = repaired.charge
    return Report(
        method=method,
        rows=layout.rows,
        prefix_rows=sum(p.stop - p.start for p in layout.pieces if p.origin == "prefix"),
        context_rows=sum(p.stop - p.start for p in layout.pieces if p.origin == "fused"),
        chunks=tuple(_fused_chunk(prompt, i, layout, found[i], states) for i in range(len(prompt.chunks))),
        fallback=None,
        rows_per_layer=charge.rows_per_layer,
        projected_per_layer=charge.projected_per_layer,
        probe_per_layer=charge.probe_per_layer,
        row_layers=charge.row_layers,
        ideal_speedup=charge.ideal,
        kv_bytes=kv_bytes(cache.kv),
        load=load,
        seconds=dict(clock.seconds),
        ttft=ttft,
        states=tuple(states),
        ids=prompt.ids,
        decode=decode,
        corrector=corrector,
        choice=repaired.why,
    )


def prefilled_report(
    prompt: Prompt,
    prefix_rows: int,
    layers: int,
    nbytes: int,
    why: str,
    clock: Clock,
    decode: Decode | None,
    missed: str = "computed by the plain prefill",
) -> Report:
    """What a plain prefill took, behind ``prefix_rows`` rows that were known."""
    ttft = clock.total
    fresh = len(prompt) - prefix_rows
    states: list[RowState] = ["exact"] * prefix_rows
    states += ["fresh"] * fresh
    return Report(
        method="prefill",
        rows=len(prompt),
        prefix_rows=prefix_rows,
        context_rows=0,
        chunks=tuple(_prefilled_chunk(prompt, i, prefix_rows, missed) for i in range(len(prompt.chunks))),
        fallback=why,
        rows_per_layer=(fresh,) * layers,
        projected_per_layer=(0,) * layers,
        probe_per_layer=(),
        row_layers=float(fresh * layers),
        ideal_speedup=len(prompt) / fresh,
        kv_bytes=nbytes,
        load=LoadReport(),
        seconds=dict(clock.seconds),
        ttft=ttft,
        states=tuple(states),
        ids=prompt.ids,
        decode=decode,
    )


def _fused_chunk(
    prompt: Prompt, index: int, layout: Layout, found: Sequence[Found], states: Sequence[RowState]
) -> ChunkReport:
    chunk, start = prompt.chunks[index], prompt.starts[index]
    name = chunk.name or f"chunk {index + 1}"
    stop = start + len(chunk)
    pieces = [p for p in layout.pieces if p.chunk == index]
    recomputed = sum(state == "recomputed" for state in states[start:stop])
    if not pieces or not found:
        context = any(p.origin == "fused" and p.stop > start for p in layout.pieces)
        why = "kept from the earlier fused context" if context else "inside the longest exact prefix"
        return ChunkReport(name, start, len(chunk), "context" if context else "prefix", why, 0, 0, not context)
    exact, repeated = all(p.exact for p in pieces), sum(p.stop - p.start for p in pieces if p.again)
    source: ChunkSource = "miss" if any(item.encoded for item in found) else "hit"
    moved, why = start - found[0].kv.base, _why(found, exact, repeated)
    return ChunkReport(name, start, len(chunk), source, why, moved, recomputed, exact, repeated)


def _why(found: Sequence[Found], exact: bool, repeated: int) -> str:
    first, *again = found
    why = first.why
    if first.kv.averaged:
        why += f"; the mean over {first.kv.averaged} contexts"
    if exact:
        why += "; stands right behind its prelude"
    if again:
        why += f"; {repeated} rows repeat earlier chunks, their KV behind the same text: {again[0].why}"
    return why


def _prefilled_chunk(prompt: Prompt, index: int, prefix_rows: int, missed: str) -> ChunkReport:
    chunk, start = prompt.chunks[index], prompt.starts[index]
    name = chunk.name or f"chunk {index + 1}"
    if start + len(chunk) <= prefix_rows:
        return ChunkReport(name, start, len(chunk), "prefix", "inside the longest exact prefix", 0, 0, True)
    return ChunkReport(name, start, len(chunk), "miss", missed, 0, 0, True)
