"""Bytes to text, and plain text files. UTF-8 is tried first; any other encoding is charset-normalizer's guess.

A guess from a few words can be wrong; what was guessed stands in the metadata.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

from charset_normalizer import from_bytes

from ..document import Document
from ..errors import UnreadableDocument

__all__ = ["Decoded", "decode", "decode_as", "read_text", "tidy"]

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins like UTF-16's
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Without their mark these fit nearly any bytes, so a short Latin-1 text would be taken for them.
_NEEDS_MARK = ["utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "utf_7"]
_CONTROLS = re.compile(r"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")  # but blanks, escape and NEL
_SURROGATES = re.compile(r"[\ud800-\udfff]")


class Decoded(NamedTuple):
    """A text, and the encoding it was in."""

    text: str
    encoding: str


def read_text(data: bytes, name: str) -> list[Document]:
    """A text file as one document; an encoding other than UTF-8 is noted in its metadata.

    Raises:
        UnreadableDocument: no text, or in no known encoding.
    """
    text, encoding = decode(data, name)
    return [Document(text, source=name, metadata={} if encoding == "utf-8" else {"encoding": encoding})]


def decode(data: bytes, name: str) -> Decoded:
    """Text of a file, in Unicode's own encodings or else the likeliest.

    Raises:
        UnreadableDocument: binary, blank, or in no known encoding.
    """
    decoded = _unicode(data, name) or _guess(data, name)
    if len(_CONTROLS.findall(decoded.text)) * 100 > len(decoded.text):
        raise UnreadableDocument(f"{name}: binary, though it is read as text: leave it out, or convert it to text")
    if not decoded.text.strip():
        raise UnreadableDocument(f"{name}: holds nothing but blanks: leave it out")
    return decoded


def decode_as(data: bytes, encoding: str) -> str | None:
    """Text of a file in an encoding that somebody named; None if it is in another, or there is none of that name."""
    try:
        return tidy(data.decode(encoding))
    except (LookupError, UnicodeError):
        return None


def tidy(text: str) -> str:
    """A text with ``\\n`` at the end of its lines, and without halves of characters, which no UTF-8 can hold."""
    return _SURROGATES.sub("\ufffd", text.replace("\r\n", "\n"))


def _unicode(data: bytes, name: str) -> Decoded | None:
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            text = decode_as(data, encoding)
            if text is None:
                raise UnreadableDocument(f"{name}: begins as {encoding} does but is damaged: save it as UTF-8")
            return Decoded(text, "utf-8" if encoding == "utf-8-sig" else encoding)
    if b"\0" in data:
        raise UnreadableDocument(f"{name}: binary (it has NUL bytes): leave it out, or convert it to text")
    text = decode_as(data, "utf-8")
    return None if text is None else Decoded(text, "utf-8")


def _guess(data: bytes, name: str) -> Decoded:
    match = from_bytes(data, cp_exclusion=_NEEDS_MARK).best()
    if match is None:
        raise UnreadableDocument(f"{name}: binary, or text in an unknown encoding: leave it out, or save it as UTF-8")
    return Decoded(tidy(str(match)), match.encoding)
