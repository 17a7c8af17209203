"""A process that adds documents to a pipeline's folder, and says what it is doing, so that it can be killed there.

``python -m tests.rag_worker FOLDER COUNT``: a line ``embedded`` per batch of vectors, ``stored`` per chunk's KV.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from blend import Blender, DiskStore
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from retrieval import Document, RagPipeline, RagSettings


class Letters:
    """An embedder that counts letters."""

    name, dimension = "letters", 26

    def __init__(self, identity="letters-1", tell=lambda text: None):
        self.identity, self.tell, self.texts = identity, tell, []

    def encode(self, texts):
        self.tell("embedded")
        self.texts += texts
        return np.array([self.encode_query(text) for text in texts], np.float32).reshape(-1, 26)

    def encode_query(self, query):
        counts = np.array([query.lower().count(chr(ord("a") + i)) for i in range(26)], np.float32)
        return counts / max(np.linalg.norm(counts), 1.0)


class TellingStore(DiskStore):
    """A disk store that says when it has stored an entry."""

    tell = staticmethod(lambda text: None)

    def put(self, kv):
        stored = super().put(kv)
        self.tell("stored")
        return stored


def documents(count):
    return [Document(f"Gull number {i} sits on lamp {i * 7 % 13} and eats bread.", id=f"{i:04}") for i in range(count)]


def open_rag(folder, tell=lambda text: None):
    store = TellingStore(Path(folder) / "kv")
    store.tell = tell
    blender = Blender(tiny_model("llama"), tiny_tokenizer(template=CHATML), store=store, check=False, bypass=False)
    settings = RagSettings(size=48, overlap=0, k=3)
    return RagPipeline(blender, Letters(tell=tell), folder=folder, settings=settings, model="tiny")


if __name__ == "__main__":
    with open_rag(sys.argv[1], lambda text: print(text, flush=True)) as rag:
        rag.add(documents(int(sys.argv[2])), encode="now")
