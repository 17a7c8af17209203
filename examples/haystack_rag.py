"""Haystack: a retriever connected to a generator, with no prompt builder between, so that each document is a chunk."""

import os

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # read when Haystack is imported

from haystack import Document, Pipeline
from haystack.components.retrievers import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from retrieval.integrations.haystack import KVBlendGenerator

DOCUMENTS = [
    Document(
        content="The Otterbeck ferry is steered by Mira Tolle. It crosses the river twice a day.",
        meta={"title": "Ferry"},
    ),
    Document(
        content="The bread of Drenn is baked with sea water.",
        meta={"title": "Bread"},
    ),
    Document(content="The lamps of the harbour are lit by hand.", meta={"title": "Lamps"}),
]
QUESTIONS = ("Who steers the Otterbeck ferry?", "What is the bread of Drenn baked with?")

store = InMemoryDocumentStore()
store.write_documents(DOCUMENTS)
pipeline = Pipeline()
pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=3))
pipeline.add_component("generator", KVBlendGenerator("smollm2", generation_kwargs={"max_tokens": 24}))
pipeline.connect("retriever.documents", "generator.documents")

for question in QUESTIONS:
    result = pipeline.run({"retriever": {"query": question}, "generator": {"query": question}})["generator"]
    report = result["meta"][0]["kvblend"]
    print(question, "->", result["replies"][0], f"- {report['hit_rate']:.0%} of the chunks were in the store")
    for chunk in report["chunks"]:
        print(f"  {chunk['name']}: {chunk['source']}, moved by {chunk['moved']}")
