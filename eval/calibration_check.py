"""``kvblend calibrate --check``: are targets met on questions that the calibration has not seen?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from blend import Adaptive, Blender, BudgetError, Fusion, Prompt
from blend.calibration_files import require_calibration
from blend.prefix import RadixPrefixCache
from blend.progress import track
from eval.arrange import Arrangement
from eval.fidelity import Reference, compare, make_reference
from eval.machine import machine_record
from eval.runner.jobs import Job, make_jobs, make_prompt
from eval.runner.options import EvalOptions
from eval.systems.exact import full_prefill

__all__ = ["CheckOptions", "Outcome", "run_calibration_check"]


@dataclass(frozen=True)
class CheckOptions:
    """What is checked.

    Attributes:
        data: sets, as ``kvblend eval`` takes them.
        model: hub id, folder, file or alias.
        questions: of each set.
        k: passages of a question.
        max_kl: targets in nats.
        budgets: targets in shares of the question's own full prefill.
        seed: of the choice of questions.
        dtype: of weights and KV; None for the model's own.

    Raises:
        BudgetError: no questions.
    """

    data: tuple[str, ...]
    model: str = "smollm2"
    questions: int = 6
    k: int = 6
    max_kl: tuple[float, ...] = (0.05, 0.02, 0.01)
    budgets: tuple[float, ...] = (0.25, 0.4)
    seed: int = 0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.questions < 1 or not self.data:
            raise BudgetError(f"{self.questions} questions of {len(self.data)} sets: give at least one of each")


class Outcome(NamedTuple):
    """One question under one target.

    Attributes:
        data: its set.
        target: ``max_kl .02``, ``ttft 40%`` and the like.
        kl: nats per token, along full prefill's own answer.
        ratio: share of the stale rows computed again; 1.0 where the prompt was prefilled.
        seconds: to the first token, over those of full prefill.
        met: the target.
        why: what the report said.
    """

    data: str
    target: str
    kl: float
    ratio: float
    seconds: float
    met: bool
    why: str


def run_calibration_check(options: CheckOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Asks every question under every target, prints how well each was met, and returns the figures.

    After Ctrl-C the finished questions are shown, with ``complete`` False.

    Args:
        blender: in place of loading ``options.model``; it is left open.

    Raises:
        BudgetError: options out of range, or no calibration.
        DataError: a set that cannot be read.
    """
    asked = EvalOptions(
        options.data, Path(), limit=options.questions, seed=options.seed, arrangement=Arrangement(k=options.k)
    )
    jobs = make_jobs(asked).jobs
    own = blender is None
    blender = blender or Blender.from_pretrained(options.model, dtype=options.dtype)
    outcomes: list[Outcome] = []
    complete = False
    try:
        require_calibration(blender.setup, blender.corrector, "--check")
        for of_one in track(_asked(blender, jobs, options), total=len(jobs), label="checking"):
            outcomes += of_one
        complete = True
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted[/] after {len(outcomes)} answers")
    finally:
        if own:
            blender.close()
    targets = list(dict.fromkeys(outcome.target for outcome in outcomes))
    sums = [_sum([o for o in outcomes if o.target == target]) for target in targets]
    if sums:
        console.print(_table(options, sums))
    record = machine_record(blender.view.dtype)
    answers = [outcome._asdict() for outcome in outcomes]
    return {
        "complete": complete,
        "machine": record,
        "options": {**asdict(options), "dtype": str(blender.view.dtype)},
        "targets": sums,
        "answers": answers,
    }


def _asked(blender: Blender, jobs: Sequence[Job], options: CheckOptions) -> Iterator[list[Outcome]]:
    assert blender.text is not None
    for number, job in enumerate(jobs):
        prompt = make_prompt(blender.text, job.task, job.example)
        blender.encode(prompt.chunks, system=prompt.system)
        if not number:
            full_prefill(blender, prompt)  # the first passes are slower than all that follow
            blender.fuse(prompt)
        truth = full_prefill(blender, prompt)
        reference = make_reference(blender, truth, job.task.tokens)
        ask = _Asker(blender, job.data, prompt, reference)
        of_kl = [ask(f"max_kl {nats:g}", blender.adaptive(max_kl=nats), max_kl=nats) for nats in options.max_kl]
        full = truth.report.ttft
        of_time = [
            ask(f"ttft {share:.0%}", blender.adaptive(ttft_budget=share * full), share=share)
            for share in options.budgets
        ]
        yield of_kl + of_time


@dataclass(frozen=True)
class _Asker:
    """One question, to be fused under one target after another."""

    blender: Blender
    data: str
    prompt: Prompt
    reference: Reference

    def __call__(self, target: str, selector: Adaptive, max_kl: float = inf, share: float = inf) -> Outcome:
        fusion = _afresh(self.blender, self.prompt).fuse(self.prompt, selector=selector)
        kl = compare(self.reference, fusion).kl
        took = fusion.report.ttft / self.reference.fusion.report.ttft
        why = fusion.report.fallback or fusion.report.choice or ""
        return Outcome(self.data, target, kl, _ratio(fusion), took, kl <= max_kl and took <= share, why)


def _afresh(blender: Blender, prompt: Prompt) -> Blender:
    """The same, knowing no more of the prompt than its system part: once prefilled, it would be known as a whole."""
    other = blender.tenant(blender.setup.salt)
    other.setup = replace(blender.setup, prefix=RadixPrefixCache())
    other.setup.learn_prelude(prompt.system, 0)
    return other


def _ratio(fusion: Fusion) -> float:
    report = fusion.report
    stale = report.recomputed_rows + report.states.count("moved")
    return 1.0 if report.fallback else report.recomputed_rows / max(stale, 1)


def _sum(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "target": outcomes[0].target,
        "n": len(outcomes),
        "met": fmean(outcome.met for outcome in outcomes),
        "kl_mean": fmean(outcome.kl for outcome in outcomes),
        "kl_median": median(outcome.kl for outcome in outcomes),
        "kl_by_set": {
            data: fmean(outcome.kl for outcome in outcomes if outcome.data == data)
            for data in dict.fromkeys(outcome.data for outcome in outcomes)
        },
        "ratio": fmean(outcome.ratio for outcome in outcomes),
        "everything": fmean(outcome.ratio == 1.0 for outcome in outcomes),
        "seconds": fmean(outcome.seconds for outcome in outcomes),
    }


def _table(options: CheckOptions, sums: Sequence[dict[str, Any]]) -> Table:
    title = f"{', '.join(options.data)}: {options.questions} questions each, {options.k} passages"
    columns = ("target", "met", "mean KL", "median KL", "ratio", "all computed", "of full prefill's TTFT")
    table = Table(*columns, title=title, title_justify="left")
    for one in sums:
        kl = f"{one['kl_mean']:.4f}", f"{one['kl_median']:.4f}"
        shares = f"{one['ratio']:.2f}", f"{one['everything']:.0%}", f"{one['seconds']:.0%}"
        table.add_row(one["target"], f"{one['met']:.0%}", *kl, *shares)
    return table
