"""The algorithm, top to bottom: from a prompt to the KV of all its rows and the logits of the last one.

1. longest exact prefix first, then every chunk's KV from the store;
2. encode what is missing and put it back (or answer from a plain prefill now, and encode afterwards);
3. lay out the prompt and move every chunk's keys to its new place, layer by layer while the pass runs where they have
   to be read from somewhere slow;
4. choose rows and compute them again, together with the question; correct those that stay as they were;
5. hand over, with a report of what was done and why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blend.account import Decode, fused_report, prefilled_report
from blend.assemble import LostChunk, assemble
from blend.chunk import kv_bytes
from blend.clock import Clock
from blend.correctors import Corrector
from blend.filling import LayerFilling
from blend.fusion import Fusion
from blend.hf.fusion_cache import FusionCache
from blend.layout import Again, Layout, lay_out
from blend.loading import LoadPlan, LoadReport, stored_bytes, with_ratio
from blend.prompt import Prompt
from blend.repair import repair
from blend.request import Request
from blend.selectors import Outlook, Selector
from blend.setup import Found, Setup

__all__ = ["fuse", "prefill"]

_TELLING_ROWS = 256  # shorter prompts take milliseconds either way, and their measurements are noise


def fuse(
    setup: Setup,
    prompt: Prompt,
    selector: Selector,
    past: Fusion | None = None,
    decode: Decode | None = None,
    bypass: bool = False,
    corrector: Corrector | None = None,
) -> Fusion:
    """Fuses a prompt; one without chunks, and without a known beginning, is prefilled.

    Args:
        past: an earlier fusion; rows of its longest common prefix with ``prompt`` are taken over as they are.
        decode: token id to text, for the report.
        bypass: prefill where the selector foresees that to be faster, or where it has turned out to be.
        corrector: what is done to the reused rows that the selector leaves.

    Raises:
        UnsupportedRotation: the prompt's length is beyond what the model's keys can be moved to.
    """
    rope = setup.view.rope
    rope.admit(len(prompt))
    past = past if past and rope.same_angles(len(past.prompt), len(prompt)) else None
    request = Request(setup, prompt, selector, past, decode, Clock(setup.view.device), corrector)
    while True:
        try:
            return _fuse(request, bypass)
        except LostChunk as lost:
            # Each round takes one more entry off the store, so this ends.
            want = request.again_of(lost.index) if lost.again else request.first_of(lost.index)
            assert want is not None, "only what was read can be damaged"
            request.unusable[want] = "damaged in the store: encoded again"
            setup.store.delete(request.found[want].kv.key)


def _fuse(request: Request, bypass: bool) -> Fusion:
    setup, prompt, clock = request.setup, request.prompt, request.clock
    with clock("lookup"):
        plan = _look_up(request)
    if why := _better_prefilled(request, plan, bypass):
        missed = "not in the store: encoded afterwards" if request.missing else "in the store, but not used"
        return prefill(setup, prompt, why, request.decode, missed=missed, clock=clock)
    with clock("encode"):
        _encode_missing(request)
    with clock("assemble"):
        layout, cache, filling, ratio = _place(request, plan)
        chosen = with_ratio(request.selector, ratio) if setup.loading == "adapt" else request.selector
        ids_1T = torch.tensor([prompt.ids], device=setup.view.device)
    try:
        repaired = repair(setup.view, ids_1T, layout, cache, chosen, clock, filling, request.corrector)
    finally:
        filling.close()
    items = [request.items_of(index) for index in range(len(prompt.chunks))]
    load = _load_report([item for of_chunk in items for item in of_chunk], filling, ratio)
    setup.pace.note("read", load.nbytes, 1, load.seconds)
    corrector = request.corrector.name if request.corrector else None
    report = fused_report(chosen.name, prompt, layout, items, repaired, cache, clock, load, request.decode, corrector)
    seconds = report.ttft - report.seconds.get("encode", 0.0)
    setup.pace.note(_pace_of(request), _work(request), len(prompt), seconds)
    exact = all(piece.exact for piece in layout.pieces)
    return Fusion(prompt, repaired.logits, report, exact, cache.kv, setup.view)


def prefill(
    setup: Setup,
    prompt: Prompt,
    why: str,
    decode: Decode | None = None,
    remember: bool = True,
    missed: str = "computed by the plain prefill",
    clock: Clock | None = None,
) -> Fusion:
    """The plain, exact path: the longest known prefix is reused, the rest runs as transformers runs it.

    Args:
        why: goes into the report.
        remember: keep the prompt's KV for later prompts that start the same way.
        missed: what the report says of chunks that no prefix covers.
        clock: of a request that has begun already.
    """
    view, total = setup.view, len(prompt)
    clock = clock or Clock(view.device)
    with clock("lookup"):
        hit = setup.longest_prefix(prompt)
        rows = hit.rows if hit else 0
        if rows and not _worthwhile(setup, rows, total):
            why = f"{why}; the known prefix of {rows} rows is too short to save anything"
            hit, rows = None, 0
    with clock("prefill"):
        logits, layers = view.prefill(torch.tensor([prompt.ids[rows:]]), hit.layers if hit else None)
        own = tuple((keys[0], values[0]) for keys, values in layers)
    setup.pace.note("past" if rows else "full", total - rows, total, clock.seconds["prefill"])
    report = prefilled_report(prompt, rows, len(view.layers), kv_bytes(own), why, clock, decode, missed)
    if remember:
        setup.remember(prompt.ids, own)
    return Fusion(prompt, logits[0], report, True, own, view)


def _look_up(request: Request) -> LoadPlan:
    """The longest exact prefix, then what the store holds of the chunks beyond it and is worth reading."""
    setup, prompt = request.setup, request.prompt
    request.prefix = setup.longest_prefix(prompt)
    starts, covered = (*prompt.starts, total := len(prompt)), max(request.covered)
    beyond = [index for index, chunk in enumerate(prompt.chunks) if starts[index] + len(chunk) > covered]
    both = (want for index in beyond for want in (request.first_of(index), request.again_of(index)) if want)
    request.wanted = tuple(dict.fromkeys(both))
    stored = setup.fetch([want for want in request.wanted if want not in request.unusable], prompt.system)
    plan = LoadPlan(setup.pace.seconds("full", total, total), setup.pace.seconds("read", 1, 1))
    if setup.loading == "adapt":
        slow = [want for want, kv in stored.items() if plan.better_encoded(kv)]
        request.unusable |= dict.fromkeys(slow, "reading it would take longer than encoding it: encoded again")
    request.found = {
        want: Found(want, kv, False, "found in the store")
        for want, kv in stored.items()
        if want not in request.unusable
    }
    return plan


def _better_prefilled(request: Request, plan: LoadPlan, bypass: bool) -> str | None:
    """Why this request is answered by a plain prefill; None where it is fused. What is missing is encoded later."""
    setup, prompt = request.setup, request.prompt
    if not prompt.chunks and not any(request.covered):
        return "no chunks, and nothing known that the prompt starts with"
    if request.missing and setup.on_miss == "prefill":
        chunks = {want.chunk for want in request.wanted}
        why: str | None = f"{len(request.missing_chunks)} of {len(chunks)} chunks are not in the store"
    else:
        why = _not_paying(request, plan) if bypass else None
    if why and request.missing:
        again = [want.chunk for want in request.missing if want.reading == "again"]
        setup.encode_afterwards(request.missing_chunks, prompt.system, again)
    return why


def _not_paying(request: Request, plan: LoadPlan) -> str | None:
    """Why fusing would take longer than a full prefill: as the selector foresees it, or as it has turned out here."""
    setup, prompt = request.setup, request.prompt
    rows, reused = len(prompt), request.reused_rows
    missing = sum(len(want.chunk) for want in request.missing)
    outlook = Outlook(rows, request.covered[0], max(rows - max(request.covered) - reused, 1), missing)
    if why := request.selector.rather_prefill(outlook):
        return why
    if rows < _TELLING_ROWS:
        return None
    fused = setup.pace.seconds(_pace_of(request), _work(request), rows)
    if fused and plan.full_seconds and fused > plan.full_seconds:
        return f"fusing takes about {fused:.3f} s here, and a full prefill {plan.full_seconds:.3f} s"
    return None


def _encode_missing(request: Request) -> None:
    setup, prompt = request.setup, request.prompt
    if request.missing:
        _encode(request)
        # Encoding has computed the prelude; a miss then goes on exactly as a hit does.
        request.prefix = setup.longest_prefix(prompt)
    elif setup.learn_prelude(prompt.system, request.prefix.rows if request.prefix else 0):
        # Chunks were encoded by another process, or long ago: from the next request on, its rows are known.
        request.prefix = setup.longest_prefix(prompt)


def _encode(request: Request) -> None:
    """What this prompt needs and the store lacks. What other orders will need of new chunks is encoded with it."""
    setup, system = request.setup, request.prompt.system
    again = [want for want in request.missing if want in request.unusable]
    new = [want for want in request.missing if want not in request.unusable]
    rereads = [want.chunk for want in new if want.reading == "again"]
    for item in setup.encode(again, system, stale=again) if again else ():
        request.found[item.want] = item._replace(why=request.unusable.get(item.want, item.why))
    for entries in setup.encode_fully(list(dict.fromkeys(want.chunk for want in new)), system, again=rereads):
        # What is there already stays: it may have been encoded again because its entry is not to be read.
        request.found = {item.want: item for item in entries} | request.found


def _place(request: Request, plan: LoadPlan) -> tuple[Layout, FusionCache, LayerFilling, float | None]:
    """Lays out the prompt and moves what is reused; also the ratio that would hide the load."""
    setup, prompt, past, prefix = request.setup, request.prompt, request.past, request.prefix
    kvs = [[item.kv for item in request.items_of(index)] for index in range(len(prompt.chunks))]
    same_angles, lossless = setup.view.rope.same_angles, setup.lossless
    layout = lay_out(
        prompt,
        *request.covered,
        [of_chunk[0] if of_chunk else None for of_chunk in kvs],
        lambda a, b: lossless and same_angles(a, b),
        past is not None and past.exact,
        {index: Again(kvs[index][1], runs) for index, runs in request.repeats.items() if len(kvs[index]) == 2},
    )
    stored = [kv for of_chunk in kvs for kv in of_chunk if stored_bytes(kv)]
    layers = prefix.layers if prefix else None, past.layers if past else None
    cache, filling = assemble(setup.view, layout, *layers, beside=setup.overlap and bool(stored))
    return layout, cache, filling, plan.hiding_ratio(stored)


def _load_report(items: Sequence[Found], filling: LayerFilling, ratio: float | None) -> LoadReport:
    nbytes = sum(stored_bytes(item.kv) for item in items)
    return LoadReport(nbytes, filling.busy, filling.waited, ratio) if nbytes else LoadReport()


def _pace_of(request: Request) -> tuple[str, str]:
    """What the pace of a method is known by. It need not be hashable: it may hold lists and tensors."""
    return "fuse", repr((request.selector, request.corrector))


def _work(request: Request) -> float:
    """Rows that fusing computes, roughly; its pace learns the rest."""
    rows = len(request.prompt) - max(request.covered)
    reused = request.reused_rows
    return rows - reused + getattr(request.selector, "ratio", 0.15) * reused


def _worthwhile(setup: Setup, rows: int, total: int) -> bool:
    """Whether going on behind ``rows`` known rows is quicker than starting at row 0.

    Behind a past, transformers builds a mask and repeats the keys of grouped heads, which a prefill from row 0 need
    not. As long as this machine has not shown both, that counts for an eighth of the rows (measured on one CPU core).
    """
    full, behind = setup.pace.seconds("full", total, total), setup.pace.seconds("past", total - rows, total)
    if full is None or behind is None or total < _TELLING_ROWS:
        return rows * 8 >= total
    return behind < full
