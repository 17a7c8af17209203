"""``kvblend bench``: speed and fidelity, measured. Knows how to read options; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from eval.cli_options import (
    DtypeOption,
    JsonOption,
    LimitOption,
    ModelOption,
    PassagesOption,
    RatioOption,
    SeedOption,
    ThreadsOption,
    dtype_of,
    names_of,
    ratios_of,
    set_threads,
    write,
)

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, help="Measure speed and fidelity.")

RowsOption = Annotated[int, typer.Option(help="Rows of the prompt.")]
ChunkRowsOption = Annotated[int, typer.Option(help="Rows of each chunk.")]
PairsOption = Annotated[int, typer.Option(help="Alternating measurements per line.")]


@bench.command("ratio")
def bench_ratio(
    model: ModelOption = "smollm2",
    ratios: Annotated[str, typer.Option(help="Comma-separated, ascending.")] = "0,0.05,0.1,0.15,0.3,0.5,1",
    limit: LimitOption = None,
    k: PassagesOption = 6,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Error against full prefill as the recompute ratio grows, per selector, on the demo's questions."""
    from eval.bench.ratio import RatioOptions, run_ratio_bench

    set_threads(threads)
    options = RatioOptions(model, ratios_of(ratios), limit, k, seed, dtype=dtype_of(dtype))
    _finish(json_file, run_ratio_bench(options, Console()))


@bench.command("ttft")
def bench_ttft(
    model: ModelOption = "smollm2",
    rows: RowsOption = 4096,
    ratio: RatioOption = 0.15,
    chunk_rows: ChunkRowsOption = 512,
    pairs: PairsOption = 5,
    systems: Annotated[str | None, typer.Option(help="Comma-separated; all if not given.")] = None,
    decode: Annotated[int, typer.Option(help="Tokens decoded behind either; 0 for none.")] = 32,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time to first token of each method against full prefill, in alternating pairs; and decoding behind either."""
    from eval.bench.ttft import BenchOptions, run_ttft_bench

    set_threads(threads)
    names = names_of(systems)
    options = BenchOptions(model, rows, ratio, chunk_rows, pairs, seed, dtype_of(dtype), names, decode)
    write(json_file, run_ttft_bench(options, Console()))


@bench.command("growth")
def bench_growth(
    model: ModelOption = "smollm2",
    rows: Annotated[str, typer.Option(help="Comma-separated lengths, ascending.")] = "1024,2048,4096,8192",
    ratio: RatioOption = 0.15,
    chunk_rows: ChunkRowsOption = 512,
    pairs: PairsOption = 3,
    plot: Annotated[Path | None, typer.Option(help="Picture to write: a .png or an .svg.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time and memory to the first token as the prompt grows: full prefill and the default recipe."""
    from eval.bench.growth import GrowthOptions, run_growth_bench
    from eval.bench.ttft import BenchOptions

    set_threads(threads)
    bench = BenchOptions(model, ratio=ratio, chunk_rows=chunk_rows, pairs=pairs, seed=seed, dtype=dtype_of(dtype))
    _finish(json_file, run_growth_bench(GrowthOptions(bench, _lengths_of(rows), plot), Console()))


@bench.command("stores")
def bench_stores(
    model: ModelOption = "smollm2",
    rows: RowsOption = 2048,
    ratio: RatioOption = 0.15,
    chunk_rows: ChunkRowsOption = 512,
    pairs: PairsOption = 3,
    system: Annotated[str, typer.Option(help="Method that fuses.")] = "prophetkv",
    codec: Annotated[str, typer.Option(help="Of the disk and Redis stores.")] = "none",
    folder: Annotated[Path | None, typer.Option(help="Of the disk store; a temporary one if not given.")] = None,
    redis: Annotated[str | None, typer.Option(help="URL of a server; one is started if not given.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time to first token with the chunks in memory, on disk and in Redis, read before computing or beside it."""
    from eval.bench.stores import StoresOptions, run_stores_bench
    from eval.bench.ttft import BenchOptions

    set_threads(threads)
    options = BenchOptions(model, rows, ratio, chunk_rows, pairs, seed, dtype_of(dtype), (system,))
    figures = run_stores_bench(StoresOptions(options, folder, redis, codec), Console())
    _finish(json_file, figures)


@bench.command("codecs")
def bench_codecs(
    model: ModelOption = "smollm2",
    codecs: Annotated[str | None, typer.Option(help="Comma-separated; all if not given.")] = None,
    limit: LimitOption = None,
    k: PassagesOption = 6,
    ratio: RatioOption = 0.15,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Bytes, speed and divergence from full prefill of each way to write chunk KV, on the demo's questions."""
    from eval.bench.codecs import CodecOptions, run_codec_bench

    set_threads(threads)
    options = CodecOptions(model, names_of(codecs), limit, k, ratio, seed, dtype=dtype_of(dtype))
    _finish(json_file, run_codec_bench(options, Console()))


@bench.command("lookup")
def bench_lookup(
    entries: Annotated[int, typer.Option(help="Chunks, or blocks, that are held.")] = 1_000_000,
    lookups: Annotated[int, typer.Option(help="Look-ups that are timed.")] = 100_000,
    subjects: Annotated[str | None, typer.Option(help="Comma-separated; all if not given.")] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Microseconds to find, add and drop a chunk or a block among a million others."""
    from eval.bench.lookup import LookupOptions, run_lookup_bench

    set_threads(1)
    options = LookupOptions(entries, lookups, seed=seed, subjects=names_of(subjects) or ())
    _finish(json_file, run_lookup_bench(options, Console()))


@bench.command("isolation")
def bench_isolation(
    model: ModelOption = "smollm2",
    rows: Annotated[int, typer.Option(help="Rows of the passage asked about.")] = 128,
    samples: Annotated[int, typer.Option(help="Passages of each kind, for each way.")] = 20,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Whether a tenant can tell by the clock what another tenant has asked about."""
    from eval.bench.isolation import IsolationOptions, run_isolation_bench

    set_threads(threads)
    options = IsolationOptions(model, rows, samples, seed, dtype_of(dtype))
    _finish(json_file, run_isolation_bench(options, Console()))


@bench.command("rag")
def bench_rag(
    data: Annotated[str, typer.Argument(help="A JSONL set, or the name of one in $KVBLEND_DATA.")] = "squad_xquad_en",
    passages: Annotated[int, typer.Option(help="Different passages in the folder.")] = 200,
    questions: Annotated[int, typer.Option(help="Asked.")] = 20,
    k: PassagesOption = 6,
    order: Annotated[
        Literal["score", "best-last", "cache-aware"], typer.Option(help="Of the passages in the prompt.")
    ] = "best-last",
    model: ModelOption = "smollm2",
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """The pipeline over a folder of real passages: recall, TTFT against full prefill, and what a second start costs."""
    from eval.bench.rag import RagOptions, run_rag_bench

    set_threads(threads)
    options = RagOptions(data, passages, questions, k, order=order, model=model, seed=seed, dtype=dtype_of(dtype))
    _finish(json_file, run_rag_bench(options, Console()))


def _finish(json_file: Path | None, figures: dict[str, Any]) -> None:
    """Writes the figures; an interrupted bench ends with the exit code of an interruption."""
    write(json_file, figures)
    if not figures.get("complete", True):
        raise typer.Exit(130)


def _lengths_of(text: str) -> tuple[int, ...]:
    """``1024,2048`` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        from blend.errors import BudgetError

        raise BudgetError(f"rows is {text!r}: give whole numbers with commas between, such as 1024,4096") from error
