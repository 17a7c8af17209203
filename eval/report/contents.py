"""What a report says, in order, as plain blocks: what was run, the tables, what is beyond chance, what it cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from eval.report.blocks import Cell, Column, Document, Notes, Picture, Section, Table, Text
from eval.report.neighbours import neighbours_table
from eval.report.results import NOTHING, column_notes, nats, percent, results_table, times, with_interval
from eval.report.run import Row, Run, rows_of
from eval.stats import SMALL, is_small

__all__ = ["write_document"]

_LIMITS = (
    ("small sets", f"sets of fewer than {SMALL} examples; their figures move by chance, and so do their intervals."),
    ("intervals", "95 % bootstrap intervals over examples. They tell how far a figure would move with other examples "
     "of the same sets, and nothing about other sets or models."),
    ("TTFT", "seconds from token ids to the first token's logits on the machine named above; look-up, moving, probe, "
     "check and repair are in it; tokenising, retrieval and the offline stage are not."),
    ("oracles", "they look at the full prefill that they are to avoid, so they have no TTFT. They show what a better "
     "choice of rows could gain."),
    ("peers", "other software shows no distribution, so it has no KL and no agreement; its speed-up is over its own "
     "full prefill."),
    ("fallbacks", "a prompt that was prefilled in full instead of fused counts with what it cost and answered."),
)  # fmt: skip


def write_document(run: Run, pictures: Sequence[Picture], left_out: Sequence[tuple[str, str]]) -> Document:
    """The whole report.

    Args:
        run: what was measured.
        pictures: drawn already.
        left_out: titles of pictures that were not drawn, and why.
    """
    every = Section("All sets together", (*_lead(run), *_in_common(run), results_table(run.rows)))
    missing = (Notes(tuple((f"{title} is not drawn", f"{why}.") for title, why in left_out)),) if left_out else ()
    sections = (
        _what_was_run(run),
        every,
        Section("Pictures", (*pictures, *missing)),
        *_beyond_chance(run),
        *_each_set(run),
        _full_prefill(run),
        _fallbacks(run),
        _costs(run),
        Section("What the columns mean", (column_notes(run.rows),)),
        Section("What to keep in mind", (Notes(_LIMITS),)),
    )
    return Document(f"Evaluation of {run.summary['model']}", sections)


def _in_common(run: Run) -> tuple[Text, ...]:
    """Which examples the figures of all sets are over, where some systems have not done them all."""
    common = run.summary.get("common") or []
    if not common or sum(one["n"] for one in common) == sum(one["n"] for one in run.summary["data"]):
        return ()
    sets = ", ".join(f"{one['name']} ({one['n']})" for one in common)
    return (Text(f"Over the examples that all systems have in common: {sets}."),)


def _what_was_run(run: Run) -> Section:
    summary, machine = run.summary, run.summary["machine"]
    blocks: list[Text | Notes | Table | Picture] = []
    if not summary["complete"]:
        blocks.append(Text("This run is not finished: its figures are of the examples that are done.", alert=True))
    facts = [("model", f"{summary['model']}, {summary['dtype']}")]
    facts += [(key, str(value)) for key, value in machine.items() if value is not None and key != "dtype"]
    options = [
        (key, _plain(value)) for key, value in run.options.items() if value is not None and key not in ("model", "data")
    ]
    if options:
        facts.append(("options", "; ".join(f"{key} {value}" for key, value in options)))
    blocks.append(Notes(tuple(facts)))
    columns = (Column("set", number=False), Column("task", number=False), Column("n"), Column("rows, mean"))
    rows = tuple(_set_line(data) for data in summary["data"])
    blocks.append(Table((*columns, Column("", number=False)), rows))
    return Section("What was run", tuple(blocks))


def _set_line(data: dict[str, Any]) -> tuple[Cell, ...]:
    rows = data.get("rows_mean")
    return (
        Cell(str(data["name"])),
        Cell(str(data.get("task") or NOTHING)),
        Cell(f"{data['n']:,}", data["n"]),
        Cell(NOTHING) if rows is None else Cell(f"{rows:,.0f}", rows),
        Cell("small set" if is_small(data["n"]) else ""),
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def _lead(run: Run) -> list[Text]:
    """One sentence on who is nearest to full prefill among those that may be used, and what it costs."""
    rows = [
        row
        for row in run.at(run.ratio)
        if row.get("kl_mean") is not None and row.get("speedup_median") and not row.exact
    ]
    if not rows:
        return []
    best = min(rows, key=lambda row: row.get("kl_mean") or 0.0)
    others = [row.title for row in rows if row is not best and _touch(row, best)]
    kl, speed = best.get("kl_mean") or 0.0, best.get("speedup_median") or 0.0
    at = "" if run.ratio is None else f" at ratio {run.ratio:g}"
    text = (
        f"Nearest to full prefill{at} is {best.title}: {with_interval(nats, kl, best.interval('kl_mean'))} nats per "
        f"token, with a TTFT speed-up of {times(speed)}."
    )
    if others:
        text += f" The intervals of {_and(others)} reach into its own: see the paired tests before calling it better."
    return [Text(text)]


def _touch(row: Row, best: Row) -> bool:
    mine, its = row.interval("kl_mean"), best.interval("kl_mean")
    return mine is not None and its is not None and mine[0] <= its[1]


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _beyond_chance(run: Run) -> list[Section]:
    sections = []
    about = Text(
        "Systems in the order of their mean KL, each against the next: paired differences over the examples that both "
        "have run, with 95 % intervals. p is corrected for the number of tests in its column (Holm); below 0.05 is "
        "called beyond chance. Positive favours the nearer one."
    )
    ratios = [run.ratio, *(ratio for ratio in run.ratios if ratio != run.ratio)]
    for ratio in ratios:
        table = neighbours_table(run, ratio)
        at = "" if ratio is None else f" at ratio {ratio:g}"
        if table is not None:
            sections.append(Section(f"Beyond chance{at}", (about, table), folded=ratio != run.ratio))
    return sections


def _each_set(run: Run) -> list[Section]:
    counts = {data["name"]: data["n"] for data in run.summary["data"]}
    sections = []
    for name, systems in (run.summary.get("by_data") or {}).items():
        small = name in counts and is_small(counts[name])
        alert = [Text(f"A small set: {counts[name]} examples.", alert=True)] if small else []
        sections.append(Section(f"Set {name}", (*alert, results_table(rows_of(systems))), folded=True))
    return sections


def _full_prefill(run: Run) -> Section:
    """Where full prefill fails itself, a system that agrees with it fails too."""
    table = []
    for data in run.summary["data"]:
        judged = [s for s in run.scores if s.system == "full" and s.data == data["name"] and s.metrics]
        if not judged:
            continue
        failed = sum(1 for score in judged if not next(iter(score.metrics.values())))
        metric = next(iter(judged[0].metrics))
        share = failed / len(judged)
        table.append(
            (Cell(data["name"]), Cell(metric), Cell(str(len(judged)), len(judged)), Cell(str(failed), failed),
             Cell(percent(share), share))
        )  # fmt: skip
    if not table:
        return Section("Where full prefill fails", (Text("Full prefill was not run."),))
    columns = (
        Column("set", number=False),
        Column("metric", number=False),
        Column("n"),
        Column("scored 0"),
        Column("share"),
    )
    text = (
        "Examples that full prefill itself answers with nothing right (0 in the headline metric). On these no system "
        "can show a loss, so answers tell less than KL does."
    )
    return Section("Where full prefill fails", (Text(text), Table(columns, tuple(table))))


def _fallbacks(run: Run) -> Section:
    found = Counter((s.system, s.setting, s.fallback) for s in run.scores if s.fallback)
    if not found:
        return Section("What fell back", (Text("Nothing: every prompt was run as its system says."),))
    titles = {(row.name, row.setting): row.title for row in run.rows}
    rows = []
    for (system, setting, why), count in found.most_common():
        ids = [s.example for s in run.scores if (s.system, s.setting, s.fallback) == (system, setting, why)]
        more = f" and {count - 3} more" if count > 3 else ""
        title = titles.get((system, setting), system)
        texts = (str(why), ", ".join(ids[:3]) + more)
        rows.append((Cell(title), Cell(setting), Cell(str(count), count), *map(Cell, texts)))
    columns = (Column("system", number=False), Column("setting", number=False), Column("examples"))
    text = Text("Prompts that were prefilled in full instead of fused. They count with what they cost and answered.")
    return Section("What fell back", (text, Table((*columns, Column("why", False), Column("ids", False)), tuple(rows))))


def _costs(run: Run) -> Section:
    text = (
        "Offline: seconds per prompt before the question was known, beyond encoding each chunk once. It is in no TTFT, "
        "and is paid again when the chunk's neighbours change."
    )
    heads = ("TTFT, median s", "offline, mean s", "rows computed again, mean", "KV of a prompt, mean MB")
    columns = (Column("system", number=False), Column("setting", number=False), *map(Column, heads))
    return Section("What it costs", (Text(text), Table(columns, tuple(_cost(run, row) for row in run.rows))))


def _cost(run: Run, row: Row) -> tuple[Cell, ...]:
    scores = run.scores_of(row)
    again = [s.recomputed for s in scores if s.recomputed is not None]
    held = [s.kv_bytes / 1e6 for s in scores if s.kv_bytes is not None]
    figures = (
        (row.get("ttft_s_median"), "{:.3f}"),
        (row.get("offline_s_mean"), "{:.3f}"),
        (fmean(again) if again else None, "{:,.0f}"),
        (fmean(held) if held else None, "{:,.1f}"),
    )
    cells = (Cell(NOTHING) if value is None else Cell(form.format(value), value) for value, form in figures)
    return (Cell(row.title), Cell(row.setting, row.ratio), *cells)
