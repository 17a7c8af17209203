"""An index in a folder, written whole or not at all. Knows files and their digests; what is in them, it does not know.

::

    folder/index.json        what the index is, and name, size and digest of each file: renamed into place at the end
    folder/files-3f2a.../    the files it names; a new set at every save, and the old one goes once the new one counts
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from retrieval.errors import DamagedIndex, IndexMismatch

__all__ = ["Opened", "open_folder", "saving"]

MANIFEST = "index.json"
FORMAT = 1


class Opened(NamedTuple):
    """A saved index: the folder of its files, and what its manifest says about it."""

    files: Path
    about: dict[str, Any]


@contextmanager
def saving(folder: str | os.PathLike[str], kind: str, about: Mapping[str, Any]) -> Iterator[Path]:
    """Gives a fresh folder to write files into; once the block ends they are the index, in place of the former ones.

    Args:
        kind: name of the index, compared when it is opened.
        about: plain data, filled in the block at the latest.

    Raises:
        DamagedIndex: the folder cannot be written to.
    """
    folder = Path(folder)
    fresh = folder / f"files-{uuid.uuid4().hex}"
    try:
        fresh.mkdir(parents=True)
        try:
            yield fresh
            files = {path.name: _sealed(path) for path in sorted(fresh.iterdir()) if path.is_file()}
            _publish(folder, {"format": FORMAT, "kind": kind, "folder": fresh.name, "files": files, "about": {**about}})
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except (OSError, RuntimeError) as error:  # the latter is how FAISS says it
        raise DamagedIndex(f"the {kind} index cannot be saved in {folder}: {error}") from error
    for old in folder.glob("files-*"):
        if old != fresh:
            shutil.rmtree(old, ignore_errors=True)  # where a reader holds it open, the next save removes it


def open_folder(folder: str | os.PathLike[str], kind: str, *, check: bool = True) -> Opened:
    """Finds the files of a saved index and compares them with what was written.

    Args:
        kind: which index it has to be.
        check: read every file and compare its digest; otherwise the sizes only.

    Raises:
        DamagedIndex: there is none, or a file of it is missing, cut off or changed.
        IndexMismatch: the folder holds another kind of index, or one of a later format.
    """
    manifest = _manifest(Path(folder))
    if manifest["format"] != FORMAT:
        raise IndexMismatch(f"{folder} holds an index of format {manifest['format']}, this version reads {FORMAT}")
    if manifest["kind"] != kind:
        raise IndexMismatch(f"{folder} holds an index of kind {manifest['kind']}, and {kind} was asked for")
    files = Path(folder) / manifest["folder"]
    for name, (size, digest) in manifest["files"].items():
        path = files / name
        try:
            same = path.stat().st_size == size and (not check or _digest(path) == digest)
        except OSError as error:
            raise DamagedIndex(f"{path} of the {kind} index cannot be read ({error}): make the index anew") from error
        if not same:
            raise DamagedIndex(f"{path} of the {kind} index is not what was written there: make the index anew")
    return Opened(files, manifest["about"])


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        line, _, seal = path.read_text(encoding="utf-8").partition("\n")
        if seal != _seal(line):
            raise ValueError("its digest is another")
        manifest: dict[str, Any] = json.loads(line)
    except FileNotFoundError as error:
        raise DamagedIndex(f"{folder} holds no index: {MANIFEST} is missing; make the index anew") from error
    except (OSError, ValueError) as error:
        raise DamagedIndex(f"{path} is damaged ({error}): make the index anew") from error
    return manifest


def _publish(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest beside its place and renames it there: the instant from which the new files count."""
    line = json.dumps(manifest)
    fresh = folder / f"{MANIFEST}.{manifest['folder']}"
    try:
        fresh.write_text(f"{line}\n{_seal(line)}", encoding="utf-8")
        _to_disk(fresh)
        os.replace(fresh, folder / MANIFEST)
    finally:
        fresh.unlink(missing_ok=True)


def _seal(line: str) -> str:
    """The second line of a manifest."""
    return f"{xxhash.xxh3_128_hexdigest(line.encode())}\n"


def _sealed(path: Path) -> tuple[int, str]:
    """Size and digest of a file that is on the disk for good."""
    _to_disk(path)
    return path.stat().st_size, _digest(path)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
