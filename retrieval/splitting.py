"""Documents into pieces of at most so many tokens, cut where a reader would cut. Knows a way to count, no tokenizer.

Where to cut is proposed by semantic-text-splitter: at the highest of headings, blank lines, sentences (Unicode's, so
that Chinese ends at its own full stop), words and characters that gives a piece which fits. What is promised of the
pieces is then made sure of here: the library trims and cuts through some characters, and takes longer for longer texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import regex
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from retrieval.document import Kind, Piece
from retrieval.errors import SettingError

__all__ = ["Splitter"]

Count = Callable[[str], int]
Span = tuple[int, int]

_LIBRARY: dict[Kind, type[TextSplitter | MarkdownSplitter]] = {"text": TextSplitter, "markdown": MarkdownSplitter}

# The library takes quadratic time over a text without words to cut at: minutes for 5 MB. In windows it is linear.
_WINDOW = 1 << 16

_BLANKS = re.compile(r"\s*")
_CHARACTER = regex.compile(r"\X")
# \X counts a run of flags from its beginning at each of them; that is short in a slice.
_SLICE = 1 << 10
# Unicode's stream-safe text (UAX #15) puts 30 marks on a letter at most; what is longer is no character.
_LONGEST = 32


@dataclass(frozen=True)
class Splitter:
    """Cuts texts into pieces.

    A piece has at most ``size`` tokens by ``count``. In order, the pieces hold everything that is not blank; none is
    blank or lies within another, and neighbours share at most ``overlap`` tokens. No cut falls within a character as
    a reader sees it (a letter and its accents, an emoji of several code points), unless it alone exceeds ``size``;
    none ever falls within a code point. Safe for several threads if ``count`` is.

    Args:
        count: tokens of a text. It need not be additive: the finished pieces are counted.
        size: tokens of a piece, at most; 1 or more.
        overlap: tokens that a piece may repeat of the one before; below ``size``.

    Raises:
        SettingError: ``size`` or ``overlap`` outside its range.
    """

    count: Count
    size: int = 256
    overlap: int = 32

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SettingError(f"size is {self.size}: a piece needs at least 1 token")
        if not 0 <= self.overlap < self.size:
            raise SettingError(f"overlap is {self.overlap}: it must lie in [0, size), and size is {self.size}")

    def split(self, text: str, kind: Kind = "text") -> list[Piece]:
        """The pieces of a text, in order; none of a blank one.

        Args:
            text: of any length.
            kind: ``markdown`` is cut along its headings and blocks first.

        Raises:
            SettingError: one code point has more than ``size`` tokens, or a kind that is none.
        """
        if kind not in _LIBRARY:
            raise SettingError(f"kind is {kind!r}: it can be {' or '.join(map(repr, _LIBRARY))}")
        count = lru_cache(maxsize=4096)(self.count)  # a finished piece was mostly counted before
        return list(self._fit(text, self._proposals(text, kind, count), count))

    def _proposals(self, text: str, kind: Kind, count: Count) -> Iterator[Span]:
        """Where the library would cut."""
        library = _LIBRARY[kind].from_callback(_Gauge(count, self.size), self.size, self.overlap)
        window = max(_WINDOW, 32 * self.size)
        start, length = 0, window
        while True:
            end = start + length
            spans = [(start + at, start + at + len(cut)) for at, cut in library.chunk_indices(text[start:end])]
            if end >= len(text):
                yield from spans
                return
            if not spans or spans[-1][0] <= start:
                length *= 2
                continue
            # The window's end has cut the last one short: it is taken again from where it begins.
            yield from spans[:-1]
            start, length = spans[-1][0], window

    def _fit(self, text: str, proposals: Iterator[Span], count: Count) -> Iterator[Piece]:
        """The proposals, moved as little as the promises need: mostly not at all."""
        edges = _character_edges(text)
        last, covered = -1, 0
        for begin, close in chain(proposals, [(len(text), len(text))]):
            start, end = edges.rfind(1, 0, begin + 1), edges.rfind(1, 0, close + 1)
            while (fresh := _next_visible(text, edges, covered)) < end:
                if not last < start <= fresh or (start < covered and count(text[start:covered]) > self.overlap):
                    start = fresh
                piece = self._longest(text, edges, (start, fresh, end), count)
                if piece is None:
                    self._open(text, edges, fresh, count)
                    continue
                yield piece
                last, covered, start = piece.start, piece.end, end

    def _longest(self, text: str, edges: bytearray, bounds: tuple[int, int, int], count: Count) -> Piece | None:
        """The longest piece that fits, from ``start`` or else from ``fresh``, up to ``end`` and beyond ``fresh``."""
        start, fresh, end = bounds
        for begin in dict.fromkeys((start, fresh)):
            stop = end
            while stop > fresh:
                stop = edges.find(1, begin + len(text[begin:stop].rstrip()))
                if count(text[begin:stop]) <= self.size:
                    return Piece(text[begin:stop], begin, stop)
                stop = edges.rfind(1, 0, stop)
        return None

    def _open(self, text: str, edges: bytearray, at: int, count: Count) -> None:
        """Lets the character at ``at`` be cut between its code points."""
        end = edges.find(1, at + 1)
        if end == at + 1:
            raise SettingError(
                f"size is {self.size}, but the character {text[at]!r} (U+{ord(text[at]):04X}) alone has "
                f"{count(text[at])} tokens: raise size"
            )
        edges[at:end] = b"\1" * (end - at)


def _character_edges(text: str) -> bytearray:
    """1 at every offset where a character begins, and at the end; 0 within one."""
    edges = bytearray(b"\1") * (len(text) + 1)
    start = 0
    while start < len(text):
        part = text[start : start + _SLICE]
        ends = range(1, len(part) + 1) if _is_simple(part) else [match.end() for match in _CHARACTER.finditer(part)]
        if start + len(part) < len(text) and len(ends) > 1:
            ends = ends[:-1]  # the slice may have cut it
        begin = 0
        for end in ends if len(ends) < ends[-1] else ():
            if 1 < end - begin <= _LONGEST:
                edges[start + begin + 1 : start + end] = bytes(end - begin - 1)
            begin = end
        start += ends[-1]
    return edges


def _is_simple(text: str) -> bool:
    """Whether every code point surely is a character: the quick way through most of a text."""
    return text.isascii() and "\r" not in text


def _next_visible(text: str, edges: bytearray, at: int) -> int:
    """Where the first character from ``at`` on begins that is not blank; the end of the text without one."""
    blanks = _BLANKS.match(text, at)
    return edges.rfind(1, 0, blanks.end() + 1) if blanks else at


class _Gauge:
    """How long a text is, read only as far as the library's search for a piece needs it.

    The library halves its way to the longest stretch that fits, and asks for every stretch on the way; most begin
    alike. One far beyond the size is not read to its end; one that goes on from the last, or ends before it, is
    reckoned by counting where they part, with some text ahead of it, because tokens merge across a seam. An estimate
    that is wrong moves a cut, no more: the finished pieces are counted.
    """

    _SEAM = 48
    """Characters ahead of a seam; how a text begins no longer shows in tokens that far on."""

    _SHORT = 200
    """Characters that are quicker counted than reckoned."""

    def __init__(self, count: Count, size: int) -> None:
        self._count, self._size = count, size
        self._reach = 5 * size  # characters that should hold a little more than size tokens
        self._known, self._tokens = "", 0  # the last text, and its tokens

    def __call__(self, text: str) -> int:
        if len(text) <= self._SHORT:
            return self._count(text)
        if len(text) > 4 * self._reach:
            return self._size + len(text)
        common = min(len(text), len(self._known))
        if not common or text[:common] != self._known[:common]:
            return self._read(text)
        if self._tokens <= self._size or len(text) < len(self._known):
            at = max(0, common - self._SEAM)
            self._tokens += self._count(text[at:]) - self._count(self._known[at:])
            self._known = text
        return self._tokens

    def _read(self, text: str) -> int:
        """Counts a text, or as much of it as is too much."""
        reach = self._reach
        while reach < len(text) and self._learn(text[:reach]) <= self._size:
            reach *= 2
        return self._tokens if reach < len(text) else self._learn(text)

    def _learn(self, text: str) -> int:
        self._known, self._tokens = text, self._count(text)
        if self._tokens > self._size // 2:
            self._reach = 1 + int(1.1 * self._size * len(text) / self._tokens)
        return self._tokens
