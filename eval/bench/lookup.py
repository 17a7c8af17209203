"""``kvblend bench lookup``: what it costs to find, add and drop an entry among a million.

No model, and KV of a byte or two: what is timed is the way to an entry, and not the copying of it. A look-up is timed
alone, the clock's own 0.1 us included; adding and dropping are timed as a whole and divided, as a few of them pay for
many. Keys and tokens are made beforehand, hashing them is part of the look-up.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import multiprocessing
import os
import random
import signal
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from blend.chunk import ChunkKV, KVLayers
from blend.errors import BudgetError, KVBlendError
from blend.prefix import BlockPrefixCache, PrefixCache, RadixPrefixCache
from blend.progress import track
from blend.stores.eviction import POLICIES, EvictionQueue, policy_by_name
from blend.stores.memory import MemoryStore
from eval.machine import machine_record

__all__ = ["SUBJECTS", "TARGETS_US", "BenchFailed", "LookupOptions", "run_lookup_bench"]

TARGETS_US = {"p50": 10.0, "p99": 50.0, "insert": 50.0, "evict": 50.0}
"""Microseconds per chunk or block to stay under."""

_PAIR_BYTES = 2  # a key and a value of one byte


class BenchFailed(KVBlendError):
    """A measurement's process ended without a result."""


@dataclass(frozen=True)
class LookupOptions:
    """What is measured.

    Attributes:
        entries: chunks, or blocks, held.
        lookups: that are timed, of entries held and of others each.
        block: rows of a block.
        path: blocks of a sequence; a quarter of them it shares with others.
        seed: of the order of look-ups.
        subjects: names of :data:`SUBJECTS`; all of them where none is given.
        isolate: measure each in a process of its own, so that none lives off memory that another has freed.

    Raises:
        BudgetError: a number out of range.
    """

    entries: int = 1_000_000
    lookups: int = 100_000
    block: int = 16
    path: int = 32
    seed: int = 0
    subjects: tuple[str, ...] = ()
    isolate: bool = True

    def __post_init__(self) -> None:
        for name in self.subjects:
            if name not in SUBJECTS:
                raise BudgetError(f"there is nothing named {name!r} to look up in: choose from {', '.join(SUBJECTS)}")
        for name, least in (("entries", self.path), ("lookups", 1), ("block", 1), ("path", 4)):
            if getattr(self, name) < least:
                raise BudgetError(f"{name} is {getattr(self, name)}: it must be {least} or more")


def run_lookup_bench(options: LookupOptions, console: Console) -> dict[str, Any]:
    """Runs the bench, prints its table and returns the figures as plain data.

    After Ctrl-C what was finished is shown and returned, with ``complete`` False.

    Raises:
        BenchFailed: a measurement's process died, for want of memory for example.

    Returns:
        Under ``results`` one dict per thing measured: ``name``, ``unit`` (chunk or block), ``entries``, ``hit_us`` and
        ``miss_us`` (p50, p90 and p99 of a look-up), ``unit_us`` (the same of a hit, divided by its blocks),
        ``insert_us`` and ``evict_us`` (mean per unit), ``bytes_per_entry`` (growth of resident memory; None where the
        system does not tell) and ``missed`` (the targets that were).
    """
    figures: dict[str, Any] = {
        "entries": options.entries,
        "targets_us": TARGETS_US,
        "complete": False,
        "machine": {name: value for name, value in machine_record(torch.uint8).items() if name != "dtype"},
        "results": [],
    }
    names = options.subjects or tuple(SUBJECTS)
    try:
        for result in track(_results(names, options), total=len(names), label="measuring"):
            figures["results"].append(result)
        figures["complete"] = True
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted[/] after {len(figures['results'])} of {len(names)} measurements")
    if figures["results"]:
        console.print(_table(figures))
        console.print(_verdict(figures), highlight=False)
    return figures


def _results(names: Iterable[str], options: LookupOptions) -> Iterator[dict[str, Any]]:
    measure = _isolated if options.isolate else _measure
    return (measure(options, name) for name in names)


def _isolated(options: LookupOptions, name: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, options, name), daemon=True)
    child.start()
    sender.close()  # the child's end is now the only one: if it dies, reading ends
    try:
        result: dict[str, Any] = receiver.recv()
        return result
    except EOFError as error:
        raise BenchFailed(f"the process that measured {name!r} died: see above, or measure fewer entries") from error
    finally:
        child.kill()
        child.join()


def _send(sender: Any, options: LookupOptions, name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which then ends this process
    sender.send(_measure(options, name))


def _measure(options: LookupOptions, name: str) -> dict[str, Any]:
    result = {"name": name, **SUBJECTS[name](options)}
    size = result.pop("nbytes") / result["entries"]
    judged = _judged(result)
    missed = [target for target, most in TARGETS_US.items() if judged[target] >= most]
    return {**result, "bytes_per_entry": None if math.isnan(size) else size, "missed": missed}


def _judged(result: dict[str, Any]) -> dict[str, float]:
    """The figures that have a target, by its name."""
    return {**result["unit_us"], "insert": result["insert_us"], "evict": result["evict_us"]}


# --- the three things measured ----------------------------------------------------------------------------------------


def _queue(options: LookupOptions, policy: str) -> dict[str, Any]:
    """An eviction queue alone: a look-up is ``in`` and ``use``, and every entry was used before the evictions."""
    count, begin = options.entries, _memory()
    queue = EvictionQueue(policy_by_name(policy))

    def find(key: int) -> None:
        if key in queue:
            queue.use(key)

    insert = _mean(lambda i: queue.add(i, 1), range(count))
    size = _memory() - begin
    lookups = _lookups(options, find, count, lambda number: number)
    for key in range(count):
        queue.use(key)
    evict = _mean(lambda _: queue.evict(), range(max(count // 2, 1)))
    return {"unit": "chunk", "entries": count, **lookups, "insert_us": insert, "evict_us": evict, "nbytes": size}


def _store(options: LookupOptions) -> dict[str, Any]:
    """A memory store: a look-up is ``in`` and ``get``, and evicting is what a put into a full store costs."""
    count, begin = options.entries, _memory()
    store, layers = MemoryStore(limit=count * _PAIR_BYTES), _layers(1)

    def put(number: int) -> None:
        store.put(ChunkKV(_name(number), "bench", (number,), (), 1, layers))

    def find(key: str) -> None:
        if key in store:
            store.get(key)

    insert = _mean(put, range(count))
    size = _memory() - begin
    lookups = _lookups(options, find, count, _name)
    evict = _mean(put, range(count, count + max(count // 10, 1)))
    return {"unit": "chunk", "entries": count, **lookups, "insert_us": insert, "evict_us": evict, "nbytes": size}


def _prefix(options: LookupOptions, make: Callable[[int, int], PrefixCache]) -> dict[str, Any]:
    """A prefix cache: a look-up is ``match(lock=True)`` and ``unlock`` of a whole sequence."""
    block, path, begin = options.block, options.path, _memory()
    shared = path // 4
    count = max(options.entries // (path - shared), 1)
    cache, layers = make(2 * options.entries * block * _PAIR_BYTES, block), _layers(path * block)

    def find(ids: array[int]) -> None:
        hit = cache.match(ids, lock=True)
        if hit is not None:
            cache.unlock(hit)

    def sequence(number: int) -> array[int]:
        """The first quarter is that of its group of 64, all else its own; no token stands in both."""
        head, own = 2 * (number // 64) * path, (2 * number + 1) * path
        parts = range(head * block, (head + shared) * block), range((own + shared) * block, (own + path) * block)
        return array("q", itertools.chain(*parts))

    # Batches, as the tokens of all sequences at once would fill the memory.
    batches = [range(first, min(first + 1000, count)) for first in range(0, count, 1000)]
    insert = sum(_mean(lambda ids: cache.insert(ids, layers), map(sequence, each)) * len(each) for each in batches)
    size, blocks = _memory() - begin, cache.stats().stored_rows // block
    lookups = _lookups(options, find, count, sequence, path)
    evict = _mean(lambda _: cache.evict(block * _PAIR_BYTES), range(max(blocks // 2, 1)))
    insert /= blocks
    return {"unit": "block", "entries": blocks, **lookups, "insert_us": insert, "evict_us": evict, "nbytes": size}


SUBJECTS: dict[str, Callable[[LookupOptions], dict[str, Any]]] = {
    **{f"queue {policy}": partial(_queue, policy=policy) for policy in POLICIES},
    "block prefix cache": partial(_prefix, make=lambda limit, block: BlockPrefixCache(limit, block=block)),
    "radix prefix cache": partial(_prefix, make=lambda limit, block: RadixPrefixCache(limit)),
    "memory store": _store,
}
"""What is measured, by name."""

# --- clocks -----------------------------------------------------------------------------------------------------------


def _each(call: Callable[[Any], object], things: Iterable[Any]) -> np.ndarray:
    """Microseconds of each call; making the things is not part of it."""
    taken, now = array("q"), time.perf_counter_ns
    for thing in things:
        begin = now()
        call(thing)
        taken.append(now() - begin)
    return np.asarray(taken) / 1000


def _mean(call: Callable[[Any], object], things: Iterable[Any]) -> float:
    """Microseconds per call of all calls together; things are made beforehand."""
    ready = list(things)
    begin = time.perf_counter()
    for thing in ready:
        call(thing)
    return (time.perf_counter() - begin) / len(ready) * 1e6


def _lookups(
    options: LookupOptions, find: Callable[[Any], None], count: int, name: Callable[[int], Any], units: int = 1
) -> dict[str, Any]:
    """Percentiles of look-ups of ``name(i)``, which is held for i below ``count``; each finds ``units`` units."""
    draw = random.Random(options.seed)
    hits = _each(find, (name(draw.randrange(count)) for _ in range(options.lookups)))
    misses = _each(find, (name(count + 64 + draw.randrange(count)) for _ in range(options.lookups)))
    return {"hit_us": _percentiles(hits), "miss_us": _percentiles(misses), "unit_us": _percentiles(hits / units)}


def _percentiles(micros: np.ndarray) -> dict[str, float]:
    return dict(zip(("p50", "p90", "p99"), map(float, np.percentile(micros, (50, 90, 99))), strict=True))


def _memory() -> float:
    """Resident bytes of this process, once what is free was given back; not a number where the system does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, and the next measurement would live off it
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, AttributeError, TypeError):
        return math.nan
    return pages * os.sysconf("SC_PAGE_SIZE")


def _name(number: int) -> str:
    """A key as long as a real one, made anew each time: its hash is not known yet."""
    return f"{number:064x}"


def _layers(rows: int) -> KVLayers:
    zeros = torch.zeros(1, rows, 1, dtype=torch.uint8)
    return ((zeros, zeros),)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _table(figures: dict[str, Any]) -> Table:
    title = f"{figures['entries']:,} entries held: microseconds; red misses its target"
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for name in ("hit p50", "hit p99", "miss p50", "p50 per unit", "p99 per unit", "insert", "evict", "bytes each"):
        table.add_column(name, justify="right")
    for result in figures["results"]:
        table.add_row(f"{result['name']} (per {result['unit']})", *_cells(result))
    return table


def _cells(result: dict[str, Any]) -> Iterator[str]:
    for figure in (result["hit_us"]["p50"], result["hit_us"]["p99"], result["miss_us"]["p50"]):
        yield f"{figure:.2f}"
    judged = _judged(result)
    for name in TARGETS_US:
        yield f"[red]{judged[name]:.2f}[/]" if name in result["missed"] else f"{judged[name]:.2f}"
    size = result["bytes_per_entry"]
    yield "–" if size is None else f"{size:,.0f}"


def _verdict(figures: dict[str, Any]) -> str:
    targets = ", ".join(f"{name} < {most:g} us" for name, most in TARGETS_US.items())
    missed = [f"{r['name']}: {', '.join(r['missed'])}" for r in figures["results"] if r["missed"]]
    return f"Targets per chunk or block: {targets}. " + (
        f"Missed by {'; '.join(missed)}." if missed else "All are met."
    )
