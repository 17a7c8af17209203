"""The notebooks of examples/ as they are committed, and the script that runs them.

Running all of them takes minutes and is a stage of CI; here are only those that the tests write themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / ".ci" / "notebooks"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"/(?:home|root|tmp|usr|var|work|opt|mnt|private|Users)/[\w.-]|[A-Z]:\\\\")
SHOWS = re.compile(r"\bprint\(|\bplt\.show\(|\bdisplay\(|^!|^%%writefile", re.MULTILINE)

# --- what is committed --------------------------------------------------------------------------------


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def complaints(notebook: Any) -> list[str]:
    """What is wrong with a notebook's cells and outputs."""
    found = []
    for number, cell in enumerate(code(notebook), 1):
        if cell.execution_count != number:
            found.append(f"cell {cell.id} was run as {cell.execution_count}, not as {number}: run all, in order")
        if SHOWS.search(cell.source) and not cell.outputs:
            found.append(f"cell {cell.id} shows something, and has no output")
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"cell {cell.id} ended with {output.ename}")
            if output.get("name") == "stderr":
                found.append(f"cell {cell.id} warned: {output.text[:80]}")
    path = MACHINE_PATH.search(nbformat.writes(notebook))
    if path:
        found.append(f"a path of some machine: {path[0]}")
    first = notebook.cells[0]
    title, _, rest = first.source.partition("\n")
    if first.cell_type != "markdown" or not title.startswith("# ") or len(re.findall(r"[.:!?](?:\s|$)", rest)) < 2:
        found.append("it does not open with a title and two sentences of what one learns")
    return found


def test_there_are_six() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_outputs_are_whole(path: Path) -> None:
    nbformat.validate(read(path))
    assert complaints(read(path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_short(path: Path) -> None:
    assert path.stat().st_size < 600_000
    assert 10 <= len(read(path).cells) <= 40


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_knows_nothing_of_the_machine(path: Path) -> None:
    notebook = read(path)
    assert notebook.metadata.kernelspec.display_name == "Python 3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.language_info
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert [cell.id for cell in notebook.cells] == [f"cell-{i:02}" for i in range(1, len(notebook.cells) + 1)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def good() -> Any:
    shown = new_output("stream", name="stdout", text="2\n")
    cell = new_code_cell("print(1 + 1)", execution_count=1, outputs=[shown])
    return new_notebook(cells=[new_markdown_cell("# Adding\n\nYou learn to add. It is easy."), cell])


def spoiled(**changes: Any) -> Any:
    notebook = good()
    notebook.cells[1].update(changes)
    return notebook


BAD = {
    "run as 3": spoiled(execution_count=3),
    "has no output": spoiled(outputs=[]),
    "ended with ZeroDivisionError": spoiled(
        outputs=[new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])]
    ),
    "warned": spoiled(outputs=[new_output("stream", name="stderr", text="UserWarning: old")]),
    "a path of some machine": spoiled(outputs=[new_output("stream", name="stdout", text="/home/ada/kv")]),
    "two sentences": new_notebook(cells=[new_markdown_cell("# Adding"), good().cells[1]]),
}


def test_the_checks_pass_what_is_good() -> None:
    assert complaints(good()) == []


@pytest.mark.parametrize("complaint", BAD)
def test_the_checks_find_what_is_bad(complaint: str) -> None:
    assert complaint in " ".join(complaints(BAD[complaint]))


# --- the script that runs them ------------------------------------------------------------------------


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def write(path: Path, *sources: str) -> Path:
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Try"), *map(new_code_cell, sources)]), path)
    return path


def test_a_run_fills_in_the_outputs_and_writes_them_only_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", "import sys, os", "print(sys.executable)\nprint(os.environ['HF_HUB_OFFLINE'])")
    before = path.read_bytes()
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a.ipynb: ok in" in done.stdout
    assert path.read_bytes() == before
    assert run("--write", path).returncode == 0
    cells = read(path).cells
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2]
    assert cells[2].outputs[0].text == f"{sys.executable}\n1\n", "the kernel is the interpreter that runs the script"
    assert [cell.id for cell in cells] == ["cell-01", "cell-02", "cell-03"]
    written = path.read_bytes()
    assert run("--write", path).returncode == 0
    assert path.read_bytes() == written, "a second run changes nothing"


def test_an_error_and_a_warning_fail_the_run_and_are_not_written(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.ipynb", "print('before')", "1 / 0")
    warning = write(tmp_path / "warning.ipynb", "import warnings\nwarnings.warn('this is old')")
    before = broken.read_bytes(), warning.read_bytes()
    done = run("--write", broken, warning)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "this is old" in done.stdout
    assert "failed: broken.ipynb, warning.ipynb" in done.stderr
    assert (broken.read_bytes(), warning.read_bytes()) == before


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    done = run("9_nothing")
    assert done.returncode == 1
    assert "there is no notebook '9_nothing' in examples/: there are 1_quickstart.ipynb" in done.stderr
