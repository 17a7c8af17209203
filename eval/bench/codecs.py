"""What each codec makes of chunk KV: bytes, speed, and divergence from full prefill, over the demo's questions.

Two divergences. *Prefix reuse* has nothing but the codec in it: the exact KV of the whole prompt goes through it, and
full prefill's answer is read over what comes out. *Fused* is what a user sees: the chunks come out of a store that
holds them coded, and are fused. Most of that divergence is the fusing's own; hence also the change against uncoded
chunks, question by question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from blend import Blender, BudgetError, FirstK, FullReuse, QueryAttention, Random, Selector
from blend.chunk import ChunkKV, KVLayers
from blend.progress import track
from blend.stores import MemoryStore, Store
from blend.stores.codecs import Codec, LayerSpec, codec_by_name
from blend.stores.entry import Packed, pack, read_head
from eval.demo.cases import DemoCase
from eval.demo.run import demo_cases
from eval.fidelity import compare, make_reference
from eval.machine import machine_record
from eval.stats import bootstrap_mean
from eval.systems.exact import full_prefill

__all__ = ["ALL", "CodecOptions", "run_codec_bench"]

Result = TypeVar("Result")

ALL = ("none", "bf16", "fp16", "zstd", "int8", "int8+zstd", "int4", "int4+zstd", "dct")
"""The codecs measured unless others are named."""


@dataclass(frozen=True)
class CodecOptions:
    """What is measured.

    Attributes:
        model: name of the model.
        codecs: names; None for :data:`ALL`. ``none`` is always measured.
        limit: only the first questions; None for all.
        k: passages per question.
        ratio: share of the reused rows computed again in fused answers; at 0 all are reused as they are.
        seed: of the passages' order.
        tokens: the longest answer that divergences are taken along.
        dtype: of weights and KV; None for bf16.

    Raises:
        BudgetError: a number out of range.
        StoreError: no such codec.
    """

    model: str = "smollm2"
    codecs: tuple[str, ...] | None = None
    limit: int | None = None
    k: int = 6
    ratio: float = 0.15
    seed: int = 0
    tokens: int = 12
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "k", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BudgetError(f"{name} is {value}: it must be 1 or more")
        Random(self.ratio)  # raises when out of range
        for name in self.names:
            codec_by_name(name)  # raises where there is none

    @property
    def names(self) -> tuple[str, ...]:
        """The codecs' names, ``none`` first."""
        return tuple(dict.fromkeys(("none", *(self.codecs if self.codecs is not None else ALL))))

    def selector(self, blender: Blender) -> Selector:
        """Full reuse, or the default selector at this ratio."""
        if self.ratio == 0:
            return FullReuse()
        return QueryAttention(self.ratio) if blender.view.observable else FirstK(self.ratio)


class Cost(NamedTuple):
    """All chunks under one codec.

    Attributes:
        nbytes: of the entries, as a store would hold them.
        ratio: bytes of the same numbers as bf16, over ``nbytes``.
        encode_gbps, decode_gbps: GB of bf16 a second of one core, from KV to an entry's bytes and, checked, back again.
        key_rms, value_rms: root mean square error, relative to the root mean square of the side of a layer of a chunk.
        key_max, value_max: the largest error, relative to the same.
    """

    nbytes: int
    ratio: float
    encode_gbps: float
    decode_gbps: float
    key_rms: float
    key_max: float
    value_rms: float
    value_max: float


@dataclass
class Divergence:
    """One codec; an entry per question, in nats per token of the answer."""

    prefix: list[float] = field(default_factory=list)
    fused: list[float] = field(default_factory=list)


class PackedStore(Store):
    """Entries under one of several codecs at a time, for comparing them behind the same keys.

    Attributes:
        entries: bytes by codec, then by key.
        active: the codec whose entries are handed out.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Packed]] = {}
        self.active = "none"

    def get(self, key: str) -> ChunkKV | None:
        entry = self.entries[self.active].get(key)
        return None if entry is None else unpack(entry, key)

    def put(self, kv: ChunkKV) -> bool:
        raise AssertionError("all chunks are encoded before any question is asked")

    def delete(self, key: str) -> bool:
        return self.entries[self.active].pop(key, None) is not None

    def __contains__(self, key: object) -> bool:
        return key in self.entries[self.active]

    def keys(self) -> Iterator[str]:
        return iter(list(self.entries[self.active]))


def run_codec_bench(options: CodecOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Runs the bench, prints its table and returns the figures as plain data.

    After Ctrl-C the finished questions are shown and returned, with ``complete`` False.

    Args:
        blender: in place of loading ``options.model``; its store is put back at the end, and it is left open.

    Raises:
        BudgetError: options out of range.
        EmbedderMissing: the packaged embedder is not installed.
    """
    cases = demo_cases(options.k, options.seed, options.limit)
    own = blender is None
    blender = blender or Blender.from_pretrained(options.model, dtype=options.dtype, background=None)
    setup = blender.setup
    costs: dict[str, Cost] = {}
    found = {name: Divergence() for name in options.names}
    n, complete = 0, False
    try:
        chunks = _encoded(blender, cases)
        store = PackedStore()
        names = tuple(dict.fromkeys((*options.names, *map(_unsqueezed, options.names))))
        for name in track(names, total=len(names), label="coding"):
            store.entries[name], costs[name] = _coded(chunks, codec_by_name(name))
        blender.setup = replace(setup, store=store)
        for row in track(_rows(blender, store, cases, options), total=len(cases), label="measuring"):
            for name, (prefix, fused) in row.items():
                found[name].prefix.append(prefix)
                found[name].fused.append(fused)
            n += 1
        complete = True
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted[/] after {n} finished question(s)")
    finally:
        blender.setup = setup
        if own:
            blender.close()
    figures = {
        "model": options.model,
        "dtype": str(blender.view.dtype).removeprefix("torch."),
        "complete": complete,
        "machine": machine_record(blender.view.dtype),
        "n": n,
        "ratio": options.ratio,
        "codecs": {
            name: costs[name]._asdict() | _divergences(found[name], found["none"]) for name in found if name in costs
        },
    }
    if costs:
        console.print(_table(figures))
    return figures


# --- coding -----------------------------------------------------------------------------------------------------------


def _encoded(blender: Blender, cases: Sequence[DemoCase]) -> list[ChunkKV]:
    """KV of all passages that any case uses."""
    memory = MemoryStore(64 << 30)
    blender.setup = replace(blender.setup, store=memory)
    blender.encode([chunk for case in cases for chunk in case.prompt(blender).chunks], progress=True)
    entries = [memory.get(key) for key in list(memory.keys())]
    return [kv for kv in entries if kv is not None]


def unpack(entry: Packed, key: str) -> ChunkKV:
    """The KV of an entry, every layer checked and decoded."""
    return read_head(entry.head, key).whole(lambda layer: entry.layers[layer])


def _coded(chunks: Sequence[ChunkKV], codec: Codec) -> tuple[dict[str, Packed], Cost]:
    """Every chunk's entry, and what all of them cost."""
    unpack(pack(chunks[0], codec), chunks[0].key)  # once uncounted: libraries are loaded on their first use
    entries, encode = _timed(lambda: {kv.key: pack(kv, codec) for kv in chunks})
    decode = 0.0
    errors: dict[str, list[tuple[float, float]]] = {"key": [], "value": []}
    for kv in chunks:
        back, seconds = _timed(partial(unpack, entries[kv.key], kv.key))
        decode += seconds
        for layer, decoded in zip(kv.layers, back.layers, strict=True):
            for side, x, y in zip(errors, layer, decoded, strict=True):
                errors[side].append(_error(x, y))
    numbers = sum(x.numel() for kv in chunks for layer in kv.layers for x in layer)
    nbytes = sum(entry.nbytes for entry in entries.values())
    gigabytes = 2 * numbers / 1e9
    off = [(fmean(rms**2 for rms, _ in found) ** 0.5, max(top for _, top in found)) for found in errors.values()]
    return entries, Cost(nbytes, 2 * numbers / nbytes, gigabytes / encode, gigabytes / decode, *off[0], *off[1])


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What ``work`` returns, and the seconds it takes one core, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.thread_time()
        return work(), time.thread_time() - started
    finally:
        torch.set_num_threads(threads)


def _error(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Root mean square and largest error of ``y``, relative to the root mean square of ``x``."""
    error, size = (y.double() - x.double()).abs(), x.double().square().mean().sqrt().clamp_min(1e-300)
    return float(error.square().mean().sqrt() / size), float(error.max() / size)


# --- divergence -------------------------------------------------------------------------------------------------------


Row = dict[str, tuple[float, float]]
"""One question: by codec, divergence with the prompt's own KV coded, and fused from coded chunks."""


def _rows(blender: Blender, store: PackedStore, cases: Sequence[DemoCase], options: CodecOptions) -> Iterator[Row]:
    selector = options.selector(blender)
    for case in cases:
        prompt = case.prompt(blender)
        reference = make_reference(blender, full_prefill(blender, prompt), options.tokens)
        row: Row = {}
        for name in dict.fromkeys(map(_unsqueezed, options.names)):
            codec, exact = codec_by_name(name), reference.fusion
            prefix = compare(reference, replace(exact, layers=_through(codec, exact.layers)))
            store.active = name
            fused = compare(reference, blender.fuse(prompt, selector=selector))
            row[name] = prefix.kl, fused.kl
        yield {name: row[_unsqueezed(name)] for name in options.names}


def _unsqueezed(name: str) -> str:
    """The codec that gives the same KV without zstd, which loses nothing: its divergence is not measured twice."""
    return "none" if name == "zstd" else name.removesuffix("+zstd")


def _through(codec: Codec, layers: KVLayers) -> KVLayers:
    """The KV after it went through the codec."""
    return tuple(codec.decode(codec.encode(k, v), LayerSpec.of(k, v)) for k, v in layers)


def _divergences(found: Divergence, none: Divergence) -> dict[str, Any]:
    """Mean, bootstrap interval and values: of both divergences, and of what the codec changes in the fused one."""
    if not found.fused:
        return {}
    change = [coded - plain for coded, plain in zip(found.fused, none.fused, strict=True)]
    kinds = {"kl_prefix": found.prefix, "kl_fused": found.fused, "kl_fused_change": change}
    means = {kind: bootstrap_mean(values) for kind, values in kinds.items()}
    return {kind: {"mean": m.value, "ci": [m.low, m.high], "values": kinds[kind]} for kind, m in means.items()}


# --- showing ----------------------------------------------------------------------------------------------------------


def _table(figures: dict[str, Any]) -> Table:
    title = (
        f"{figures['model']} {figures['dtype']}, {figures['n']} question(s); speed of one core; KL to full prefill "
        f"along its answer, nats per token [95 % interval]; fused at ratio {figures['ratio']:g}"
    )
    heads = ("MB", "ratio", "encode GB/s", "decode GB/s", "K error", "V error", "prefix reuse", "fused", "change")
    table = Table("codec", *heads, title=title)
    for name, f in figures["codecs"].items():
        errors = (f"{f[f'{side}_rms']:.2%}\n[dim]max {f[f'{side}_max']:.0%}[/]" for side in ("key", "value"))
        size = f"{f['nbytes'] / 1e6:.1f}", f"{f['ratio']:.2f}x"
        speed = f"{f['encode_gbps']:.3f}", f"{f['decode_gbps']:.3f}"
        shown = (_cell(f, "kl_prefix", ".5f"), _cell(f, "kl_fused", ".4f"), _cell(f, "kl_fused_change", "+.4f"))
        table.add_row(name, *size, *speed, *errors, *shown)
    return table


def _cell(f: dict[str, Any], kind: str, form: str) -> str:
    if kind not in f:
        return "–"
    low, high = f[kind]["ci"]
    return f"{f[kind]['mean']:{form}}\n[dim]{low:{form}} – {high:{form}}[/]"
