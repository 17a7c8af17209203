"""The ``kvblend`` command. Knows how to read options and print errors; the work is done elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from eval.bench.cli import bench
from eval.calibrate_cli import calibrate
from eval.cli_options import (
    DtypeOption,
    JsonOption,
    LimitOption,
    ModelOption,
    OverlapOption,
    PassagesOption,
    RatioOption,
    SeedOption,
    SizeOption,
    ThreadsOption,
    dtype_of,
    names_of,
    set_threads,
    write,
)
from eval.eval_cli import compare, evaluate, report
from eval.rag.cli import ask, chat, index
from eval.store_cli import app as store_app

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Reuse the KV of retrieved passages anywhere.")
for command in (index, ask, chat, compare, report, calibrate):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")
app.add_typer(store_app, name="store")


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

    set_threads(threads)
    figures = run_check(model, Console(), dtype_of(dtype), rows)
    write(json_file, figures)
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

    set_threads(threads)
    result = run_demo(DemoOptions(model=model, ratio=ratio, limit=limit, k=k, seed=seed), Console())
    write(json_file, result.as_dict())
    if not result.complete:
        raise typer.Exit(130)


@app.command()
def replay(
    trace: Annotated[str, typer.Argument(help="A JSONL trace, or the name of one in $KVBLEND_DATA/traces.")],
    policy: Annotated[str | None, typer.Option(help="Eviction policies, comma-separated.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Such as 10GiB,25%,unbounded.")] = None,
    bytes_per_row: Annotated[int, typer.Option(help="KV of one row; SmolLM2-135M in bf16 if not given.")] = 23_040,
    prefix: Annotated[str, typer.Option(help="Kind of prefix cache: radix or block.")] = "radix",
    limit: Annotated[int | None, typer.Option(help="Only the first requests.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot of hit rate against capacity.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Hit rates of a recorded trace, by exact prefix and by chunk, for each policy and capacity. Needs no model."""
    from eval.replay.run import DEFAULT_CAPACITIES, DEFAULT_POLICIES, ReplayOptions, run_replay

    set_threads(1)
    policies, capacities = names_of(policy) or DEFAULT_POLICIES, names_of(capacity) or DEFAULT_CAPACITIES
    options = ReplayOptions(trace, policies, capacities, bytes_per_row, prefix, limit, plot)
    figures = run_replay(options, Console())
    write(json_file, figures)
    if not figures["complete"]:
        raise typer.Exit(130)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Hub id, folder with a config.json, .gguf file, or the alias smollm2.")],
    documents: Annotated[int, typer.Option(help="How many documents there are.")],
    tokens: Annotated[int, typer.Option(help="Tokens of each document.")],
    k: PassagesOption = 6,
    ratio: RatioOption = 0.15,
    size: SizeOption = 256,
    overlap: OverlapOption = 32,
    system: Annotated[int, typer.Option(help="Rows of the system part.")] = 32,
    question: Annotated[int, typer.Option(help="Rows of the question.")] = 32,
    contexts: Annotated[int, typer.Option(help="Contexts that KV is averaged over; 0: passages encoded alone.")] = 4,
    dtype: DtypeOption = None,
    tflops: Annotated[float | None, typer.Option(help="10^12 operations per second; measured if not given.")] = None,
    asks_per_day: Annotated[float | None, typer.Option(help="Questions a day, for break-even in days.")] = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Bytes, memory, expected gain and break-even of a model on so many documents, from its config alone."""
    from eval.planning.plan import PlanOptions, run_plan

    set_threads(threads)
    work = (documents, tokens, k, ratio, size, overlap, system, question, contexts)
    options = PlanOptions(model, *work, dtype=dtype_of(dtype), tflops=tflops, asks_per_day=asks_per_day)
    write(json_file, run_plan(options, Console()))


def main() -> None:
    """Entry point: kvblend's own errors are one line, an interruption is no traceback."""
    try:
        app()
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)
    except Exception as error:
        from blend.errors import KVBlendError  # a command that failed has loaded torch already, --help has not

        if not isinstance(error, KVBlendError):
            raise
        Console(stderr=True).print("[red]error[/]:", Text(str(error)), highlight=False, soft_wrap=True)
        sys.exit(1)
