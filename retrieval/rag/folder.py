"""Where a pipeline lies on disk: opening the model over its store of chunk KV, and copying everything elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from blend import Blender, Chunk, open_store
from retrieval.errors import SettingError
from retrieval.rag.catalogue import Catalogue
from retrieval.rag.finder import Finder
from retrieval.rag.record import FILE, Record

__all__ = ["open_blender", "save"]

_STEP = 64  # entries that are copied together


def open_blender(
    model: str | os.PathLike[str], folder: str | os.PathLike[str] | None, store: str, options: dict[str, Any]
) -> Blender:
    """The model, over the store that belongs to a folder.

    Args:
        store: its address; a path without scheme lies in the folder; empty for ``kv`` there, or for memory.
    """
    if not isinstance(store, str):
        raise SettingError(
            f"store is a {type(store).__name__}: give its address, so that the folder can be opened again, or make the "
            "Blender yourself: RagPipeline(Blender.from_pretrained(model, store=store))"
        )
    options = {"bypass": False, **options}
    if folder is not None:
        options["store"] = _address(folder, store or "kv")
    elif store:
        options["store"] = store
    return Blender.from_pretrained(model, **options)


def save(
    record: Record,
    catalogue: Catalogue,
    finder: Finder,
    blender: Blender,
    own: Path | None,
    folder: str | os.PathLike[str] | None,
) -> None:
    """Writes a pipeline into ``folder``, or, where that is its ``own`` or None, its indexes only.

    The record comes last: a folder without it was not finished, and may be written again.

    Raises:
        SettingError: no folder, or one in which another pipeline lies.
    """
    if folder is None and own is None:
        raise SettingError("this pipeline has no folder of its own: name one")
    if folder is None or (own is not None and Path(folder).resolve() == own.resolve()):
        finder.save()
        return
    target = Path(folder)
    if (target / FILE).exists():
        raise SettingError(f"{os.fspath(folder)!r} holds a pipeline already: name another folder, or remove that one")
    target.mkdir(parents=True, exist_ok=True)
    catalogue.copy(target / "catalogue.sqlite")
    finder.save(target / "index")
    if not _lasting(record.store):
        codec = blender.store.codec  # what it loses is part of every key
        record = replace(record, store="kv" if codec == "none" else f"kv?codec={codec}")
        _copy_kv(catalogue, blender, record, target)
    record.write(target)


def _copy_kv(catalogue: Catalogue, blender: Blender, record: Record, target: Path) -> None:
    assert blender.text is not None, "a pipeline is refused without a tokenizer"
    system = blender.text.system_ids(record.settings.system)
    numbers = sorted(catalogue.numbers())
    with open_store(_address(target, record.store)) as store:
        for at in range(0, len(numbers), _STEP):
            chunks = [Chunk(ids) for ids in catalogue.ids(numbers[at : at + _STEP]).values()]
            keys = [key for chunk in chunks for key in blender.setup.keys(chunk, system)]
            store.put_many([kv for kv in blender.store.get_many(keys) if kv is not None])


def _lasting(store: str) -> bool:
    """Whether an address leads to the same entries from another process and folder."""
    return any("://" in tier and not tier.strip().startswith("memory:") for tier in store.split("|"))


def _address(folder: str | os.PathLike[str], store: str) -> str:
    """The address of a store; a relative path without scheme lies in the folder."""
    if "://" in store:
        return store
    place, found, options = store.partition("?")
    return f"file://{quote(os.fspath(Path(folder) / Path(place).expanduser()))}{found}{options}"
