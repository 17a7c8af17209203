"""How good an answer is, from 0 to 1: one file per metric, pure functions of texts. Knows no models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["METRICS", "Metric"]

Metric = Callable[[str, Sequence[str]], float]
"""Of an answer and the accepted answers: 0 (wrong) to 1; the best over the accepted ones."""

METRICS: dict[str, Metric] = {}
"""By name, as in ``Task.metrics`` and in JSON files."""
