"""Writes a report into a run's folder."""

from __future__ import annotations

from pathlib import Path

from eval.report.blocks import Picture
from eval.report.contents import write_document
from eval.report.html import write_html
from eval.report.markdown import write_markdown
from eval.report.plots import PLOTS, NothingToDraw
from eval.report.run import Run, read_run
from eval.report.style import inline_svg, save, style

__all__ = ["write_report"]


def write_report(folder: Path) -> list[Path]:
    """Makes ``report.md``, ``report.html`` (one self-contained page) and ``plots/`` of a run, finished or not.

    A picture that the run has nothing for is left out, and the report says so.

    Args:
        folder: with ``summary.json`` and the scores.

    Returns:
        The files, the two reports first.

    Raises:
        ReportError: the folder holds no run that can be read.
        ExtraMissing: matplotlib is not installed.
    """
    run = read_run(folder)
    pictures, left_out, files = _draw(run, folder / "plots")
    document = write_document(run, pictures, left_out)
    reports = {folder / "report.md": write_markdown(document), folder / "report.html": write_html(document)}
    for path, text in reports.items():
        path.write_text(text, encoding="utf-8")
    return [*reports, *files]


def _draw(run: Run, folder: Path) -> tuple[list[Picture], list[tuple[str, str]], list[Path]]:
    """The pictures, those left out and why, and the files; files of an earlier report that are no longer true go."""
    pictures, left_out, files = [], [], []
    folder.mkdir(exist_ok=True)
    for plot in PLOTS:
        paths = {kind: folder / f"{plot.name}.{kind}" for kind in ("png", "svg")}
        with style():
            try:
                figure = plot.draw(run)
            except NothingToDraw as why:
                left_out.append((plot.title, str(why)))
                for path in paths.values():
                    path.unlink(missing_ok=True)
                continue
            kinds = {kind: save(figure, kind) for kind in paths}
        for kind, path in paths.items():
            path.write_bytes(kinds[kind])
            files.append(path)
        pictures.append(Picture(plot.name, plot.title, plot.caption, inline_svg(kinds["svg"], plot.name)))
    return pictures, left_out, files
