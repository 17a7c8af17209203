"""Draws the README's picture: a real prompt of the demo, each token in the colour of its origin.

Usage: python examples/draw_prompt.py examples/prompt.svg
"""

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console, Group
from rich.text import Text

from blend import Blender
from blend.report_view import coloured_prompt, legend
from eval.demo import load_passages, load_questions

with Blender.from_pretrained("smollm2") as blender:
    question = load_questions()[0]
    by_id = {p.id: p for p in load_passages()}
    wanted = [*question.gold, *[i for i in by_id if i not in question.gold][:3]]
    chunks = [blender.chunk(f"{by_id[i].title}\n{by_id[i].text}", by_id[i].title) for i in reversed(wanted)]
    blender.encode(chunks)
    report = blender.fuse(blender.prompt(question.question, chunks)).report

console = Console(record=True, width=110, file=StringIO())
console.print(Group(legend(), Text(), coloured_prompt(report)))
svg = console.export_svg(title=f"kvblend: {report.recomputed_rows} of {report.rows} rows recomputed")
# The picture stands alone: no fonts from elsewhere, the reader's own monospace.
svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
Path(sys.argv[1]).write_text(svg, encoding="utf-8")
