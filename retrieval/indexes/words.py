"""What counts as a word, for search by words. Knows no language, only scripts.

Words are runs of letters, marks and digits, in one spelling: NFKC (full-width letters become plain ones) and without
case. Scripts that leave no space between words give every character and every pair of neighbours instead, which finds
words of one and two characters exactly and longer ones by their parts, as Lucene's CJKBigramFilter with outputUnigrams
does.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

__all__ = ["words"]

# Han, kana and Hangul, as in Lucene; Thai, Lao, Burmese and Khmer leave no spaces either.
_UNSPACED = (
    "\u2e80-\u2fdf\u3005-\u3007\u3041-\u3096\u3099-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003fffd"
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u1000-\u1049\u1780-\u17d3"
)

# Marks that \w leaves out, though a word goes on behind them: accents, Hebrew and Arabic points, Indic vowel signs.
_MARKS = "\u0300-\u036f\u0591-\u05bd\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"

_RUNS = re.compile(f"([{_UNSPACED}]+)|((?:[^\\W_{_UNSPACED}]|[{_MARKS}])+)")


def words(text: str) -> list[str]:
    """The words of a text, in order, as often as they stand there."""
    found = []
    for unspaced, word in _RUNS.findall(unicodedata.normalize("NFKC", text).casefold()):
        if word:
            found.append(word)
        else:
            found += unspaced
            found += map("".join, pairwise(unspaced))
    return found
