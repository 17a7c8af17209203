"""Choosing rows and computing them again: the probe, the check and the narrowed pass; correcting the others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blend.clock import Clock
from blend.correction import Corrections
from blend.correctors import Corrector
from blend.filling import LayerFilling
from blend.hf.fusion_cache import FusionCache
from blend.hf.narrow import NarrowPass, PassOver
from blend.hf.view import ModelView
from blend.layout import Layout
from blend.selectors import Candidates, FreshKV, Selector

__all__ = ["Charge", "Repaired", "repair"]


class Charge(NamedTuple):
    """What a request has computed, so that methods can be compared at equal cost.

    Attributes:
        rows_per_layer: rows that ran through each layer, in the repair pass.
        projected_per_layer: rows whose K/V were projected there in addition (checks, and the last layer).
        probe_per_layer: rows that ran through each layer in the probe pass.
        row_layers: all of it in whole layers' worth of rows; a projection counts by its share of the parameters.
        ideal: row-layers of a full prefill over ``row_layers``: the speed-up if every row cost the same.
    """

    rows_per_layer: tuple[int, ...]
    projected_per_layer: tuple[int, ...]
    probe_per_layer: tuple[int, ...]
    row_layers: float
    ideal: float


class Repaired(NamedTuple):
    """Logits of the last row (fp32 ``[V]``), the rows computed again, what it cost, and why so many."""

    logits: Tensor
    chosen: Tensor
    charge: Charge
    why: str | None = None


def repair(
    view: ModelView,
    ids_1T: Tensor,
    layout: Layout,
    cache: FusionCache,
    selector: Selector,
    clock: Clock,
    filling: LayerFilling,
    corrector: Corrector | None = None,
) -> Repaired:
    """Runs the question and the rows that ``selector`` chooses over the assembled cache, in place.

    Where nothing is stale and only the tail is fresh, that is plain prefix caching and the stock forward does it.

    Args:
        filling: of the cache; what a stage has waited for it is booked as ``load``.
        corrector: what is done to the stale rows that are not chosen; None leaves them as they are.
    """
    if not layout.stale.numel() and layout.forced.numel() == layout.rows - layout.settled_rows:
        return _go_on(view, ids_1T, layout, cache, clock, filling)
    corrections = Corrections(corrector, layout, cache, view.rope) if corrector else None
    chooser = _Chooser(layout, cache, selector, view.device, corrections)
    probe_rows: tuple[int, ...] = ()
    if selector.wants_attention and chooser.stale.numel():
        waited = filling.waited
        with clock("probe"):
            chooser.attention_T, probe_rows = _question_attention(view, ids_1T, layout, cache, selector)
        clock.shift("probe", "load", filling.waited - waited)
    checks = selector.check_layers(len(view.layers)) if chooser.stale.numel() else ()
    waited = filling.waited
    with clock("repair"):
        rows_S = chooser.up_to_check() if checks else chooser.before_layer_0(clock.total)
        plan = view.narrow_pass(cache, rows_S=rows_S, checks=dict.fromkeys(checks, chooser.check), correct=corrections)
        logits = view.run(ids_1T, plan)
    clock.split("repair", "check", chooser.checked_at)
    clock.shift("repair", "load", filling.waited - waited)
    assert logits is not None
    return Repaired(logits, chooser.chosen, _charge(view, plan, probe_rows, layout.rows), chooser.why)


def _go_on(
    view: ModelView, ids_1T: Tensor, layout: Layout, cache: FusionCache, clock: Clock, filling: LayerFilling
) -> Repaired:
    """The stock forward over the fresh tail, behind the KV that is there."""
    start = layout.settled_rows
    with clock("prefill"):
        filling.wait(filling.count - 1)
        waited = filling.waited if filling.beside else 0.0
        past = tuple((keys[:, :start], values[:, :start]) for keys, values in cache.kv)
        logits, layers = view.prefill(ids_1T[:, start:], past)
        for target, (keys, values) in zip(cache.states, layers, strict=True):
            target.keys, target.values = keys, values
    clock.shift("prefill", "load", waited)
    count, depth = layout.rows - start, len(view.layers)
    charge = Charge((count,) * depth, (0,) * depth, (), float(count * depth), layout.rows / count)
    return Repaired(logits[0], layout.stale, charge)


class _Chooser:
    """Asks the selector, and adds the rows that always run."""

    def __init__(
        self,
        layout: Layout,
        cache: FusionCache,
        selector: Selector,
        device: torch.device,
        corrections: Corrections | None,
    ) -> None:
        self.layout, self.cache, self.selector, self.corrections = layout, cache, selector, corrections
        self.stale = layout.stale.to(device)
        self.forced = layout.forced.to(device)
        self.chosen = self.stale[:0]
        self.attention_T: Tensor | None = None
        self.checked_at: float | None = None
        self.why: str | None = None
        # At the first check every stale row still runs.
        self._left = self.stale

    def before_layer_0(self, elapsed: float) -> Tensor:
        if not self.stale.numel():
            return self._with_forced(self.stale)
        candidates = Candidates(self.stale, self.layout, self.attention_T, elapsed=elapsed)
        self.why = self.selector.explain(candidates)
        return self._with_forced(self.selector.choose(candidates))

    def up_to_check(self) -> Tensor | None:
        """Rows that run up to the first check: all that are not exact already; None (all) where few are exact.

        An unnarrowed layer runs the stock causal kernel, which is the quicker way through nearly all rows.
        """
        count = self.stale.numel() + self.forced.numel()
        return None if count > 0.75 * self.layout.rows else torch.cat([self.stale, self.forced]).sort().values

    def check(self, layer: int, rows_R: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        target = self.cache.states[layer]
        cached = target.keys[0].index_select(1, rows_R), target.values[0].index_select(1, rows_R)
        fresh = FreshKV(layer, rows_R, keys[0], values[0], *cached)
        if self.corrections:
            self.corrections.see(fresh)
        candidates = Candidates(self._left, self.layout, self.attention_T, fresh)
        self._left = self.selector.choose(candidates).to(self.stale.device)
        rows = self._with_forced(self._left)
        self.checked_at = Clock.now(rows.device)
        return rows

    def _with_forced(self, chosen: Tensor) -> Tensor:
        self.chosen = chosen.to(self.stale.device)
        return torch.cat([self.chosen, self.forced]).sort().values


def _question_attention(
    view: ModelView, ids_1T: Tensor, layout: Layout, cache: FusionCache, selector: Selector
) -> tuple[Tensor, tuple[int, ...]]:
    """The question's softmax attention over all rows, fp32 ``[T]``: mean over heads, question rows and layers."""
    wanted = set(selector.probe_layers(len(cache.states)))
    last = max(wanted)
    forced = layout.forced.to(view.device)
    total_T = torch.zeros(layout.rows, device=view.device)

    def observe(layer: int, weights: Tensor) -> None:
        if layer in wanted:
            total_T.add_(weights.mean(dim=(0, 1, 2)))
        if layer == last:
            raise PassOver

    plan = view.narrow_pass(cache, rows_S=forced, observer=observe, only_last=False)
    view.run(ids_1T, plan)
    return total_T / len(wanted), tuple(plan.ran)


def _charge(view: ModelView, plan: NarrowPass, probe_rows: tuple[int, ...], total: int) -> Charge:
    row_layers = sum(plan.ran) + view.projection_share * sum(plan.projected) + sum(probe_rows)
    ideal = total * len(view.layers) / max(row_layers, 1.0)
    return Charge(tuple(plan.ran), tuple(plan.projected), probe_rows, row_layers, ideal)
