"""As many rows as a request calls for: until enough expected error is covered, or a target for it or time is met.

Whose turn it is, :mod:`blend.selectors.expected_error` says; how many get theirs is what this adds. Measured on
SmolLM2, a question's divergence from full prefill falls about in proportion to the expected error of the rows that are
left stale, so that is what is spent on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from blend.calibration import Calibration
from blend.errors import BudgetError
from blend.selectors.base import Candidates, Outlook, Selector, Wants, top_rows
from blend.selectors.expected_error import expected_error

__all__ = ["Adaptive"]

_MOST = 0.15  # of the stale rows, where no target asks for more


class _Spending(NamedTuple):
    """How many rows, and why."""

    rows: int
    why: str


@dataclass(frozen=True)
class Adaptive(Selector):
    """The rows with the largest expected error, as many as it takes.

    Without a target, until ``mass`` of the expected error of the stale rows is covered. A target takes its place:
    ``max_kl`` computes the fewest rows with which the calibration predicts that little divergence, and every stale row
    where it would take more than pays; ``ttft_budget`` computes as many as there is time for.

    With a calibration, a request that is answered sooner by a plain prefill is (short prompts, few hits): it is as
    exact as an answer can be.

    Attributes:
        mass: share of the expected error of all stale rows that is to be covered, in [0, 1]. It is the question's
            attention to a row times what is known of how far the row is off (:class:`~blend.ExpectedError`).
        most: share of the stale rows computed again at most. None: .15 for ``mass``, all for a target.
        max_kl: nats from full prefill, the mean along an answer; above 0.
        ttft_budget: seconds to the first token; above 0.
        calibration: where predictions come from; see ``Blender.adaptive``, which finds it.

    Raises:
        BudgetError: a number out of range, two targets, or a target without a calibration.
    """

    name: ClassVar[str] = "adaptive"
    wants: ClassVar[Wants] = "question_attention"
    adapts: ClassVar[bool] = True
    mass: float = 0.7
    most: float | None = None
    max_kl: float | None = None
    ttft_budget: float | None = None
    calibration: Calibration | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("mass", "most"):
            share = getattr(self, name)
            if share is not None and not 0.0 <= share <= 1.0:
                raise BudgetError(f"{name} is {share}: it must lie in [0, 1]")
        for name in ("max_kl", "ttft_budget"):
            target = getattr(self, name)
            if target is not None and not 0.0 < target < math.inf:
                raise BudgetError(f"{name} is {target}: it must be above 0")
        if self.max_kl is not None and self.ttft_budget is not None:
            raise BudgetError("max_kl and ttft_budget are both given: a request can be held to one of them")
        if self.calibration is None and (self.max_kl is not None or self.ttft_budget is not None):
            raise BudgetError(
                "max_kl and ttft_budget need a calibration: use Blender.adaptive, which finds the one that "
                "`kvblend calibrate MODEL` has made"
            )

    def probe_layers(self, layers: int) -> tuple[int, ...]:
        return tuple(range(layers))

    def choose(self, candidates: Candidates) -> Tensor:
        return top_rows(candidates.stale, expected_error(candidates), self._spend(candidates).rows)

    def explain(self, candidates: Candidates) -> str:
        return self._spend(candidates).why

    def rather_prefill(self, outlook: Outlook) -> str | None:
        """Where even a fusion that computes nothing again takes longer; or where all fits into the budget."""
        if self.calibration is None:
            return None
        full = self.calibration.full.seconds(outlook.rows - outlook.prefix, outlook.rows)
        fused = self.calibration.fuse_seconds(outlook.rows, outlook.fresh, outlook.missing)
        if self.ttft_budget is not None and full * self.calibration.slack <= self.ttft_budget:
            return f"a full prefill takes about {full:.3f} s here, within the budget of {self.ttft_budget:g} s"
        if fused >= full:
            first = f"with {outlook.missing} rows to encode first, " if outlook.missing else ""
            return f"{first}fusing takes about {fused:.3f} s here by its calibration, and a full prefill {full:.3f} s"
        return None

    def _spend(self, candidates: Candidates) -> _Spending:
        left = _left(candidates)
        if self.max_kl is not None:
            return self._for_kl(candidates, left)
        if self.ttft_budget is not None:
            return self._for_seconds(candidates, left)
        stale = len(left) - 1
        wanted = stale if self.mass == 1.0 else _first_below(left, (1.0 - self.mass) * left[0])
        most = round((_MOST if self.most is None else self.most) * stale)
        rows = min(wanted, most)
        covered = 1.0 - left[rows] / left[0] if left[0] else 1.0
        limit = f", the most of {most} rows reached" if wanted > most else ""
        return _Spending(rows, f"{covered:.0%} of the expected error covered ({self.mass:.0%} wanted{limit})")

    def _for_kl(self, candidates: Candidates, left: list[float]) -> _Spending:
        known, stale, target = self.calibration, len(left) - 1, self.max_kl
        assert known is not None
        assert target is not None
        wanted = next(n for n in range(stale + 1) if known.kl(left[n]) <= target)
        asked = f"max_kl {target:g}"
        if self.most is not None and wanted > round(self.most * stale):
            rows = round(self.most * stale)
            return _Spending(
                rows, f"{asked} is not met: {known.kl(left[rows]):.3g} predicted at the most of {rows} rows"
            )
        layout = candidates.layout
        prefix = sum(piece.stop - piece.start for piece in layout.pieces if piece.origin == "prefix")
        paying = max(known.paying(layout.rows, layout.rows - prefix) - layout.forced.numel(), 0.0)
        if wanted > paying:
            return _Spending(stale, f"{asked} takes {wanted} rows, more than pays ({paying:.0f}): all computed again")
        return _Spending(wanted, f"{asked}, predicted {known.kl(left[wanted]):.3g}")

    def _for_seconds(self, candidates: Candidates, left: list[float]) -> _Spending:
        known, stale, budget = self.calibration, len(left) - 1, self.ttft_budget
        assert known is not None
        assert budget is not None
        layout, gone = candidates.layout, candidates.elapsed
        forced = layout.forced.numel()
        fits = known.repair.most((budget - gone) / known.slack, layout.rows) - forced
        most = round((1.0 if self.most is None else self.most) * stale)
        rows = math.floor(min(max(fits, 0), most))
        predicted = gone + known.repair.seconds(rows + forced, layout.rows)
        short = "cannot be met" if predicted > budget else "leaves no margin"
        said = f"ttft_budget {budget:g} s" + ("" if fits >= 0 else f" {short}: nothing computed again")
        return _Spending(rows, f"{said}, predicted {predicted:.3f} s; KL predicted {known.kl(left[rows]):.3g}")


def _left(candidates: Candidates) -> list[float]:
    """The expected error that is left when the worst 0, 1, 2, ... rows are computed again; ends in 0."""
    error_T = expected_error(candidates)
    worst_first = error_T[candidates.stale.to(error_T.device)].double().sort(descending=True).values
    # From the smallest up, so that rounding never makes it rise.
    left = torch.cat([worst_first.flip(0).cumsum(0).flip(0), worst_first.new_zeros(1)])
    return [float(x) for x in left.tolist()]


def _first_below(left: list[float], bound: float) -> int:
    """The fewest rows that leave at most ``bound``."""
    return next(n for n, x in enumerate(left) if x <= bound)
