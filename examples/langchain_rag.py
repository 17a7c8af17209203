"""LangChain: any retriever, and a chain that gives its documents to the model one by one, so that KV is reused."""

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from blend import Blender
from retrieval import Embedder
from retrieval.integrations.langchain import ChatKVBlend, fused_documents_chain

DOCUMENTS = [
    Document(
        "The Otterbeck ferry is steered by Mira Tolle. It crosses the river twice a day.",
        metadata={"title": "Ferry"},
    ),
    Document(
        "Bread in Drenn is baked with sea water.",
        metadata={"title": "Bread"},
    ),
    Document("The river Sall rises below Mount Keth and flows to the harbour of Drenn.", metadata={"title": "River"}),
]
QUESTIONS = ("Who steers the Otterbeck ferry?", "What is the bread of Drenn baked with?")


class MiniLM(Embeddings):
    """kvblend's embedding model, as LangChain wants one."""

    def __init__(self) -> None:
        self.embedder = Embedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.embedder.encode(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


with Blender.from_pretrained("smollm2") as blender:
    retriever = InMemoryVectorStore.from_documents(DOCUMENTS, MiniLM()).as_retriever(search_kwargs={"k": 3})
    chain = {"context": retriever, "question": RunnablePassthrough()} | fused_documents_chain(blender)
    for piece in chain.stream(QUESTIONS[0]):
        print(piece, end="", flush=True)
    print()

    # The chat model alone gives a message, with the report in its metadata.
    llm = ChatKVBlend(blender=blender, max_tokens=24)
    for question in QUESTIONS:
        message = llm.invoke(question, documents=retriever.invoke(question))
        report = message.response_metadata["kvblend"]
        print(message.text, f"- {report['hit_rate']:.0%} of the chunks were in the store")
        for chunk in report["chunks"]:
            print(f"  {chunk['name']}: {chunk['source']}, moved by {chunk['moved']}")
