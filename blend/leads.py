"""What chunks are encoded behind, and its KV, computed once for many chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from blend.encode import EncodePlan, Lead
from blend.hf.view import ModelView

__all__ = ["Leads"]


class Leads:
    """The contexts that chunks were averaged over last, with their KV; kept until others are asked for."""

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], tuple[Lead, ...]] | None = None

    def of(
        self, view: ModelView, plan: EncodePlan, prelude: Lead, remembers: Callable[[int], bool]
    ) -> tuple[Lead, ...]:
        """The prelude with each context of the plan's background behind it, cut where the model holds no more.

        Args:
            prelude: of the plan.
            remembers: whether a longer pass may go on from the KV of one of so many rows.
        """
        asked = plan.prelude, plan.background, plan.fingerprint, plan.adapter, plan.salt
        last = self._last  # another thread may put another in its place
        if last is None or last[0] != asked:
            made = tuple(_lead(view, prelude, context, remembers) for context in plan.background.contexts)
            last = self._last = asked, made
        return last[1]


def _lead(view: ModelView, prelude: Lead, context: tuple[int, ...], remembers: Callable[[int], bool]) -> Lead:
    ids = (*prelude.ids, *context)[: view.context]
    if not remembers(len(ids)):
        return Lead(ids)
    known = len(prelude.ids) if prelude.kv is not None else 0
    _, layers = view.prefill(torch.tensor([ids[known:]]), prelude.kv)
    return Lead(ids, tuple((keys[0], values[0]) for keys, values in layers))
