"""The adaptive recipe of a Blender: as many rows computed again as a target takes, by what was calibrated for it."""

from __future__ import annotations

from blend.admission import accept
from blend.calibration_files import find_calibration, require_calibration
from blend.correctors import Corrector
from blend.hf.view import ModelView
from blend.selectors import Adaptive, Selector
from blend.setup import Setup

__all__ = ["Adapting"]


class Adapting:
    """What makes a Blender spend as much as it takes.

    Attributes:
        view: the model.
        setup: what a calibration was made for.
        corrector: the Blender's own.
    """

    view: ModelView
    setup: Setup
    corrector: Corrector | None

    def adaptive(
        self,
        *,
        mass: float = Adaptive.mass,
        most: float | None = None,
        max_kl: float | None = None,
        ttft_budget: float | None = None,
    ) -> Adaptive:
        """A selector that computes as many rows again as it takes, for this Blender or for one request.

        Its predictions are those that ``kvblend calibrate MODEL`` has made for this model, background, prelude and
        corrector. Without a target it does with none, and then learns from its requests whether fusing pays.

        Args:
            mass: share of the stale rows' expected error that is to be covered.
            most: share of the stale rows computed again at most; see :class:`Adaptive`.
            max_kl: in place of ``mass``: nats from full prefill, the mean along an answer.
            ttft_budget: in place of ``mass``: seconds to the first token.

        Raises:
            BudgetError: a number out of range; two targets; no calibration, or one that cannot be used.
        """
        for name, target in (("max_kl", max_kl), ("ttft_budget", ttft_budget)):
            if target is not None:
                require_calibration(self.setup, self.corrector, name)
        return Adaptive(mass, most, max_kl, ttft_budget, find_calibration(self.setup, self.corrector))

    def _own_adaptive(self, options: dict[str, float | None]) -> Selector:
        selector = self.adaptive(max_kl=options["max_kl"], ttft_budget=options["ttft_budget"])
        accept(self.view, selector, self.corrector)
        return selector
