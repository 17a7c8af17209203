"""What is known of a model before it is asked: how far it strays from full prefill, and how long things take.

Two measured laws, each a line with a few numbers. **Divergence**: along an answer, the KL divergence from full prefill
grows with the expected error of the rows that stay stale (:func:`blend.selectors.expected_error.expected_error`), as
``level * left ** slope``. **Time**: seconds of a pass are linear in the rows that run,
and in those rows times the rows that they look at. Knows nothing of models, stores or files;
:mod:`blend.calibration_fit` finds the numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from blend.errors import BudgetError

__all__ = ["Calibration", "Line"]

_VERSION = 1


class Line(NamedTuple):
    """Seconds of a pass.

    Attributes:
        base: whatever its size.
        row: per row that runs.
        pair: per row that runs and row of the prompt.
    """

    base: float = 0.0
    row: float = 0.0
    pair: float = 0.0

    def seconds(self, run: float, rows: int) -> float:
        """Of ``run`` rows that run in a prompt of ``rows`` rows."""
        return self.base + run * (self.row + self.pair * rows)

    def most(self, seconds: float, rows: int) -> float:
        """How many rows can run within ``seconds``; not a whole number, and below zero where not even none."""
        each = self.row + self.pair * rows
        return (seconds - self.base) / each if each else math.copysign(math.inf, seconds - self.base)


@dataclass(frozen=True)
class Calibration:
    """One model under one recipe (background, prelude, corrector), measured on one machine.

    Attributes:
        key: whose it is; see :func:`blend.calibration_files.calibration_key`.
        model: its name, for messages.
        questions: how many were measured.
        level: nats of KL at expected error 1, such that ``quantile`` of all measurements lie below the line.
        slope: exponent of the expected error that is left.
        quantile: the margin of ``level``.
        full: a full prefill.
        before: everything of a fusion before rows are computed again, for a prompt whose chunks are all known.
        repair: the pass that computes rows again, the question's included.
        encode: seconds per row of a chunk that has to be encoded first.
        slack: measured seconds over predicted ones, at the 90th percentile; what is left of a budget is divided by it.

    Raises:
        BudgetError: a number out of range.
    """

    key: str
    model: str
    questions: int
    level: float
    slope: float
    quantile: float
    full: Line
    before: Line
    repair: Line
    encode: float
    slack: float

    def __post_init__(self) -> None:
        for name in ("full", "before", "repair"):
            object.__setattr__(self, name, Line(*map(float, getattr(self, name))))
        numbers = (self.level, self.slope, self.encode, *self.full, *self.before, *self.repair)
        if not all(math.isfinite(x) and x >= 0.0 for x in numbers):
            raise BudgetError(f"a calibration with {numbers}: every number must be finite, and 0 or more")
        if self.questions < 1 or not 0.0 < self.quantile < 1.0 or not 1.0 <= self.slack < math.inf:
            raise BudgetError(
                f"a calibration of {self.questions} questions, quantile {self.quantile}, slack {self.slack}: "
                "at least 1 question, a quantile between 0 and 1 and a slack of 1 or more"
            )

    def kl(self, left: float) -> float:
        """Nats per token of the answer, where stale rows with this much expected error in all are left."""
        return self.level * left**self.slope if left > 0.0 else 0.0

    def fuse_seconds(self, rows: int, run: float, missing: int = 0) -> float:
        """A whole fusion.

        Args:
            rows: of the prompt.
            run: rows that are computed: the question's and the chosen ones.
            missing: rows of chunks that have to be encoded first.
        """
        return missing * self.encode + self.before.seconds(rows, rows) + self.repair.seconds(run, rows)

    def paying(self, rows: int, computed: int) -> float:
        """How many rows a fusion can compute before it takes as long as a prefill of ``computed`` rows."""
        left = self.full.seconds(computed, rows) - self.before.seconds(rows, rows)
        return self.repair.most(left, rows)

    def as_json(self) -> str:
        """For a file."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, key: str | None = None) -> Calibration:
        """What :meth:`as_json` wrote.

        Args:
            key: whose it must be; None for anybody's.

        Raises:
            BudgetError: no calibration, one of another version, or of another model or recipe.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            version = plain.pop("version")
            if version != _VERSION:
                raise BudgetError(f"it is of version {version!r}, and this is version {_VERSION}")
            calibration = cls(**plain)
        except BudgetError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BudgetError(f"it is no calibration: {type(error).__name__}: {error}") from error
        if key is not None and calibration.key != key:
            raise BudgetError("it is a calibration of another model, background, prelude or corrector")
        return calibration
