"""What ``kvblend compare`` prints. Computes nothing of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["show_comparison"]

_COLOURS = {"better": "green", "worse": "red"}
_FEW = 3


def show_comparison(figures: Mapping[str, Any], titles: Mapping[str, str], console: Console) -> None:
    """Prints the figures of :func:`eval.comparing.compare.run_compare`.

    Args:
        figures: as it returns them.
        titles: of the measures, by name.
        console: where to.
    """
    for side in "ab":
        run = figures[side]
        system = f", {run['system']}" if run["system"] else ""
        console.print(Text(f"{side}: {run['folder']} ({run['model'] or 'model not told'}{system})"), highlight=False)
    for warning in _warnings(figures):
        console.print(Text(warning, style="yellow"), highlight=False)
    for group in figures["groups"]:
        console.print(_table(group, titles))
    for side in "ab":
        for line in _only(side, figures[f"only_{side}"]):
            console.print(Text(line), highlight=False)
    tests, level = sum(len(group["measures"]) for group in figures["groups"]), figures["level"]
    note = (
        "Means over the examples that both have, but medians of the speed-up and its change; charged share: row-layers "
        "computed, of full prefill's. change: b - a with its 95 % bootstrap interval; +/=/-: examples where b is "
        "higher, as high, lower. p: sign-flip test; McNemar's where it is yes or no, sign test for medians. A "
        f"verdict stands where p < {level:g}: of these {tests} tests about {tests * level:.1f} would get one by chance."
    )
    console.print(Text(note, style="dim"), highlight=False)


def _warnings(figures: Mapping[str, Any]) -> list[str]:
    models = [figures[side]["model"] for side in "ab"]
    warnings = []
    if None not in models and models[0] != models[1]:
        warnings.append(
            f"The runs have different models, {models[0]} and {models[1]}: what changed may be the model's doing."
        )
    if figures["prompts_differ"]:
        warnings.append(
            f"{figures['prompts_differ']} pairs have prompts of different lengths: the runs put other passages, or in "
            "other pieces, before the same questions."
        )
    return warnings


def _table(group: Mapping[str, Any], titles: Mapping[str, str]) -> Table:
    sets = ", ".join(f"{name} {n}" for name, n in group["data"].items())
    small = "; a small set" if group["small"] else ""
    title = Text(f"{group['title']}: {group['n']} pairs{small} ({sets})")
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("a", "b", "change", "p", "+/=/-"):
        table.add_column(head, justify="right", no_wrap=head == "change")
    table.add_column("verdict", no_wrap=True)
    for name, m in group["measures"].items():
        low, high = (_number(end, sign=True) for end in m["ci"])
        verdict = m["verdict"] or ""
        table.add_row(
            titles[name],
            _number(m["a"]),
            _number(m["b"]),
            f"{_number(m['change'], sign=True)}\n[dim]{low}, {high}[/]",
            "<.001" if m["p"] < 0.001 else f"{m['p']:.3f}",
            f"{m['higher']}/{m['same']}/{m['lower']}",
            Text(verdict, style=_COLOURS.get(verdict, "")),
        )
    return table


def _only(side: str, only: Mapping[str, list[str]]) -> list[str]:
    return [f"only in {side}: {kind} {_few(names)}" for kind, names in only.items() if names]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more


def _number(value: float, *, sign: bool = False) -> str:
    """Three decimals, and two digits where those would be zeros."""
    plus = "+" if sign and value else ""
    return f"{value:{plus}.3f}" if abs(value) >= 0.01 else f"{value:{plus}.2g}"
