"""The pipeline among processes: killed in the middle of adding, and on the real model from end to end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from retrieval import Document, IndexMismatch, RagPipeline, RagSettings
from tests.conftest import ROOT
from tests.rag_worker import documents, open_rag

COUNT = 400


def killed_at(folder, line, times):
    """Adds in another process, and kills it as soon as it has said a line so many times."""
    command = [sys.executable, "-m", "tests.rag_worker", str(folder), str(COUNT)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        for said in worker.stdout:
            times -= said.strip() == line
            if not times:
                worker.send_signal(signal.SIGKILL)
                break
    assert worker.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_killed_in_the_middle_of_adding_the_rest_is_done_only(tmp_path):
    killed_at(tmp_path, "embedded", 3)
    rag = open_rag(tmp_path)
    there = rag.stats()
    assert 0 < there.documents < COUNT
    assert there.encoded == 0
    rag.close()

    killed_at(tmp_path, "stored", 120)  # some batches: of each its passages alone, then their means
    rag = open_rag(tmp_path)
    there = rag.stats()
    assert there.documents == COUNT, "encoding begins when all is indexed"
    assert 4 <= there.encoded < COUNT
    changes = rag.add(documents(COUNT), encode="now")
    assert changes.unchanged == COUNT
    assert rag.embedder.texts == [], "nothing is embedded twice"
    assert changes.encoded == COUNT - there.encoded
    assert rag.stats() == (COUNT, COUNT, COUNT)
    found = {hit.passage.document for hit in rag.retrieve("Gull", COUNT)}
    assert found == {document.id for document in documents(COUNT)}
    rag.close()


TOWN = [
    Document("The Otterbeck ferry is steered by Mira Tolle. It crosses twice a day.", id="ferry", title="The ferry"),
    Document("The lamps of the harbour are lit by hand.", id="lamps"),
    Document("Bread in Drenn is baked with sea water.", id="bread"),
]
QUESTIONS = [
    "Who steers the Otterbeck ferry?",
    "How are the lamps of the harbour lit?",
    "What is the bread of Drenn baked with?",
    "How often does the ferry cross?",
]


@pytest.mark.slow
def test_from_documents_to_answers_with_a_real_model(tmp_path, smollm2, embedder):
    settings = RagSettings(k=3, order="score")  # in this order the small model reads these well
    with RagPipeline.from_pretrained("smollm2", embedder, folder=tmp_path / "rag", settings=settings) as rag:
        rag.add(TOWN)
        rag.drain()
        assert rag.stats() == (3, 3, 3)
        answers = [rag.ask(question, max_new_tokens=16) for question in QUESTIONS]
        assert "Mira Tolle" in answers[0].text
        assert "twice a day" in answers[3].text
        assert all(answer.report.hit_rate == 1.0 for answer in answers)

        async def all_at_once():
            return await asyncio.gather(*(rag.aask(question, max_new_tokens=16) for question in QUESTIONS * 2))

        assert [answer.text for answer in asyncio.run(all_at_once())] == [answer.text for answer in answers] * 2

        chat = rag.chat(k=1)
        chat.ask(QUESTIONS[0], max_new_tokens=12)
        second = chat.ask(QUESTIONS[3], max_new_tokens=12)
        assert second.report.context_rows + second.report.prefix_rows > 0

        rag.update([Document(TOWN[0].text.replace("Mira Tolle", "Lena Voss"), id="ferry", title="The ferry")])
        assert "Lena Voss" in rag.ask(QUESTIONS[0], max_new_tokens=16).text

    with RagPipeline.load(tmp_path / "rag", embedder=embedder) as rag:
        assert rag.stats() == (3, 3, 3)
        answer = rag.ask(QUESTIONS[0], max_new_tokens=16)
        assert "Lena Voss" in answer.text
        assert [chunk.source for chunk in answer.report.chunks].count("miss") == 0
        other = rag.ask("¿Quién dirige el ferry de Otterbeck?", max_new_tokens=16)
        assert other.hits[0].passage.document == "ferry"
    with pytest.raises(IndexMismatch, match="retriever"):
        RagPipeline.load(tmp_path / "rag", embedder=embedder, settings=RagSettings(retriever="dense"))
