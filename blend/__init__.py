"""kvblend: answers from fused chunk KV, wherever the chunks stand in the prompt."""

from blend.background import Background
from blend.calibration import Calibration
from blend.chunk import Chunk, ChunkKV, Retention
from blend.correctors import Corrector, MeanShift
from blend.engine import Blender, Encoded
from blend.errors import (
    BudgetError,
    CorruptEntry,
    ForeignKV,
    KVBlendError,
    ModelNotFound,
    PromptError,
    PromptTooLong,
    SelfCheckFailed,
    StoreError,
    StoreUnavailable,
    UnsupportedModel,
    UnsupportedRotation,
)
from blend.fusion import Answer, Fusion
from blend.prompt import Prompt
from blend.report import ChunkReport, Report
from blend.selectors import (
    Adaptive,
    ChunkDeviation,
    ExpectedError,
    FirstK,
    FullRecompute,
    FullReuse,
    KVDeviation,
    QueryAttention,
    Random,
    Selector,
    WeightedDeviation,
)
from blend.stores import DiskStore, FsspecStore, MemoryStore, RedisStore, Store, TieredStore, open_store

__all__ = [
    "Adaptive",
    "Answer",
    "Background",
    "Blender",
    "BudgetError",
    "Calibration",
    "Chunk",
    "ChunkDeviation",
    "ChunkKV",
    "ChunkReport",
    "Corrector",
    "CorruptEntry",
    "DiskStore",
    "Encoded",
    "ExpectedError",
    "FirstK",
    "ForeignKV",
    "FsspecStore",
    "FullRecompute",
    "FullReuse",
    "Fusion",
    "KVBlendError",
    "KVDeviation",
    "MeanShift",
    "MemoryStore",
    "ModelNotFound",
    "Prompt",
    "PromptError",
    "PromptTooLong",
    "QueryAttention",
    "Random",
    "RedisStore",
    "Report",
    "Retention",
    "Selector",
    "SelfCheckFailed",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "TieredStore",
    "UnsupportedModel",
    "UnsupportedRotation",
    "WeightedDeviation",
    "open_store",
]
