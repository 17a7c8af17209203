"""Time to first token of each method against HF's best full prefill, in pairs, in one process.

TTFT counts everything from token ids to the last row's logits: look-up, moving, probe, check and repair. The full
prefill is the model's stock forward with stock SDPA, no cache to read, logits of the last row only. Every method runs
between two full prefills and is compared with their mean, so a machine that slows down slows both.

``kvblend`` is the default recipe as a Blender has it: averaged KV, its selector and its corrector. The published
methods run over chunks that were encoded alone. Then an answer is decoded behind the first method's KV, beside the
same answer behind a full prefill's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blend import (
    Blender,
    Chunk,
    FirstK,
    FullRecompute,
    FullReuse,
    Fusion,
    KVDeviation,
    Prompt,
    QueryAttention,
    Selector,
)
from blend.admission import admit, default_corrector, default_selector
from blend.errors import BudgetError
from blend.progress import track
from eval.bench.decode import Decoded, compare_decoding
from eval.demo import load_passages
from eval.machine import machine_record
from eval.systems import UnknownSystem

__all__ = [
    "RECIPE",
    "BenchOptions",
    "Measured",
    "bench_prompt",
    "full_prefill",
    "methods",
    "recipe",
    "run_ttft_bench",
]

RECIPE = "kvblend"
"""The name of the default recipe among the systems."""

QUESTION = "Who founded the harbour town, and in which year did the first ship arrive?"


@dataclass(frozen=True)
class BenchOptions:
    """What is measured.

    Attributes:
        model: name of the model.
        rows: rows of the prompt.
        ratio: share of stale rows computed again.
        chunk_rows: rows of each chunk.
        pairs: measurements per method.
        seed: order of the chunks.
        dtype: of weights and KV; None for bf16.
        systems: names of the methods; None for all.
        decode: tokens that are decoded to compare the two caches; 0 for none.
    """

    model: str = "smollm2"
    rows: int = 4096
    ratio: float = 0.15
    chunk_rows: int = 512
    pairs: int = 5
    seed: int = 0
    dtype: torch.dtype | None = None
    systems: tuple[str, ...] | None = None
    decode: int = 32

    def __post_init__(self) -> None:
        if self.rows < 256:
            raise BudgetError(f"rows is {self.rows}: a prompt of at least 256 rows is needed to measure anything")
        if self.pairs < 1:
            raise BudgetError(f"pairs is {self.pairs}: at least 1 measurement is needed")
        if self.chunk_rows < 16:
            raise BudgetError(f"chunk-rows is {self.chunk_rows}: chunks of at least 16 rows are needed")
        if self.decode < 0:
            raise BudgetError(f"decode is {self.decode}: it must be 0 tokens or more")


@dataclass
class Measured:
    """One method's figures, a list entry per pair; ``seconds`` per stage."""

    ttft: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    fusion: Fusion | None = None

    def add(self, fusion: Fusion, seconds: float, full: float) -> None:
        """Books one run of ``seconds`` beside a full prefill of ``full`` seconds."""
        self.ttft.append(seconds)
        self.full.append(full)
        for stage, value in fusion.report.seconds.items():
            self.seconds.setdefault(stage, []).append(value)
        self.fusion = fusion

    @property
    def speedups(self) -> list[float]:
        return [full / ttft for full, ttft in zip(self.full, self.ttft, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Medians over the pairs, and every speed-up."""
        assert self.fusion is not None
        report = self.fusion.report
        return {
            "ttft_s": statistics.median(self.ttft),
            "speedup": statistics.median(self.speedups),
            "speedups": self.speedups,
            "ideal": report.ideal_speedup,
            "full_s": statistics.median(self.full),
            "seconds": {stage: statistics.median(values) for stage, values in self.seconds.items()},
            "recomputed_rows": report.recomputed_rows,
            "row_layers": report.row_layers,
        }


def methods(ratio: float, names: tuple[str, ...] | None = None) -> dict[str, Selector]:
    """The published methods by name; ``recompute`` runs every row through our path, which shows what that path costs.

    Raises:
        UnknownSystem: a name that is none of these.
    """
    known: dict[str, Selector] = {
        "reuse": FullReuse(),
        "epic": FirstK(ratio=ratio),
        "cacheblend": KVDeviation(ratio=ratio),
        "prophetkv": QueryAttention(ratio=ratio),
        "recompute": FullRecompute(),
    }
    for name in names or ():
        if name not in known:
            raise UnknownSystem(f"there is no system {name!r} to time: choose from {', '.join(known)}")
    return {name: known[name] for name in names or known}


def recipe(blender: Blender, prompt: Prompt, ratio: float) -> Callable[[], Fusion]:
    """Encodes the prompt's chunks for the default recipe, and returns what fuses the prompt with it.

    Args:
        blender: any; the recipe brings its own background.
    """
    averaged = blender.averaged(())
    averaged.encode(prompt.chunks, system=prompt.system, progress=True)
    selector, corrector = default_selector(blender.view, ratio), default_corrector(averaged.setup.background)
    return partial(averaged.fuse, prompt, selector=selector, corrector=corrector)


def run_ttft_bench(options: BenchOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Runs the bench, prints its table and returns the figures as plain data.

    Raises:
        BudgetError: options out of range.
        UnknownSystem: a method that is not there.
        PromptTooLong: more rows than the model holds.
    """
    chosen = _check(options)
    own = blender is None
    blender = blender or Blender.from_pretrained(options.model, dtype=options.dtype, background=None)
    prompt = bench_prompt(blender, options)
    admit(blender.view, blender.tokenizer, prompt)  # before the chunks of a prompt that is too long are encoded
    requests = _requests(blender, prompt, options.ratio, chosen)
    results = {name: Measured() for name in chosen}
    rounds = _rounds(blender, prompt, requests, options.pairs)
    for name, fusion, seconds, full in track(rounds, total=options.pairs * len(chosen), label="measuring"):
        results[name].add(fusion, seconds, full)
    first: Fusion = next(iter(results.values())).fusion  # type: ignore[assignment]  # pairs >= 1
    decoded = compare_decoding(first, options.decode) if options.decode else None
    figures = {
        "model": options.model,
        "dtype": str(blender.view.dtype).removeprefix("torch."),
        "machine": machine_record(blender.view.dtype),
        "rows": len(prompt),
        "chunks": len(prompt.chunks),
        "ratio": options.ratio,
        "pairs": options.pairs,
        "kv_bytes": first.report.kv_bytes,
        "systems": {"full": _full_figures(results), **{name: m.as_dict() for name, m in results.items()}},
        "decode": decoded.as_dict() if decoded else None,
    }
    console.print(_table(figures))
    if decoded:
        console.print(_decode_line(decoded, chosen[0]))
    if own:
        blender.close()
    return figures


def _check(options: BenchOptions) -> tuple[str, ...]:
    """The systems in the order in which they are timed; raises :class:`UnknownSystem`."""
    known = (RECIPE, *methods(options.ratio))
    for name in options.systems or ():
        if name not in known:
            raise UnknownSystem(f"there is no system {name!r} to time: choose from {', '.join(known)}")
    return options.systems or known


def _requests(
    blender: Blender, prompt: Prompt, ratio: float, chosen: tuple[str, ...]
) -> dict[str, Callable[[], Fusion]]:
    """What fuses the prompt, per system; all their chunks are encoded then."""
    published = methods(ratio)
    if chosen != (RECIPE,):
        blender.encode(prompt.chunks, system=prompt.system, progress=True)
    return {
        name: recipe(blender, prompt, ratio)
        if name == RECIPE
        else partial(blender.fuse, prompt, selector=published[name])
        for name in chosen
    }


def bench_prompt(blender: Blender, options: BenchOptions) -> Prompt:
    """A prompt of exactly ``options.rows`` rows: the demo corpus as running text, cut into chunks, shuffled."""
    frame = blender.prompt(QUESTION)
    text = [i for p in load_passages() for i in blender.chunk(f"{p.title}\n{p.text}").ids]
    wanted = options.rows - len(frame)
    # Later copies of the text start one token further on, so that no two chunks are the same.
    ids = [text[(i + i // len(text)) % len(text)] for i in range(wanted)]
    chunks = [Chunk(tuple(ids[i : i + options.chunk_rows])) for i in range(0, wanted, options.chunk_rows)]
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(options.seed)).tolist()
    return Prompt(frame.system, tuple(chunks), frame.question).reordered(order)


def _rounds(
    blender: Blender, prompt: Prompt, requests: Mapping[str, Callable[[], Fusion]], pairs: int
) -> Iterator[tuple[str, Fusion, float, float]]:
    """Yields (name, fusion, seconds, mean seconds of the full prefills before and after), the methods in turn."""
    ids_1T = torch.tensor([prompt.ids])
    for fuse in requests.values():  # warm-up, and the first full prefill below is one too
        fuse()
    full_prefill(blender, ids_1T)
    before = full_prefill(blender, ids_1T)
    for _ in range(pairs):
        for name, fuse in requests.items():
            started = time.perf_counter()
            fusion = fuse()
            fusion.logits.argmax().item()  # the first token is there
            seconds = time.perf_counter() - started
            after = full_prefill(blender, ids_1T)
            yield name, fusion, seconds, (before + after) / 2
            before = after


def full_prefill(blender: Blender, ids_1T: torch.Tensor) -> float:
    """Seconds of the stock forward; with no padding and no past it needs no mask and takes SDPA's causal kernel."""
    started = time.perf_counter()
    logits, _ = blender.view.prefill(ids_1T)
    logits.argmax().item()
    return time.perf_counter() - started


def _full_figures(results: dict[str, Measured]) -> dict[str, Any]:
    seconds = statistics.median(full for m in results.values() for full in m.full)
    return {"ttft_s": seconds, "speedup": 1.0, "ideal": 1.0, "seconds": {"prefill": seconds}}


def _table(figures: dict[str, Any]) -> Table:
    machine = figures["machine"]
    title = (
        f"{figures['model']} {figures['dtype']}, {figures['rows']} rows in {figures['chunks']} chunks, ratio "
        f"{figures['ratio']}, {machine['threads']} thread(s), median of {figures['pairs']} pairs"
    )
    table = Table("method", "TTFT s", "speed-up", "ideal", "of ideal", "stages (ms)", title=title)
    for name, f in figures["systems"].items():
        shown = {stage: f"{seconds * 1e3:.0f}" for stage, seconds in f["seconds"].items() if seconds > 5e-4}
        stages = ", ".join(f"{stage} {ms}" for stage, ms in shown.items())
        share = f"{f['speedup'] / f['ideal']:.0%}"
        table.add_row(name, f"{f['ttft_s']:.2f}", f"{f['speedup']:.2f}x", f"{f['ideal']:.2f}x", share, stages)
    return table


def _decode_line(decoded: Decoded, system: str) -> str:
    return (
        f"decoding {decoded.tokens} tokens: {decoded.step_ms(decoded.fused):.1f} ms a token behind {system}'s KV, "
        f"{decoded.step_ms(decoded.full):.1f} ms behind a full prefill's, ratio {decoded.ratio:.3f}"
    )
