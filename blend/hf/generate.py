"""Handing fused KV to transformers: an ordinary cache, and the arguments with which ``generate`` uses it right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from queue import Queue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from blend.chunk import KVLayers
from blend.hf.view import ModelView
from rope.hf import cache_argument

__all__ = ["generate", "generation_inputs", "hand_over", "stream"]


def hand_over(view: ModelView, layers: KVLayers) -> DynamicCache:
    """A fresh cache of the model's own layer kinds, filled with KV ``[H, rows, D]`` per layer.

    Full layers share memory with ``layers``: decoding appends by concatenation, so the originals stay as they are and
    can be handed over again. Sliding layers trim themselves.
    """
    cache = DynamicCache(config=view.model.config)
    for layer, (keys, values) in zip(cache.layers, layers):  # KV-sharing layers at the end own no KV  # noqa: B905
        assert isinstance(layer, DynamicLayer), "models with other cache layers are refused at load"
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.update(keys[None], values[None])
        else:
            layer.lazy_initialization(keys[None], values[None])
            layer.keys, layer.values = keys[None], values[None]
    return cache


def generation_inputs(view: ModelView, ids: tuple[int, ...], layers: KVLayers, copies: int = 1) -> dict[str, Any]:
    """Arguments for ``model.generate``: all ids, an explicit mask, and KV of every row but the last.

    One row must be left for ``generate`` to run: with all rows cached it would feed the whole prompt again. The
    mask is explicit because ``generate`` would guess one from any padding token inside the prompt.

    Args:
        copies: beams or returned sequences per prompt.
    """
    cache = hand_over(view, tuple((keys[:, :-1], values[:, :-1]) for keys, values in layers))
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    ids_1T = torch.tensor([ids], device=view.device)
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T), **cache_argument(view.model, cache)}


def generate(
    view: ModelView,
    tokenizer: Any,
    ids: tuple[int, ...],
    layers: KVLayers,
    options: dict[str, Any],
    stop: Event | None = None,
) -> Any:
    """``model.generate`` over the fused KV; returns whatever it returns (prompt and new ids).

    Args:
        options: keyword arguments for ``generate``; sampling, beams, stop strings and logits processors behave as
            they do there.
        stop: ends the generation once it is set.
    """
    options = _ended_by(stop, options)
    if options.get("stop_strings") is not None:
        options.setdefault("tokenizer", tokenizer)
    inputs = generation_inputs(view, ids, layers, _copies(view, options))
    model: Any = view.model
    return model.generate(**inputs, **options)


def stream(
    view: ModelView,
    tokenizer: Any,
    ids: tuple[int, ...],
    layers: KVLayers,
    options: dict[str, Any],
    stop: Event | None = None,
) -> Iterator[str]:
    """Pieces of the answer's text as they come. Leaving the loop early stops the generation, and so does ``stop``.

    Raises:
        Whatever ``generate`` raises, in the consumer's thread.
    """
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stopped, failures = Event(), Queue[BaseException]()
    options = {**_ended_by(stop, options), "streamer": streamer}
    call = partial(generate, view, tokenizer, ids, layers, options, stopped)
    worker = Thread(target=_run, args=(call, streamer, failures))
    worker.start()
    try:
        yield from (piece for piece in streamer if piece)
        if not failures.empty():
            raise failures.get()
    finally:
        stopped.set()
        worker.join()


def _ended_by(stop: Event | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options for a generation that ends once ``stop`` is set."""
    if stop is None:
        return dict(options)
    criteria = StoppingCriteriaList([*options.get("stopping_criteria", []), _StopWhen(stop)])
    return {**options, "stopping_criteria": criteria}


def _run(call: Callable[[], Any], streamer: TextIteratorStreamer, failures: Queue[BaseException]) -> None:
    try:
        call()
    except BaseException as error:  # handed to the consumer, who would wait for ever otherwise
        failures.put(error)
        streamer.end()


class _StopWhen(StoppingCriteria):
    def __init__(self, stopped: Event) -> None:
        self.stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.stopped.is_set(), dtype=torch.bool, device=input_ids.device)


def _copies(view: ModelView, options: dict[str, Any]) -> int:
    config = options.get("generation_config") or view.model.generation_config
    wanted = (options.get(name) or getattr(config, name, None) or 1 for name in ("num_beams", "num_return_sequences"))
    return max(int(n) for n in wanted)
