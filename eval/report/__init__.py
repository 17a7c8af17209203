"""The report of an evaluation run: one page, tables and pictures made of its figures.

::

    run folder -> Run -> Document (sections of text, tables, pictures) -> report.md, report.html, plots/

Measures nothing, and shows nothing of the data sets but names and ids.
"""

from eval.report.readme import readme_table
from eval.report.run import ReportError, Run, read_run
from eval.report.write import write_report

__all__ = ["ReportError", "Run", "read_run", "readme_table", "write_report"]
