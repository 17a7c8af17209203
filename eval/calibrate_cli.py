"""``kvblend calibrate``. Knows how to read options; the work is done elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from eval.cli_options import (
    DtypeOption,
    JsonOption,
    SeedOption,
    ThreadsOption,
    dtype_of,
    names_of,
    ratios_of,
    set_threads,
    write,
)

__all__ = ["calibrate"]


def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or the alias smollm2.")],
    questions: Annotated[
        int | None, typer.Option(help="To measure, 20 if not given; with --check: of each set.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Sets as `kvblend eval` takes them; the bundled demo.")] = None,
    ratio: Annotated[str, typer.Option(help="Shares of the stale rows computed again.")] = "0,0.02,0.05,0.1,0.15,0.3",
    quantile: Annotated[float, typer.Option(help="Of the divergences measured that predictions lie above.")] = 0.8,
    check: Annotated[str | None, typer.Option(help="Sets: measure nothing, see how targets are met on these.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what `max_kl`, `ttft_budget` and `ratio="auto"` predict with, once per model, and keep it."""
    from eval.calibrating import CalibrateOptions, run_calibrate
    from eval.calibration_check import CheckOptions, run_calibration_check

    set_threads(threads)
    if check is not None:
        of_check = CheckOptions(
            names_of(check) or (), model, 6 if questions is None else questions, seed=seed, dtype=dtype_of(dtype)
        )
        figures = run_calibration_check(of_check, Console())
    else:
        options = CalibrateOptions(
            model,
            names_of(data) or CalibrateOptions.data,
            20 if questions is None else questions,
            ratios=ratios_of(ratio),
            quantile=quantile,
            seed=seed,
            dtype=dtype_of(dtype),
        )
        figures = run_calibrate(options, Console())
    write(json_file, figures)
    if not figures["complete"]:
        raise typer.Exit(130)
