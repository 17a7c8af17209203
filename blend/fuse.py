"""The algorithm, top to bottom: from a prompt to the KV of all its rows and the logits of the last one.

1. longest exact prefix first, then every chunk's KV from the store;
2. encode what is missing and put it back;
3. lay out the prompt and move every chunk's keys to its new place;
4. choose rows and compute them again, together with the question;
5. hand over, with a report of what was done and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from blend.assemble import assemble
from blend.chunk import Chunk, ChunkKV, kv_bytes
from blend.clock import Clock
from blend.fusion import Fusion
from blend.layout import Layout, lay_out
from blend.prompt import Prompt
from blend.repair import Charge, Repaired, repair
from blend.report import ChunkReport, ChunkSource, Report, RowState
from blend.selectors import Selector
from blend.setup import Found, Setup

__all__ = ["fuse", "prefill"]

Decode = Callable[[int], str]

# Behind a past, transformers builds a mask and repeats the keys of grouped heads, which a prefill from row 0 need not;
# on the CPU that costs about as much as an eighth of the rows.
_SHORT = 8


def fuse(
    setup: Setup, prompt: Prompt, selector: Selector, past: Fusion | None = None, decode: Decode | None = None
) -> Fusion:
    """Fuses a prompt; one without chunks, and without a known beginning, is prefilled.

    Args:
        past: an earlier fusion; rows of its longest common prefix with ``prompt`` are taken over as they are.
        decode: token id to text, for the report.

    Raises:
        UnsupportedRotation: the prompt's length is beyond what the model's keys can be moved to.
    """
    rope = setup.view.rope
    rope.admit(len(prompt))
    clock = Clock(setup.view.device)
    with clock("lookup"):
        prefix = setup.longest_prefix(prompt)
        past = past if past and rope.same_angles(len(past.prompt), len(prompt)) else None
        covered = (prefix.rows if prefix else 0, _common(prompt.ids, past.prompt.ids) if past else 0)
        if not prompt.chunks and not any(covered):
            return prefill(setup, prompt, "no chunks, and nothing known that the prompt starts with", decode)
        places = zip(prompt.starts, prompt.chunks, strict=True)
        wanted = [chunk for start, chunk in places if start + len(chunk) > max(covered)]
        stored = setup.fetch(wanted, prompt.system)
    with clock("encode"):
        missing = list(dict.fromkeys(chunk for chunk in wanted if chunk not in stored))
        encoded = {Chunk(kv.ids): kv for kv in setup.encode(missing, prompt.system)} if missing else {}
        found = [_found(chunk, stored, encoded) for chunk in prompt.chunks]
        if missing:
            # Encoding has computed the prelude; a miss then goes on exactly as a hit does.
            prefix = setup.longest_prefix(prompt)
            covered = (prefix.rows if prefix else 0, covered[1])
    with clock("assemble"):
        chunks = [item.kv if item else None for item in found]
        layout = lay_out(prompt, *covered, chunks, rope.same_angles, past is not None and past.exact)
        cache = assemble(setup.view, layout, chunks, prefix.layers if prefix else None, past.layers if past else None)
        ids_1T = torch.tensor([prompt.ids], device=setup.view.device)
    repaired = repair(setup.view, ids_1T, layout, cache, selector, clock)
    report = _report(selector.name, prompt, layout, found, repaired, clock, kv_bytes(cache.kv), decode)
    exact = all(piece.exact for piece in layout.pieces)
    return Fusion(prompt, repaired.logits, report, exact, cache.kv, setup.view)


def prefill(setup: Setup, prompt: Prompt, why: str, decode: Decode | None = None, remember: bool = True) -> Fusion:
    """The plain, exact path: the longest known prefix is reused, the rest runs as transformers runs it.

    Args:
        why: goes into the report.
        remember: keep the prompt's KV for later prompts that start the same way.
    """
    view = setup.view
    clock = Clock(view.device)
    with clock("lookup"):
        hit = setup.longest_prefix(prompt)
        rows = hit.rows if hit else 0
        if 0 < rows * _SHORT < len(prompt):
            why = f"{why}; the known prefix of {rows} rows is too short to save anything"
            hit, rows = None, 0
    with clock("prefill"):
        logits, layers = view.prefill(torch.tensor([prompt.ids[rows:]]), hit.layers if hit else None)
        own = tuple((keys[0], values[0]) for keys, values in layers)
    ttft = clock.total
    if remember and setup.remembers(len(prompt)):
        setup.prefix.insert(prompt.ids, own, extra=setup.salt)
    fresh = len(prompt) - rows
    states: list[RowState] = ["exact"] * rows
    states += ["fresh"] * fresh
    report = Report(
        method="prefill",
        rows=len(prompt),
        prefix_rows=rows,
        context_rows=0,
        chunks=tuple(_prefilled_chunk(prompt, i, rows) for i in range(len(prompt.chunks))),
        fallback=why,
        rows_per_layer=(fresh,) * len(view.layers),
        projected_per_layer=(0,) * len(view.layers),
        probe_per_layer=(),
        row_layers=float(fresh * len(view.layers)),
        ideal_speedup=len(prompt) / fresh,
        kv_bytes=kv_bytes(own),
        seconds=dict(clock.seconds),
        ttft=ttft,
        states=tuple(states),
        ids=prompt.ids,
        decode=decode,
    )
    return Fusion(prompt, logits[0], report, True, own, view)


def _found(chunk: Chunk, stored: dict[Chunk, ChunkKV], encoded: dict[Chunk, ChunkKV]) -> Found | None:
    if chunk in stored:
        return Found(stored[chunk], False)
    return Found(encoded[chunk], True) if chunk in encoded else None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _report(
    method: str,
    prompt: Prompt,
    layout: Layout,
    found: Sequence[Found | None],
    repaired: Repaired,
    clock: Clock,
    nbytes: int,
    decode: Decode | None,
) -> Report:
    charge: Charge = repaired.charge
    ttft = clock.total  # before anything that only the report needs
    chosen = set(repaired.chosen.tolist())
    states: list[RowState] = []
    for piece in layout.pieces:
        if piece.origin == "fresh":
            states += ["fresh"] * (piece.stop - piece.start)
        else:
            kept: RowState = "exact" if piece.exact else "moved"
            states += ["recomputed" if row in chosen else kept for row in range(piece.start, piece.stop)]
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
        kv_bytes=nbytes,
        seconds=dict(clock.seconds),
        ttft=ttft,
        states=tuple(states),
        ids=prompt.ids,
        decode=decode,
    )


def _fused_chunk(
    prompt: Prompt, index: int, layout: Layout, found: Found | None, states: Sequence[RowState]
) -> ChunkReport:
    chunk, start = prompt.chunks[index], prompt.starts[index]
    name = chunk.name or f"chunk {index + 1}"
    stop = start + len(chunk)
    piece = next((p for p in layout.pieces if p.chunk == index), None)
    recomputed = sum(state == "recomputed" for state in states[start:stop])
    if piece is None or found is None:
        context = any(p.origin == "fused" and p.stop > start for p in layout.pieces)
        why = "kept from the earlier fused context" if context else "inside the longest exact prefix"
        return ChunkReport(name, start, len(chunk), "context" if context else "prefix", why, 0, 0, not context)
    moved = start - found.kv.base
    why = "not in the store: encoded now and kept" if found.encoded else "found in the store"
    if piece.exact:
        why += "; stands right behind its prelude"
    source: ChunkSource = "miss" if found.encoded else "hit"
    return ChunkReport(name, start, len(chunk), source, why, moved, recomputed, piece.exact)


def _prefilled_chunk(prompt: Prompt, index: int, prefix_rows: int) -> ChunkReport:
    chunk, start = prompt.chunks[index], prompt.starts[index]
    inside = start + len(chunk) <= prefix_rows
    why = "inside the longest exact prefix" if inside else "computed by the plain prefill"
    return ChunkReport(
        chunk.name or f"chunk {index + 1}", start, len(chunk), "prefix" if inside else "miss", why, 0, 0, True
    )
