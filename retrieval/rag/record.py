"""What a pipeline's folder was made with, and whether what opens it is the same.

::

    rag/settings.json       this record
    rag/catalogue.sqlite    documents and passages
    rag/index/              indexes, made from the catalogue
    rag/kv/                 chunk KV, unless another store was named
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from blend import Blender
from blend.hf.progress import library_bars
from retrieval.embed import Embedder, Embeds
from retrieval.errors import DamagedIndex, IndexMismatch
from retrieval.rag.settings import RagSettings

__all__ = ["FILE", "Record", "embedder_of"]

FILE = "settings.json"
_FORMAT = 1


@dataclass(frozen=True)
class Record:
    """The contents of ``settings.json``.

    Attributes:
        model: name that the model was loaded by; empty where it was handed over.
        fingerprint: of model, dtype and tokenizer.
        dtype: of the model, such as ``bfloat16``.
        prelude: what passages are encoded behind.
        embedder: folder or hub id of the embedding model; empty for the packaged one.
        embedder_identity: of its weights; empty without an embedder.
        store: address of the chunk KV; relative folders lie in the pipeline's own.
        settings: of the pipeline.
    """

    model: str
    fingerprint: str
    dtype: str
    prelude: str
    embedder: str
    embedder_identity: str
    store: str
    settings: RagSettings

    @classmethod
    def of(cls, blender: Blender, embedder: Embeds | None, settings: RagSettings, model: str, store: str) -> Record:
        """What these are recorded as."""
        setup, dtype = blender.setup, str(blender.view.dtype).removeprefix("torch.")
        name, identity = (embedder.name, embedder.identity) if embedder else ("", "")
        return cls(model, setup.fingerprint, dtype, setup.prelude, name, identity, store, settings)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Record:
        """The record of a folder.

        Raises:
            IndexMismatch: it is no pipeline's folder, or one of another version.
            DamagedIndex: the record cannot be read.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise IndexMismatch(
                f"{os.fspath(folder)!r} is no folder of a pipeline (it has no {FILE}): "
                "make one with `kvblend index` or RagPipeline.from_pretrained(folder=...)"
            )
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            version = plain.pop("format")
            plain["settings"] = RagSettings.from_dict(plain["settings"])
            record = cls(**plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedIndex(f"{FILE} in {os.fspath(folder)!r} cannot be read ({error}): index anew") from error
        if version != _FORMAT:
            raise IndexMismatch(
                f"{os.fspath(folder)!r} has format {version}, and this version reads {_FORMAT}: index anew"
            )
        return record

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes the record, whole or not at all."""
        plain: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        draft = Path(folder) / f"{FILE}.{os.getpid()}.tmp"
        draft.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(Path(folder) / FILE)

    def require(self, other: Record) -> None:
        """Raises :class:`IndexMismatch` where a folder was made with something else than ``other``, and says what."""
        if self.fingerprint != other.fingerprint:
            raise IndexMismatch(
                f"the folder was made with the model {_model(self)}, and is opened with {_model(other)}: weights, "
                "dtype or tokenizer differ, so its KV would be wrong; open it with the same model, or index anew"
            )
        for name, value in self.settings.as_dict().items():
            given = getattr(other.settings, name)
            if name in _FIXED and value != given:
                raise IndexMismatch(
                    f"the folder was made with {name}={value!r}, and is opened with {given!r}: its passages depend on "
                    "it; leave it as it is, or index anew"
                )
        if self.embedder_identity != other.embedder_identity:
            raise IndexMismatch(
                f"the folder was made with the embedder {_embedder(self)}, and is opened with {_embedder(other)}: "
                "their vectors do not compare; open it with the same embedder, or index anew"
            )
        if self.prelude != other.prelude:
            raise IndexMismatch(
                f"the folder was made with prelude={self.prelude!r}, and is opened with {other.prelude!r}: no passage "
                "would be found in its store; open it with the same prelude, or index anew"
            )

    def named_model(self) -> str:
        """The name to load the model by.

        Raises:
            IndexMismatch: the folder's pipeline was given a Blender, whose model has no name.
        """
        if not self.model:
            raise IndexMismatch(
                "the folder does not say what its model is called, since its pipeline was given a Blender: "
                "load(folder, model=...)"
            )
        return self.model

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


_FIXED = ("size", "overlap", "retriever", "dense", "system", "passage")
"""Settings that what lies in a folder depends on; the others may change from one opening to the next."""


def embedder_of(given: Embeds | str | os.PathLike[str] | None, settings: RagSettings) -> Embeds | None:
    """The embedder that a pipeline needs: the one given, loaded by name, or the packaged one; None for words alone."""
    if settings.retriever == "sparse":
        return None
    if given is None or isinstance(given, str | os.PathLike):
        with library_bars(False):
            return Embedder(given)
    return given


def _model(record: Record) -> str:
    return f"{record.model or 'without a name'!r} [{record.fingerprint[:12]}, {record.dtype}]"


def _embedder(record: Record) -> str:
    if not record.embedder_identity:
        return "none (words alone)"
    return f"{record.embedder or 'that is packaged'!r} [{record.embedder_identity[:12]}]"
