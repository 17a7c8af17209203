"""Exact match, as SQuAD and CMRC 2018 count it. See :mod:`eval.metrics.text` for what is left out."""

from __future__ import annotations

from collections.abc import Sequence

from .text import best, first_line, tokens

__all__ = ["em"]


def em(answer: str, accepted: Sequence[str]) -> float:
    """1 where the answer's first line is an accepted answer, but for case, punctuation, articles and white space.

    Two texts of which nothing is left are the same.

    Raises:
        SettingError: there is no accepted answer.
    """
    return best(_same, first_line(answer), accepted)


def _same(answer: str, accepted: str) -> float:
    ours, theirs = tokens(answer, accepted)
    return float(ours == theirs)
