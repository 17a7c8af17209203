"""Small tokenizers, trained on the spot, whose ids every tiny model reads."""

from __future__ import annotations

from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["BOS_TEMPLATE", "CHATML", "CONTROL", "tiny_tokenizer"]

CONTROL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
"""Control tokens, ids 0 to 5."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template without BOS, as Qwen's."""

BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that writes BOS and has no system role, as Gemma's."""

_TEXT = """
The old pier at Marrow Bay was built in 1911, after the storm had taken the wooden one. Its lamps are lit by hand.
Question: who lights the lamps? Answer: the keeper, who lives above the bakery and writes the names of all the gulls
in a book. Answer the question from the passages below, in a few words. You are a helpful system; a user asks, and
the assistant answers. Bread in this town is baked with sea water, which is why visitors call it grey bread. Nobody
knows how many steps lead down to the harbour: some say 212, others count 198, and the tide takes 3 or 4 every year.
"""
_CHARACTERS = [*map(chr, range(ord("!"), ord("~") + 1))]


def tiny_tokenizer(
    kind: Literal["bpe", "unigram"] = "bpe", *, bos: bool = False, template: str | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most 250 ids for ASCII text.

    Args:
        kind: ``bpe`` over bytes (GPT-2, Llama 3, Qwen) or ``unigram`` with word-start marks (SentencePiece, as in T5
            and Gemma).
        bos: put ``<s>`` before every text, as Llama does.
        template: chat template.
    """
    tokenizer = _byte_pairs() if kind == "bpe" else _unigrams()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    spaces = ["Ġ", "Ċ"]  # how a byte-level alphabet writes the space and the end of a line
    trainer = trainers.BpeTrainer(
        vocab_size=250,
        special_tokens=list(CONTROL),
        initial_alphabet=[*_CHARACTERS, *spaces],
        limit_alphabet=len(_CHARACTERS) + len(spaces),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer


def _unigrams() -> Tokenizer:
    words = sorted({f"▁{word}" for word in _TEXT.split() if word.isalpha()})
    pieces = [(token, 0.0) for token in CONTROL]
    pieces += [(character, -9.0) for character in (*_CHARACTERS, "▁", "\n")]
    pieces += [(word, -4.0) for word in words][: 250 - len(pieces)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=CONTROL.index("<unk>"), byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
