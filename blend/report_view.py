"""Draws a report: a rich table for terminals, coloured tokens for notebooks."""

from __future__ import annotations

from html import escape
from io import StringIO
from itertools import groupby

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from blend.report import Report, RowState

__all__ = ["as_html", "as_table", "as_text", "coloured_prompt", "legend", "summary"]

# Okabe-Ito colours, told apart by colour-blind readers too.
COLOURS: dict[RowState, tuple[str, str]] = {
    "exact": ("#cfe8fc", "reused"),
    "moved": ("#cfe8fc", "reused"),
    "recomputed": ("#ffd08a", "recomputed"),
    "fresh": ("#c7ecc7", "fresh"),
}


def as_table(report: Report) -> Group:
    """Summary, chunks and stages."""
    chunks = Table("chunk", "rows", "at", "source", "moved", "recomputed", "why", title="chunks", title_justify="left")
    for c in report.chunks:
        moved = f"{c.moved:+d}" if c.moved else "0"
        chunks.add_row(c.name, str(c.rows), str(c.start), c.source, moved, str(c.recomputed), c.why)
    stages = Table("stage", "ms", "share", title="time to first token", title_justify="left")
    for stage, seconds in report.seconds.items():
        stages.add_row(stage, f"{seconds * 1e3:.1f}", f"{seconds / max(report.ttft, 1e-9):.0%}")
    stages.add_row("total", f"{report.ttft * 1e3:.1f}", "100%", style="bold")
    head = Text(summary(report))
    return Group(head, chunks, stages) if report.chunks else Group(head, stages)


def as_text(report: Report) -> str:
    """The table as plain text."""
    console = Console(file=StringIO(), width=120, force_terminal=False, force_jupyter=False)
    console.print(as_table(report))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue().rstrip("\n")


def as_html(report: Report) -> str:
    """Summary, legend, and the prompt with every token in the colour of its origin."""
    legend = " ".join(
        f'<span style="background:{colour};color:#111;padding:0 .4em;border-radius:3px">{escape(label)}</span>'
        for colour, label in dict(COLOURS.values()).items()
    )
    body = "".join(
        f'<span style="background:{COLOURS[state][0]};color:#111">{escape(text)}</span>'
        for state, text in _runs(report)
    )
    return (
        f'<div style="font-family:monospace"><div>{escape(summary(report))}</div><div>{legend}</div>'
        f'<div style="white-space:pre-wrap;border:1px solid #ccc;padding:.5em;max-height:24em;overflow:auto">'
        f"{body}</div></div>"
    )


def coloured_prompt(report: Report) -> Text:
    """The prompt for a terminal, in the same colours."""
    text = Text()
    for state, run in _runs(report):
        text.append(run, style=f"black on {COLOURS[state][0]}")
    return text


def legend() -> Text:
    """What the colours mean."""
    text = Text()
    for colour, label in dict(COLOURS.values()).items():
        text.append(f" {label} ", style=f"black on {colour}")
        text.append(" ")
    return text


def _runs(report: Report) -> list[tuple[RowState, str]]:
    """The prompt's text in runs of one origin."""
    decode = report.decode or (lambda tokens: "".join(f"{token} " for token in tokens))
    pairs = zip(report.states, report.ids, strict=True)
    # A run is decoded as a whole: a character may be made of several tokens.
    return [(state, decode([token for _, token in run])) for state, run in groupby(pairs, key=lambda p: p[0])]


def summary(report: Report) -> str:
    """One line: how much was reused and recomputed, and how long the first token took."""
    if report.fallback is not None:
        return f"full prefill of {report.rows} rows ({report.fallback}); TTFT {report.ttft * 1e3:.0f} ms"
    load = report.load
    loaded = f"; read {load.nbytes / 1e6:.1f} MB in {load.seconds * 1e3:.0f} ms, " if load.nbytes else ""
    loaded += f"{max(load.seconds - load.waited, 0.0) * 1e3:.0f} ms of it hidden" if loaded else ""
    loaded += f" (a ratio of {load.hiding_ratio:.2f} would hide it)" if loaded and load.hiding_ratio else ""
    context = f", {report.context_rows} from the earlier context (approximate)" if report.context_rows else ""
    method = f"{report.method} + {report.corrector}" if report.corrector else report.method
    choice = f" ({report.choice})" if report.choice else ""
    return (
        f"{method}: {report.rows} rows, {report.reused_rows} reused "
        f"({report.prefix_rows} exact prefix{context}), {report.recomputed_rows} recomputed{choice}; "
        f"computed 1/{report.ideal_speedup:.1f} of a full prefill's row-layers; "
        f"KV {report.kv_bytes / 1e6:.1f} MB{loaded}; TTFT {report.ttft * 1e3:.0f} ms"
    )
