"""Files and rows to documents, one small file per format. Knows nothing of what becomes of the documents."""

from .files import READERS, Reader, Skipped, load, load_folder
from .html import read_html
from .markdown import read_markdown
from .pdf import read_pdf
from .plain import read_text
from .rows import from_rows, read_jsonl

__all__ = [
    "READERS",
    "Reader",
    "Skipped",
    "from_rows",
    "load",
    "load_folder",
    "read_html",
    "read_jsonl",
    "read_markdown",
    "read_pdf",
    "read_text",
]
