"""``kvblend eval``, ``report`` and ``compare``. Knows how to read options; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from eval.cli_options import (
    DtypeOption,
    JsonOption,
    ModelOption,
    ThreadsOption,
    dtype_of,
    names_of,
    ratios_of,
    set_threads,
    write,
)

__all__ = ["compare", "evaluate", "report"]

DataOption = Annotated[
    str,
    typer.Option(help="Sets, comma-separated: .jsonl files, names in $KVBLEND_DATA, demo, needle, hub:TASK."),
]
SystemsOption = Annotated[str, typer.Option(help="Comma-separated; `all` for every one that needs no other package.")]
RatiosOption = Annotated[str, typer.Option("--ratio", help="Shares of the reused rows computed again.")]
OutOption = Annotated[Path, typer.Option(help="The run's folder; an unfinished run in it is gone on with.")]
OrderOption = Annotated[
    Literal["given", "shuffled", "retrieved"], typer.Option(help="Of the passages; retrieved: ours, best last.")
]
RayOption = Annotated[str | None, typer.Option(help="Address of a Ray cluster; `local` starts one, `auto` finds one.")]


def evaluate(
    data: DataOption,
    out: OutOption = Path("run"),
    systems: SystemsOption = "full,prefix,reuse,cacheblend,epic,prophetkv",
    ratio: RatiosOption = "0.15",
    model: ModelOption = "smollm2",
    limit: Annotated[int | None, typer.Option(help="Questions per set, chosen by the seed.")] = None,
    k: Annotated[int | None, typer.Option(help="Passages per question, gold ones kept; all if not given.")] = None,
    order: OrderOption = "given",
    context: Annotated[bool, typer.Option(help="Without: what the model knows by heart.")] = True,
    seed: Annotated[int, typer.Option(help="Of the questions and of the order of their passages.")] = 0,
    task: Annotated[str | None, typer.Option(help="How questions are put and judged, if the sets do not say.")] = None,
    store: Annotated[str | None, typer.Option(help="For chunk KV, such as file:///kv; memory if not given.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only every n-th question, from the i-th.")] = None,
    ray: RayOption = None,
    workers: Annotated[int | None, typer.Option(help="Models at a time on the Ray cluster.")] = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Compare fusion methods on QA sets: quality, distance from full prefill and TTFT, with a report."""
    from eval.arrange import Arrangement
    from eval.runner import EvalOptions, run_eval
    from eval.runner.cluster import RayMeasure
    from eval.runner.options import shard_of
    from eval.systems import OWN

    set_threads(threads)
    options = EvalOptions(
        data=names_of(data) or (),
        out=out,
        systems=OWN if systems == "all" else names_of(systems) or (),
        ratios=ratios_of(ratio),
        model=model,
        dtype=dtype_of(dtype),
        limit=limit,
        seed=seed,
        task=task,
        arrangement=Arrangement(order, k, seed, context),
        store=store,
        shard=shard_of(shard),
    )
    measure = RayMeasure(ray, workers, threads or 1) if ray else None
    summary = run_eval(options, Console(), measure=measure)
    write(json_file, summary)
    if not summary["complete"] and options.shard == (0, 1):
        raise typer.Exit(130)


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    short: Annotated[bool, typer.Option("--short", help="Print a Markdown table too, as in README.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Sum up the scores in a folder and write the report again, after shards were put together."""
    from eval.report import readme_table
    from eval.runner import RunFolder
    from eval.runner.folder import read_scores
    from eval.runner.run import finish

    read_scores(run)  # raises where there is no run, before a folder is made
    summary = finish(RunFolder(run), Console())
    if short:
        typer.echo(readme_table(summary))
    write(json_file, summary)


def compare(
    run_a: Annotated[Path, typer.Argument(help="A run's folder.")],
    run_b: Annotated[Path, typer.Argument(help="Another, or the same with --systems.")],
    systems: Annotated[str | None, typer.Option(help="a,b: system a of RUN_A against b of RUN_B.")] = None,
    json_file: JsonOption = None,
) -> None:
    """What changed between two runs, or between two systems, with the paired test."""
    from blend.errors import BudgetError
    from eval.comparing.compare import run_compare

    pair = names_of(systems) or (None, None)
    if len(pair) != 2:
        raise BudgetError(f"systems is {systems!r}: give two, such as cacheblend,prophetkv")
    write(json_file, run_compare(run_a, run_b, Console(), system_a=pair[0], system_b=pair[1]))
