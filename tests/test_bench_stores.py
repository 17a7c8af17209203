"""The benches of stores and of isolation, in small: what they report, not how fast it was."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from blend import Blender, BudgetError
from blend.testing.tiny import tiny_model
from eval.bench.isolation import IsolationOptions, auc, run_isolation_bench
from eval.bench.stores import StoresOptions, run_stores_bench
from eval.bench.ttft import BenchOptions
from eval.cli import app


@pytest.fixture
def quiet():
    return Console(quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_stores_in_small(smollm2, quiet, tmp_path, codec):
    bench = BenchOptions(rows=256, chunk_rows=64, pairs=1, systems=("epic",))
    with Blender(*smollm2, check=False) as blender:
        figures = run_stores_bench(StoresOptions(bench, tmp_path, codec=codec), quiet, blender)
    names = ["memory"]
    for kind in ("disk, warm", "disk, cold", *(("Redis",) if shutil.which("redis-server") else ())):
        names += [f"{kind}, read before", f"{kind}, read beside"]
    names += ["nowhere, prefill first", "nowhere, encode first"]
    assert list(figures["stores"]) == names
    for name, f in figures["stores"].items():
        stored = name.startswith(("disk", "Redis"))
        assert f["hits"] == (0 if name.startswith("nowhere") else figures["chunks"])
        assert (f["read_bytes"] > 0) == stored
        assert f["waited_s"] <= f["load_s"] * 1.01
        assert f["ttft_s"] > 0
    assert figures["complete"]
    json.dumps(figures)


def test_isolation_in_small(quiet):
    with Blender(tiny_model("llama", torch.float32), None, check=False) as blender:
        figures = run_isolation_bench(IsolationOptions(rows=40, samples=3), quiet, blender)
    assert list(figures["ways"]) == ["one tenant", "one tenant, jitter", "two tenants"]
    for f in figures["ways"].values():
        assert 0.0 <= f["auc"] <= 1.0
        assert f["interval"][0] <= f["auc"] <= f["interval"][1]
    json.dumps(figures)


def test_auc_counts_pairs():
    assert auc([1, 2], [3, 4]) == 1.0
    assert auc([3, 4], [1, 2]) == 0.0
    assert auc([1, 3], [2, 4]) == 0.75
    assert auc([1, 1], [1, 1]) == 0.5


def test_isolation_needs_samples():
    with pytest.raises(BudgetError, match="samples 1"):
        IsolationOptions(samples=1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench stores --system cachegen", "no system 'cachegen'"),
        ("bench stores --rows 10", "rows is 10"),
        ("bench codecs --codecs int3", "no codec 'int3'"),
        ("bench lookup --entries 0", "entries is 0"),
        ("bench isolation --samples 0", "samples 0"),
        ("replay nowhere.jsonl", "nowhere.jsonl"),
        ("replay mooncake_conversation --policy mru", "no eviction policy 'mru'"),
        ("store ls gopher://hole", "gopher"),
        ("store ls redis://127.0.0.1:1/0", "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_says_so(command, message):
    result = CliRunner().invoke(app, command.split())
    assert message in str(result.exception)


def test_looking_up_from_the_command_line(tmp_path):
    file = tmp_path / "lookup.json"
    options = ["--entries", "2000", "--lookups", "200", "--subjects", "queue lru", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "lookup", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["complete"]


def test_replaying_from_the_command_line(data, tmp_path):
    file = tmp_path / "replay.json"
    command = ["replay", "mtrag_passages", "--policy", "lru,gdsf", "--capacity", "10%,unbounded", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    results = json.loads(file.read_text())["results"]
    assert [(r["capacity"], r["policy"]) for r in results] == [
        ("10%", "lru"), ("10%", "gdsf"), ("unbounded", "lru"), ("unbounded", "gdsf"),
    ]  # fmt: skip
    assert all(0 <= r["prefix_hit_rate"] <= r["chunk_hit_rate"] <= 1 for r in results)
