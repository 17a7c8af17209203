"""A question's prompt in rows, and the operations that each way of fusing it takes: arithmetic, nothing is run.

It follows :mod:`blend.repair` step by step, so that what it calls ``alike`` is the ideal speed-up of a report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from blend.hf.shape import LayerShape, ModelShape

__all__ = ["METHODS", "Ask", "alike", "fused_flops"]

METHODS = {"epic": "EPIC", "cacheblend": "CacheBlend", "prophetkv": "ProphetKV"}
"""The ways to repair that are compared, with their titles; the last is what a Blender costs by default."""


class Span(NamedTuple):
    """Of the rows ``start`` to ``stop - 1`` the part ``share``, evenly spread."""

    start: int
    stop: int
    share: float = 1.0

    @property
    def rows(self) -> float:
        return self.share * (self.stop - self.start)


class Ask(NamedTuple):
    """A prompt: system part, ``k`` passages of ``passage`` rows, question.

    ::

        | system | passage 1 | passage 2 ... passage k | question |
          exact    exact       stale: ``ratio`` of it    fresh
                   (right behind its prelude)
    """

    system: int
    passage: int
    k: int
    question: int
    ratio: float

    @property
    def rows(self) -> int:
        """Rows of the prompt."""
        return self.system + self.k * self.passage + self.question

    @property
    def stale(self) -> Span:
        """Rows whose KV is moved."""
        return Span(self.system + self.passage, self.rows - self.question)

    @property
    def fresh(self) -> Span:
        """The question."""
        return Span(self.rows - self.question, self.rows)

    @property
    def chosen(self) -> list[Span]:
        """What is computed: chosen rows and question."""
        return [self.stale._replace(share=self.ratio), self.fresh]

    @property
    def up_to_check(self) -> list[Span]:
        """What CacheBlend computes up to its check: all stale rows; or simply every row where few others are left."""
        wide = self.rows - self.stale.start
        return [Span(0 if wide > 0.75 * self.rows else self.stale.start, self.rows)]


def fused_flops(shape: ModelShape, ask: Ask, method: str) -> float:
    """Operations of fusing a prompt whose passages are all stored."""
    if not ask.stale.rows:  # one passage, right behind its prelude: plain prefix caching
        return shape.prefill_flops(ask.question, behind=ask.rows - ask.question)
    outside = shape.rest_flops * sum(span.rows for span in ask.chosen) + shape.head_flops
    if method == "prophetkv":
        return outside + _probe(shape, ask) + _repair(shape, ask, lambda index: ask.chosen)
    if method == "cacheblend":
        outside = shape.rest_flops * sum(span.rows for span in ask.up_to_check) + shape.head_flops
        check = sum(_known(layer, ask.up_to_check) for layer in shape.layers[1:2])
        return outside + check + _repair(shape, ask, lambda index: ask.chosen if index else ask.up_to_check)
    return outside + _repair(shape, ask, lambda index: ask.chosen)


def _probe(shape: ModelShape, ask: Ask) -> float:
    """The question alone, through all layers that have KV of their own."""
    layers = (layer for layer in shape.layers if layer.numbers)
    return shape.rest_flops * ask.question + sum(_through(layer, [ask.fresh], ask.rows) for layer in layers)


def _repair(shape: ModelShape, ask: Ask, running: Callable[[int], Sequence[Span]]) -> float:
    """The rows ``running`` in each layer; in the last one, K/V of all of them and the rest for the last row alone.

    Layers that share another layer's K/V have none of their own to stop behind.
    """
    *layers, last = shape.layers
    before = sum(_through(layer, running(index), ask.rows) for index, layer in enumerate(layers))
    if shape.shares_kv:
        return before + _through(last, running(len(layers)), ask.rows)
    return before + _known(last, running(len(layers))) + _through(last, [Span(ask.rows - 1, ask.rows)], ask.rows)


def _through(layer: LayerShape, spans: Sequence[Span], total: int) -> float:
    if layer.alone:
        spans = [Span(total - 1, total)]
    rows = sum(span.rows for span in spans)
    pairs = sum(span.share * layer.seen(span.start, span.stop) for span in spans)
    return rows * layer.row_flops + pairs * layer.pair_flops + total * layer.key_flops


def _known(layer: LayerShape, spans: Sequence[Span]) -> float:
    return sum(span.rows for span in spans) * layer.known_flops


def alike(shape: ModelShape) -> ModelShape:
    """The same model if a row cost one operation per layer wherever it stands: what a report's ideal counts."""
    layers = [
        layer._replace(row_flops=1.0, known_flops=layer.known_flops / layer.row_flops, pair_flops=0.0, key_flops=0.0)
        for layer in shape.layers
    ]
    return replace(shape, layers=tuple(layers), rest_flops=0.0, head_flops=0.0)
