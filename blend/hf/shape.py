"""What a model costs, read off its config alone: bytes of KV, parameters, and operations per row. Loads no weights.

The model is built on torch's meta device, where tensors have shapes and no memory, and a few rows are run through its
own forward. What then stands in its cache gives the bytes, and torch's counter of matrix products the operations, so
that no list of families is needed. An operation is a multiplication or an addition; what is no matrix product
(norms, rotations, softmax) is left out, as is customary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from blend.errors import UnsupportedModel
from blend.hf.attention import Reach
from blend.hf.config import read_config
from blend.hf.fusion_cache import cached_kv
from blend.hf.view import read_reaches
from rope.hf import cache_argument, decoder_layers, refuse_foreign_state

__all__ = ["LayerShape", "ModelShape", "model_shape", "read_shape"]


class LayerShape(NamedTuple):
    """One decoder layer.

    Attributes:
        keys: (heads, numbers per head) of a row's cached key; (0, 0) where it uses another layer's.
        values: the same of its value.
        row_flops: operations that a row takes, its attention apart.
        known_flops: the part of them that is done before the row's keys and values are known.
        pair_flops: operations of a row's attention to one row that it sees.
        key_flops: operations per row of the prompt in every pass, cached rows too (MLA unpacks their keys and values).
        reach: how far back it sees.
        alone: the prompt's last row alone runs through it (Gemma 4, where layers use the KV of others).
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    row_flops: float
    known_flops: float
    pair_flops: float
    key_flops: float
    reach: Reach
    alone: bool = False

    @property
    def numbers(self) -> int:
        """Numbers that are cached for a row."""
        return self.keys[0] * self.keys[1] + self.values[0] * self.values[1]

    def seen(self, start: int, stop: int) -> int:
        """Rows that the rows ``start`` to ``stop - 1`` see, themselves among them, all in all."""
        return _seen(self.reach, start, stop)


@dataclass(frozen=True)
class ModelShape:
    """A model without its weights.

    Attributes:
        name: as it was asked for.
        family: transformers' name of the model type.
        dtype: of weights and KV.
        layers: the decoder layers.
        params: parameters in all.
        rest_flops: operations per row outside of the layers, the logits apart.
        head_flops: operations of one row's logits.
        context: rows that the model can hold, or None if its config names no limit.
    """

    name: str
    family: str
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    params: int
    rest_flops: float
    head_flops: float
    context: int | None

    @property
    def row_bytes(self) -> int:
        """Bytes of KV per row."""
        return self.dtype.itemsize * sum(layer.numbers for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.dtype.itemsize * self.params

    @property
    def row_flops(self) -> float:
        """Operations per row of a plain prefill, attention and what the last row alone takes apart."""
        return self.rest_flops + sum(layer.row_flops + layer.key_flops for layer in self.layers if not layer.alone)

    @property
    def last_flops(self) -> float:
        """Operations of the last row alone, attention apart: its logits, and the layers that only it runs through."""
        return self.head_flops + sum(layer.row_flops for layer in self.layers if layer.alone)

    @property
    def shares_kv(self) -> bool:
        """Whether some layers use the KV of others."""
        return any(layer.numbers == 0 for layer in self.layers)

    def prefill_flops(self, rows: int, behind: int = 0) -> float:
        """Operations of a plain prefill of ``rows`` rows behind so many known ones, with the last row's logits."""
        total = behind + rows
        pairs = ((x.seen(total - 1 if x.alone else behind, total) * x.pair_flops) for x in self.layers)
        unpacked = sum(x.key_flops for x in self.layers) * behind
        return rows * self.row_flops + sum(pairs) + unpacked + self.last_flops


def read_shape(name: str | os.PathLike[str], dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a model by hub id, folder, ``.gguf`` file or alias.

    Args:
        dtype: None for the checkpoint's own (bf16 for GGUF, aliases, and where its config names none).

    Raises:
        ModelNotFound: the name leads to no config.
        UnsupportedModel, UnsupportedRotation: as :func:`model_shape`.
    """
    return model_shape(read_config(name), dtype, os.fspath(name))


def model_shape(config: PreTrainedConfig, dtype: torch.dtype | None = None, name: str = "") -> ModelShape:
    """Builds the model of a config without memory, and runs a few rows through it.

    Raises:
        UnsupportedRotation: the model caches something else than keys and values.
        UnsupportedModel: its forward needs more than shapes.
    """
    text = config.get_text_config()
    wanted = dtype or getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.bfloat16
    model = _without_memory(config, wanted)
    refuse_foreign_state(model)
    try:
        runs = _Run(model, 2), _Run(model, 2, behind=2), _Run(model, 4)
    except Exception as error:  # whatever a forward trips over that asks for the value of a number
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(
            f"the forward of {type(model).__name__} does not run on shapes alone ({reason}): it cannot be planned for; "
            "`kvblend check` tries it with its weights"
        ) from error
    head_flops = 2.0 * model.get_output_embeddings().weight.numel()
    return ModelShape(
        name or type(model).__name__,
        str(text.model_type),
        wanted,
        _layers(*runs, read_reaches(model)),
        sum(p.numel() for p in model.parameters()),
        (runs[2].outside - runs[0].outside) / 2,
        head_flops,
        getattr(text, "max_position_embeddings", None),
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def _without_memory(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    builder: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    # Eager attention is made of products that can be counted, and the batched experts compute those of each row
    # without asking which rows chose which.
    choices = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    try:
        with torch.device("meta"):
            model: PreTrainedModel = builder.from_config(config, dtype=dtype, trust_remote_code=False, **choices)
    except (ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"{config.model_type} is no decoder-only language model: {reason}") from error
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]  # it would ask how long the prompt is
    model.train(False)
    return model


class _MeteredCache(DynamicCache):
    """Notes what had been computed when each layer's keys and values arrived."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counter = counter
        self.known: dict[int, int] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.known[layer_idx] = self.counter.get_total_flops()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Run:
    """One forward over the shapes of ``rows`` rows, behind so many cached ones.

    Attributes:
        cached: keys and values ``[B, H, rows, D]`` per layer that has some of its own.
        flops: operations of each layer.
        alone: whether the last row alone ran through each layer.
        known: of each layer, up to its keys and values; none for layers that have none of their own.
        outside: operations outside of the layers.
    """

    def __init__(self, model: PreTrainedModel, rows: int, behind: int = 0) -> None:
        counter = FlopCounterMode(display=False)
        cache = _MeteredCache(counter)
        if behind:
            _forward(model, cache, behind)
        began: list[int] = []
        ended: list[int] = []
        self.alone: list[bool] = []
        hooks = []

        def enter(layer: Any, args: Any, kwargs: Any) -> None:
            began.append(counter.get_total_flops())
            hidden_BTC = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.alone.append(hidden_BTC.shape[-2] < rows)

        for layer in decoder_layers(model):
            hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(layer.register_forward_hook(lambda *_: ended.append(counter.get_total_flops())))
        try:
            with counter:
                _forward(model, cache, rows)
        finally:
            for hook in hooks:
                hook.remove()
        self.cached = dict(zip(sorted(cache.known), cached_kv(cache), strict=True))
        self.flops = [stop - start for start, stop in zip(began, ended, strict=True)]
        self.known = {index: total - began[index] for index, total in cache.known.items()}
        self.outside = counter.get_total_flops() - sum(self.flops)


@torch.no_grad()
def _forward(model: PreTrainedModel, cache: _MeteredCache, rows: int) -> None:
    ids_1T = torch.zeros(1, rows, dtype=torch.int64, device="meta")
    model(input_ids=ids_1T, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))


def _layers(two: _Run, behind: _Run, four: _Run, reaches: list[Reach]) -> tuple[LayerShape, ...]:
    """The layers of runs of 2 rows, of 2 rows behind 2 cached ones, and of 4 rows.

    With ``n`` rows of ``t`` run, a layer takes ``row_flops * n + pair_flops * n * t + key_flops * t`` operations: eager
    attention computes every pair of them. Of a single row the last two are one.
    """
    layers = []
    for index, reach in enumerate(reaches):
        alone, later = two.alone[index], (behind.flops[index] - two.flops[index]) / 2
        pair_flops = later if alone else (four.flops[index] - 2 * two.flops[index]) / 8
        key_flops = 0.0 if alone else later - 2 * pair_flops
        row_flops = two.flops[index] / (1 if alone else 2) - 2 * pair_flops - key_flops
        keys, values = (_heads(states) for states in two.cached.get(index, (None, None)))
        known_flops = two.known.get(index, 0) / 2
        layers.append(LayerShape(keys, values, row_flops, known_flops, pair_flops, key_flops, reach, alone))
    return tuple(layers)


def _heads(states_BHTD: Tensor | None) -> tuple[int, int]:
    return (0, 0) if states_BHTD is None else (states_BHTD.shape[1], states_BHTD.shape[3])


@lru_cache(maxsize=1024)
def _seen(reach: Reach, start: int, stop: int) -> int:
    if reach == Reach():
        return (stop * (stop + 1) - start * (start + 1)) // 2
    return sum(position - reach.first(position) + 1 for position in range(start, stop))
