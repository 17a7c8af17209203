"""Sets through the library ``datasets``: from the hub, or local files with the columns of a task's hub set.

Knows that library; what the columns mean, the task's own file knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.tasks.base import DataError, HubSet, Row
from eval.vocabulary import Example

__all__ = ["read_hub"]

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Local files that can be read, by suffix."""


def read_hub(hub: HubSet, choose: Callable[[Sequence[Example]], list[Example]], seed: int) -> list[Example]:
    """The chosen examples of a set, with the contexts that it gives them.

    Args:
        hub: its ``path`` may also be a local folder or file. A file is one split: demonstrations come from it as well.
        choose: picks from all examples.
        seed: of contexts drawn from other examples.

    Raises:
        DataError: it cannot be loaded, or a row has other columns.
    """
    one_file = Path(hub.path).is_file()
    examples = list(_examples(hub, hub.split))
    chosen = choose(examples)
    if hub.fill is None:
        return chosen
    pool = examples if hub.shots is None or one_file else list(_examples(hub, hub.shots))
    return hub.fill(chosen, pool, seed)


def _examples(hub: HubSet, split: str) -> Iterator[Example]:
    for number, row in enumerate(_rows(hub, split)):
        try:
            example = hub.convert(row)
        except DataError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"row {number} of {hub.path} is not of this task's form ({type(error).__name__}: {error}): its columns "
                f"are {', '.join(row)}"
            ) from error
        yield replace(example, id=example.id or str(number))


def _rows(hub: HubSet, split: str) -> Sequence[Row]:
    import datasets  # takes a second, so only who reads with it waits for it

    try:
        rows: Sequence[Row] = datasets.load_dataset(**_arguments(hub, split))
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error) or "it is empty"
        raise DataError(
            f"{_place(hub, split)} cannot be loaded: {reason}. Without a network, give a local copy: "
            "hub:FOLDER or hub:FILE (.json, .jsonl, .csv, .parquet)"
        ) from error
    return rows


def _arguments(hub: HubSet, split: str) -> dict[str, Any]:
    """Of ``datasets.load_dataset``; it calls the only split of a file ``train``."""
    path = Path(hub.path)
    if not path.is_file():
        return {"path": hub.path, "name": hub.config, "revision": hub.revision, "split": split}
    if path.suffix not in _BUILDERS:
        raise ValueError(f"its name does not end in {', '.join(_BUILDERS)}")
    return {"path": _BUILDERS[path.suffix], "data_files": str(path), "split": "train"}


def _place(hub: HubSet, split: str) -> str:
    if Path(hub.path).is_file():
        return f"the file {hub.path}"
    if Path(hub.path).is_dir():
        return f"split {split} of the folder {hub.path}"
    config = "" if hub.config is None else f", configuration {hub.config}"
    return f"split {split} of {hub.path}{config}, on the hub,"
