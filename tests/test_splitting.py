"""Splitting: the promises of Splitter over hostile texts, and its cuts over real ones, by real tokenizers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from blend.testing.tokenizers import tiny_tokenizer
from blend.text import PromptText
from retrieval import splitting
from retrieval.errors import SettingError
from retrieval.splitting import Splitter

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
ATOMS = [
    *("a", "word ", "The cat sat. ", "supercalifragilistic", "你好", "世界。", "！", "？", "한글", "ก็", "क्षि", "é"),
    *(FAMILY, "👍🏽", "☀️", "🇩🇪", "e\u0301", "\u0301", "\u200d", "\ufe0f", "\u0600", "\u200b", "\ufeff", "\0"),
    *(" ", "  ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\x1c"),
    *(
        "# H\n",
        "- item\n",
        "```\ncode  x\n```\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "*b*",
        "[l](u)",
        "$x^2$",
        "> q\n",
    ),
]


def byte_pairs():
    """A byte-level BPE that has seen some Chinese and emoji, so that pieces of characters are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["你好，世界。马罗湾的老码头！" * 3, f"{FAMILY}👍🏽🇩🇪 the old pier, the cat sat.\n\n" * 3], trainer
    )
    return lambda text: len(tokenizer.encode(text).ids)


def as_chunk(prompt_text):
    """Tokens of a piece once it is a chunk of a prompt."""
    return lambda text: len(prompt_text.encode(text.strip() + "\n\n"))


COUNTS = {
    "byte pairs": byte_pairs(),
    "chunk of byte pairs": as_chunk(PromptText(tiny_tokenizer())),
    "chunk of unigrams": as_chunk(PromptText(tiny_tokenizer("unigram"))),
    "bytes": lambda text: len(text.encode()),
}


def characters(text):
    """Spans of the characters that a reader sees."""
    return [match.span() for match in regex.finditer(r"\X", text)]


def check(text, pieces, splitter):
    """Every promise of Splitter."""
    for piece in pieces:
        assert text[piece.start : piece.end] == piece.text
        assert piece.text.strip()
        assert splitter.count(piece.text) <= splitter.size
    held = {at for piece in pieces for at in range(piece.start, piece.end)}
    assert all(at in held or character.isspace() for at, character in enumerate(text))
    for left, right in pairwise(pieces):
        assert left.start < right.start
        assert left.end < right.end
        if right.start < left.end:
            assert splitter.count(text[right.start : left.end]) <= splitter.overlap
    cuts = {at for piece in pieces for at in (piece.start, piece.end)}
    for start, end in characters(text):
        if splitter.count(text[start:end]) <= splitter.size:
            assert cuts.isdisjoint(range(start + 1, end)), f"cut within {text[start:end]!r}"


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(st.sampled_from(ATOMS) | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join),
    size=st.sampled_from([1, 2, 5, 8, 12, 30, 80]),
    share=st.floats(0, 0.99),
    kind=st.sampled_from(["text", "markdown"]),
    name=st.sampled_from(sorted(COUNTS)),
    window=st.sampled_from([40, 200, 1 << 16]),
)
# The library's own cuts: an overlap that is too long, and a piece within the next.
@example("a| a | b |\n|---|---|\n| 1 | 2 |\n", 8, 0.125, "markdown", "byte pairs", 40)
@example("\r\n# H\n# H\n\n", 8, 0.75, "text", "chunk of byte pairs", 40)
def test_promises(text, size, share, kind, name, window):
    count = COUNTS[name]
    splitter = Splitter(count, size, int(share * size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "_WINDOW", window)
        patch.setattr(splitting, "_SLICE", 64)
        try:
            pieces = splitter.split(text, kind)
        except SettingError:
            assert max(map(count, text)) > size
            return
    check(text, pieces, splitter)


# --- real texts ---------------------------------------------------------------------------------------


def passages(data, name, characters):
    """Titles and passages of a data set, as Markdown."""
    parts, length = {}, 0
    with (data / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            for context in json.loads(line)["contexts"]:
                part = f"# {context['title']}\n\n{context['text']}"
                length += 0 if part in parts else len(part)
                parts[part] = None
            if length > characters:
                break
    return "\n\n".join(parts)[:characters]


@pytest.fixture(scope="module")
def count(smollm2):
    return as_chunk(PromptText(smollm2[1]))


@pytest.mark.parametrize(("size", "overlap"), [(256, 32), (40, 0)])
@pytest.mark.parametrize("kind", ["text", "markdown"])
@pytest.mark.parametrize("name", ["squad_xquad_en", "xquad_zh"])
def test_real_texts_are_cut_where_the_library_cuts_them(data, count, name, kind, size, overlap, monkeypatch):
    monkeypatch.setattr(splitting, "_WINDOW", 1 << 13)
    text = passages(data, name, 24_000)
    splitter = Splitter(count, size, overlap)
    pieces = splitter.split(text, kind)
    check(text, pieces, splitter)
    # Neither the windows nor the reckoned sizes show: every piece is what slow and exact counting gives.
    library = {"text": TextSplitter, "markdown": MarkdownSplitter}[kind].from_callback(count, size, overlap)
    assert [(piece.start, piece.text) for piece in pieces] == library.chunk_indices(text)


def test_headings_are_cut_first(count):
    text = "# One\n\nThe pier is old. It is wet.\n\n# Two\n\nThe lamps are lit by hand. Every night.\n"
    pieces = Splitter(count, 24, 0).split(text, "markdown")
    assert [piece.text.split("\n")[0] for piece in pieces] == ["# One", "# Two"]


@pytest.mark.parametrize("end", "。！？")
def test_chinese_is_cut_at_its_sentences(count, end):
    text = "".join(f"马罗湾的老码头建于{year}年，风暴把木制的码头冲走了{end}" for year in range(1900, 1920))
    pieces = Splitter(count, 120, 0).split(text)
    assert len(pieces) > 5
    assert all(piece.text.endswith(end) for piece in pieces)


def test_a_text_that_just_fits_is_one_piece(count):
    text = "The old pier at Marrow Bay was built in 1911. " * 30
    size = count(text)
    assert [piece.text for piece in Splitter(count, size, 0).split(text)] == [text.strip()]
    assert len(Splitter(count, size - 1, 0).split(text)) == 2


def test_neighbours_overlap(count):
    text = "".join(f"Lamp {number} is lit. " for number in range(200))
    pieces = Splitter(count, 60, 15).split(text)
    assert all(right.start < left.end for left, right in pairwise(pieces))
    assert all(right.start == left.end + 1 for left, right in pairwise(Splitter(count, 60, 0).split(text)))


def test_one_long_line(count, monkeypatch):
    """Several windows; a 5 MB file is nothing but more of them."""
    monkeypatch.setattr(splitting, "_WINDOW", 1 << 13)
    for text in ("ab" * 10_000, "The pier is old " * 1_250, "马罗湾的老码头" * 2_500):
        splitter = Splitter(count)
        pieces = splitter.split(text)
        assert pieces[0].start == 0
        assert pieces[-1].end == len(text.rstrip())
        assert all(splitter.count(piece.text) <= 256 for piece in pieces)
        assert min(splitter.count(piece.text) for piece in pieces[:-1]) > 200


@pytest.mark.parametrize(
    "text", ["🇩🇪" * 20_000, "e" + "\u0301" * 40_000, "a" + " " * 200_000 + "b", "\n" * 100_000 + "x"]
)
def test_monotonous_texts(text):
    splitter = Splitter(COUNTS["bytes"], 64, 8)
    pieces = splitter.split(text)
    assert all(splitter.count(piece.text) <= 64 for piece in pieces)
    assert sum(len(piece.text) for piece in pieces) >= len("".join(text.split()))


def test_flags_stay_whole():
    pieces = Splitter(COUNTS["bytes"], 50, 10).split("abc" + "🇩🇪" * 3000)  # two code points and eight bytes each
    assert len(pieces) > 400
    assert all(piece.start % 2 == 1 and piece.end % 2 == 1 for piece in pieces[1:])


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " \n\t", "\u3000\x1c\u2028"])
@pytest.mark.parametrize("kind", ["text", "markdown"])
def test_nothing_to_cut(text, kind):
    assert Splitter(len).split(text, kind) == []


@pytest.mark.parametrize(
    ("size", "overlap", "why"),
    [(0, 0, "size is 0: a piece needs at least 1"), (8, 8, r"overlap is 8: .*\[0, size\)"), (8, -1, "overlap is -1")],
)
def test_settings(size, overlap, why):
    with pytest.raises(SettingError, match=why):
        Splitter(len, size, overlap)


def test_a_character_beyond_the_size():
    with pytest.raises(SettingError, match=r"size is 3, but the character '😀' \(U\+1F600\) alone has 4 tokens"):
        Splitter(COUNTS["bytes"], 3, 0).split("abc 😀")


def test_an_emoji_beyond_the_size_is_cut_between_code_points():
    pieces = Splitter(COUNTS["bytes"], 8, 0).split(f"a {FAMILY} b")
    assert "".join(piece.text for piece in pieces).replace(" ", "") == f"a{FAMILY}b"
    whole = Splitter(COUNTS["bytes"], len(FAMILY.encode()), 0).split(f"a {FAMILY} b")
    assert FAMILY in [piece.text for piece in whole]


def test_an_unknown_kind():
    with pytest.raises(SettingError, match="kind is 'html': it can be 'text' or 'markdown'"):
        Splitter(len).split("x", "html")
