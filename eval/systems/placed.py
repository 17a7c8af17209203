"""Systems that turn chunk keys to positions of their own choosing, and repair nothing.

::

    rows    | system          | chunk 0    | chunk 1    | question                  |
    keys    | as if at system | starts[0]  | starts[1]  | where they are            |
              exact             cached KV    cached KV    the model's stock forward

A fused prompt turns every key to the row that it stands in. Here a key's position and its row are two things: attention
sees the rows from left to right, and the rotation of each key says how far away it is. Knows nothing of selectors.

Shape suffixes: ``H`` kv heads, ``T`` rows of the prompt, ``R`` rows before the question, ``D`` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from blend import Blender, Fusion, Prompt, UnsupportedModel
from blend.account import fused_report
from blend.admission import admit
from blend.chunk import KVLayers
from blend.clock import Clock
from blend.hf.fusion_cache import FusionCache
from blend.hf.view import ModelView
from blend.layout import Layout, lay_out
from blend.loading import LoadReport
from blend.readings import Wanted, means
from blend.repair import Charge, Repaired
from blend.report import Report
from blend.setup import Found, Setup
from eval.systems.base import Case, Fused, System
from rope import Move
from rope.rotation import turn_, turn_name

__all__ = ["place", "reuse_unrotated"]


def reuse_unrotated(ratio: float) -> System:
    """Full reuse without rotation: what engines do that put cached KV one after the other.

    Every chunk's keys stay where they were when it was encoded, right behind its prelude; so all chunks seem to begin
    at the same place, and only the first one's distance to the question is right.
    """

    def run(blender: Blender, case: Case) -> Fused:
        base = len(blender.setup.plan(case.prompt.system).prelude)
        return Fused(place(blender, case.prompt, "reuse-unrotated", [base] * len(case.prompt.chunks)))

    return System("reuse-unrotated", "full reuse, not rotated", "0", run, in_place=False)


@torch.inference_mode()
def place(
    blender: Blender,
    prompt: Prompt,
    method: str,
    starts: Sequence[int],
    *,
    system: int = 0,
    during: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Fusion:
    """KV of all rows, with keys turned to the positions that are named; the question runs behind them as it is.

    A prompt without chunks is prefilled.

    Args:
        method: goes into the report.
        starts: per chunk, the position that its first row's key is turned to.
        system: the same for the system part; its KV is exact.
        during: opened while the question runs.

    Raises:
        UnsupportedModel: the model's angles depend on the length of the pass (longrope).
        UnsupportedRotation: the prompt is longer than keys can be moved to.
        CorruptEntry: a stored chunk is damaged.
    """
    setup, view = blender.setup, blender.view
    if not prompt.chunks:
        return blender.fuse(prompt)
    admit(view, blender.tokenizer, prompt)
    if view.rope.by_length:
        raise UnsupportedModel(f"{method}: this model's angles depend on the length of the pass: leave this system out")
    view.rope.admit(len(prompt))
    clock = Clock(view.device)
    found = _find(setup, prompt, clock)
    known, past = _system(setup, prompt, clock)
    with clock("assemble"):
        parts = [_Part(past, len(prompt.system), 0, system)] if past else []
        parts += [_Part(item.kv.layers, len(item.kv.ids), item.kv.base, to)
                  for item, to in zip(found, starts, strict=True)]  # fmt: skip
        moved = _turned(view, parts, len(prompt))
    with clock("prefill"), during():
        logits, layers = view.prefill(torch.tensor([prompt.question]), moved)
    # The first chunk may stand right behind its prelude, and be exact, if it stays where it is.
    stays = setup.lossless and system == 0 and starts[0] == prompt.starts[0]
    layout = lay_out(prompt, known, 0, [item.kv for item in found], lambda length, other: stays)
    cache = FusionCache(layers, len(prompt))
    report = _report(method, prompt, layout, found, cache, logits[0], clock)
    chunks = (replace(c, moved=to - item.kv.base) for c, item, to in zip(report.chunks, found, starts, strict=True))
    exact = all(piece.exact for piece in layout.pieces) and during is nullcontext
    return Fusion(prompt, logits[0], replace(report, chunks=tuple(chunks)), exact, cache.kv, view)


class _Part(NamedTuple):
    """Rows that were cached side by side: their KV, how many, the position of the first one then and now."""

    layers: KVLayers
    rows: int
    start: int
    to: int


def _find(setup: Setup, prompt: Prompt, clock: Clock) -> list[Found]:
    """KV of every chunk; those that are missing are encoded now."""
    wanted = means(prompt.chunks)
    with clock("lookup"):
        stored = setup.fetch(wanted, prompt.system)
    found = {want: Found(want, kv, False, "found in the store") for want, kv in stored.items()}
    missing = [want for want in wanted if want not in found]
    if missing:
        with clock("encode"):
            found |= {item.want: item for item in setup.encode(missing, prompt.system)}
    return [found[Wanted(chunk, "mean")] for chunk in prompt.chunks]


def _system(setup: Setup, prompt: Prompt, clock: Clock) -> tuple[int, KVLayers]:
    """Exact KV of the system part, and how many of its rows were known; none if it is empty."""
    rows = len(prompt.system)
    with clock("lookup"):
        hit = setup.longest_prefix(Prompt(prompt.system, (), prompt.question[:1]))
    known = hit.rows if hit else 0
    if known == rows:
        return known, hit.layers if hit else ()
    with clock("prefill"):
        ids = torch.tensor([prompt.system[known:]])
        _, layers = setup.view.prefill(ids, hit.layers if hit else None)
        own = tuple((keys[0], values[0]) for keys, values in layers)
    setup.remember(prompt.system, own)
    return known, own


def _turned(view: ModelView, parts: Sequence[_Part], total: int) -> KVLayers:
    """KV ``[H, R, D]`` of all parts, one after the other, each turned to where it is said to be."""
    from_R = torch.cat([torch.arange(part.start, part.start + part.rows) for part in parts]).to(view.device)
    to_R = torch.cat([torch.arange(part.to, part.to + part.rows) for part in parts]).to(view.device)
    turns = view.rope.turns(Move(from_R, to_R, total, total))
    layers: list[tuple[Tensor, Tensor]] = []
    for index, rotation in enumerate(view.rope.layers):
        pairs = [part.layers[index] for part in parts]  # a slow store is read here, once per layer
        keys, values = torch.cat([pair[0] for pair in pairs], dim=1), torch.cat([pair[1] for pair in pairs], dim=1)
        if rotation is not None:
            name = turn_name(rotation.table, rotation.sign)
            turn_(keys if rotation.slot == "key" else values, rotation, turns[name])
        layers.append((keys, values))
    return layers


def _report(
    method: str,
    prompt: Prompt,
    layout: Layout,
    found: Sequence[Found],
    cache: FusionCache,
    logits: Tensor,
    clock: Clock,
) -> Report:
    fresh, depth = layout.forced.numel(), len(cache.states)
    charge = Charge((fresh,) * depth, (0,) * depth, (), float(fresh * depth), layout.rows / fresh)
    repaired = Repaired(logits, layout.stale[:0], charge)
    return fused_report(method, prompt, layout, [[item] for item in found], repaired, cache, clock, LoadReport(), None)
