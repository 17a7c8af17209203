"""Time to first token with the chunks in memory, on disk (warm and cold) and in Redis; read before computing or beside.

Every run stands between two full prefills and is compared with their mean. Cold means that the operating system was
told to forget the files' pages before the run. What a request without a single hit costs is measured too: a look-up
in an empty store, then a plain prefill.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blend import Blender, Chunk, Fusion, MemoryStore, Prompt, Selector
from blend.admission import admit
from blend.afterwards import Afterwards
from blend.errors import StoreUnavailable
from blend.fuse import fuse
from blend.prefix import RadixPrefixCache
from blend.progress import track
from blend.setup import Setup
from blend.stores import DiskStore, Store, open_store
from eval.bench.ttft import BenchOptions, bench_prompt, full_prefill, methods
from eval.machine import machine_record

__all__ = ["Case", "StoresOptions", "run_stores_bench"]


@dataclass(frozen=True)
class StoresOptions:
    """What is measured: ``bench``'s prompt, pairs and ratio, its first system (ProphetKV if none is named).

    Attributes:
        bench: model, rows, chunk rows, ratio, pairs, dtype.
        folder: where the disk store lies; None for a temporary one.
        redis: URL of a server; None starts one where ``redis-server`` is installed.
        codec: of the disk and Redis stores.
    """

    bench: BenchOptions = field(default_factory=BenchOptions)
    folder: Path | None = None
    redis: str | None = None
    codec: str = "none"


@dataclass
class Case:
    """One way of keeping the chunks."""

    name: str
    setup: Setup
    before: Callable[[], None] = lambda: None
    ttft: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    fusion: Fusion | None = None
    loads: list[tuple[float, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Medians over the pairs."""
        assert self.fusion is not None
        pairs = zip(self.full, self.ttft, strict=True)
        return {
            "ttft_s": statistics.median(self.ttft),
            "speedup": statistics.median(full / ttft for full, ttft in pairs),
            "read_bytes": self.fusion.report.load.nbytes,
            "load_s": statistics.median(seconds for seconds, _ in self.loads),
            "waited_s": statistics.median(waited for _, waited in self.loads),
            "hiding_ratio": self.fusion.report.load.hiding_ratio,
            "hits": sum(chunk.source == "hit" for chunk in self.fusion.report.chunks),
        }


def run_stores_bench(options: StoresOptions, console: Console, blender: Blender | None = None) -> dict[str, Any]:
    """Runs the bench, prints its table and returns the figures as plain data.

    Raises:
        StoreUnavailable: the Redis server named does not answer.
    """
    bench = options.bench
    name, selector = next(iter(methods(bench.ratio, bench.systems or ("prophetkv",)).items()))
    own = blender is None
    blender = blender or Blender.from_pretrained(bench.model, dtype=bench.dtype, background=None)
    prompt = bench_prompt(blender, bench)
    admit(blender.view, blender.tokenizer, prompt)
    blender.encode(prompt.chunks, system=prompt.system, progress=True)
    complete = True
    with ExitStack() as stack:
        cases = _cases(blender, options, stack, console)
        try:
            _measure(blender, prompt, selector, cases, bench.pairs)
        except KeyboardInterrupt:
            complete = False
    figures = {
        "model": bench.model,
        "machine": machine_record(blender.view.dtype),
        "rows": len(prompt),
        "chunks": len(prompt.chunks),
        "system": name,
        "ratio": bench.ratio,
        "codec": options.codec,
        "pairs": bench.pairs,
        "complete": complete,
        "full_s": statistics.median(s for case in cases for s in case.full) if cases[-1].full else None,
        "stores": {case.name: case.as_dict() for case in cases if case.ttft},
    }
    console.print(_table(figures))
    if own:
        blender.close()
    return figures


def _cases(blender: Blender, options: StoresOptions, stack: ExitStack, console: Console) -> list[Case]:
    """Every way, each store filled with the same entries."""
    base = blender.setup
    folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvblend-bench-")))
    disk = stack.enter_context(DiskStore(folder, codec=options.codec))
    slow: list[tuple[str, Store, Callable[[], None]]] = [
        ("disk, warm", disk, lambda: None),
        ("disk, cold", disk, lambda: _forget(folder)),
    ]
    try:
        url = options.redis or stack.enter_context(_redis_server())
        slow.append(("Redis", stack.enter_context(open_store(f"{url}?codec={options.codec}")), lambda: None))
    except FileNotFoundError:
        console.print("[yellow]no Redis[/]: redis-server is not installed; install it or give --redis URL")
    cases = [Case("memory", base)]
    for name, store, before in slow:
        setup = replace(base, store=store)
        _fill(base, setup)
        cases.append(Case(f"{name}, read before", replace(setup, overlap=False), before))
        cases.append(Case(f"{name}, read beside", setup, before))
    empty = replace(base, store=MemoryStore(1), prefix=RadixPrefixCache(1), afterwards=Afterwards())
    stack.enter_context(empty.afterwards.request())  # nothing is encoded behind the measurements' back
    stack.callback(empty.afterwards.close, finish=False)
    cases.append(Case("nowhere, prefill first", replace(empty, on_miss="prefill")))
    cases.append(Case("nowhere, encode first", empty))
    return cases


def _fill(base: Setup, setup: Setup) -> None:
    """Puts all entries of one store into another, under the keys that its codec gives them."""
    for key in list(base.store.keys()):
        kv = base.store.get(key)
        assert kv is not None
        own = setup.plan(kv.prelude).key(Chunk(kv.ids))
        if not setup.store.put(replace(kv, key=own)):
            raise StoreUnavailable(f"the store did not take an entry of {kv.nbytes} bytes: is there room?")


def _measure(blender: Blender, prompt: Prompt, selector: Selector, cases: list[Case], pairs: int) -> None:
    for case, seconds, full in track(
        _rounds(blender, prompt, selector, cases, pairs), total=pairs * len(cases), label="measuring"
    ):
        assert case.fusion is not None
        load = case.fusion.report.load
        case.ttft.append(seconds)
        case.full.append(full)
        case.loads.append((load.seconds, load.waited))


def _rounds(
    blender: Blender, prompt: Prompt, selector: Selector, cases: list[Case], pairs: int
) -> Iterator[tuple[Case, float, float]]:
    ids_1T = torch.tensor([prompt.ids])
    for case in cases:
        case.fusion = fuse(case.setup, prompt, selector)
    before = full_prefill(blender, ids_1T)
    for _ in range(pairs):
        for case in cases:
            case.before()
            started = time.perf_counter()
            case.fusion = fuse(case.setup, prompt, selector)
            case.fusion.logits.argmax().item()
            seconds = time.perf_counter() - started
            after = full_prefill(blender, ids_1T)
            yield case, seconds, (before + after) / 2
            before = after


def _forget(folder: Path) -> None:
    """Drops the files' pages from the page cache. They were synced when they were written."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _redis_server() -> Iterator[str]:
    """A server of one's own on a free port, gone afterwards; FileNotFoundError where there is no binary."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise FileNotFoundError("redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvblend-redis-") as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _await(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


def _await(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise StoreUnavailable(f"redis-server does not answer on port {port}")


def _table(figures: dict[str, Any]) -> Table:
    title = (
        f"{figures['model']}, {figures['rows']} rows in {figures['chunks']} chunks, {figures['system']} at ratio "
        f"{figures['ratio']}, codec {figures['codec']}, {figures['machine']['threads']} thread(s), "
        f"median of {figures['pairs']} pairs"
    )
    table = Table("chunks are in", "TTFT s", "speed-up", "read MB", "load ms", "not hidden ms", "hits", title=title)
    if figures["full_s"]:
        table.add_row("(full prefill)", f"{figures['full_s']:.3f}", "1.00x", "", "", "", "")
    for name, f in figures["stores"].items():
        read = (f"{f['read_bytes'] / 1e6:.1f}", f"{f['load_s'] * 1e3:.0f}", f"{f['waited_s'] * 1e3:.0f}")
        shown = read if f["read_bytes"] else ("", "", "")
        table.add_row(name, f"{f['ttft_s']:.3f}", f"{f['speedup']:.3f}x", *shown, str(f["hits"]))
    return table
