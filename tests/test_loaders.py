"""Loaders: every format with a real file of it, every way a file can be unreadable, and folders of both."""

from __future__ import annotations

import builtins
import io
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from retrieval.document import Document
from retrieval.errors import ExtraMissing, UnreadableDocument
from retrieval.loaders import (
    READERS,
    from_rows,
    load,
    load_folder,
    read_html,
    read_jsonl,
    read_markdown,
    read_pdf,
    read_text,
)

STEG = "Der alte Steg in Möwenbucht wurde im Jahr 1911 gebaut; die Lampen werden jeden Abend von Hand angezündet."
PIER_ZH = "马罗湾的老码头建于1911年，风暴把木制的码头冲走之后。灯是手工点亮的。每天晚上都有人来。"


def make_pdf(*pages, password=None, title=None):
    """A PDF of these texts, one line a page."""
    writer = pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    for text in pages:
        page = writer.add_blank_page(300, 300)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode("latin-1"))
        page[NameObject("/Contents")] = writer._add_object(stream)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    if title:
        writer.add_metadata({"/Title": title})
    if password is not None:
        writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def only(documents):
    (document,) = documents
    return document


# --- text ---------------------------------------------------------------------------------------------


def test_text_is_kept_but_for_line_ends_and_mark():
    document = only(read_text("\ufeffone\r\n\r\n  two \n".encode(), "a.txt"))
    assert document == Document("one\n\n  two \n", id="a.txt", source="a.txt")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (STEG, "latin-1"),
        (PIER_ZH, "gb18030"),
        (PIER_ZH, "utf-16"),
        (PIER_ZH, "utf-32"),
        (STEG, "utf-8-sig"),
        ("Старый пирс был построен в 1911 году, сразу после шторма.", "cp1251"),
    ],
)
def test_encodings(text, encoding):
    document = only(read_text(text.encode(encoding), "a.txt"))
    assert document.text == text
    assert ("encoding" in document.metadata) == (encoding != "utf-8-sig")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"MZ\0\0text", "NUL bytes"),
        (bytes(range(1, 256)) * 20, "binary"),
        (b"\x01\x02\x03\x04 ok", "binary"),
        (b" \n\t\n", "nothing but blanks"),
        (b"\xff\xfeabc", "damaged: save it as UTF-8"),
    ],
)
def test_no_text(data, why):
    with pytest.raises(UnreadableDocument, match=f"^x.txt: .*{why}"):
        read_text(data, "x.txt")


# --- Markdown -----------------------------------------------------------------------------------------


def test_markdown_with_front_matter():
    data = b"---\ntitle: The pier\ntags: [sea, wood]\ndate: 2024-05-01\n---\n\n# Pier\n\nOld.\n"
    document = only(read_markdown(data, "n/pier.md"))
    assert (document.title, document.text, document.kind) == ("The pier", "# Pier\n\nOld.", "markdown")
    assert document.metadata == {"title": "The pier", "tags": ["sea", "wood"], "date": "2024-05-01"}
    assert document.id == document.source == "n/pier.md"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("intro\n\n## The pier ##\n\ntext", "The pier"),
        ("The pier\n========\n\ntext", "The pier"),
        ("```sh\n# a comment\n```\n\n# The pier\n", "The pier"),
        ("# C#\n", "C#"),
        ("no heading, #hashtag", ""),
    ],
)
def test_markdown_title(text, title):
    document = only(read_markdown(text.encode(), "a.md"))
    assert (document.title, document.text) == (title, text)


@pytest.mark.parametrize(
    "text", ["---\nprose: and: more\n---\ntext\n", "---\njust prose\n---\ntext\n", "---\nd: 2024-99-99\n---\ntext"]
)
def test_rules_that_are_no_front_matter_stay(text):
    assert only(read_markdown(text.encode(), "a.md")).text == text


def test_front_matter_alone_is_no_text():
    with pytest.raises(UnreadableDocument, match=r"^a\.md: front matter and no text"):
        read_markdown(b"---\ntitle: x\n---\n", "a.md")


# --- HTML ---------------------------------------------------------------------------------------------

PAGE = """<html><head><title>The pier</title><meta name="author" content="Mira Tolle"></head><body>
<nav><a href="/">Home</a> <a href="/about">About us</a></nav><article><h1>The old pier</h1>
<p>The old pier at Marrow Bay was built in 1911, after the storm had taken the wooden one.</p><h2>Lamps</h2>
<p>Its lamps are lit by hand every evening, and put out by the wind as a rule.</p>
<table><tr><th>Year</th><th>Lamps</th></tr><tr><td>1911</td><td>12</td></tr></table></article>
<script>var hidden = 1;</script></body></html>"""


def test_html_becomes_markdown():
    document = only(read_html(PAGE.encode(), "pier.html"))
    assert document.kind == "markdown"
    assert document.title.startswith("The")
    assert document.metadata["author"] == "Mira Tolle"
    for part in ("# The old pier", "## Lamps", "built in 1911", "| 1911 | 12 |"):
        assert part in document.text
    assert "hidden" not in document.text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>Short, <b>unclosed", "Short"),
        ("no tags at all", "no tags at all"),
        ("<table><tr><td>1911<td>12", "1911"),
        ("<p>" * 3000 + "deep", "deep"),
    ],
)
def test_broken_html(page, text):
    assert text in only(read_html(page.encode(), "a.html")).text


def test_html_names_its_encoding():
    page = f"<html><head><meta charset='gb18030'><title>码头</title></head><body><p>{PIER_ZH}</p></body></html>"
    document = only(read_html(page.encode("gb18030"), "a.html"))
    assert (document.title, document.text) == ("码头", PIER_ZH)
    wrong = page.replace("gb18030", "no-such-charset").encode()
    assert only(read_html(wrong, "a.html")).text == PIER_ZH


@pytest.mark.parametrize("page", ["<html><body><div id=root></div><script>go()</script></body></html>", "<!-- -->"])
def test_html_without_text(page, capfd):
    with pytest.raises(UnreadableDocument, match=r"^a\.html: a page without text"):
        read_html(page.encode(), "a.html")
    assert capfd.readouterr() == ("", "")


# --- PDF ----------------------------------------------------------------------------------------------


def test_pdf_pages():
    document = only(read_pdf(make_pdf("The old pier.", "", "Its lamps.", title="Marrow Bay"), "pier.pdf"))
    assert document.text.split() == ["The", "old", "pier.", "Its", "lamps."]
    assert (document.title, len(document.pages)) == ("Marrow Bay", 3)
    assert document.page(document.text.index("old")) == 1
    assert document.page(document.text.index("Its")) == 3
    assert document.text[document.pages[2] :].startswith("Its")


def test_pdf_that_opens_without_a_password():
    assert "pier" in only(read_pdf(make_pdf("The pier.", password=""), "a.pdf")).text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (make_pdf("secret", password="x"), "encrypted with a password"),
        (make_pdf("", ""), "2 pages without text, probably scanned: run OCR"),
        (b"this is no PDF at all", "damaged, or no PDF"),
        (make_pdf("The pier.")[:300], "damaged, or no PDF"),
    ],
)
def test_unreadable_pdf(data, why, capfd):
    with pytest.raises(UnreadableDocument, match=f"^a.pdf: {why}"):
        read_pdf(data, "a.pdf")
    assert capfd.readouterr() == ("", "")


def test_a_pdf_that_pypdf_mends_is_read_in_silence(capfd):
    document = only(read_pdf(make_pdf("The pier.").replace(b"startxref\n", b"startxref\n9"), "a.pdf"))
    assert "pier" in document.text
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("pypdf").level == logging.NOTSET


# --- rows ---------------------------------------------------------------------------------------------


def test_jsonl():
    data = b'{"id": 7, "text": "one", "title": "T", "source": "s", "year": 1911}\n\n{"text": "two\\r\\n"}\n'
    first, second = read_jsonl(data, "a.jsonl")
    assert first == Document("one", "7", "T", "s", metadata={"year": 1911})
    assert (second.text, second.id, second.source) == ("two\n", "a.jsonl:3", "a.jsonl:3")


def test_jsonl_with_other_fields():
    documents = read_jsonl(b'{"body": "one", "key": "k", "text": 3}', "a", text="body", id="key")
    assert documents == [Document("one", "k", source="a:1", metadata={"text": 3})]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{'text': 1}", "no JSON"),
        ("[1]", "a list and no object"),
        ('{"body": "x"}', "no field 'text' among 'body'"),
        ('{"text": 3}', "holds no text but 3"),
        ('{"text": "  "}', "holds no text but '  '"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_bad_line_is_named(line, why):
    with pytest.raises(UnreadableDocument, match=f"^a.jsonl, line 2: .*{why}"):
        read_jsonl(b'{"text": "one"}\n' + line.encode(), "a.jsonl")


def test_rows_of_datasets():
    import datasets

    rows = datasets.Dataset.from_list(
        [{"context": "one", "name": "a", "n": 1}, {"context": "two", "name": "b", "n": 2}]
    )
    first, second = from_rows(rows, text="context", title="name")
    assert (first.text, first.title, first.metadata) == ("one", "a", {"n": 1})
    assert first.id == Document("one", title="a").digest != second.id
    with pytest.raises(
        UnreadableDocument, match=r"^row 0: no field 'text' among 'context', 'name', 'n': name it text="
    ):
        list(from_rows(rows))


def test_half_a_character_is_replaced():
    document = only(read_jsonl(b'{"text": "a\\ud83d"}', "a"))
    assert document.text == "a\ufffd"
    assert document.digest


# --- files and folders --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with a file of each kind."""
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    (tmp_path / "b" / ".hidden" / "x.txt").write_text("hidden")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "b" / "page.HTML").write_text(PAGE)
    (tmp_path / "b" / "pier.pdf").write_bytes(make_pdf("The pier."))
    (tmp_path / "a.md").write_text("# Pier\n")
    (tmp_path / "README").write_text("no suffix")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "steg.txt").write_bytes(STEG.encode("latin-1"))
    return tmp_path


def test_a_folder(folder):
    documents = list(load_folder(folder))
    assert [document.id for document in documents] == [
        "README",
        "a.md",
        "b/page.HTML",
        "b/pier.pdf",
        "rows.jsonl:1",
        "rows.jsonl:2",
        "steg.txt",
    ]
    assert all(document.source == document.id for document in documents)
    assert not any(str(folder) in repr(document) for document in documents)


def test_what_is_unreadable_is_reported(folder):
    (folder / "empty.txt").touch()
    (folder / "x.bin").write_bytes(bytes(range(256)))
    (folder / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (folder / "scan.pdf").write_bytes(make_pdf(""))
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "b" / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    skipped = {}
    documents = list(load_folder(folder, on_unreadable=lambda file: skipped.update({file.name: file.why})))
    assert len(documents) == 7
    expected = {
        "empty.txt": "empty (0 bytes)",
        "x.bin": "binary",
        "picture.txt": "binary",
        "scan.pdf": "1 pages without text",
        "gone.txt": "no such file, or a link to none",
        "self.txt": "cannot be read",
        "b/loop": "a link back to a folder that holds it",
        "pipe": "a device or pipe",
    }
    assert skipped.keys() == expected.keys()
    for name, why in expected.items():
        assert skipped[name].startswith(why)
        assert ": leave it out" in skipped[name] or "or " in skipped[name] or "OCR" in skipped[name]


def test_the_first_unreadable_file_ends_it(folder):
    (folder / "a.bin").write_bytes(b"\0")
    documents = load_folder(folder)
    assert next(documents).id == "README"
    with pytest.raises(UnreadableDocument, match=r"^a\.bin: binary"):
        next(documents)


def test_links_to_other_folders_are_followed(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "far.txt").write_text("far")
    (folder / "link").symlink_to(other)
    assert "link/far.txt" in [document.id for document in load_folder(folder)]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights of POSIX")
def test_no_permission():
    place = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    user = os.geteuid()
    try:
        place.chmod(0o755)
        (place / "ok.txt").write_text("fine")
        (place / "closed.txt").write_text("x")
        (place / "closed.txt").chmod(0)
        (place / "room").mkdir()
        (place / "room").chmod(0)
        skipped = []
        if user == 0:
            os.seteuid(65534)  # root may read everything
        documents = list(load_folder(place, on_unreadable=skipped.append))
    finally:
        os.seteuid(user)
        (place / "room").chmod(0o700)
        shutil.rmtree(place)
    assert [document.id for document in documents] == ["ok.txt"]
    assert sorted(file.name for file in skipped) == ["closed.txt", "room"]
    assert all("no permission to read it: change its rights" in file.why for file in skipped)


def test_empty_and_missing_folders(tmp_path):
    with pytest.raises(UnreadableDocument, match=r"it is empty: put \.txt, \.md"):
        list(load_folder(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(UnreadableDocument, match="none of its 1 files can be read"):
        list(load_folder(tmp_path, on_unreadable=lambda file: None))
    with pytest.raises(UnreadableDocument, match="no such folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(UnreadableDocument, match=r"use load$"):
        load_folder(tmp_path / "x.bin")


def test_one_file(folder):
    assert only(load(folder / "a.md")).id == "a.md"
    assert only(load(str(folder / "a.md"), name="notes/a.md")).source == "notes/a.md"
    with pytest.raises(UnreadableDocument, match=r"^b: a folder: use load_folder"):
        load(folder / "b")
    with pytest.raises(UnreadableDocument, match=r"^c\.txt: no such file"):
        load(folder / "c.txt")


def test_a_reader_of_ones_own(folder):
    (folder / "x.bin").write_bytes(b"\0\1")
    readers = {**READERS, ".bin": lambda data, name: [Document(data.hex(), source=name)]}
    assert only(load(folder / "x.bin", readers=readers)).text == "0001"
    assert "x.bin" in [document.id for document in load_folder(folder, readers=readers, progress=True)]


@pytest.mark.parametrize(
    ("module", "read"), [("pypdf", read_pdf), ("trafilatura", read_html), ("frontmatter", read_markdown)]
)
def test_a_missing_library_names_its_extra(module, read, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == module:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraMissing, match=r'pip install "kvblend\[docs\]"'):
        read(b"text", "a")
