"""ROUGE-L, by the library rouge-score; Chinese by character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from retrieval.errors import ExtraMissing

from .text import best, has_cjk, zh_tokens

__all__ = ["rouge_l"]


def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, over the whole answer (Lin, "ROUGE", ACL workshop 2004).

    The library's own words, ASCII letters and digits without stemming; where either text has a Chinese character, those
    of CMRC 2018. Answers are summaries: all of their lines are judged.

    Raises:
        ExtraMissing: without rouge-score.
        SettingError: there is no accepted answer.
    """
    return best(_score, answer, accepted)


def _score(answer: str, accepted: str) -> float:
    return float(_scorer(has_cjk(answer, accepted)).score(accepted, answer)["rougeL"].fmeasure)


class _ByCharacter:
    """The library's tokenizer interface."""

    def tokenize(self, text: str) -> list[str]:
        return zh_tokens(text)


@cache
def _scorer(by_character: bool) -> Any:  # the library has no types
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as missing:
        raise ExtraMissing('ROUGE-L needs rouge-score: pip install "kvblend[eval]"') from missing
    return RougeScorer(["rougeL"], use_stemmer=False, tokenizer=_ByCharacter() if by_character else None)
