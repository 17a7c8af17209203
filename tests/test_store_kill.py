"""SIGKILL at random instants, 200 times in all: no wrong byte, nothing lost that was put, the limit held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("kill_driver.py")
ROOT = DRIVER.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 30, 750_000], ids=["roomy", "tight"])
def test_kills_in_the_middle_of_writes(tmp_path, limit):
    """100 kills of two writers and two readers; the driver checks every promise after each, and ends at a breach.

    With room nothing that was put may be missing; where room is tight, entries leave all the time.
    """
    command = [sys.executable, "-W", "error", str(DRIVER), str(tmp_path / "kv"), "100", str(limit), "7"]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    told = json.loads(run.stdout)
    print(told)
    assert told["kills"] == 100
    assert told["mid_write"] >= 5, f"only {told['mid_write']} of the kills fell into a write: they prove little"
    assert told["entries"] > 0
    assert told["most_bytes"] <= limit
