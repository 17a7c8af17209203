"""The report adds up, and shows what it says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from html import unescape
from io import StringIO

import pytest
from rich.console import Console

from blend import Blender, Chunk, FirstK, FullRecompute, FullReuse, KVDeviation, Prompt, QueryAttention
from blend.report_view import COLOURS, coloured_prompt
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer

STAGES = {"lookup", "encode", "assemble", "probe", "check", "repair", "prefill"}


@pytest.fixture(scope="module")
def blender():
    with Blender(tiny_model("llama"), tiny_tokenizer(template=CHATML), check=False) as blender:
        yield blender


def worded(blender):
    passages = ["The old pier & its <b>lamps</b>.", "Bread is grey."]
    return blender.prompt("Who built it?", passages)


def reports(blender):
    """One of every kind of request."""
    prompt = tiny_prompt(31)
    named = replace(prompt, chunks=(Chunk(prompt.chunks[0].ids, "<b>&"), *prompt.chunks[1:]))
    for selector in (FullReuse(), FirstK(0.3), QueryAttention(0.3), KVDeviation(0.3), FullRecompute()):
        for _ in range(2):  # missed, then hit
            yield blender.fuse(named, selector=selector).report
    yield blender.prefill(prompt).report
    yield blender.fuse(prompt).report  # all prefix
    yield blender.fuse(Prompt(prompt.system, (), prompt.question)).report  # no chunks
    past = blender.fuse(tiny_prompt(32))
    longer = replace(tiny_prompt(32), question=(*tiny_prompt(32).question, *tiny_ids(5, seed=3)))
    yield blender.fuse(longer, past=past).report
    yield blender.fuse(worded(blender)).report


def test_every_row_is_accounted_for(blender):
    for report in reports(blender):
        assert len(report.states) == len(report.ids) == report.rows
        assert set(report.states) <= set(COLOURS)
        assert report.reused_rows + report.recomputed_rows + report.states.count("fresh") == report.rows
        assert report.states.count("exact") >= report.prefix_rows
        assert report.recomputed_rows == sum(chunk.recomputed for chunk in report.chunks)
        assert report.prefix_rows + report.context_rows <= report.reused_rows
        assert sum(chunk.rows for chunk in report.chunks) < report.rows


def test_chunks_stand_where_they_say(blender):
    for report in reports(blender):
        for chunk in report.chunks:
            assert 0 <= chunk.start < chunk.start + chunk.rows < report.rows
            span = report.states[chunk.start : chunk.start + chunk.rows]
            assert span.count("recomputed") == chunk.recomputed
            assert "fresh" not in span or report.method == "prefill"
        stops = [chunk.start + chunk.rows for chunk in report.chunks]
        assert [chunk.start for chunk in report.chunks][1:] == stops[:-1]


def test_charge_and_seconds(blender):
    for report in reports(blender):
        assert len(report.rows_per_layer) == len(report.projected_per_layer) == 4
        assert all(0 < rows <= report.rows for rows in report.rows_per_layer)
        assert report.row_layers > 0
        assert report.ideal_speedup == pytest.approx(report.rows * 4 / report.row_layers)
        assert set(report.seconds) <= STAGES
        assert all(seconds >= 0 for seconds in report.seconds.values())
        assert sum(report.seconds.values()) <= report.ttft
        assert report.kv_bytes == report.rows * 4 * 2 * (2 * 16) * 4  # layers, K and V, heads x dim, fp32


def test_hit_rate_counts_what_was_not_encoded_now():
    blender, prompt = Blender(tiny_model("llama"), check=False), tiny_prompt(1)
    blender.encode(prompt.chunks[:1], system=prompt.system)
    assert blender.fuse(prompt).report.hit_rate == pytest.approx(1 / 3)
    assert blender.fuse(prompt).report.hit_rate == 1.0
    assert blender.fuse(Prompt((5,), (), (6,))).report.hit_rate == 1.0


def test_as_plain_data(blender):
    for report in reports(blender):
        data = json.loads(json.dumps(report.as_dict()))
        assert data["rows"] == report.rows
        assert data["reused_rows"] == report.reused_rows
        assert data["recomputed_rows"] == report.recomputed_rows
        assert [chunk["name"] for chunk in data["chunks"]] == [chunk.name for chunk in report.chunks]
        assert data["seconds"] == report.seconds
        assert not {"ids", "states", "decode"} & set(data), "tokens stay out"


def test_as_text(blender):
    for report in reports(blender):
        text = str(report)
        assert all(chunk.name in text for chunk in report.chunks)
        assert str(report.rows) in text
        assert all(stage in text for stage in report.seconds)
        assert "\x1b" not in text, "plain text has no colours"
        if report.fallback:
            assert report.fallback.split()[0] in text


def test_chunks_without_a_name_get_their_place():
    blender = Blender(tiny_model("llama"), check=False)
    report = blender.fuse(Prompt((5, 6), (Chunk((7, 8)), Chunk((9,))), (3,))).report
    assert [chunk.name for chunk in report.chunks] == ["chunk 1", "chunk 2"]


def test_a_rich_console_takes_it(blender):
    report = blender.fuse(worded(blender)).report
    console = Console(file=StringIO(), width=120)
    console.print(report)
    assert "passage 2" in console.file.getvalue()


def shown(html):
    """The prompt's text as a browser shows it: the last box."""
    box = html.split("pre-wrap")[1].split(">", 1)[1]
    return unescape(re.sub(r"<[^>]*>", "", box))


def test_html_shows_the_prompt_and_escapes_it(blender):
    prompt = worded(blender)
    html = blender.fuse(prompt).report._repr_html_()
    assert "<b>lamps</b>" not in html
    assert "<|im_start|>" not in html
    assert shown(html) == blender.tokenizer.decode(prompt.ids)
    for state in ("exact", "recomputed", "fresh"):
        assert COLOURS[state][0] in html
    assert html.count("<div") == html.count("</div>")
    assert html.count("<span") == html.count("</span>")


def test_html_of_every_kind_of_request(blender):
    for report in reports(blender):
        html = report._repr_html_()
        assert "<b>" not in html
        assert shown(html) == "".join(report.decode(token) for token in report.ids)


def test_the_coloured_prompt_is_the_prompt(blender):
    for report in reports(blender):
        text = coloured_prompt(report)
        assert text.plain == "".join(report.decode(token) for token in report.ids)
        assert len({str(span.style) for span in text.spans}) == len({COLOURS[state][0] for state in report.states})


def test_without_a_tokenizer_ids_are_shown():
    blender, prompt = Blender(tiny_model("llama"), check=False), tiny_prompt(1)
    report = blender.fuse(prompt).report
    assert coloured_prompt(report).plain.split() == [str(token) for token in prompt.ids]
    assert shown(replace(report, decode=None)._repr_html_()).split() == [str(token) for token in prompt.ids]


def test_a_report_is_short_where_only_its_repr_is_shown():
    with Blender(tiny_model("llama"), check=False) as blender:
        report = blender.fuse(tiny_prompt()).report
    assert repr(report).startswith("<Report expected-error: ")
    assert len(repr(report)) < 400


def test_a_selector_may_hold_what_cannot_be_hashed():
    @dataclass(frozen=True)
    class Listed(FirstK):
        extra: list = field(default_factory=lambda: [1, 2])

    with Blender(tiny_model("llama"), selector=Listed(0.2), check=False) as blender:
        prompt = tiny_prompt(chunks=(150, 150))
        assert blender.fuse(prompt).report.recomputed_rows > 0
        assert blender.fuse(prompt).report.recomputed_rows > 0
