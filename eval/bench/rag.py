"""The pipeline on real passages: a folder of files, indexed; what is found, what answering costs, what a second start.

Questions and passages come from a JSONL set with gold passages (``squad_xquad_en`` in ``$KVBLEND_DATA``), written as
one text file each into a temporary folder. An answer counts as right when its first line holds one of the gold answers.
TTFT is from token ids to the first token's logits, beside the model's own full prefill of the same prompt, one after
the other; retrieval is the same for both and is told apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from blend import Blender, BudgetError, Prompt
from blend.hf.progress import library_bars
from blend.progress import track
from eval.bench.ttft import full_prefill
from eval.machine import machine_record
from eval.metrics import METRICS
from eval.rag.sets import RagQuestion, RagSet, read_set, write_files
from retrieval import Document, Embedder, RagPipeline, RagSettings
from retrieval.loaders import load_folder

__all__ = ["RagOptions", "run_rag_bench"]

RETRIEVERS: tuple[Literal["dense", "sparse", "hybrid"], ...] = ("dense", "sparse", "hybrid")


@dataclass(frozen=True)
class RagOptions:
    """What is measured.

    Attributes:
        data: a JSONL set with gold passages, or the name of one in ``$KVBLEND_DATA``.
        passages: different passages in the folder, the questions' gold ones among them.
        questions: asked.
        k: passages per question.
        tokens: of an answer, at most.
        order: of the passages in the prompt.
        model: name of the model.
        seed: of the choice of questions.
        dtype: of weights and KV; None for bf16.

    Raises:
        BudgetError: a number out of range.
    """

    data: str = "squad_xquad_en"
    passages: int = 200
    questions: int = 20
    k: int = 6
    tokens: int = 24
    order: Literal["score", "best-last", "cache-aware"] = RagSettings.order
    model: str = "smollm2"
    seed: int = 0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if min(self.questions, self.k, self.tokens) < 1 or self.passages < self.questions:
            raise BudgetError(
                f"{self.questions} questions, {self.passages} passages, k {self.k}, {self.tokens} tokens: at least 1 "
                "of each, and as many passages as questions"
            )


def run_rag_bench(options: RagOptions, console: Console) -> dict[str, Any]:
    """Runs the bench, prints its tables and returns the figures as plain data."""
    chosen = read_set(options.data, passages=options.passages, questions=options.questions, seed=options.seed)
    with library_bars(False):
        embedder = Embedder()
    with tempfile.TemporaryDirectory() as place:
        files, rag_folder = Path(place) / "files", Path(place) / "rag"
        write_files(chosen, files)
        settings = RagSettings(k=options.k, order=options.order)
        first, (changes, seconds) = _start(options, embedder, rag_folder, settings, files)
        figures: dict[str, Any] = {
            "data": options.data,
            "order": options.order,
            "machine": machine_record(first.blender.view.dtype),
            "first_start": {**changes, **seconds, "kv_bytes": _bytes(rag_folder / "kv")},
            "recall": _recall(options, embedder, chosen, files),
        }
        with first:
            asked, figures["complete"] = _asked(first, chosen, options)
        if not figures["complete"]:
            console.print("[yellow]interrupted[/]: the questions so far")
        figures["questions"] = asked
        again, (changes, seconds) = _start(options, embedder, rag_folder, settings, files)
        with again:
            figures["second_start"] = {**changes, **seconds}
    figures["summary"] = _summary(asked)
    _show(figures, console)
    return figures


# --- steps --------------------------------------------------------------------------------------------


def _documents(files: Path) -> list[Document]:
    return list(load_folder(files))


def _start(
    options: RagOptions, embedder: Embedder, folder: Path, settings: RagSettings, files: Path
) -> tuple[RagPipeline, tuple[dict[str, int], dict[str, float]]]:
    """Opens the pipeline and brings it up to date with the files, as ``kvblend index`` does."""
    started = time.perf_counter()
    rag = RagPipeline.from_pretrained(
        options.model, embedder, folder=folder, settings=settings, dtype=options.dtype, progress=False
    )
    opened = time.perf_counter()
    changes = rag.sync(_documents(files), encode="now", progress=True)
    seconds = {"open_s": opened - started, "sync_s": time.perf_counter() - opened}
    return rag, ({**changes._asdict(), "passages_in_all": len(rag)}, seconds)


def _recall(options: RagOptions, embedder: Embedder, chosen: RagSet, files: Path) -> dict[str, float]:
    """Share of the questions whose gold file is among those of the ``k`` passages found, per retriever."""
    documents = _documents(files)
    found: dict[str, float] = {}
    with Blender.from_pretrained(options.model, dtype=options.dtype, check=False, progress=False) as blender:
        for retriever in RETRIEVERS:
            settings = RagSettings(retriever=retriever, k=options.k)
            with RagPipeline(blender, embedder, settings=settings) as rag:
                rag.add(documents, encode="never")
                right = [q.gold in {h.passage.document for h in rag.retrieve(q.text)} for q in chosen.questions]
            found[retriever] = statistics.mean(right)
    return found


def _asked(rag: RagPipeline, chosen: RagSet, options: RagOptions) -> tuple[list[dict[str, Any]], bool]:
    """Every question, fused and by full prefill in turns; and whether all were asked."""
    rag.ask(chosen.questions[0].text, 1, max_new_tokens=1)  # a first one, which does not count
    done: list[dict[str, Any]] = []
    try:
        for number, question in enumerate(
            track(chosen.questions, total=len(chosen.questions), label="asking", show=True)
        ):
            done.append(_one(rag, question, options, fused_first=bool(number % 2)))
    except KeyboardInterrupt:
        return done, False
    return done, True


def _one(rag: RagPipeline, question: RagQuestion, options: RagOptions, fused_first: bool) -> dict[str, Any]:
    context = rag.context(question.text, answer_rows=options.tokens)
    full = None if fused_first else _full(rag, context.prompt)
    answer = rag.ask(question.text, max_new_tokens=options.tokens)
    full = _full(rag, context.prompt) if full is None else full
    plain = rag.ask(question.text, max_new_tokens=options.tokens, full=True)
    report = answer.report
    return {
        "rows": report.rows,
        "retrieve_s": answer.seconds["retrieve"],
        "ttft_s": report.ttft,
        "full_s": full,
        "speedup": full / report.ttft,
        "ideal": report.ideal_speedup,
        "hit_rate": report.hit_rate,
        "found": question.gold in {hit.passage.document for hit in answer.hits},
        "right": bool(METRICS["held"](answer.text, question.answers)),
        "right_full": bool(METRICS["held"](plain.text, question.answers)),
        "same": answer.text == plain.text,
    }


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _full(rag: RagPipeline, prompt: Prompt) -> float:
    return full_prefill(rag.blender, torch.tensor([prompt.ids], device=rag.blender.view.device))


def _summary(asked: Sequence[dict[str, Any]]) -> dict[str, float]:
    if not asked:
        return {}
    medians = ("rows", "retrieve_s", "ttft_s", "full_s", "speedup", "ideal")
    means = ("hit_rate", "found", "right", "right_full", "same")
    return {
        **{name: statistics.median(row[name] for row in asked) for name in medians},
        **{name: statistics.mean(row[name] for row in asked) for name in means},
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(
        "start",
        "open, s",
        "sync, s",
        "new documents",
        "passages embedded",
        "encoded",
        title=f"{figures['data']}, {figures['order']}",
    )
    for name in ("first", "second"):
        start = figures[f"{name}_start"]
        seconds = (f"{start['open_s']:.1f}", f"{start['sync_s']:.1f}")
        table.add_row(name, *seconds, *(str(start[key]) for key in ("added", "passages", "encoded")))
    console.print(table)
    recall = ", ".join(f"{name} {share:.2f}" for name, share in figures["recall"].items())
    console.print(f"gold passage among those found: {recall}")
    if not (s := figures["summary"]):
        return
    console.print(
        f"{len(figures['questions'])} questions of {s['rows']:.0f} rows: TTFT fused {s['ttft_s']:.2f} s, full prefill "
        f"{s['full_s']:.2f} s: [bold]{s['speedup']:.2f}x[/] ({s['ideal']:.2f}x by row-layers); "
        f"{s['retrieve_s'] * 1e3:.0f} ms to retrieve; chunk hits {s['hit_rate']:.0%}"
    )
    console.print(
        f"answers that hold the gold one: fused {s['right']:.2f}, full prefill {s['right_full']:.2f}; "
        f"word for word the same: {s['same']:.2f}"
    )
