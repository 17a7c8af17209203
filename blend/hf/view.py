"""What kvblend needs to know of a transformers model: its layers, rotation, reach, context and identity.

Attaching a view registers the fusion attention and one pre-hook per decoder layer; :meth:`ModelView.close` takes both
away again. The model's forward stays its own.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blend.chunk import KVLayers
from blend.errors import UnsupportedModel
from blend.hf.attention import Reach, attach, detach, stock_attention
from blend.hf.fusion_cache import FusionCache, cached_kv
from blend.hf.narrow import NarrowPass, PassOver, hook_layers
from rope import BoundedTable, Rope, read_rope
from rope.hf import cache_argument, decoder_layers

__all__ = ["ModelView", "read_reaches"]


class ModelView:
    """A model made ready for fusion.

    Args:
        model: a decoder-only model of transformers, in eval mode.

    Attributes:
        rope: how each cache layer carries its position.
        reaches: window or chunk of each decoder layer.
        context: rows that the model can hold, or None if its config names no limit.
        fingerprint: sha256 over weights (sampled), config, dtype and rotation.
        observable: whether the attention of selected rows can be watched (query-attention selectors need it).

    Raises:
        UnsupportedRotation: the model's cached KV cannot be moved; the message says why.
        UnsupportedModel: the model is in training mode or spread over several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.training:
            raise UnsupportedModel(f"{type(model).__name__} is in training mode (dropout): call model.eval() first")
        devices = {p.device for p in model.parameters()}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UnsupportedModel(f"the model is spread over {names}: load it on one device (device=...)")
        self.model = model
        self.device = model.device
        self.rope: Rope = read_rope(model)
        self.layers = decoder_layers(model)
        self.reaches = read_reaches(model)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.fingerprint = _fingerprint(model, self.rope)
        self._loaded_dtype = model.dtype
        self._closed = False
        self._stock_attention = stock_attention(model)
        self._hooks = hook_layers(self.layers, self)
        self.observable = self._attach()

    def close(self) -> None:
        """Takes the hooks and the attention away; the model is as it was."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        if self.observable:
            detach(self.model)

    def require_ready(self) -> None:
        """Raises :class:`UnsupportedModel` when the view was closed, or the model cast since it was read."""
        if self._closed:
            raise UnsupportedModel("this view of the model is closed: build a new Blender to go on")
        if self.model.dtype != self._loaded_dtype:
            raise UnsupportedModel(
                f"the model was cast from {self._loaded_dtype} to {self.model.dtype} after it was read, which rounds "
                "its RoPE frequencies too: load it with from_pretrained(..., dtype=...) and build a new Blender"
            )

    @property
    def dtype(self) -> torch.dtype:
        """dtype of weights and KV."""
        return self.model.dtype

    @cached_property
    def kv_like(self) -> KVLayers:
        """One row of keys and values ``[H, 1, D]`` per cache layer: the shapes and dtypes of this model's KV."""
        _, layers = self.prefill(torch.ones(1, 1, dtype=torch.int64))
        return _one_row(layers)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model embeds."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]

    @property
    def stretches(self) -> bool:
        """Whether the model runs prompts beyond ``context`` (dynamic NTK), though no key can be moved there."""
        return any(isinstance(table, BoundedTable) for table in self.rope.tables.values())

    @property
    def projection_share(self) -> float:
        """Share of a decoder layer's parameters that stands before its attention: what a check costs per row."""
        projections = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "kv_a_proj", "q_a_proj")
        layer = self.layers[min(1, len(self.layers) - 1)]
        total = sum(p.numel() for p in layer.parameters())
        return sum(p.numel() for n, p in layer.named_parameters() if any(k in n for k in projections)) / total

    # --- plain passes -----------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, ids_BT: Tensor, past: KVLayers | None = None) -> tuple[Tensor, KVLayers]:
        """A plain forward pass, stock to the last bit.

        Args:
            ids_BT: token ids ``[B, T]``; with B > 1, padded on the right (what the padding computes is thrown away).
            past: exact KV ``[H, n, D]`` of the rows before, the same for all B.

        Returns:
            fp32 logits ``[B, V]`` of the last row and KV per layer, ``[B, H, rows, D]`` where rows include the past.
        """
        cache = DynamicCache()  # without config: sliding layers keep every row
        for index, (keys, values) in enumerate(past or ()):
            batch = ids_BT.shape[0], -1, -1, -1
            cache.update(keys[None].expand(batch), values[None].expand(batch), index)
        out = self.model(
            input_ids=ids_BT.to(self.device), use_cache=True, logits_to_keep=1, **cache_argument(self.model, cache)
        )
        return out.logits[:, -1].float(), cached_kv(cache)

    # --- narrowed passes --------------------------------------------------------------------------

    def narrow_pass(self, cache: FusionCache, **plan: Any) -> NarrowPass:
        """A pass over ``cache`` with this model's reaches and masks; see :class:`NarrowPass` for ``plan``."""
        return NarrowPass(
            self,
            cache,
            self.reaches,
            fusion_masks=self.observable,
            float_masks=self._stock_attention == "eager",
            **plan,
        )

    @torch.inference_mode()
    def run(self, ids_1T: Tensor, plan: NarrowPass) -> Tensor | None:
        """Runs the model over ``plan``'s cache; fp32 logits ``[V]`` of the last row, or None if it stops early."""
        # A 4-D mask is passed through unbuilt; the hooks replace it layer by layer. Where some layer runs all rows
        # the model makes its own, as ever.
        skip = self.observable and plan.narrow_from_start
        mask = torch.empty(1, 1, 0, 0, device=self.device) if skip else None
        with plan:
            try:
                out = self.model(
                    input_ids=ids_1T,
                    attention_mask=mask,
                    use_cache=True,
                    logits_to_keep=1,
                    **cache_argument(self.model, plan.cache),
                )
            except PassOver:
                return None
        logits: Tensor = out.logits[0, -1].float()
        return logits

    # --- attaching --------------------------------------------------------------------------------

    def _attach(self) -> bool:
        """Puts the fusion attention in place; False for models that do not take part in transformers' registry."""
        if not attach(self.model):
            return False
        if self._calls_fusion_attention():
            return True
        detach(self.model)
        return False

    def _calls_fusion_attention(self) -> bool:
        """Tries it: four rows, of which the last two run, and every cache layer must have handed us its queries."""
        seen: set[int] = set()
        ids = torch.arange(1, 5, device=self.device)[None]
        _, layers = self.prefill(ids)
        self.kv_like = _one_row(layers)
        cache = FusionCache([(keys.clone(), values.clone()) for keys, values in layers], 4)
        rows = torch.tensor([2, 3], device=self.device)
        plan = NarrowPass(
            self, cache, self.reaches, rows_S=rows, only_last=False, observer=lambda layer, weights: seen.add(layer)
        )
        self.observable = True
        try:
            self.run(ids, plan)
        except Exception:  # whatever a model does with a mask that is no tensor, it cannot take ours
            return False
        return seen >= set(range(len(layers)))


def _one_row(layers: KVLayers) -> KVLayers:
    return tuple((keys[0, :, :1].clone(), values[0, :, :1].clone()) for keys, values in layers)


def read_reaches(model: PreTrainedModel) -> list[Reach]:
    """Window or chunk of each layer, as the config states it (the attention's own arguments win over it)."""
    config = model.config.get_text_config()
    count = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * count
    return [_reach(kind, window, getattr(config, "attention_chunk_size", None)) for kind in kinds[:count]]


def _reach(kind: str, window: int | None, chunk: int | None) -> Reach:
    if kind == "sliding_attention" and window:
        return Reach(window=int(window))
    if kind == "chunked_attention" and chunk:
        return Reach(chunk=int(chunk))
    return Reach()


def _fingerprint(model: PreTrainedModel, rope: Rope) -> str:
    """Cheap and stable: config, and of every tensor its name, shape, dtype and 16 evenly spaced numbers."""
    state = hashlib.sha256()
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal"):
        config.pop(volatile, None)
    state.update(json.dumps(config, sort_keys=True, default=str).encode())
    state.update(rope.digest())
    samples = []
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel():
            flat = tensor.detach().reshape(-1)
            picks = torch.linspace(0, flat.numel() - 1, 16, dtype=torch.float64).long().to(flat.device)
            samples.append(flat[picks].float())
    state.update(torch.cat(samples).cpu().numpy().tobytes())  # one transfer, not one per tensor
    return state.hexdigest()
