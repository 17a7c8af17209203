"""The pipeline: documents in, answers out, KV reused. Only here and in integrations does retrieval use blend."""

from retrieval.rag.answer import RagAnswer
from retrieval.rag.chat import Chat
from retrieval.rag.intake import Changes
from retrieval.rag.pipeline import RagPipeline
from retrieval.rag.settings import RagSettings
from retrieval.rag.shelf import Stats
from retrieval.rag.stream import AsyncRagStream, RagStream

__all__ = ["AsyncRagStream", "Changes", "Chat", "RagAnswer", "RagPipeline", "RagSettings", "RagStream", "Stats"]
