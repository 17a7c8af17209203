"""The public names: exactly these, all documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import blend
import retrieval
import rope

BLEND = [
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
RETRIEVAL = [
    "ORDERS",
    "AsyncRagStream",
    "Changes",
    "Chat",
    "DamagedIndex",
    "DenseIndex",
    "Document",
    "DocumentExists",
    "Embedder",
    "EmbedderMissing",
    "Embeds",
    "ExtraMissing",
    "Hit",
    "HybridIndex",
    "Index",
    "IndexMismatch",
    "Match",
    "Passage",
    "Piece",
    "RagAnswer",
    "RagPipeline",
    "RagSettings",
    "RagStream",
    "Reranker",
    "SettingError",
    "Skipped",
    "SparseIndex",
    "Splitter",
    "Stats",
    "UnknownDocument",
    "UnreadableDocument",
    "from_rows",
    "load_folder",
]
ROPE = [
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


@pytest.mark.parametrize(("package", "names"), [(blend, BLEND), (retrieval, RETRIEVAL), (rope, ROPE)])
def test_exactly_these_names(package, names):
    assert sorted(package.__all__) == sorted(names)
    assert all(hasattr(package, name) for name in names)


@pytest.mark.parametrize(
    "thing",
    [getattr(p, name) for p in (blend, retrieval, rope) for name in p.__all__],
    ids=lambda t: getattr(t, "__name__", "constant"),
)
def test_everything_public_is_documented(thing):
    assert inspect.getdoc(thing)
    if not inspect.isclass(thing) or issubclass(thing, Exception):
        return
    for name, member in vars(thing).items():
        if not name.startswith("_") and callable(member) and not hasattr(rope.RopeTable, name):
            assert inspect.getdoc(getattr(thing, name)), f"{thing.__name__}.{name}"


def modules():
    for package in (blend, retrieval, rope):
        yield package.__name__
        yield from (m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))


@pytest.mark.parametrize("name", list(modules()))
def test_every_module_says_what_it_is_and_names_what_it_offers(name):
    module = importlib.import_module(name)
    assert module.__doc__
    offered = getattr(module, "__all__", [])
    assert all(hasattr(module, public) for public in offered)
    assert len(offered) == len(set(offered))


def test_errors_form_one_tree():
    errors = [getattr(blend, name) for name in BLEND if inspect.isclass(getattr(blend, name))]
    errors = [error for error in errors if issubclass(error, Exception)]
    assert len(errors) == 12
    assert all(issubclass(error, blend.KVBlendError) for error in errors)
    assert issubclass(blend.PromptError, ValueError)
    assert issubclass(blend.BudgetError, ValueError)
    assert blend.UnsupportedRotation is rope.UnsupportedRotation
