"""The ``kvblend`` command. Knows how to read options and print errors; the work is done elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from blend.errors import BudgetError, KVBlendError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Reuse the KV of retrieved passages anywhere.")
bench = typer.Typer(no_args_is_help=True, help="Measure speed and fidelity.")
app.add_typer(bench, name="bench")

ModelOption = Annotated[str, typer.Option(help="Hub id, folder, .gguf file, or the alias smollm2.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads for torch; as many as idle cores if not given.")]
DtypeOption = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; the model's own if not given.")]
LimitOption = Annotated[int | None, typer.Option(help="Only the first questions.")]
PassagesOption = Annotated[int, typer.Option(help="Passages per question.")]
SeedOption = Annotated[int, typer.Option(help="Of the order of the passages.")]
RatioOption = Annotated[float, typer.Option(help="Share of reused rows computed again, 0 to 1.")]


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or the alias smollm2.")],
    dtype: DtypeOption = None,
    rows: Annotated[int | None, typer.Option(help="Length of the random prompt.")] = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Prove that a model fuses correctly against its own full prefill, or refuse it with the reason."""
    from eval.check import run_check  # torch is loaded once a command needs it

    _set_threads(threads)
    figures = run_check(model, Console(), _dtype(dtype), rows)
    _write(json_file, figures)
    if not figures["passed"]:
        raise typer.Exit(1)


@app.command()
def demo(
    model: ModelOption = "smollm2",
    ratio: RatioOption = 0.15,
    limit: LimitOption = None,
    k: PassagesOption = 6,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Answer questions about an invented world in six ways, and show what each costs and how true it stays."""
    from eval.demo.run import DemoOptions, run_demo

    _set_threads(threads)
    result = run_demo(DemoOptions(model=model, ratio=ratio, limit=limit, k=k, seed=seed), Console())
    _write(json_file, result.as_dict())
    if not result.complete:
        raise typer.Exit(130)


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
    from eval.bench_ratio import RatioOptions, run_ratio_bench

    _set_threads(threads)
    options = RatioOptions(model, _ratios(ratios), limit, k, seed, dtype=_dtype(dtype))
    figures = run_ratio_bench(options, Console())
    _write(json_file, figures)
    if not figures["complete"]:
        raise typer.Exit(130)


@bench.command("ttft")
def bench_ttft(
    model: ModelOption = "smollm2",
    rows: Annotated[int, typer.Option(help="Rows of the prompt.")] = 4096,
    ratio: RatioOption = 0.15,
    chunk_rows: Annotated[int, typer.Option(help="Rows of each chunk.")] = 512,
    pairs: Annotated[int, typer.Option(help="Alternating measurements per method.")] = 5,
    systems: Annotated[str | None, typer.Option(help="Comma-separated; all if not given.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time to first token of each method against full prefill, in alternating pairs."""
    from eval.bench_ttft import BenchOptions, run_ttft_bench

    _set_threads(threads)
    names = tuple(systems.split(",")) if systems else None
    options = BenchOptions(model, rows, ratio, chunk_rows, pairs, seed, _dtype(dtype), names)
    _write(json_file, run_ttft_bench(options, Console()))


def main() -> None:
    """Entry point: kvblend's own errors are one line, an interruption is no traceback."""
    try:
        app()
    except KVBlendError as error:
        Console(stderr=True).print(f"[red]error[/]: {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _set_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise BudgetError(f"threads is {threads}: it must be 1 or more")
    import torch

    from eval.machine import idle_cores

    torch.set_num_threads(threads or idle_cores())


def _ratios(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise BudgetError(f"ratios is {text!r}: give numbers with commas between, such as 0,0.15,1") from error


def _dtype(name: str | None) -> Any:
    import torch

    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}
    if name not in known:
        raise BudgetError(f"dtype is {name!r}: choose bf16, fp16 or fp32")
    return known[name]
