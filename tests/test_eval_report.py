"""The report of an evaluation: what it says, and that nothing of the data gets out."""

from __future__ import annotations

import builtins
import html
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eval.report import ReportError, read_run, readme_table, write_report
from eval.report.contents import write_document
from eval.report.markdown import escape, write_markdown
from eval.report.plots import PLOTS
from eval.report.results import nats
from eval.report.run import rows_of
from retrieval.errors import ExtraMissing
from tests.made_up_run import SECRET, SETS, SYSTEMS, few, make_scores, make_summary, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), make_scores())


@pytest.fixture(scope="module")
def written(folder):
    return write_report(folder)


def report(folder, scores, **options):
    write_report(write_run(folder, scores, **options))
    return (folder / "report.md").read_text(encoding="utf-8"), (folder / "report.html").read_text(encoding="utf-8")


def words(folder, scores, **options):
    """The report's text, with no pictures drawn."""
    return write_markdown(write_document(read_run(write_run(folder, scores, **options)), [], []))


# --- the files --------------------------------------------------------------------------------------------------------


def test_all_files_are_written(folder, written):
    names = [path.relative_to(folder).as_posix() for path in written]
    assert names[:2] == ["report.md", "report.html"]
    assert sorted(names[2:]) == sorted(f"plots/{plot.name}.{kind}" for plot in PLOTS for kind in ("png", "svg"))
    assert all(path.stat().st_size > 1000 for path in written)
    shown = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (folder / "report.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(f"plots/{plot.name}.png" for plot in PLOTS), "each picture once, where it is"


class Page(HTMLParser):
    """Collects tags, ids and whatever could be fetched; open tags must be closed."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.tags, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name.rpartition(":")[2] in ("href", "src", "action", "poster"):
                self.links.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag != "meta":
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(written):
    text = written[1].read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "pictures share no id"
    assert all(link.startswith(("#", "data:image/png")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert page.tags.count("svg") == len(PLOTS)
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= set(re.findall(r"--([\w-]+):", text)), "every colour is known"


def test_nothing_of_the_data_but_names_and_ids(written):
    for path in written[:2]:
        assert SECRET not in path.read_text(encoding="utf-8")


def test_what_comes_from_data_is_escaped(tmp_path):
    bad = "<script>alert(1)</script>|*a*`b`\n# [x](y) $m$"
    systems = {"full": SYSTEMS["full"], "cachecraft": (bad, *SYSTEMS["cachecraft"][1:])}
    scores = make_scores(systems, sets={bad: "squad"}, n=4)
    scores = [replace(s, example=f"{bad}{number}", fallback=bad) for number, s in enumerate(scores)]
    markdown, page = report(tmp_path, scores, systems=systems)
    assert "<script" not in markdown
    assert Page(page).tags.count("script") == 1
    assert html.escape(" ".join(bad.split())) in " ".join(page.split())
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables if "alert" in line} > {6}, "no cell is split in two"
    assert escape("a_b <i> | `c`\nd $") == r"a\_b &lt;i&gt; \| \`c\` d \$"


def test_the_same_run_gives_the_same_bytes(tmp_path):
    folder = write_run(tmp_path, few(["full", "epic"]))
    before = {path: path.read_bytes() for path in write_report(folder)}
    assert {path: path.read_bytes() for path in write_report(folder)} == before


# --- what it says -----------------------------------------------------------------------------------------------------


def test_tables_have_a_line_per_system_and_setting(folder, written):
    text = written[0].read_text(encoding="utf-8")
    pooled = text.split("## All sets together")[1].split("## ")[0]
    rows = [line.split(" | ") for line in pooled.splitlines() if line.startswith("| ")][1:]
    swept = sum(own is None for _, own, *_ in SYSTEMS.values())
    assert len(rows) == len(SYSTEMS) + 2 * swept
    entry = read_run(folder).summary["systems"]["epic"]["0.15"]
    line = next(row for row in rows if row[0] == "| EPIC" and row[1] == "0.15")
    low, high = entry["ci"]["kl_mean"]
    assert line[2] == "120"
    assert line[3] == rf"{entry['kl_mean']:.3f} \[{low:.3f}, {high:.3f}\]"
    assert f"{entry['speedup_median']:.2f}x" in " ".join(line)
    assert all(f"## Set {escape(name)}" in text for name in SETS)
    assert "commit**: 0123abc" in text
    assert "threads**: 1" in text


def test_a_line_on_who_is_nearest(written):
    assert "Nearest to full prefill at ratio 0.15 is FusionRAG: 0." in written[0].read_text(encoding="utf-8")


def test_small_and_unfinished_are_said(tmp_path):
    scores = few(["full", "epic"])
    markdown, page = report(tmp_path, scores, summary=make_summary(scores, complete=False))
    assert "This run is not finished" in markdown
    assert "A small set: 8 examples." in markdown
    assert '<p class="alert">' in page
    markdown = words(tmp_path / "b", few(["full", "epic"], n=30))
    assert "not finished" not in markdown
    assert "| small set |" not in markdown


def test_how_often_full_prefill_fails(tmp_path):
    scores = [replace(s, metrics={"f1": 0.0 if s.example.endswith(("1", "2")) else 0.5}) for s in few(["full", "epic"])]
    markdown = words(tmp_path, scores)
    assert r"| squad\_en | f1 | 8 | 2 | 25% |" in markdown
    markdown = words(tmp_path / "b", few(["epic"]))
    assert "Full prefill was not run." in markdown


def test_what_fell_back(tmp_path):
    scores = few(["full", "epic"], ratios=(0.15,))
    markdown = words(tmp_path, scores)
    assert "Nothing: every prompt was run as its system says." in markdown
    scores = [replace(s, fallback="too short") if s.system == "epic" else s for s in scores]
    markdown = words(tmp_path / "b", scores)
    ids = r"squad\_en-0, squad\_en-1, squad\_en-2 and 5 more"
    assert f"| EPIC | 0.15 | 8 | too short | {ids} |" in markdown


def test_peers_and_oracles_leave_gaps_not_zeros(tmp_path):
    scores = [
        replace(s, kl=None, kl_first=None, top1=None, same_answer=None, charged=None) if s.system == "epic" else s
        for s in few(["full", "epic", "oracle-kv"], ratios=(0.15,))
    ]
    markdown = words(tmp_path, scores)
    pooled = markdown.split("## All sets together")[1].split("## ")[0]
    peer = next(line for line in pooled.splitlines() if line.startswith("| EPIC")).split(" | ")
    oracle = next(line for line in pooled.splitlines() if line.startswith("| oracle")).split(" | ")
    assert peer[3:8] == ["–"] * 5
    assert peer[-1].endswith("x \\[") or "x" in peer[-1]
    assert oracle[-1].strip(" |") == "–"


def test_readme_table_is_sorted_by_kl(folder):
    summary = read_run(folder).summary
    table = readme_table(summary).splitlines()
    sets = " | ".join(f"KL {name.replace('_', chr(92) + '_')}" for name in SETS)
    assert table[0] == f"| system | KL mean | F1 | held | charged | speed-up | {sets} |"
    assert len(table) == 2 + len(SYSTEMS)
    kls = [float(line.split(" | ")[1].split()[0]) for line in table[2:]]
    assert kls == sorted(kls)
    epic, other = ([line for line in some if line.startswith("| EPIC |")]
                   for some in (table, readme_table(summary, 0.3).splitlines()))  # fmt: skip
    assert len(epic) == len(other) == 1
    assert epic != other
    assert any(line.startswith("| EPIC-16, k=16 |") for line in table)
    with pytest.raises(ReportError, match=r"ratio 0\.2; there are 0\.05, 0\.15, 0\.3"):
        readme_table(summary, 0.2)


def test_what_is_a_ratio():
    rows = rows_of({"full": {"1": {}}, "reuse": {"0": {}}, "k": {"k=16": {}}, "epic": {"1": {}, "0": {}, "0.5": {}}})
    assert [(row.name, row.ratio) for row in rows] == [
        ("full", None), ("reuse", None), ("k", None), ("epic", 0.0), ("epic", 0.5), ("epic", 1.0)
    ]  # fmt: skip
    assert [row.exact for row in rows] == [True, False, False, False, False, False]


def test_small_numbers_keep_their_digits():
    assert [nats(x) for x in (0.0, 0.0564, 1.5, 0.00042, 5e-12)] == ["0", "0.056", "1.500", "4e-4", "5e-12"]


# --- what cannot be drawn ---------------------------------------------------------------------------------------------


def test_one_ratio_has_no_curves(tmp_path):
    (tmp_path / "plots").mkdir(parents=True)
    (tmp_path / "plots" / "kl_ratio.png").write_bytes(b"of an earlier report")
    markdown, page = report(tmp_path, few(["full", "reuse", "epic"], ratios=(0.15,)))
    assert not (tmp_path / "plots" / "kl_ratio.png").exists()
    assert "plots/tradeoff.png" in markdown
    assert "KL against the ratio is not drawn**: it takes at least two ratios, and this run has one." in markdown
    assert page.count("<figure>") == len(PLOTS) - 2


def test_a_run_with_nothing_to_draw_still_has_a_report(tmp_path):
    scores = [
        replace(s, rows=100, ttft_s=None, seconds={}, kl=None, kl_first=None, metrics={}, kv_error=None, charged=None)
        for s in few(["epic"], ratios=(0.15,), n=1)
    ]
    markdown, page = report(tmp_path, scores)
    assert markdown.count("is not drawn**") == len(PLOTS)
    assert "<figure>" not in page


def test_dollar_signs_are_no_formulas(tmp_path):
    systems = {"epic": ("$x$ {of} \\frac", *SYSTEMS["epic"][1:])}
    markdown, _ = report(tmp_path, make_scores(systems, sets={"s": "squad"}, n=6), systems=systems)
    assert "plots/tradeoff.png" in markdown


def test_without_matplotlib_the_message_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    folder = write_run(tmp_path, few(["full"]))
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ExtraMissing, match=r'pip install "kvblend\[plot\]"'):
        write_report(folder)


# --- bad folders ------------------------------------------------------------------------------------------------------


def test_bad_folders(tmp_path):
    with pytest.raises(ReportError, match=r"there is no .*summary\.json: give the folder of a run"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(ReportError, match=r"summary\.json cannot be read"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ReportError, match="holds a list, not an object"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text('{"model": "m"}', encoding="utf-8")
    with pytest.raises(ReportError, match="lacks complete, data, dtype, machine, systems"):
        write_report(tmp_path)
