"""LlamaIndex: any index or retriever, and a synthesizer that gives its nodes to the model one by one."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from blend import Blender
from retrieval import Embedder
from retrieval.integrations.llamaindex import KVBlendLLM, query_engine

DOCUMENTS = [
    Document(text="The Otterbeck ferry is steered by Mira Tolle. It crosses the river twice a day."),
    Document(text="Bread in Drenn is baked with sea water."),
    Document(text="The river Sall rises below Mount Keth and flows to the harbour of Drenn."),
]
QUESTIONS = ("Who steers the Otterbeck ferry?", "What is the bread of Drenn baked with?")


class MiniLM(BaseEmbedding):
    """kvblend's embedding model, as LlamaIndex wants one."""

    _embedder: Embedder = PrivateAttr(default_factory=Embedder)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embedder.encode([text])[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


with Blender.from_pretrained("smollm2") as blender:
    index = VectorStoreIndex.from_documents(DOCUMENTS, embed_model=MiniLM())
    llm = KVBlendLLM(blender, max_tokens=24)
    for question in QUESTIONS:
        response = query_engine(index, llm, similarity_top_k=3).query(question)
        report = response.metadata["kvblend"]
        print(question, "->", response, f"- {report['hit_rate']:.0%} of the chunks were in the store")
        for chunk in report["chunks"]:
            print(f"  {chunk['name']}: {chunk['source']}, moved by {chunk['moved']}")

    # Piece by piece; the report is there before the first.
    response = query_engine(index, llm, similarity_top_k=3, streaming=True).query(
        "Below which mountain does the Sall rise?"
    )
    for piece in response.response_gen:
        print(piece, end="", flush=True)
    print()
