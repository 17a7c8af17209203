"""What the demo prints: the table, some answers, and a verdict made of the figures. Measures nothing."""

from __future__ import annotations

from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from eval.demo.measure import Measured
from eval.demo.result import DemoResult, EncodeCost, Summary

__all__ = ["answers", "encode_line", "table", "verdict"]

_CAPTION = (
    "TTFT: median seconds to the first token. Speed-up: over full prefill, median. Ideal: if every computed row cost "
    "the same. KL: mean nats from full prefill, at the first token and per token of its answer. Same: as full prefill."
)


def encode_line(cost: EncodeCost) -> str:
    """What encoding has cost: it is paid once and in none of the times of the table."""
    return (
        f"{cost.passages} passages encoded once, {cost.rows:,} rows and {cost.nbytes / 1e6:.0f} MB in "
        f"{cost.seconds:.1f} s: part of no time below"
    )


def table(result: DemoResult) -> Table:
    """One line per system. Needs at least one finished question."""
    done = result.questions
    recall = fmean(q.case.recall for q in done)
    title = (
        f"{result.options.model}, {result.machine['dtype']}, {result.machine['threads']} thread(s), "
        f"{len(done)} questions over {result.options.k} shuffled passages ({recall:.0%} of the gold ones found), "
        f"ratio {result.options.ratio:g}"
    )
    out = Table(title=title, caption=_CAPTION, box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("", no_wrap=True)
    for name in ("TTFT s", "speed-up", "ideal", "KL first", "KL answer", "same first", "same answer"):
        out.add_column(name, justify="right", min_width=max(map(len, name.split())))  # broken at the space, if at all
    for summary in result.summaries().values():
        out.add_row(summary.title, *_cells(summary))
    return out


def _cells(s: Summary) -> list[str]:
    return [
        f"{s.ttft_s:.3f}",
        f"{s.speedup:.2f}x",
        f"{s.ideal:.1f}x",
        f"{s.kl_first:.3f}",
        f"{s.kl:.3f}",
        f"{s.same_first_token:.0%}",
        f"{s.same_answer:.0%}",
    ]


def answers(result: DemoResult) -> Table:
    """Every system's answers to the first questions; right ones in green, what repeats full prefill's not repeated."""
    shown = result.questions[: result.options.samples]
    out = Table(title=f"The first {result.options.tokens} tokens of some answers", box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("")
    for measured in shown:
        question = measured.case.question
        out.add_column(f"{question.question}\n[dim]{question.answers[0]}[/]")
    for system in result.systems:
        out.add_row(system.title, *(_answer(measured, system.name) for measured in shown))
    return out


def _answer(measured: Measured, name: str) -> str:
    answer = measured.runs[name].answer or ""
    if name != "full" and answer == measured.runs["full"].answer:
        return "[dim]as full prefill[/]"
    return f"[green]{escape(answer)}[/]" if measured.case.question.answered_by(answer) else escape(answer)


def verdict(result: DemoResult) -> str:
    """One sentence: the repaired method that is nearest to full prefill, beside reuse without repair."""
    summaries = result.summaries()
    repaired = [summaries[name] for name in ("cacheblend", "epic", "prophetkv", "kvblend")]
    best, reuse, prefix = min(repaired, key=lambda s: s.kl), summaries["reuse"], summaries["prefix"]
    nearer = "nearer to it than" if best.kl < reuse.kl else "no nearer to it than"
    return (
        f"Over shuffled passages {best.title} has the first token {_pace(best.speedup)} full prefill and is, at "
        f"{best.kl:.3f} nats per token, {nearer} reuse without repair ({reuse.kl:.3f} nats, {_pace(reuse.speedup)} "
        f"full prefill); the prefix cache is {_pace(prefix.speedup)} full prefill."
    )


def _pace(speedup: float) -> str:
    if abs(speedup - 1) < 0.05:
        return "as soon as"
    return f"{speedup:.1f}x sooner than" if speedup > 1 else f"{1 / speedup:.1f}x later than"
