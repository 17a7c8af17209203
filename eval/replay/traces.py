"""Traces of requests: which pieces of prompt were asked for, in which order. Knows no store and no policy.

A trace is a JSONL file, one request a line, in one of three formats, told apart by the keys of its first line:

``hash_ids`` (Mooncake): ``timestamp`` in ms, ``input_length`` in tokens, and an id per block of 512 tokens, the last of
    which may be shorter. The id stands for the block and all before it, so equal blocks behind different beginnings
    have different ids.
``segments`` (agents): ``segments`` is a list of ``[id, words]``; equal ids are equal text, wherever they stand.
    A word counts as one row, as no text is kept that could be tokenised.
``doc_ids`` (retrieval): the passages of a turn, best first. ``..-7384-8758`` at the end of an id is a passage's first
    and last character, and four characters count as a row; a passage without it counts as 128 rows. What else the
    prompt holds is not recorded.

Only Mooncake's times are those of one clock; in the other formats a second passes with each request.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from blend.errors import KVBlendError

__all__ = ["KNOWN_TRACES", "Request", "Trace", "TraceError", "find_trace", "read_trace"]

KNOWN_TRACES = ("mooncake_conversation", "agent_miniswe", "agent_magagent", "tau_airline", "mtrag_passages")
"""Names that are looked for in ``$KVBLEND_DATA/traces``."""

_DATA = "../shared/data"  # where KVBLEND_DATA is not set

BLOCK_ROWS = 512
CHARACTERS_PER_ROW = 4
PASSAGE_ROWS = 128

_SPAN = re.compile(r"-(\d+)-(\d+)$")


class TraceError(KVBlendError, ValueError):
    """A trace that is not there or cannot be read; the message names the line and what is expected in it."""


class Request(NamedTuple):
    """One request's prompt.

    Attributes:
        seconds: when it came; later than the request before it.
        chunks: numbers of its chunks, in order.
        rows: rows of each.
    """

    seconds: float
    chunks: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came.

    Attributes:
        name: of the file.
        format: ``hash_ids``, ``segments`` or ``doc_ids``.
        page: rows that are held or dropped together; a chunk takes whole pages.
        sizes: rows of each chunk, by its number.
        requests: all of them.
    """

    name: str
    format: str
    page: int
    sizes: tuple[int, ...]
    requests: tuple[Request, ...]

    @cached_property
    def input_rows(self) -> int:
        """Rows of all requests."""
        return sum(sum(request.rows) for request in self.requests)

    @cached_property
    def distinct_rows(self) -> int:
        """Rows of all chunks, each counted once and in whole pages: what an unbounded store of chunks ends up with."""
        return sum(self.pages(chunk) for chunk in range(len(self.sizes))) * self.page

    def pages(self, chunk: int) -> int:
        """Pages that a chunk takes."""
        return -(-self.sizes[chunk] // self.page)

    def tokens(self, request: Request) -> array[int]:
        """The prompt as token ids for a prefix cache, one per page; no two chunks share an id."""
        ids = array("q")
        for chunk in request.chunks:
            ids.extend(range(self._first[chunk], self._first[chunk] + self.pages(chunk)))
        return ids

    @cached_property
    def _first(self) -> list[int]:
        first = [0]
        for chunk in range(len(self.sizes)):
            first.append(first[-1] + self.pages(chunk))
        return first


class _Piece(NamedTuple):
    """A chunk as its trace names it."""

    name: int | str
    rows: int


def find_trace(trace: str) -> Path:
    """The file that a path, or the name of a known trace, stands for.

    Raises:
        TraceError: there is none; the message tells where it was looked for.
    """
    if Path(trace).is_file():
        return Path(trace)
    folder = os.environ.get("KVBLEND_DATA", _DATA)
    if trace not in KNOWN_TRACES:
        raise TraceError(f"no file {trace!r}: give the path of a JSONL trace, or one of {', '.join(KNOWN_TRACES)}")
    path = Path(folder) / "traces" / f"{trace}.jsonl"
    if not path.is_file():
        raise TraceError(f"no file {path}: set KVBLEND_DATA to the folder that has traces/{path.name}")
    return path


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Reads a trace.

    Args:
        limit: only the first requests.

    Raises:
        TraceError: the file is empty, of an unknown format, or has a line that does not fit its format.
    """
    reader = _Reader(path.name)
    with path.open(encoding="utf-8") as lines:
        for number, record in islice(_records(lines, path.name), limit):
            reader.add(number, record)
    return reader.trace(path.stem)


class _Reader:
    """Collects requests and numbers their chunks."""

    def __init__(self, name: str) -> None:
        self.requests: list[Request] = []
        self._name = name
        self._format = ""
        self._numbers: dict[int | str, int] = {}
        self._sizes: list[int] = []
        self._given = 0.0

    def add(self, number: int, record: Mapping[str, Any]) -> None:
        """Books a line."""
        self._format = self._format or _format(record, self._name, number)
        form = _FORMATS[self._format]
        try:
            seconds, pieces = form.read(record, len(self.requests))
            self.requests.append(self._request(seconds, pieces))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise TraceError(f"{self._name}, line {number}: {reason}; expected {form.expected}") from error

    def trace(self, name: str) -> Trace:
        """All that was read."""
        if not self.requests:
            raise TraceError(f"{self._name} holds no request")
        form = _FORMATS[self._format]
        return Trace(name, self._format, form.page, tuple(self._sizes), tuple(self.requests))

    def _request(self, seconds: float, pieces: list[_Piece]) -> Request:
        if self.requests and seconds < self._given:
            raise ValueError(f"a time of {seconds:g} s after one of {self._given:g} s")
        self._given = seconds
        if self.requests:  # requests of the same time keep their order
            seconds = max(seconds, self.requests[-1].seconds + 1e-6)
        chunks = tuple(self._number(piece) for piece in pieces)
        return Request(seconds, chunks, tuple(piece.rows for piece in pieces))

    def _number(self, piece: _Piece) -> int:
        """The number of a chunk, given when it is first met."""
        known = self._numbers.setdefault(piece.name, len(self._sizes))
        if known == len(self._sizes):
            self._sizes.append(piece.rows)
        elif self._sizes[known] != piece.rows:
            raise ValueError(f"{piece.name!r} has {piece.rows} rows here and {self._sizes[known]} further up")
        return known


def _records(lines: Iterable[str], name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{name}, line {number}: this is no JSON ({error}); expected one object a line") from error
        if not isinstance(record, dict):
            raise TraceError(f"{name}, line {number}: a JSON {type(record).__name__}; expected one object a line")
        yield number, record


def _format(record: Mapping[str, Any], name: str, number: int) -> str:
    for key in _FORMATS:
        if key in record:
            return key
    known = "; or ".join(form.expected for form in _FORMATS.values())
    raise TraceError(f"{name}, line {number}: unknown format with the keys {', '.join(record)}; expected {known}")


def _blocks(record: Mapping[str, Any], index: int) -> tuple[float, list[_Piece]]:
    length, names = record["input_length"], record["hash_ids"]
    if not _all_int(names) or len(names) != -(-length // BLOCK_ROWS) or not names:
        raise ValueError(f"{len(names)} hash ids for {length} tokens")
    last = length - BLOCK_ROWS * (len(names) - 1)
    pieces = [_Piece(name, BLOCK_ROWS) for name in names[:-1]]
    return record["timestamp"] / 1000, [*pieces, _Piece(names[-1], last)]


def _segments(record: Mapping[str, Any], index: int) -> tuple[float, list[_Piece]]:
    pieces = [_Piece(name, words) for name, words in record["segments"]]
    if any(not isinstance(piece.name, int | str) or not _all_int([piece.rows]) or piece.rows < 0 for piece in pieces):
        raise ValueError("a segment that is no id and number of words")
    return float(index), [piece for piece in pieces if piece.rows]  # an empty message has no KV


def _passages(record: Mapping[str, Any], index: int) -> tuple[float, list[_Piece]]:
    names = record["doc_ids"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("doc_ids that are no list of strings")
    return float(index), [_Piece(name, _passage_rows(name)) for name in names]


def _passage_rows(name: str) -> int:
    span = _SPAN.search(name)
    if span is None:
        return PASSAGE_ROWS
    first, last = map(int, span.groups())
    if last <= first:
        raise ValueError(f"passage {name!r} ends before it begins")
    return -(-(last - first) // CHARACTERS_PER_ROW)


class _Format(NamedTuple):
    """How a line is read: seconds and pieces of the request with this index."""

    read: Callable[[Mapping[str, Any], int], tuple[float, list[_Piece]]]
    page: int
    expected: str


_FORMATS = {
    "hash_ids": _Format(
        _blocks, BLOCK_ROWS, '"timestamp" in ms, rising, "input_length", "hash_ids" [one integer per 512 tokens]'
    ),
    "segments": _Format(_segments, 1, '"segments" [[id, words], ...]'),
    "doc_ids": _Format(_passages, 1, '"doc_ids" ["...", ...]'),
}


def _all_int(values: Any) -> bool:
    return all(type(value) is int for value in values)
