"""``tests/gpu/run.py`` on the CPU with tiny models: the same code that a GPU runs, but for what only a GPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).with_name("gpu")


@pytest.fixture
def script(monkeypatch):
    """The script's modules, which find each other as neighbours; they leave no trace behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    monkeypatch.setenv("KVBLEND_ATTENTION", "")
    yield lambda name: __import__(name)
    for name in set(sys.modules) - before:
        if name in ("run", "lab", "found", "suites"):
            del sys.modules[name]


@pytest.mark.slow
def test_the_whole_script(tmp_path):
    environment = {**os.environ, "KVBLEND_ATTENTION": ""}
    command = [sys.executable, str(FOLDER / "run.py"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: suite["failures"] for name, suite in report["suites"].items()} == {"sdpa": {}, "blocked": {}}
    assert len(report["suites"]["sdpa"]["proofs"]) == 6
    assert set(report["choice"]["chosen"].values()) <= {"gemm", "blocked"}
    assert not report["skipped"]
    assert not report["errors"]
    assert [case["model"] for case in report["compared"]] == ["tiny Llama", "tiny Qwen"]
    assert all(case["kv_off"] < 0.02 and case["next_logits_off"] < 0.02 for case in report["compared"])
    # Two lengths, two models: one full prefill and two recipes each, and the other backend once.
    assert len(report["cases"]) == 2 * 2 * 3 + 1
    for case in report["cases"]:
        assert case["ttft_s"] > 0
        assert case["of_ideal"] == pytest.approx(case["speedup"] / case["ideal"])
    table = (tmp_path / "report.md").read_text()
    assert "| tiny Llama | 320 | default | 0.15 | blocked |" in table
    assert "| sdpa | all pass |" in table
    assert done.stdout.endswith(table + "\n")


def test_what_does_not_fit_the_time_is_listed(script, tmp_path, capsys):
    assert script("run").main(["--small", "--budget", "0.5", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["skipped"] == ["bringing layers over", "building tiny Llama", "building tiny Qwen"]
    assert all("did not end within 0 s" in suite["crashed"] for suite in report["suites"].values())
    table = (tmp_path / "report.md").read_text()
    assert "* building tiny Llama" in table
    assert "CRASHED" in table


def test_a_case_that_fails_is_listed_and_the_others_run(script, tmp_path):
    found = script("found").Found(tmp_path, time.monotonic() + 60, {"device": "a CPU"})

    def fails():
        raise RuntimeError("an illegal memory access was encountered")

    assert found.case("one", 1, fails, found.cases) is None
    case = {"model": "m", "rows": 8, "method": "default", "ttft_s": 0.5, "speedup": 2.0, "ideal": 4.0, "of_ideal": 0.5}
    found.case("two", 1, lambda: case, found.cases)
    table = (tmp_path / "report.md").read_text()
    assert "* one: RuntimeError: an illegal memory access was encountered" in table
    assert "| m | 8 | default |  |  | 0.500 | 2.00 | 4.00 | 50% |  |" in table


def test_a_backend_that_crashes_the_process_is_a_finding(script):
    def process(code):
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    running = {"dies": process("import os; os.abort()"), "lives": process('print(\'{"failures": {}, "proofs": {}}\')')}
    results = script("suites").suite_results(running, 60)
    assert results["lives"] == {"failures": {}, "proofs": {}}
    assert "exit status -6" in results["dies"]["crashed"]


def test_a_backend_that_is_wrong_is_found_out(script, monkeypatch):
    suites = script("suites")

    def later(query, key, value, mask, **options):
        rows = (mask.rows_S + 1).clamp(max=mask.total - 1)
        return eager(query, key, value, type(mask)(rows, mask.total, mask.reach), **options)

    eager = suites.BACKENDS["eager"]
    monkeypatch.setitem(suites.BACKENDS, "sdpa", later)
    wrong = suites.run_suite("sdpa", torch.device("cpu"), ("llama",))["failures"]
    assert "test_any_rows" in wrong
    assert "llama: no row sees the future" in wrong


def test_without_a_gpu_it_says_so(script, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        script("run").main(["--out", str(tmp_path)])
    assert "--small" in capsys.readouterr().err
