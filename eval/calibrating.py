"""``kvblend calibrate``: measures a model against its own full prefill, so that targets can be kept later.

Each question is prefilled in full, and fused with more and more rows computed again. What is noted is how much expected
error the stale rows were left with, how far that was from full prefill along its own answer, and what each step took.
Prompts are of several lengths, since time depends on it. Every finished question is on disk: after Ctrl-C the same
command does the rest only, and what is there makes a calibration already.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from blend import Blender, BudgetError, Calibration
from blend.calibration_files import calibration_file, calibration_key, keep_calibration
from blend.calibration_fit import Observed, Point, fit
from blend.progress import track
from blend.readings import means
from blend.selectors import Candidates, ExpectedError
from blend.selectors.expected_error import expected_error
from eval.arrange import Arrangement
from eval.fidelity import compare, make_reference
from eval.machine import machine_record
from eval.runner.jobs import Job, make_jobs, make_prompt
from eval.runner.options import EvalOptions
from eval.systems.exact import full_prefill

__all__ = ["CalibrateOptions", "calibration_jobs", "observe", "run_calibrate"]

DEMO = "demo?contexts=9"
LEAST = 4  # questions; fewer say nothing about the next one


@dataclass(frozen=True)
class CalibrateOptions:
    """What is measured.

    Attributes:
        model: hub id, folder, file or alias.
        data: sets, as ``kvblend eval`` takes them; the bundled demo by default.
        questions: so many, of all sets together.
        passages: numbers of passages; the questions take turns.
        ratios: shares of the stale rows computed again; two at least, in [0, 1].
        quantile: of the measured divergences that the calibration is to lie above.
        seed: of the choice of questions and passages.
        dtype: of weights and KV; None for the model's own.

    Raises:
        BudgetError: a number out of range.
    """

    model: str = "smollm2"
    data: tuple[str, ...] = (DEMO,)
    questions: int = 20
    passages: tuple[int, ...] = (3, 6, 9)
    ratios: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3)
    quantile: float = 0.8
    seed: int = 0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.questions < LEAST:
            raise BudgetError(
                f"questions is {self.questions}: it takes at least {LEAST} to say anything about the next"
            )
        if not self.passages or min(self.passages) < 2:
            raise BudgetError(
                f"passages is {self.passages}: give numbers from 2, the first passage of a prompt is exact"
            )
        if len(set(self.ratios)) < 2:
            raise BudgetError(f"ratios is {self.ratios}: give at least two")
        for ratio in self.ratios:
            ExpectedError(ratio)  # raises when out of range
        if not 0.0 < self.quantile < 1.0:
            raise BudgetError(f"quantile is {self.quantile}: it must lie between 0 and 1")


def run_calibrate(options: CalibrateOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Measures what is not on disk yet, keeps the calibration in the user's cache folder, prints and returns it.

    Args:
        blender: in place of loading ``options.model``, such as one with a background, prelude or corrector of its own;
            it is left open. Its store should be in memory, so that encoding is measured.

    Raises:
        BudgetError: options out of range, or data with fewer questions than it takes.
        DataError: a set that cannot be read.
        ModelNotFound, UnsupportedModel: the model.
    """
    jobs = calibration_jobs(options)
    own = blender is None
    blender = blender or Blender.from_pretrained(options.model, dtype=options.dtype)
    complete = False
    try:
        file = calibration_file(blender.setup, blender.corrector)
        notes = _Notes(file.with_suffix(".jsonl"), options)
        done = notes.read()
        left = [job for job in jobs if _name(job) not in done]
        try:
            for name, observed in track(_observed(blender, left, options), total=len(left), label="calibrating"):
                notes.add(name, observed)
                done[name] = observed
            complete = True
        except KeyboardInterrupt:
            console.print("[yellow]interrupted[/]: the same command goes on where it stopped")
        used = [done[name] for job in jobs if (name := _name(job)) in done]
        figures: dict[str, Any] = {"complete": complete, "questions": len(used), "calibration": None}
        figures["machine"] = machine_record(blender.view.dtype)
        if len(used) < LEAST:
            console.print(f"{len(used)} questions are measured, and it takes {LEAST}: nothing to keep yet")
            return figures
        calibration = fit(calibration_key(blender.setup, blender.corrector), options.model, used, options.quantile)
        keep_calibration(blender.setup, blender.corrector, calibration)
        if complete:
            notes.drop()
        console.print(_table(calibration, used))
        console.print(f"kept in {file}", highlight=False, soft_wrap=True)
        return figures | {"calibration": asdict(calibration), "file": str(file), "observed": [asdict(o) for o in used]}
    finally:
        if own:
            blender.close()


def calibration_jobs(options: CalibrateOptions) -> list[Job]:
    """The questions, each with its passages.

    Raises:
        BudgetError: fewer than it takes.
    """
    turns = []
    for k in options.passages:
        asked = EvalOptions(
            options.data, Path(), limit=options.questions, seed=options.seed, arrangement=Arrangement(k=k)
        )
        turns.append(make_jobs(asked).jobs)
    # Sets one after the other would leave no question of the later ones.
    order = sorted(range(len(turns[0])), key=lambda i: sum(job.data == turns[0][i].data for job in turns[0][:i]))
    jobs = [turns[turn % len(turns)][i] for turn, i in enumerate(order[: options.questions])]
    if len(jobs) < LEAST:
        raise BudgetError(f"{', '.join(options.data)} has {len(jobs)} questions, and it takes {LEAST}: add a set")
    return jobs


def observe(blender: Blender, job: Job, ratios: Sequence[float]) -> Observed:
    """Measures one question."""
    assert blender.text is not None
    prompt = make_prompt(blender.text, job.task, job.example)
    missing = blender.setup.missing(prompt.chunks, prompt.system)
    began = time.perf_counter()
    for _ in blender.setup.encode(means(missing), prompt.system):
        pass
    encode = time.perf_counter() - began
    blender.encode(prompt.chunks, system=prompt.system)
    truth = full_prefill(blender, prompt)
    reference = make_reference(blender, truth, job.task.tokens)
    points = []
    for ratio in ratios:
        selector = _Noting(ratio)
        fusion = blender.fuse(prompt, selector=selector, corrector=blender.corrector)
        if not selector.noted:
            continue  # nothing is stale
        error_S = selector.noted[-1]
        chosen, repair = fusion.report.recomputed_rows, fusion.report.seconds["repair"]
        run = max(fusion.report.rows_per_layer)
        kl = compare(reference, fusion).kl
        points.append(Point(chosen, run, float(error_S[chosen:].sum()), kl, fusion.report.ttft - repair, repair))
    return Observed(len(prompt), truth.report.ttft, sum(map(len, missing)), encode if missing else 0.0, tuple(points))


class _Noting(ExpectedError):
    """Keeps the expected error of the stale rows, largest first."""

    def __init__(self, ratio: float) -> None:
        super().__init__(ratio)
        object.__setattr__(self, "noted", [])

    noted: list[Tensor]

    def choose(self, candidates: Candidates) -> Tensor:
        error_T = expected_error(candidates)
        error_S = error_T[candidates.stale.to(error_T.device)].double()
        self.noted.append(error_S.sort(descending=True).values)
        return super().choose(candidates)


def _observed(blender: Blender, jobs: Sequence[Job], options: CalibrateOptions) -> Iterator[tuple[str, Observed]]:
    """Every question, after a short one that does not count: the first passes are slower than all that follow."""
    for number, job in enumerate(jobs):
        if not number:
            short = replace(job.example, contexts=job.example.contexts[:2])
            observe(blender, replace(job, example=short), options.ratios[:1])
        yield _name(job), observe(blender, job, options.ratios)


def _name(job: Job) -> str:
    return f"{job.data}/{job.example.id}/{len(job.example.contexts)}"


class _Notes:
    """What is measured so far, a line per question; lines of other ratios or another seed are none of it."""

    def __init__(self, file: Path, options: CalibrateOptions) -> None:
        self._file, self._asked = file, [options.seed, *options.ratios]

    def read(self) -> dict[str, Observed]:
        if not self._file.exists():
            return {}
        found = {}
        # What an interruption has left unfinished is measured again.
        for line in self._file.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                plain = json.loads(line)
                points = tuple(Point(*point) for point in plain["observed"].pop("points"))
                if plain["asked"] == self._asked:
                    found[plain["name"]] = Observed(**plain["observed"], points=points)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BudgetError(
                    f"{self._file} cannot be gone on with: {error}; delete it, and start again"
                ) from error
        return found

    def add(self, name: str, observed: Observed) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        whole = self._file.read_bytes() if self._file.exists() else b""
        with self._file.open("r+b" if whole else "wb") as file:
            file.seek(whole.rfind(b"\n") + 1)
            file.truncate()  # half a line, of a process that was killed
            plain = {"asked": self._asked, "name": name, "observed": asdict(observed)}
            file.write(json.dumps(plain).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def drop(self) -> None:
        self._file.unlink(missing_ok=True)


def _table(known: Calibration, observed: Sequence[Observed]) -> Table:
    """What the calibration foresees for the mean prompt that it has seen."""
    rows = round(sum(one.rows for one in observed) / len(observed))
    title = f"{known.model}: {known.questions} questions, {rows} rows on average"
    table = Table("KL at most", "expected error left", "", title=title, title_justify="left")
    for kl in (0.05, 0.02, 0.01):
        left = (kl / known.level) ** (1 / known.slope) if known.slope and known.level else 0.0
        table.add_row(f"{kl:g}", f"{left:.3g}", f"for {known.quantile:.0%} of what was measured")
    full = known.full.seconds(rows, rows)
    table.add_section()
    table.add_row("full prefill", f"{full:.2f} s", f"{full / rows * 1e3:.2f} ms a row")
    fused = known.fuse_seconds(rows, rows // 10)
    table.add_row("fused, 10 % run", f"{fused:.2f} s", f"as many rows as pay: {known.paying(rows, rows):.0f}")
    table.add_row("encoding first", f"{known.encode * 1e3:.2f} ms", "a row of a chunk that is missing")
    return table
