"""Whether an accepted answer stands in an answer, however much is said around it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .text import CJK, best, first_line

__all__ = ["held"]

_WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")


def held(answer: str, accepted: Sequence[str]) -> float:
    """1 where the answer's first line has all words of an accepted answer, whole, in their order and side by side.

    Words are runs of letters, digits and underscores in lower case; Chinese characters are words of their own. A model
    that answers in sentences gets its due here, where exact match and F1 count its words against it. As "Lost in the
    Middle" counts (Liu et al., TACL 2024, arXiv:2307.03172), but by whole words: "1" does not stand in "1956".

    Raises:
        SettingError: there is no accepted answer.
    """
    return best(_stands_in, first_line(answer), accepted)


def _stands_in(answer: str, accepted: str) -> float:
    return float(_words(accepted) in _words(answer))


def _words(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.lower()))} "
