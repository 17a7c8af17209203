"""``kvblend store``: what lies in a store, whether it is whole, and how to clear out what no model uses any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Column, Table

from eval.cli_options import dtype_of

if TYPE_CHECKING:
    from blend.stores.base import Store
    from blend.stores.prune import Pruned

__all__ = ["app", "list_store", "prune_store", "verify_store"]

app = typer.Typer(no_args_is_help=True, help="Look after stores of chunk KV.")

UrlArgument = Annotated[str, typer.Argument(help="Such as file:///kv, redis://host/0 or s3://bucket/kv.")]


@app.command("ls")
def ls(url: UrlArgument) -> None:
    """Count entries and bytes, by model fingerprint and codec."""
    with _open(url) as store:
        list_store(store, Console())


@app.command("verify")
def verify(url: UrlArgument) -> None:
    """Read and check every entry. Damaged ones are removed; then the exit code is 1."""
    with _open(url) as store:
        whole = verify_store(store, Console())
    if not whole:
        raise typer.Exit(1)


@app.command("prune")
def prune_command(
    url: UrlArgument,
    model: Annotated[list[str] | None, typer.Option(help="Model whose entries stay; may be given again.")] = None,
    fingerprint: Annotated[list[str] | None, typer.Option(help="The same by fingerprint, as ls shows it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32 of the models; their own if not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove the entries of all other models, and of other format versions."""
    from blend.errors import StoreError  # torch is loaded once a command needs it

    if not model and not fingerprint:
        raise StoreError("nothing is named that stays: give --model or --fingerprint, so that not all is removed")
    keep = {*(fingerprint or ()), *(_fingerprint(name, dtype) for name in model or ())}
    with _open(url) as store:
        prune_store(store, keep, Console(), dry_run)


def list_store(store: Store, console: Console) -> dict[tuple[str, str], tuple[int, int]]:
    """Prints, and gives, entries and bytes per (fingerprint, codec)."""
    from blend.stores.listing import listing

    entries, nbytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for entry in listing(store):
        group = (entry.fingerprint or "not usable here", entry.codec or "?")
        entries[group] += 1
        nbytes[group] += entry.nbytes
    table = Table(Column("model fingerprint", overflow="fold"), "codec", "entries", "MB")
    for group in sorted(entries):
        table.add_row(*group, f"{entries[group]:,}", _mb(nbytes[group]))
    console.print(table)
    console.print(f"{entries.total():,} entries, {_mb(nbytes.total())} MB")
    return {group: (entries[group], nbytes[group]) for group in entries}


def verify_store(store: Store, console: Console) -> bool:
    """Reads every entry; whether all were whole."""
    keys = list(store.keys())
    before = store.stats.as_dict()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True) as progress:
        for key in progress.track(keys, description="checking"):
            store.get(key)
    stats = {name: count - before[name] for name, count in store.stats.as_dict().items()}
    rate = f", {stats['bytes_read'] / 1e6 / stats['read_seconds']:.0f} MB/s" if stats["read_seconds"] else ""
    console.print(f"{stats['hits']:,} entries are whole ({_mb(stats['bytes_read'])} MB{rate})")
    console.print(f"{stats['corrupt']:,} damaged and {stats['foreign']:,} foreign entries were removed")
    if stats["failures"]:
        console.print(f"[red]{stats['failures']:,} entries could not be read[/]")
    return not (stats["corrupt"] or stats["foreign"] or stats["failures"])


def prune_store(store: Store, keep: Collection[str], console: Console, dry_run: bool = False) -> Pruned:
    """Removes entries of models that are not in ``keep``, and says what went."""
    from blend.stores.prune import prune

    pruned = prune(store, keep, dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    console.print(
        f"{pruned.kept:,} entries kept; {pruned.removed:,} of other models and {pruned.unusable:,} of other format "
        f"versions or damaged {verb} ({_mb(pruned.freed_bytes)} MB)"
    )
    return pruned


def _open(url: str) -> Store:
    """Opens a store that is there: these commands look after stores, and make none."""
    from blend.errors import StoreError
    from blend.stores.url import open_store

    scheme, found, place = url.partition("://")
    folder = Path((place if found else url).partition("?")[0]).expanduser()
    if (scheme == "file" or not found) and not folder.is_dir():
        raise StoreError(f"there is no folder {folder}: name one that a store was opened in")
    return open_store(url)


def _fingerprint(model: str, dtype: str | None) -> str:
    from blend import Blender

    with Blender.from_pretrained(model, dtype=dtype_of(dtype), check=False) as blender:
        return blender.setup.fingerprint


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"
