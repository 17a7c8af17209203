"""Replays: trace formats, hit rates known beforehand, and bad input."""

from __future__ import annotations

import builtins
import io
import json

import pytest
from rich.console import Console

from blend.errors import BudgetError, StoreError
from eval.replay import KNOWN_TRACES, ReplayOptions, TraceError, read_trace, run_replay
from eval.replay import run as run_module
from eval.replay.capacity import read_capacity, show_bytes
from eval.replay.paths import ChunkPath, PrefixPath
from eval.replay.plot import PlotMissing, plot_replay
from eval.replay.traces import find_trace


def write(path, *records):
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records), encoding="utf-8")
    return path


def segments(*requests):
    return [{"session": "s", "segments": [list(segment) for segment in request]} for request in requests]


def replay(trace, **options):
    screen = io.StringIO()
    figures = run_replay(ReplayOptions(str(trace), **options), Console(file=screen, width=200))
    return figures, screen.getvalue()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_blocks_of_512_the_last_one_short(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 1, "hash_ids": [7, 8, 9]},
        {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]},
        {"timestamp": 3500, "input_length": 1, "output_length": 1, "hash_ids": [70]},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert (trace.name, trace.format, trace.page) == ("t", "hash_ids", 512)
    assert [request.rows for request in trace.requests] == [(512, 512, 6), (512,), (1,)]
    assert [request.chunks for request in trace.requests] == [(0, 1, 2), (0,), (3,)]
    assert trace.input_rows == 1030 + 512 + 1
    assert trace.distinct_rows == 4 * 512, "a short block takes a whole page"
    assert list(trace.tokens(trace.requests[0])) == [0, 1, 2]
    seconds = [request.seconds for request in trace.requests]
    assert seconds == sorted(set(seconds)), "requests of one time keep their order"
    assert seconds[2] == 3.5


def test_segments_and_their_words(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", *segments([("a", 3), ("b", 2), ("c", 0)], [("b", 2), ("a", 3)])))
    assert [request.rows for request in trace.requests] == [(3, 2), (2, 3)], "an empty message has no rows"
    assert list(trace.tokens(trace.requests[0])) == [0, 1, 2, 3, 4]
    assert list(trace.tokens(trace.requests[1])) == [3, 4, 0, 1, 2]
    assert [request.seconds for request in trace.requests] == [0, 1]


def test_passages_by_the_span_in_their_ids(tmp_path):
    line = {"session": "s", "turn": 1, "doc_ids": ["82_7384-8758-0-1374", "ibm_03-7-11", "no-span"]}
    trace = read_trace(write(tmp_path / "t.jsonl", line))
    assert trace.requests[0].rows == (344, 1, 128), "four characters a row, rounded up; 128 rows where nothing is known"


def test_only_the_first_requests(tmp_path):
    path = write(tmp_path / "t.jsonl", *segments([("a", 1)], [("b", 1)]), "this line is not read")
    assert len(read_trace(path, limit=2).requests) == 2


GOOD = {"timestamp": 5, "input_length": 600, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no request"),
        (["nonsense"], "line 1: this is no JSON .* expected one object a line"),
        (["[1]"], "line 1: a JSON list; expected one object"),
        (
            [{"prompt": "x"}],
            r'line 1: unknown format with the keys prompt; expected .*"hash_ids".*"segments".*"doc_ids"',
        ),
        ([GOOD, {**GOOD, "hash_ids": [1]}], "line 2: 1 hash ids for 600 tokens; expected .*one integer per 512 tokens"),
        ([GOOD, {**GOOD, "hash_ids": ["1", "2"]}], "line 2: 2 hash ids for 600"),
        ([GOOD, {**GOOD, "timestamp": 4}], "line 2: a time of 0.004 s after one of 0.005 s; expected .*rising"),
        ([GOOD, {**GOOD, "input_length": 601}], "line 2: 2 has 89 rows here and 88 further up"),
        ([GOOD, {"timestamp": 5, "hash_ids": [1]}], "line 2: no 'input_length'"),
        ([GOOD, "", *segments([("a", 1)])], "line 3: no 'input_length'"),
        (segments([("a", 1)], [("a", 2)]), "line 2: 'a' has 2 rows here and 1 further up"),
        (segments([("a", "1")]), "line 1: a segment that is no id and number of words"),
        (segments([("a", -1)]), "line 1: a segment that is no id"),
        ([{"segments": [1]}], r"line 1: .*expected \"segments\" \[\[id, words\]"),
        ([{"doc_ids": "a"}], "line 1: doc_ids that are no list of strings"),
        ([{"doc_ids": ["a-9-3"]}], "line 1: passage 'a-9-3' ends before it begins"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", *lines))


def test_a_trace_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match=r"no file 'nowhere': give the path .*mooncake_conversation, agent_miniswe"):
        find_trace("nowhere")
    monkeypatch.setenv("KVBLEND_DATA", str(tmp_path))
    with pytest.raises(TraceError, match=r"set KVBLEND_DATA to the folder that has traces/tau_airline.jsonl"):
        find_trace("tau_airline")
    (tmp_path / "traces").mkdir()
    write(tmp_path / "traces" / "tau_airline.jsonl", *segments([("a", 1)]))
    assert find_trace("tau_airline").parent == tmp_path / "traces"
    monkeypatch.delenv("KVBLEND_DATA")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "traces").rename(tmp_path / "shared" / "data")
    with pytest.raises(TraceError, match=r"no file .*shared/data"):
        find_trace("tau_airline")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("1.5 kb", 1500), ("25%", 250), ("0.5", 500), ("1", 1000), ("7B", 7), ("unbounded", None)],
)
def test_capacities(text, nbytes):
    assert read_capacity(text, 1000).nbytes == nbytes


@pytest.mark.parametrize("text", ["", "many", "10", "-1GiB", "0", "5 GiB of it", "1 ib", "0%", "101%"])
def test_a_capacity_that_cannot_be_read(text):
    with pytest.raises(BudgetError, match=r"10GiB.*25% or 0.25.*unbounded"):
        read_capacity(text, 1000)


def test_bytes_in_words():
    assert [show_bytes(n) for n in (0, 999, 1536, 3 << 30, 5 << 40)] == ["0 B", "999 B", "1.5 KiB", "3 GiB", "5 TiB"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_row": 0}, "bytes-per-row is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"policies": ()}, "at least one policy"),
        ({"capacities": ()}, "at least one policy and one capacity"),
        ({"prefix": "trie"}, "'trie': choose from radix, block"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(BudgetError, match=message):
        ReplayOptions("t", **options)


def test_an_unknown_policy():
    with pytest.raises(StoreError, match="'fifo': choose from lru"):
        ReplayOptions("t", policies=("fifo",))


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_hit_rates_worked_out_by_hand(tmp_path):
    """Prefix: 4 + 7 rows of 21 are known from the start. Chunks: also b, behind another beginning."""
    trace = write(
        tmp_path / "t.jsonl",
        *segments([("a", 4), ("b", 3)], [("a", 4), ("c", 1)], [("b", 3), ("a", 4)], [("b", 3), ("a", 4)]),
    )
    figures, text = replay(trace, policies=("lru",), capacities=("unbounded",), bytes_per_row=10)
    (result,) = figures["results"]
    # Found in order: nothing; a; as prefix nothing, as chunks b and a; both.
    assert figures["input_rows"] == 26
    assert result["prefix_hit_rate"] == pytest.approx((4 + 7) / 26)
    assert result["chunk_hit_rate"] == pytest.approx((4 + 7 + 7) / 26)
    assert result["prefix_bytes"] == (4 + 3 + 1 + 7) * 10, "ab, ac and ba; the a at the start is held once"
    assert result["chunk_bytes"] == (4 + 3 + 1) * 10
    assert result["prefix_dedup_ratio"] == pytest.approx((7 + 5 + 7) / 15)
    assert result["chunk_dedup_ratio"] == pytest.approx((4 * 4 + 3 * 3 + 1) / 8)
    assert (result["prefix_evicted_rows"], result["chunk_evictions"], result["chunk_refused"]) == (0, 0, 0)
    assert (result["policy"], result["capacity"], result["capacity_bytes"]) == ("lru", "unbounded", None)
    assert figures["complete"]
    assert "42.3%" in text
    assert "69.2%" in text


def test_a_chunk_twice_in_one_request_is_computed_in_it(tmp_path):
    trace = write(tmp_path / "t.jsonl", *segments([("a", 4), ("a", 4)], [("a", 4), ("a", 4)]))
    figures, _ = replay(trace, policies=("lru",), capacities=("unbounded",))
    assert figures["results"][0]["chunk_hit_rate"] == 0.5, "nothing is known of the first request before it comes"


def test_a_limit_is_kept(tmp_path):
    """Room for 5 of 8 rows: whoever comes back has left."""
    trace = write(tmp_path / "t.jsonl", *segments(*([("a", 4)], [("b", 4)]) * 3, [("huge", 99)]))
    figures, _ = replay(trace, policies=("lru",), capacities=("50B", "unbounded"), bytes_per_row=10)
    tight, free = figures["results"]
    assert tight["chunk_hit_rate"] == 0
    assert tight["prefix_hit_rate"] == pytest.approx(4 / 123), "of a run's four rows one is left over each time"
    assert tight["chunk_bytes"] == 40
    assert tight["prefix_bytes"] <= 50
    assert tight["chunk_evictions"] == 5
    assert tight["chunk_refused"] == 1
    assert tight["prefix_evicted_rows"] > 0
    assert free["chunk_hit_rate"] == pytest.approx(16 / figures["input_rows"])


def test_policies_differ_where_they_should(tmp_path):
    """One chunk in every request, and a stream of others: LRU and LFU both keep it, and only uses tell of another."""
    stream = [[("hot", 10)] * 1 for _ in range(5)] + [[(f"k{i}", 10)] for i in range(3)] + [[("hot", 10)]]
    trace = write(tmp_path / "t.jsonl", *segments(*stream))
    figures, _ = replay(trace, policies=("lru", "gdsf"), capacities=("20B",), bytes_per_row=1)
    lru, gdsf = (result["chunk_hit_rate"] for result in figures["results"])
    assert lru == pytest.approx(40 / 90)
    assert gdsf == pytest.approx(50 / 90), "used five times, it outlives three that were used once"


def test_the_trace_s_clock_rules_both_paths(tmp_path):
    """Hotness decays in the trace's seconds, not in those that the replay takes."""
    lines = [{"timestamp": t, "input_length": 512, "hash_ids": [h]} for t, h in ((0, 1), (0, 1), (9e6, 2), (9e6, 3))]
    lines.append({"timestamp": 9e6, "input_length": 512, "hash_ids": [2]})
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    now = [0.0]

    def clock():
        return now[0]

    for path in (PrefixPath(trace, "radix", "hotness", 2, clock), ChunkPath(trace, "hotness", 2, clock)):
        for request in trace.requests:
            now[0] = request.seconds
            path.serve(request)
        assert path.found_rows == 2 * 512, "1 was used twice, but hours ago: it leaves before 2"


@pytest.mark.parametrize("prefix", ["radix", "block"])
def test_blocks_and_tree_agree_on_whole_blocks(tmp_path, prefix):
    lines = [{"timestamp": i, "input_length": 1024, "hash_ids": [0, i // 2]} for i in range(1, 20)]
    figures, _ = replay(
        write(tmp_path / "t.jsonl", *lines), policies=("lru",), capacities=("unbounded",), prefix=prefix
    )
    assert figures["results"][0]["prefix_hit_rate"] == pytest.approx((18 + 9) / 38)


def test_one_result_per_policy_and_capacity(tmp_path):
    trace = write(tmp_path / "t.jsonl", *segments(*([(f"k{i % 7}", 8)] for i in range(40))))
    figures, text = replay(trace, plot=tmp_path / "made" / "plot.svg")
    pairs = [(result["capacity"], result["policy"]) for result in figures["results"]]
    assert len(pairs) == len(set(pairs)) == 24
    for result in figures["results"]:
        assert 0 <= result["prefix_hit_rate"] <= 1
        assert 0 <= result["chunk_hit_rate"] <= 33 / 40
        for path in ("prefix", "chunk"):
            lookup = result["lookup_us"][path]
            assert 0 < lookup["p50"] <= lookup["p90"] <= lookup["p99"]
    json.dumps(figures)
    assert "unbounded" in text
    assert "<svg" in (tmp_path / "made" / "plot.svg").read_text(encoding="utf-8")


def test_interrupted_shows_what_is_done(tmp_path, monkeypatch):
    trace = write(tmp_path / "t.jsonl", *segments([("a", 1)]))
    calls, original = [], run_module._replay

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(run_module, "_replay", interrupted)
    figures, text = replay(trace)
    assert not figures["complete"]
    assert len(figures["results"]) == 2
    assert "interrupted after 2 of 24 runs" in text
    assert "2%" in text, "the table of what is done"


def test_a_plot_without_matplotlib(tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PlotMissing, match=r"kvblend\[plot\]"):
        plot_replay({"results": []}, tmp_path / "p.png")


# --- the recorded ones ------------------------------------------------------------------------------------------------


@pytest.fixture
def traces(data, monkeypatch):
    monkeypatch.setenv("KVBLEND_DATA", str(data))
    for name in KNOWN_TRACES:
        if not (data / "traces" / f"{name}.jsonl").is_file():
            pytest.skip(f"{name} is not among the data")


def test_mooncake_s_blocks_come_back_as_often_as_is_known(traces):
    """0.37 of its blocks; ids name whole beginnings, so that a chunk's rate can only be the prefix's."""
    trace = read_trace(find_trace("mooncake_conversation"))
    assert len(trace.requests) == 12_031
    seen, hits, blocks = set(), 0, 0
    for request in trace.requests:
        hits += sum(chunk in seen for chunk in request.chunks)
        blocks += len(request.chunks)
        seen.update(request.chunks)
    assert 0.366 < hits / blocks < 0.374
    figures, _ = replay("mooncake_conversation", policies=("lru",), capacities=("unbounded",))
    (result,) = figures["results"]
    assert 0.366 < result["prefix_hit_rate"] < 0.374
    assert result["chunk_hit_rate"] == result["prefix_hit_rate"]
    assert result["chunk_bytes"] == result["prefix_bytes"] == trace.distinct_rows * figures["bytes_per_row"]


@pytest.mark.parametrize(
    ("name", "prefix", "chunk"),
    [
        ("agent_miniswe", 0.928, 0.962),
        ("agent_magagent", 0.838, 0.926),
        ("tau_airline", 0.958, 0.969),
        ("mtrag_passages", 0.078, 0.177),
    ],
)
def test_the_others_too(traces, name, prefix, chunk):
    figures, _ = replay(name, policies=("lru",), capacities=("unbounded",))
    (result,) = figures["results"]
    assert result["prefix_hit_rate"] == pytest.approx(prefix, abs=5e-4)
    assert result["chunk_hit_rate"] == pytest.approx(chunk, abs=6e-4)
