"""What the metrics make of a text: its first line, its words, Chinese by character. Knows nothing of scores.

Words are SQuAD's (Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016,
arXiv:1606.05250; its evaluation script): lower case, without ASCII punctuation and the articles a, an, the, split at
white space. Where the answer or the accepted one has a Chinese character, both are segmented as for CMRC 2018 (Cui et
al., "A Span-Extraction Dataset for Chinese Machine Reading Comprehension", EMNLP-IJCNLP 2019, arXiv:1810.07366): lower
case, without punctuation, each Chinese character by itself, other words whole, articles kept. Two differences from its
script, neither of which needs nltk's models: white space alone splits other words, and all Unicode punctuation and
symbols are left out where the script lists some thirty.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Sequence

from retrieval.errors import SettingError

__all__ = ["CJK", "bare", "best", "first_line", "has_cjk", "tokens", "zh_tokens"]

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters that are words of their own, as ranges of a regular expression: Han, and kana."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANY_CJK = re.compile(f"[{CJK}]")
_ZH_TOKEN = re.compile(rf"[{CJK}]|[^\s{CJK}]+")


def first_line(answer: str) -> str:
    """The line that is judged, of a short answer.

    A model that was not taught to stop goes on with questions of its own, and one that copies the passages would hold
    every answer. Published evaluations cut there too: CacheBlend's, LongBench's few-shot sets, "Lost in the Middle".
    """
    return answer.strip().partition("\n")[0]


def tokens(answer: str, accepted: str) -> tuple[list[str], list[str]]:
    """The words of both, by one rule."""
    split = zh_tokens if has_cjk(answer, accepted) else _words
    return split(answer), split(accepted)


def has_cjk(*texts: str) -> bool:
    """Whether any of the texts has a character that is a word of its own."""
    return any(map(_ANY_CJK.search, texts))


def zh_tokens(text: str) -> list[str]:
    """Chinese characters one by one, other words whole, no punctuation."""
    return _ZH_TOKEN.findall(bare(text))


def bare(text: str) -> str:
    """Lower case, without punctuation and symbols of any script."""
    return "".join(char for char in text.lower() if unicodedata.category(char)[0] not in "PS")


def best(score: Callable[[str, str], float], answer: str, accepted: Sequence[str]) -> float:
    """The highest score over the accepted answers.

    Raises:
        SettingError: there is no accepted answer.
    """
    if not accepted:
        raise SettingError("there is no accepted answer to judge by: an example needs at least one")
    return max(score(answer, one) for one in accepted)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
