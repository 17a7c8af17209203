"""F1 of words, as SQuAD and CMRC 2018 count it. See :mod:`eval.metrics.text` for what a word is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from .text import best, first_line, has_cjk, tokens

__all__ = ["f1"]


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of the shares of words that the answer's first line and an accepted answer have in common.

    In common are words in any order, each as often as in both (SQuAD). Where either text has a Chinese character it
    is their longest common run (CMRC 2018): single characters are too often the same by accident. MLQA and LongBench
    count Chinese otherwise, without order or by segmented words, so their figures are not to be set beside these.
    Where nothing is left of a text, 1 if nothing is left of the other either, else 0 (SQuAD 2.0).

    Raises:
        SettingError: there is no accepted answer.
    """
    return best(_f1, first_line(answer), accepted)


def _f1(answer: str, accepted: str) -> float:
    ours, theirs = tokens(answer, accepted)
    if not ours or not theirs:
        return float(ours == theirs)
    common = _longest_run if has_cjk(answer, accepted) else _any_order
    return 2 * common(ours, theirs) / (len(ours) + len(theirs))


def _any_order(ours: list[str], theirs: list[str]) -> int:
    return sum((Counter(ours) & Counter(theirs)).values())


def _longest_run(ours: list[str], theirs: list[str]) -> int:
    return SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match().size
