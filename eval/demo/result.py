"""The demo's figures, summed up per system and as plain data. Knows no models and draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from blend import BudgetError
from eval.demo.measure import Measured, Run
from eval.stats import bootstrap_mean
from eval.systems import System

__all__ = ["DemoOptions", "DemoResult", "EncodeCost", "Summary"]


@dataclass(frozen=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        model: name of the model.
        ratio: share of the reused rows that CacheBlend, EPIC and ProphetKV compute again, in [0, 1].
        limit: only the first questions; None for all.
        k: passages per question.
        seed: of the passages' order.
        tokens: the longest answer.
        samples: the first questions, whose answers are shown. Only there is every system's answer decoded: the
            others are compared along full prefill's, which takes no decoding.

    Raises:
        BudgetError: a number out of range.
    """

    model: str = "smollm2"
    ratio: float = 0.15
    limit: int | None = None
    k: int = 6
    seed: int = 0
    tokens: int = 12
    samples: int = 3

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("k", 1), ("tokens", 1), ("samples", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BudgetError(f"{name} is {value}: it must be {least} or more")


class EncodeCost(NamedTuple):
    """What encoding all passages once has cost."""

    passages: int
    rows: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """One system over all questions: medians of times, means of divergences (nats), shares of the questions."""

    title: str
    n: int
    ttft_s: float
    speedup: float
    ideal: float
    row_layers: float
    kl_first: float
    kl: float
    kl_median: float
    kl_ci: tuple[float, float]
    same_first_token: float
    same_answer: float

    @classmethod
    def of(cls, title: str, runs: Sequence[Run]) -> Summary:
        """Sums up at least one run."""
        kl = bootstrap_mean([run.kl for run in runs])
        return cls(
            title=title,
            n=len(runs),
            ttft_s=median(run.ttft_s for run in runs),
            speedup=median(run.speedup for run in runs),
            ideal=median(run.ideal for run in runs),
            row_layers=fmean(run.row_layers for run in runs),
            kl_first=fmean(run.kl_first for run in runs),
            kl=kl.value,
            kl_median=median(run.kl for run in runs),
            kl_ci=(kl.low, kl.high),
            same_first_token=fmean(run.same_first_token for run in runs),
            same_answer=fmean(run.same_answer for run in runs),
        )


@dataclass
class DemoResult:
    """Everything that the demo has found out.

    Attributes:
        options: what was asked for.
        systems: what was compared.
        machine: see :func:`eval.machine.machine_record`; empty until the model is loaded.
        encoded: cost of encoding the passages, or None if it was not finished.
        questions: the finished ones.
        complete: False after an interruption.
        seconds: all of it, loading included.
    """

    options: DemoOptions
    systems: tuple[System, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    encoded: EncodeCost | None = None
    questions: list[Measured] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0

    def summaries(self) -> dict[str, Summary]:
        """One per system, over the finished questions; empty if there are none."""
        if not self.questions:
            return {}
        return {s.name: Summary.of(s.title, [q.runs[s.name] for q in self.questions]) for s in self.systems}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        done = self.questions
        return {
            "model": self.options.model,
            "dtype": self.machine.get("dtype"),
            "complete": self.complete,
            "seconds": self.seconds,
            "options": asdict(self.options),
            "machine": self.machine,
            "data": {
                "corpus": "kvblend demo",
                "questions": len(done),
                "recall": fmean(q.case.recall for q in done) if done else None,
                "rows": median(q.rows for q in done) if done else None,
                "encoded": self.encoded._asdict() if self.encoded else None,
            },
            "systems": {name: asdict(summary) for name, summary in self.summaries().items()},
            "questions": [_question(q) for q in done],
        }


def _question(measured: Measured) -> dict[str, Any]:
    return {
        "id": measured.case.question.id,
        "passages": [passage.id for passage in measured.case.passages],
        "recall": measured.case.recall,
        "rows": measured.rows,
        "systems": {name: asdict(run) for name, run in measured.runs.items()},
    }
