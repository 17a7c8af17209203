"""Reads the rotation off a transformers model: finds its angle tables, caches the same tokens at two places, fits.

One of the two places that import transformers. It runs two forward passes of a few one-token sequences and leaves
the model as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope.errors import UnsupportedRotation
from rope.probe import LayerSample, fit_rope
from rope.rotation import Rope
from rope.tables import BoundedTable, FrequencyTable, RegimeTable, RopeTable, SampledTable

__all__ = ["cache_argument", "decoder_layers", "read_rope", "read_tables", "refuse_foreign_state"]

_POSITIONS = (0, 37)
_TOKENS = 16
_WAY_OUT = "Use full prefill, or a model in which every layer is plain attention (Llama, Qwen3, Mistral, Gemma, ...)."


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers of a model, text part only.

    Raises:
        UnsupportedRotation: no list of ``num_hidden_layers`` modules is found.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    stacks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not _is_vision(name)
    ]
    if count is None or not stacks:
        raise UnsupportedRotation(
            f"{type(model).__name__} has no stack of {count} decoder layers. Use a decoder-only language model."
        )
    # A stack of whole layers holds more parameters than, say, a list of per-layer norms of the same length.
    return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))


def cache_argument(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """``cache`` as a keyword argument for ``model`` and ``model.generate``: called ``past_key_values`` before 5.23."""
    named = "cache" in inspect.signature(type(model).forward).parameters
    return {"cache" if named else "past_key_values": cache}


def read_tables(model: PreTrainedModel) -> dict[str, RopeTable]:
    """Every angle table that the model holds, duplicates dropped, by a short name.

    Raises:
        UnsupportedRotation: an ``inv_freq`` is not fp32 (the model was cast after loading), or the RoPE type changes
            with the length in an unknown way.
    """
    tables: dict[str, RopeTable] = {}
    for name, module in model.named_modules():
        if _is_vision(name):
            continue
        for key, table in _module_tables(module):
            if not any(table.digest() == known.digest() for known in tables.values()):
                tables[key if key not in tables else f"{key}@{name}"] = table
    return tables


@torch.inference_mode()
def read_rope(model: PreTrainedModel) -> Rope:
    """The rotation of every cache layer of ``model``.

    Raises:
        UnsupportedRotation: the cache is recurrent, indexed, or changes with the position other than by a rotation;
            or the model was cast after loading.
    """
    refuse_foreign_state(model)
    tables = read_tables(model)
    layers = decoder_layers(model)
    caches = [_one_token_cache(model, position) for position in _POSITIONS]
    samples = []
    for index, (first, second) in enumerate(zip(caches[0].layers, caches[1].layers, strict=True)):
        (k0, v0), (k1, v1) = _states(first, index), _states(second, index)
        samples.append(LayerSample((k0, k1), (v0, v1), list(_gain_candidates(layers[index]))))
    return fit_rope(samples, tables, _POSITIONS)


def refuse_foreign_state(model: PreTrainedModel) -> None:
    """Refuses models whose own cache holds more than keys and values, with the reason."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedRotation(f"{name} is an encoder-decoder: there is no decoder prompt to fuse. {_WAY_OUT}")
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception as error:  # a config that describes no cache at all
        raise UnsupportedRotation(f"{name} describes no key/value cache ({error}). {_WAY_OUT}") from error
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise UnsupportedRotation(
            f"{name} has recurrent or convolutional layers: their state depends on the whole prefix and cannot be "
            f"assembled from chunks. {_WAY_OUT}"
        )
    if any(isinstance(layer, DynamicIndexedLayer) for layer in layers):
        raise UnsupportedRotation(
            f"{name} uses indexed attention: it caches a second, rotated set of keys to choose what it attends, which "
            f"kvblend cannot move. {_WAY_OUT}"
        )


def _module_tables(module: nn.Module) -> Iterator[tuple[str, RopeTable]]:
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith("original_inv_freq"):
            continue
        if name.endswith("inv_freq") and buffer.ndim == 1:
            yield name, _frequency_table(module, name, buffer)
        elif name == "embed_positions" and buffer.ndim == 2:
            sin_PF, cos_PF = buffer.detach().double().cpu().chunk(2, dim=-1)
            yield name, SampledTable(torch.atan2(sin_PF, cos_PF))


def _frequency_table(module: nn.Module, name: str, buffer: Tensor) -> RopeTable:
    if buffer.dtype != torch.float32:
        raise UnsupportedRotation(
            f"{type(module).__name__}.{name} is {buffer.dtype}, not float32: the model was cast after loading "
            "(.to(bfloat16), .half()), which rounds the RoPE frequencies and puts every key at a wrong angle. "
            "Reload it with from_pretrained(..., dtype=...)."
        )
    prefix = name.removesuffix("inv_freq")
    rope_type = getattr(module, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type[prefix.removesuffix("_")]
    # The buffer itself may have been rewritten by a long call before; its original copy never is.
    original = getattr(module, f"{prefix}original_inv_freq", buffer)
    short = FrequencyTable(original.detach().float().cpu().clone())
    if rope_type == "longrope":
        return _longrope_table(module, prefix, short)
    if "dynamic" in str(rope_type):
        # One short of the original length: transformers goes back to these frequencies only below it.
        return BoundedTable(short, int(module.original_max_seq_len) - 1)  # type: ignore[arg-type]  # set by __init__
    return short


def _longrope_table(module: nn.Module, prefix: str, short: FrequencyTable) -> RegimeTable:
    config: Any = module.config
    layer_type = prefix.removesuffix("_") or None
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    switch = int(parameters["original_max_position_embeddings"])
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=switch + 1, layer_type=layer_type)
    return RegimeTable(short, FrequencyTable(long.float().cpu()), switch)


def _one_token_cache(model: PreTrainedModel, position: int) -> DynamicCache:
    """N sequences of one token, all at ``position``."""
    vocab = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (_TOKENS, 1), generator=generator).to(model.device)
    cache = DynamicCache()
    try:
        model(
            input_ids=ids,
            position_ids=torch.full_like(ids, position),
            attention_mask=None,
            **cache_argument(model, cache),
            use_cache=True,
            logits_to_keep=1,
        )
    except Exception as error:
        raise UnsupportedRotation(
            f"{type(model).__name__} does not run with a plain key/value cache ({type(error).__name__}: {error}): what "
            f"it keeps between tokens cannot be assembled from chunks. {_WAY_OUT}"
        ) from error
    if not cache.layers:
        raise UnsupportedRotation(
            f"{type(model).__name__} put nothing into a key/value cache: it has no attention whose KV could be reused. "
            f"{_WAY_OUT}"
        )
    return cache


def _states(layer: Any, index: int) -> tuple[Tensor, Tensor]:
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        raise UnsupportedRotation(
            f"cache layer {index} is a {type(layer).__name__}, not a plain key/value layer. {_WAY_OUT}"
        )
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    return keys[:, :, 0].detach(), values[:, :, 0].detach()


def _gain_candidates(layer: nn.Module) -> Sequence[Tensor]:
    """Weights that could stand behind the rotation: the norms of the layer, as they are and as ``1 + weight``."""
    weights = [p.detach() for p in layer.parameters() if p.ndim == 1]
    return [gain for weight in weights for gain in (weight, 1 + weight)]


def _is_vision(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith(("vision", "visual", "audio", "image")) for part in parts)
