"""PDF files, page by page, by pypdf. Reads the text that is there; does not recognise scanned letters."""

from __future__ import annotations

from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING

from ..document import Document
from ..errors import ExtraMissing, UnreadableDocument
from .plain import tidy
from .quiet import quiet

if TYPE_CHECKING:
    from pypdf import PdfReader

__all__ = ["read_pdf"]


def read_pdf(data: bytes, name: str) -> list[Document]:
    """A PDF file as one document with pages, an empty line between them.

    Raises:
        ExtraMissing: without pypdf, or without cryptography for a file that AES encrypts.
        UnreadableDocument: encrypted, damaged, or scanned.
    """
    try:
        import pypdf
        from pypdf.errors import DependencyError
    except ImportError as missing:
        raise ExtraMissing('reading PDF needs pypdf: pip install "kvblend[docs]"') from missing
    with quiet("pypdf"):
        try:
            reader = pypdf.PdfReader(BytesIO(data))
            # Many files are encrypted with an empty password, only so as not to be printed or changed.
            locked = reader.is_encrypted and not reader.decrypt("")
            pages = [] if locked else [tidy(page.extract_text()).strip() for page in reader.pages]
            title = "" if locked else _title(reader)
        except DependencyError as missing:
            raise ExtraMissing(
                f"{name}: is encrypted with AES, which pypdf reads with cryptography: pip install cryptography"
            ) from missing
        except Exception as error:  # a damaged file can end in nearly any of Python's errors
            raise UnreadableDocument(f"{name}: damaged, or no PDF ({error}): print it to a new PDF") from error
    if locked:
        raise UnreadableDocument(f"{name}: encrypted with a password: save it without, or leave it out")
    if not any(pages):
        raise UnreadableDocument(
            f"{name}: {len(pages)} pages without text, probably scanned: run OCR over it (ocrmypdf)"
        )
    parts = [f"{page}\n\n" if page else "" for page in pages]
    starts = tuple(accumulate(map(len, parts[:-1]), initial=0))
    return [Document("".join(parts), title=title, source=name, pages=starts)]


def _title(reader: PdfReader) -> str:
    return tidy(str(reader.metadata.title or "")).strip() if reader.metadata else ""
