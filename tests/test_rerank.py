"""Reranking with a real cross-encoder: a tiny one with random weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from retrieval.document import Hit, Passage
from retrieval.errors import EmbedderMissing, SettingError
from retrieval.rerank import Reranker

TEXTS = ["the ferry crosses the strait", "green copper", "who steers", "bread " * 200]


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    """Saves a BERT of one layer with so many labels, and returns its folder."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    def make(labels):
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = [prefix + letter for letter in "abcdefghijklmnopqrstuvwxyz?" for prefix in ("", "##")]
        vocabulary = {token: i for i, token in enumerate([*special, *letters])}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            num_labels=labels,
            initializer_range=0.5,
        )
        folder = tmp_path_factory.mktemp(f"reranker{labels}")
        BertForSequenceClassification(config).save_pretrained(folder)
        fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def reranker(make_model):
    return Reranker(make_model(1))


def test_a_score_per_text(reranker):
    scores = reranker.scores("who steers the ferry?", TEXTS)
    assert len(scores) == 4
    assert all(type(score) is float for score in scores)
    assert len(set(scores)) == 4, "the pair is not read"
    assert reranker.scores("who steers the ferry?", TEXTS[::-1]) == pytest.approx(scores[::-1], abs=1e-5)
    assert reranker.scores("green?", TEXTS) != pytest.approx(scores, abs=1e-5), "the question is not read"
    assert reranker.scores("nothing?", []) == []


def test_hits_are_sorted_by_the_models_score(reranker):
    hits = [Hit(Passage(i, text, "document"), 0.9 - 0.1 * i) for i, text in enumerate(TEXTS)]
    found = reranker.rerank("who steers the ferry?", hits)
    scores = dict(zip(range(4), reranker.scores("who steers the ferry?", TEXTS), strict=True))
    assert [hit.passage.number for hit in found] == sorted(scores, key=lambda number: -scores[number])
    assert [hit.score for hit in found] == pytest.approx(sorted(scores.values(), reverse=True), abs=1e-5)
    assert reranker.rerank("nothing?", []) == []


def test_equal_passages_keep_their_order(reranker):
    hits = [Hit(Passage(i, "green copper", "document"), 0.5) for i in range(5)]
    assert [hit.passage.number for hit in reranker.rerank("copper?", hits)] == [0, 1, 2, 3, 4]


def test_threads_share_it(reranker):
    truth = [reranker.scores(text, TEXTS) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for scores, alone in zip(
            pool.map(lambda text: reranker.scores(text, TEXTS), TEXTS * 3), truth * 3, strict=True
        ):
            assert scores == pytest.approx(alone, abs=1e-5)


def test_a_classifier_is_refused(make_model):
    with pytest.raises(SettingError, match="gives 3 numbers for a pair"):
        Reranker(make_model(3))


@pytest.mark.parametrize("model", ["nobody/no-such-reranker", "/nowhere/at/all"])
def test_no_such_model(model):
    with pytest.raises(EmbedderMissing, match=f"from {model!r}.*none comes with kvblend"):
        Reranker(model)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(EmbedderMissing, match="give a folder or hub id"):
        Reranker(tmp_path)
