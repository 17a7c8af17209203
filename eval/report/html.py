"""A report as one self-contained page: its own style, its own few lines of script, pictures as inline SVG.

Knows nothing of evaluations.
"""

from __future__ import annotations

from html import escape

from eval.report.blocks import Cell, Column, Document, Notes, Picture, Section, Table, Text
from eval.report.style import page_colours

__all__ = ["write_html"]

# Nothing is fetched, even if a mistake of ours let something in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_CSS = """
:root { %s --soft: #f6f8fa; --alert: #d55e00; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { %s --soft: #161b22; --alert: #ff9a56; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p, li, figcaption { max-width: 46rem; }
ul { padding-left: 1.2rem; } li { margin: .2rem 0; overflow-wrap: anywhere; }
.alert { border-left: 4px solid var(--alert); padding: .4rem .8rem; background: var(--soft); font-weight: 600; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; } a { color: inherit; }
summary { cursor: pointer; font-weight: 600; margin: 1.25rem 0 .5rem; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.number { text-align: right; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
tbody tr:hover td { background: var(--soft); }
figure { margin: 0 0 2rem; }
figure svg { display: block; width: 100%; min-width: 38rem; max-width: 56rem; height: auto; }
figcaption { color: var(--muted); font-size: .9rem; }
@media print { details > * { display: block; } }
"""

# A cell without a number goes last, whichever way the column is sorted.
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentNode, place = head.cellIndex, body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const number = head.className === "number";
  const key = row => { const cell = row.cells[place]; return number ? parseFloat(cell.dataset.v) : cell.textContent; };
  const compare = (a, b) => {
    if (number && (isNaN(a) || isNaN(b))) return isNaN(a) - isNaN(b);
    return (up ? 1 : -1) * (number ? a - b : a.localeCompare(b, undefined, {numeric: true}));
  };
  body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
};
"""


def write_html(document: Document) -> str:
    """The whole page."""
    title, colours = escape(document.title), page_colours()
    css = _CSS.replace("%s", colours[0], 1).replace("%s", colours[1], 1)
    links = "".join(
        f'<a href="#s{number}">{escape(section.title)}</a>'
        for number, section in enumerate(document.sections)
        if not section.folded
    )
    body = "".join(_section(section, number) for number, section in enumerate(document.sections))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<nav>{links}</nav>\n{body}"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(section: Section, number: int) -> str:
    title, body = escape(section.title), "\n".join(_block(block) for block in section.blocks)
    if section.folded:
        return f'<details id="s{number}"><summary>{title}</summary>\n{body}\n</details>\n'
    return f'<section id="s{number}">\n<h2>{title}</h2>\n{body}\n</section>\n'


def _block(block: Text | Notes | Table | Picture) -> str:
    if isinstance(block, Text):
        return f'<p class="alert">{escape(block.text)}</p>' if block.alert else f"<p>{escape(block.text)}</p>"
    if isinstance(block, Notes):
        return "<ul>" + "".join(_note(term, note) for term, note in block.items) + "</ul>"
    if isinstance(block, Table):
        return _table(block)
    title = escape(block.title)
    svg = block.svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    caption = escape(block.caption)
    return f'<figure>\n<h3>{title}</h3>\n<div class="wide">{svg}</div>\n<figcaption>{caption}</figcaption>\n</figure>'


def _note(term: str, note: str) -> str:
    return f"<li><b>{escape(term)}</b>: {escape(note)}</li>" if term else f"<li>{escape(note)}</li>"


def _table(table: Table) -> str:
    heads = "".join(f"<th{_class(column)}><button>{escape(column.head)}</button></th>" for column in table.columns)
    rows = "\n".join(
        "<tr>" + "".join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)) + "</tr>"
        for row in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(cell: Cell, column: Column) -> str:
    value = f' data-v="{cell.value!r}"' if column.number and cell.value is not None else ""
    return f"<td{_class(column)}{value}>{escape(cell.text)}</td>"


def _class(column: Column) -> str:
    return ' class="number"' if column.number else ""
