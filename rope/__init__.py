"""rope: reads a model's rotary position embedding and moves cached keys exactly from one position to another."""

from rope.errors import KVBlendError, UnsupportedRotation
from rope.hf import read_rope
from rope.rotation import LayerRotation, Move, Rope
from rope.tables import BoundedTable, FrequencyTable, RegimeTable, RopeTable, SampledTable

__all__ = [
    "BoundedTable",
    "FrequencyTable",
    "KVBlendError",
    "LayerRotation",
    "Move",
    "RegimeTable",
    "Rope",
    "RopeTable",
    "SampledTable",
    "UnsupportedRotation",
    "read_rope",
]
