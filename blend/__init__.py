"""kvblend: answers from fused chunk KV, wherever the chunks stand in the prompt."""

from blend.chunk import Chunk, ChunkKV
from blend.engine import Blender, Encoded
from blend.errors import (
    BudgetError,
    ForeignKV,
    KVBlendError,
    ModelNotFound,
    PromptError,
    PromptTooLong,
    SelfCheckFailed,
    UnsupportedModel,
    UnsupportedRotation,
)
from blend.fusion import Answer, Fusion
from blend.prompt import Prompt
from blend.report import ChunkReport, Report
from blend.selectors import (
    FirstK,
    FullRecompute,
    FullReuse,
    KVDeviation,
    QueryAttention,
    Random,
    Selector,
)
from blend.stores import MemoryStore, Store

__all__ = [
    "Answer",
    "Blender",
    "BudgetError",
    "Chunk",
    "ChunkKV",
    "ChunkReport",
    "Encoded",
    "FirstK",
    "ForeignKV",
    "FullRecompute",
    "FullReuse",
    "Fusion",
    "KVBlendError",
    "KVDeviation",
    "MemoryStore",
    "ModelNotFound",
    "Prompt",
    "PromptError",
    "PromptTooLong",
    "QueryAttention",
    "Random",
    "Report",
    "Selector",
    "SelfCheckFailed",
    "Store",
    "UnsupportedModel",
    "UnsupportedRotation",
]
