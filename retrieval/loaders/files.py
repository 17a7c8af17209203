"""Files and folders to documents: which reader for which suffix, and what is said of files that no reader takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import track

from ..document import Document
from ..errors import UnreadableDocument
from .html import read_html
from .markdown import read_markdown
from .pdf import read_pdf
from .plain import read_text
from .rows import read_jsonl

__all__ = ["READERS", "Reader", "Skipped", "load", "load_folder"]

Reader = Callable[[bytes, str], list[Document]]
"""Makes documents of a file's bytes and name; raises UnreadableDocument with a message that begins with ``name:``."""

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        ".txt": read_text,
        ".md": read_markdown,
        ".markdown": read_markdown,
        ".html": read_html,
        ".htm": read_html,
        ".xhtml": read_html,
        ".pdf": read_pdf,
        ".jsonl": read_jsonl,
        ".ndjson": read_jsonl,
    }
)
"""Readers by suffix. Add your own with ``load_folder(folder, readers={**READERS, ".docx": read_docx})``."""


class Skipped(NamedTuple):
    """A file or folder that gave no document: its path below the folder, and why."""

    name: str
    why: str


def load(
    path: str | os.PathLike[str], *, name: str | None = None, readers: Mapping[str, Reader] = READERS
) -> list[Document]:
    """The documents of one file: one, but for JSON Lines.

    Args:
        path: the file. A suffix without a reader is read as text.
        name: id and source of the document; the file's name if not given.
        readers: by suffix, in lower case.

    Raises:
        UnreadableDocument: no such file, or no text in it.
        ExtraMissing: the library for its format is not installed.
    """
    path = Path(path)
    name = path.name if name is None else name
    return readers.get(path.suffix.lower(), read_text)(_bytes(path, name), name)


def load_folder(
    folder: str | os.PathLike[str],
    *,
    progress: bool = False,
    on_unreadable: Literal["raise"] | Callable[[Skipped], None] = "raise",
    readers: Mapping[str, Reader] = READERS,
) -> Iterator[Document]:
    """The documents of every file in a folder and the folders in it, in order of their paths.

    A document's id and source are its path below the folder, with ``/``. Names that begin with a dot are hidden: they
    are left out. Links are followed, but not back into a folder that holds them.

    Args:
        folder: where to look.
        progress: show a bar on standard error.
        on_unreadable: called with every file that gives no document; ``"raise"`` ends at the first.
        readers: by suffix, in lower case; other files are read as text.

    Raises:
        UnreadableDocument: no such folder, no document in it, or an unreadable file. The folder is looked at at once,
            its files as their documents are asked for.
        ExtraMissing: the library for a format is not installed.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        hint = "a file and no folder: use load" if os.path.isfile(folder) else "no such folder"
        raise UnreadableDocument(f"{folder}: {hint}")
    return _documents(folder, progress, _raise if on_unreadable == "raise" else on_unreadable, readers)


def _documents(
    folder: Path, progress: bool, skip: Callable[[Skipped], None], readers: Mapping[str, Reader]
) -> Iterator[Document]:
    found = 0
    files = list(_walk(folder, "", skip, frozenset()))
    console = Console(stderr=True)
    for path, name in track(files, "reading", console=console, transient=True, disable=not progress):
        try:
            documents = load(path, name=name, readers=readers)
        except UnreadableDocument as error:
            skip(Skipped(name, str(error).removeprefix(f"{name}: ")))
            continue
        found += len(documents)
        yield from documents
    if not found:
        what = f"none of its {len(files)} files can be read" if files else "it is empty"
        raise UnreadableDocument(f"{folder}: {what}: put {', '.join(readers)} or other text files there")


def _walk(
    folder: Path, prefix: str, skip: Callable[[Skipped], None], above: frozenset[Path]
) -> Iterator[tuple[Path, str]]:
    """Files below a folder, and their names from ``prefix`` on."""
    real = folder.resolve()
    if real in above:
        skip(Skipped(prefix.rstrip("/"), "a link back to a folder that holds it: leave it out"))
        return
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        skip(Skipped(prefix.rstrip("/") or str(folder), _reason(error)))
        return
    for path in paths:
        name = f"{prefix}{path.name}"
        if os.path.isdir(path):  # False, where Path.is_dir may raise
            yield from _walk(path, f"{name}/", skip, above | {real})
        else:
            yield path, name


def _bytes(path: Path, name: str) -> bytes:
    if os.path.isdir(path):
        raise UnreadableDocument(f"{name}: a folder: use load_folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UnreadableDocument(f"{name}: a device or pipe and no file: leave it out")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableDocument(f"{name}: {_reason(error)}") from error
    if not data:
        raise UnreadableDocument(f"{name}: empty (0 bytes): leave it out")
    return data


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "no permission to read it: change its rights (chmod u+r), or leave it out"
    if isinstance(error, FileNotFoundError):
        return "no such file, or a link to none"
    return f"cannot be read ({error.strerror}): leave it out"


def _raise(skipped: Skipped) -> None:
    raise UnreadableDocument(f"{skipped.name}: {skipped.why}")
