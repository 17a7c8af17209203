"""Whether an answer is the right label, for classification by example."""

from __future__ import annotations

from collections.abc import Sequence

from .text import bare, best, first_line

__all__ = ["label"]


def label(answer: str, accepted: Sequence[str]) -> float:
    """1 where the answer's first line is an accepted label and nothing else.

    Case, punctuation and white space do not count, an underscore is a space, and what stands before a colon may
    introduce the label ("Intent: card_arrival"). A line with more in it than the label names another one, or hedges:
    ``exchange_rate`` is no part of ``card_payment_wrong_exchange_rate``. (LongBench looks for labels anywhere in the
    line and needs the list of all of them.)

    Raises:
        SettingError: there is no accepted answer.
    """
    return best(_same, first_line(answer), accepted)


def _same(line: str, accepted: str) -> float:
    return float(_plain(accepted) in {_plain(line), _plain(line.rpartition(":")[2])})


def _plain(text: str) -> str:
    return " ".join(bare(text.replace("_", " ")).split())
