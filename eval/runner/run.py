"""``kvblend eval``: from options to a folder of scores, a summary and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console

from blend import Blender
from blend.progress import track
from eval.runner.folder import RunFolder
from eval.runner.jobs import Job, Jobs, make_jobs
from eval.runner.lab import Lab
from eval.runner.options import EvalOptions
from eval.runner.show import summary_table
from eval.summary import summarize
from eval.vocabulary import Score

__all__ = ["finish", "run_eval"]

Measure = Callable[[EvalOptions, Jobs, Sequence[Job], RunFolder], Iterator[list[Score]]]
"""Measures the jobs that are left, one list of scores each, in any order; tells the folder what is run first."""


def run_eval(
    options: EvalOptions,
    console: Console,
    *,
    blender: Blender | None = None,
    measure: Measure | None = None,
    report: bool = True,
) -> dict[str, Any]:
    """Measures what is not in the folder yet, prints a table and returns the summary.

    Every finished example is on disk; after Ctrl-C, or worse, the same call does the rest only. Examples that do not
    fit the model are told before anything is measured.

    Args:
        blender: in place of loading ``options.model``; it is left open.
        measure: in place of this process (:class:`eval.runner.cluster.RayMeasure`).
        report: draw it too.

    Raises:
        RunExists: the folder holds a run that asked for something else.
        DataError: a set that cannot be read.
        PromptTooLong: an example that does not fit; the message names it.
    """
    every = make_jobs(options)
    folder = RunFolder(options.out, options.shard)
    index, count = options.shard
    mine = every.jobs[index::count]
    complete = False
    try:
        left = _left(mine, folder)
        if left or not (options.out / "run.json").exists():
            scored = measure(options, every, left, folder) if measure else _here(options, every, left, folder, blender)
            for scores in track(scored, total=len(left), label="measuring"):
                folder.add(scores)
        else:
            folder.begin(options.identity, {})
        complete = True
    except KeyboardInterrupt:
        console.print("[yellow]interrupted[/]: the same command goes on where it stopped")
    return finish(folder, console, expected=_expected(every, options), complete=complete, report=report)


def finish(
    folder: RunFolder,
    console: Console,
    *,
    expected: int | None = None,
    complete: bool = True,
    report: bool = True,
) -> dict[str, Any]:
    """Sums up the scores in a folder, writes summary and report, and prints the table.

    Args:
        expected: scores of the whole run, all shards; None if nobody knows.
        complete: this process has done its part.
        report: draw it too.
    """
    scores = folder.scores()
    record = folder.record() if (folder.path / "run.json").exists() else {}
    summary = summarize(scores, record) | {"complete": complete and (expected is None or len(scores) >= expected)}
    if not scores:
        console.print("no example was finished: nothing to show")
        return summary
    folder.write_summary(summary)
    console.print(summary_table(summary))
    if report:
        _report(folder, console)
    return summary


def _report(folder: RunFolder, console: Console) -> None:
    from eval.report import write_report
    from retrieval.errors import ExtraMissing

    try:
        written = write_report(folder.path)
    except ExtraMissing as missing:
        console.print(f"[yellow]no report[/]: {missing}")
        return
    console.print(f"{len(written)} files: {folder.path / 'report.md'}, {folder.path / 'report.html'}", highlight=False)


def _left(jobs: Sequence[Job], folder: RunFolder) -> list[Job]:
    """Jobs with what is still to be measured of them."""
    scores = folder.scores() if (folder.path / "run.json").exists() else []
    done: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for score in scores:
        done.setdefault((score.data, score.example), set()).add((score.system, score.setting))
    rest = [job.without(done.get((job.data, job.example.id), ())) for job in jobs]
    return [job for job in rest if job.todo]


def _here(
    options: EvalOptions, every: Jobs, left: Sequence[Job], folder: RunFolder, blender: Blender | None
) -> Iterator[list[Score]]:
    """In this process."""
    lab = Lab(options.model, every.passages, dtype=options.dtype, store=options.store, blender=blender)
    with closing(lab):
        for job in left:
            lab.admit(job)
        folder.begin(options.identity, {"model": options.model, **lab.record()})
        for job in left:
            yield lab.measure(job)


def _expected(every: Jobs, options: EvalOptions) -> int:
    return len(every.jobs) * len(options.plan)
