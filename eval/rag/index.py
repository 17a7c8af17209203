"""``kvblend index``: brings the folder of a pipeline up to date with a folder of documents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from retrieval import Changes, Document, RagPipeline, RagSettings
from retrieval.errors import SettingError, UnreadableDocument
from retrieval.loaders import Skipped, load_folder
from retrieval.rag.record import FILE, Record

__all__ = ["IndexOptions", "run_index"]


@dataclass(frozen=True)
class IndexOptions:
    """What is indexed, and where to.

    Attributes:
        documents: folder of documents.
        target: folder of the pipeline; made if need be.
        model: name of the model; None for the target's, or ``smollm2``.
        embedder: folder or hub id of the embedding model; None for the target's, or the packaged one.
        dtype: of the model; None for the target's, or the model's own.
        store: address of the chunk KV; None for the target's, or its folder ``kv``.
        prune: remove what is not in the folder of documents any more.
        settings: those of :class:`RagSettings` that were given; the others are the target's.
    """

    documents: Path
    target: Path
    model: str | None = None
    embedder: str | None = None
    dtype: torch.dtype | None = None
    store: str | None = None
    prune: bool = False
    settings: dict[str, Any] | None = None


def run_index(options: IndexOptions, console: Console) -> dict[str, Any]:
    """Reads, splits, embeds and encodes what is new or changed; prints and returns what that was.

    Ctrl-C keeps what is done; the next run does the rest only. ``complete`` is False then.

    Raises:
        SettingError: no such folder, or the pipeline's folder lies in it.
        UnreadableDocument: no document can be read.
        IndexMismatch: the pipeline's folder was made with another model, embedder or setting.
    """
    _require_apart(options.documents, options.target)
    started = time.perf_counter()
    skipped: list[Skipped] = []
    figures: dict[str, Any] = {"complete": False, "folder": str(options.documents), "to": str(options.target)}
    try:
        documents = _read(options.documents, skipped, console)
        with _open(options) as rag:
            changes = _sync(rag, documents, skipped, options.prune)
            stats = rag.stats()
    except KeyboardInterrupt:
        console.print("[yellow]interrupted[/]: what is done is kept; the same command does the rest")
        return figures
    figures |= {
        "complete": True,
        **changes._asdict(),
        "skipped": [file._asdict() for file in skipped],
        "documents": stats.documents,
        "passages_in_all": stats.passages,
        "found": stats.encoded - changes.encoded,
        "kv_bytes": _nbytes(options.target / "kv"),
        "other_bytes": _nbytes(options.target) - _nbytes(options.target / "kv"),
        "seconds": time.perf_counter() - started,
    }
    _show(figures, console)
    _tell_skipped(skipped, console)
    return figures


def _read(folder: Path, skipped: list[Skipped], console: Console) -> list[Document]:
    try:
        return list(load_folder(folder, progress=True, on_unreadable=skipped.append))
    except UnreadableDocument:
        _tell_skipped(skipped, console)
        raise


def _open(options: IndexOptions) -> RagPipeline:
    """The pipeline of the target, made if it is not there."""
    given = {"dtype": options.dtype, "store": options.store}
    others: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changed = options.settings or {}
    if (options.target / FILE).exists():
        settings = replace(Record.read(options.target).settings, **changed)
        return RagPipeline.load(options.target, options.model, options.embedder, settings=settings, **others)
    settings = RagSettings(**changed)
    return RagPipeline.from_pretrained(
        options.model or "smollm2", options.embedder, folder=options.target, settings=settings, **others
    )


def _sync(rag: RagPipeline, documents: Sequence[Document], skipped: Sequence[Skipped], prune: bool) -> Changes:
    changes = rag.sync(documents, encode="now", progress=True)
    if not prune:
        return changes
    there = {document.id for document in documents}
    gone = [entry.id for entry in rag.documents() if entry.id not in there and not _came_from(entry.source, skipped)]
    removed = rag.remove(gone)
    return changes._replace(removed=removed.removed, dropped=changes.dropped + removed.dropped)


def _came_from(source: str, skipped: Sequence[Skipped]) -> bool:
    """Whether a document may have come from a file that cannot be read now: then it is not known to be gone.

    Of a folder, or a file of many documents, the source is only the beginning.
    """
    return any(source == file.name or source.startswith((f"{file.name}/", f"{file.name}:")) for file in skipped)


def _require_apart(documents: Path, target: Path) -> None:
    """Refuses to index a pipeline's own files."""
    if not documents.is_dir():
        raise SettingError(f"there is no folder {documents}: name the folder that holds the documents")
    place, above = target.resolve(), documents.resolve()
    if place.is_relative_to(above) and not any(part.startswith(".") for part in place.relative_to(above).parts):
        raise SettingError(
            f"{target} lies in {documents}, so that its own files would be indexed: choose a place outside, or a "
            "hidden one such as .rag"
        )


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_row(
        "documents",
        f"{figures['added']:,} added, {figures['updated']:,} updated, {figures['unchanged']:,} unchanged, "
        f"{figures['removed']:,} removed, {len(figures['skipped']):,} skipped",
    )
    table.add_row("passages", f"{figures['passages']:,} embedded now, {figures['passages_in_all']:,} in all")
    table.add_row("KV", f"{figures['encoded']:,} passages encoded now, {figures['found']:,} found in the store")
    size = f"{figures['kv_bytes'] / 1e6:,.1f} MB of KV, {figures['other_bytes'] / 1e6:,.1f} MB of text and indexes"
    table.add_row("size", size)
    table.add_row("time", f"{figures['seconds']:,.1f} s")
    console.print(table, highlight=False)


def _tell_skipped(skipped: Sequence[Skipped], console: Console) -> None:
    if skipped:
        console.print(f"[yellow]skipped {len(skipped):,} file{'s' * (len(skipped) > 1)}[/]", highlight=False)
    for file in skipped:
        console.print(f"  {escape(file.name)}: {escape(file.why)}", highlight=False, soft_wrap=True)
