"""``kvblend ask`` and ``kvblend chat``: answers as they come, where they come from, and what they took."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from blend import PromptError, Report
from blend.errors import KVBlendError
from blend.report_view import as_table, coloured_prompt, legend
from eval.systems.exact import full_prefill
from retrieval import RagAnswer, RagPipeline, RagStream

__all__ = ["AskOptions", "run_ask", "run_chat"]

HELP = "/sources lists the passages of the last answer, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True)
class AskOptions:
    """What is asked of which pipeline.

    Attributes:
        folder: of the pipeline.
        model: name of the model; None for the folder's.
        k: passages; None for the folder's setting.
        max_new_tokens: of an answer; None for the pipeline's default.
        explain: print the report and the prompt in colours.
        compare: answer by full prefill too.
    """

    folder: Path
    model: str | None = None
    k: int | None = None
    max_new_tokens: int | None = None
    explain: bool = False
    compare: bool = False


def run_ask(options: AskOptions, question: str, console: Console) -> dict[str, Any]:
    """Answers one question, prints the answer as it comes and its passages, and returns both as plain data.

    Ctrl-C stops the answer; ``complete`` is False then.

    Raises:
        PromptError: an empty question.
        IndexMismatch, DamagedIndex: the folder is no pipeline's, or opened with another model.
    """
    if not question.strip():
        raise PromptError('the question is empty: ask something, such as kvblend ask rag/ "Who built the pier?"')
    with RagPipeline.load(options.folder, options.model) as rag:
        if options.compare:
            _warm_up(rag, question, options)
        stream = rag.stream(question, options.k, max_new_tokens=options.max_new_tokens)
        complete = _say(stream, console)
        answer = stream.answer
        figures = {"complete": complete, **_figures(answer)}
        _cite(answer, console)
        if options.explain:
            _explain(answer.report, console)
        if options.compare and complete:
            figures["full"] = _compare(rag, stream, options, console)
        return figures


def run_chat(options: AskOptions, console: Console) -> None:
    """A conversation: questions from the keyboard, or line by line from a pipe."""
    with RagPipeline.load(options.folder, options.model) as rag:
        stats = rag.stats()
        where = f"{options.folder}: {stats.documents:,} documents, {stats.passages:,} passages"
        console.print(f"[bold]{escape(where)}[/]. {HELP}.", highlight=False, soft_wrap=True)
        chat = rag.chat(options.k)
        for line in _lines(console):
            if line == "/sources":
                if chat.turns:
                    _cite(chat.turns[-1], console)
                else:
                    console.print("nothing has been asked yet")
            elif line.startswith("/"):
                console.print(f"{escape(line)} is no command. {HELP}.", highlight=False, soft_wrap=True)
            else:
                try:
                    _say(chat.stream(line, max_new_tokens=options.max_new_tokens), console)
                except KVBlendError as error:
                    console.print(f"[red]error[/]: {escape(str(error))}", highlight=False)
                except KeyboardInterrupt:
                    console.print("[yellow]stopped[/] before the first word")


def _lines(console: Console) -> Iterator[str]:
    """Lines that were typed or piped, blank ones left out, up to the end or ``/quit``."""
    prompt = "[bold green]>[/] " if sys.stdin.isatty() else ""
    while True:
        try:
            line = console.input(prompt).strip()
        except EOFError:
            console.print()
            return
        if line == "/quit":
            return
        if line:
            yield line


# --- one answer -------------------------------------------------------------------------------------------------------


def _say(stream: RagStream, console: Console) -> bool:
    """Prints an answer as it comes, and one line on what it took; whether it came to its end."""
    complete = True
    try:
        for piece in stream:
            console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        complete = False
    stream.close()
    console.out("" if complete else " ...")
    console.print(_line(stream.report), style="dim", highlight=False, soft_wrap=True)
    for note in stream.context.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", highlight=False, soft_wrap=True)
    return complete


def _line(report: Report) -> str:
    if report.fallback is not None:
        return f"{report.rows:,} rows prefilled ({report.fallback}); first token after {_ms(report)}"
    context = f", {report.context_rows:,} of them from earlier turns" if report.context_rows else ""
    fresh = report.rows - report.reused_rows - report.recomputed_rows
    return (
        f"{report.rows:,} rows: {report.reused_rows:,} reused{context}, {report.recomputed_rows:,} recomputed, "
        f"{fresh:,} new; first token after {_ms(report)}"
    )


def _ms(report: Report) -> str:
    return f"{report.ttft * 1e3:,.0f} ms"


def _cite(answer: RagAnswer, console: Console) -> None:
    table = Table("", "passage", "score", "begins", box=None, pad_edge=False, header_style="bold")
    for number, hit in enumerate(answer.hits, 1):
        beginning = " ".join(hit.passage.text.split())[:60]
        table.add_row(str(number), Text(hit.passage.citation), f"{hit.score:.3f}", Text(beginning, style="dim"))
    console.print(table, highlight=False)


def _explain(report: Report, console: Console) -> None:
    console.print(as_table(report))
    console.print(legend())
    console.print(coloured_prompt(report))


def _figures(answer: RagAnswer) -> dict[str, Any]:
    hits = [
        {
            "citation": hit.passage.citation,
            "document": hit.passage.document,
            "score": hit.score,
            "text": hit.passage.text,
        }
        for hit in answer.hits
    ]
    return {
        "question": answer.question,
        "answer": answer.text,
        "hits": hits,
        "notes": list(answer.notes),
        "seconds": answer.seconds,
        "report": answer.report.as_dict(),
    }


# --- beside full prefill ----------------------------------------------------------------------------------------------


def _warm_up(rag: RagPipeline, question: str, options: AskOptions) -> None:
    """Both ways once, so that neither pays for being the first in this process."""
    context = rag.context(question, options.k, rag.answer_rows(options.max_new_tokens))
    rag.fuse(context)
    full_prefill(rag.blender, context.prompt)


def _compare(rag: RagPipeline, stream: RagStream, options: AskOptions, console: Console) -> dict[str, Any]:
    """The same prompt by the model's own full prefill, which reuses nothing, and both answers side by side."""
    fusion = full_prefill(rag.blender, stream.context.prompt)
    full = RagStream(stream.context, fusion, rag.pieces(fusion, rag.answer_rows(options.max_new_tokens)))
    for _ in full:
        pass
    ratio = full.report.ttft / stream.report.ttft
    pace = f"{ratio:.1f}x sooner" if ratio >= 1 else f"{1 / ratio:.1f}x later"
    table = Table("", "fused", "full prefill", title="the same prompt, each way once before", title_justify="left")
    table.add_row("answer", Text(stream.answer.text), Text(full.answer.text))
    table.add_row("first token after", f"{_ms(stream.report)}, {pace}", _ms(full.report))
    table.add_row("computed, in rows", f"{1 / stream.report.ideal_speedup:.0%}", "100%")
    console.print(table, highlight=False)
    return {"answer": full.answer.text, "ttft": full.report.ttft, "speedup": ratio}
