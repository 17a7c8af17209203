"""How good an answer is, from 0 to 1: one file per metric, pure functions of texts. Knows no models.

=========== =========================================================================================
``em``      the first line is an accepted answer, but for case, articles and punctuation
``f1``      words that the first line and an accepted answer have in common
``label``   the first line is an accepted label, and nothing else
``held``    an accepted answer stands in the first line
``rouge_l`` longest common subsequence of words of the whole answer and an accepted one
=========== =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .exact import em
from .holding import held
from .labels import label
from .overlap import f1
from .rouge import rouge_l

__all__ = ["METRICS", "Metric"]

Metric = Callable[[str, Sequence[str]], float]
"""Of an answer and the accepted answers: 0 (wrong) to 1; the best over the accepted ones."""

METRICS: dict[str, Metric] = {"em": em, "f1": f1, "rouge_l": rouge_l, "label": label, "held": held}
"""By name, as in ``Task.metrics`` and in JSON files."""
