"""Tiny random-weight models of every decoder family, to prove KV fusion on each of them offline.

``FAMILIES`` is a table of model types with the few settings in which each differs from ``COMMON``;
``REFUSED`` lists families whose cached state cannot be fused. Configuration and model classes come from
transformers' Auto classes. Weights are drawn in float32 from one seeded generator and rounded to the wanted
dtype, so that a bfloat16 model is the float32 model of the same seed, rounded.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

__all__ = ["FAMILIES", "REFUSED", "Family", "tiny_config", "tiny_model"]

WINDOW = 24  # sliding window, in tokens
CHUNK = 32  # attention chunk of llama4, in tokens
QK_GAIN = 1.3  # extra gain of the query and key projections: attention far from uniform

_QK_PROJ = re.compile(r"\b(q|k|qkv|Wqkv|query|key|query_key_value|q_b|c_attn)(_proj)?$")
_QK_NORM = re.compile(r"\b(q|k|query|key)_?(layer)?_?norm")

# Settings of every tiny model; a configuration class takes those that it declares.
COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@dataclass(frozen=True)
class Family:
    """One tiny configuration: a transformers model type and what differs from the common defaults."""

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    attn: str | None = None


def _fam(name: str, model_type: str | None = None, attn: str | None = None, **overrides: Any) -> Family:
    return Family(name, model_type or name, overrides, attn)


def _table(*families: Family) -> Mapping[str, Family]:
    return MappingProxyType({family.name: family for family in families})


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **settings}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
_YARN64 = _rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)
_MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
_LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
_ALTERNATING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
_GEMMA: dict[str, Any] = {**_ALTERNATING, "query_pre_attn_scalar": 16}
_SHARED_KV: dict[str, Any] = {  # six layers, of which the last two reuse the KV of layers 2 and 3
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_NOPE: dict[str, Any] = {"no_rope_layers": [1, 0, 1, 0]}  # 0: a layer without rotary embedding
_SCALES: dict[str, Any] = {"embedding_multiplier": 1.5, "logits_scaling": 0.5, "residual_multiplier": 0.8}
_QWEN2_VL: dict[str, Any] = {
    "text_config": {"rope_parameters": _rope("default", mrope_section=[2, 3, 3])},
    "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 4},
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}

FAMILIES: Mapping[str, Family] = _table(
    _fam("llama"),
    _fam("llama_linear", "llama", rope_parameters=_rope("linear", factor=4.0)),
    _fam("llama_dynamic", "llama", rope_parameters=_rope("dynamic", factor=2.0), max_position_embeddings=256),
    _fam("llama_yarn", "llama", rope_parameters=_YARN),
    _fam("llama_llama3", "llama", rope_parameters=_LLAMA3),
    _fam("mistral", sliding_window=None),
    _fam("mistral_swa", "mistral", sliding_window=WINDOW),
    _fam("ministral", **_ALTERNATING),
    _fam("ministral3", rope_parameters={**_YARN64, **_MSCALE, "llama_4_scaling_beta": 0.1}),
    _fam("qwen2"),
    _fam("qwen2_swa", "qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    _fam("qwen3"),
    _fam("qwen3_moe"),
    _fam("qwen2_moe", shared_expert_intermediate_size=48),
    _fam("qwen2_vl", **_QWEN2_VL),
    _fam("mixtral"),
    _fam("gemma"),
    _fam("gemma2", **_GEMMA),
    _fam("gemma3_text", **_GEMMA),
    _fam("gemma3n_text", **_SHARED_KV, laurel_rank=8),
    _fam("gemma4_text", **_SHARED_KV, global_head_dim=32),
    _fam("vaultgemma", **_GEMMA),
    _fam("phi"),
    _fam("phi3"),
    _fam(
        "phi3_longrope",
        "phi3",
        original_max_position_embeddings=64,
        rope_parameters=_rope(
            "longrope",
            factor=8.0,
            original_max_position_embeddings=64,
            short_factor=[1.0 + 0.05 * i for i in range(8)],
            long_factor=[1.5 + 0.75 * i for i in range(8)],
        ),
    ),
    _fam("phimoe"),
    _fam("olmo"),
    _fam("olmo2"),
    _fam("olmo3", **_ALTERNATING),
    _fam("olmoe"),
    _fam("smollm3", **_NOPE),
    _fam("granite", **_SCALES, attention_multiplier=0.25),
    _fam("granitemoe", **_SCALES, attention_multiplier=0.25),
    _fam("cohere", logit_scale=1.5),
    _fam("cohere_qk_norm", "cohere", logit_scale=1.5, use_qk_norm=True),
    _fam("cohere2", **_ALTERNATING, logit_scale=1.5),
    _fam("glm"),
    _fam("glm4"),
    _fam("glm4_moe", **_GROUPS),
    _fam("stablelm"),
    _fam("starcoder2"),
    _fam("gpt_neox"),
    _fam("gptj", rotary_dim=8),
    _fam("codegen", rotary_dim=8),
    _fam("gpt_oss", **_ALTERNATING, rope_parameters={**_YARN, "truncate": False}),
    _fam("deepseek_v2", **_MLA, **_GROUPS),
    _fam("deepseek_v3", **_MLA, **_GROUPS),
    _fam("deepseek_v3_yarn", "deepseek_v3", **_MLA, **_GROUPS, rope_parameters={**_YARN, **_MSCALE}),
    _fam(
        "llama4_text",
        **_NOPE,
        attention_chunk_size=CHUNK,
        intermediate_size_mlp=96,
        interleave_moe_layer_step=2,
        num_experts_per_tok=1,
        floor_scale=CHUNK,
    ),
    _fam("nemotron"),
    _fam("exaone4", **_ALTERNATING),
    _fam("falcon"),
    _fam("falcon_gqa", "falcon", new_decoder_architecture=True, num_kv_heads=2),
    _fam("falcon_alibi", "falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    _fam("persimmon"),
    _fam("seed_oss"),
    _fam("ernie4_5"),
    _fam("hunyuan_v1_dense"),
    _fam("arcee"),
    _fam("apertus", rope_parameters=_LLAMA3),
    _fam("nanochat"),
    _fam("helium"),
    _fam("diffllama"),
    _fam("minimax_m2", rotary_dim=8),
    _fam("dots1", **_GROUPS),
    _fam("minicpm3", **_MLA, scale_emb=2, dim_model_base=128),
    _fam("doge"),
    _fam("bitnet"),
    _fam("bloom"),
)
"""Families on which KV fusion must be exact."""

REFUSED: Mapping[str, Family] = _table(
    # learned absolute positions are added to the embeddings
    _fam("gpt2"),
    _fam("opt", ffn_dim=96, word_embed_proj_dim=64),
    _fam("gpt_bigcode"),
    # recurrent or convolutional state depends on the whole prefix
    _fam(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        shared_expert_intermediate_size=48,
    ),
    _fam("lfm2", layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    _fam("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    _fam("bamba", attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_state=16, mamba_chunk_size=32),
    _fam("mamba", state_size=8),
    # lightning attention, and attention over an index of its own
    _fam("minimax", layer_types=["linear_attention", "full_attention"] * 2, block_size=32),
    _fam("deepseek_v32", **_MLA, **_GROUPS, index_topk=32, index_head_dim=16, index_n_heads=2),
)
"""Families that must be refused: what they cache cannot be moved to another place of a prompt."""


def _family(name: str) -> Family:
    family = FAMILIES.get(name) or REFUSED.get(name)
    if family is None:
        known = ", ".join([*FAMILIES, *REFUSED])
        raise KeyError(f"no tiny model is called {name!r}; the names are: {known}")
    return family


def tiny_config(name: str) -> PreTrainedConfig:
    """Configuration of the tiny model called ``name``, from ``FAMILIES`` or ``REFUSED``."""
    family = _family(name)
    overrides = copy.deepcopy(family.overrides)
    text = overrides.get("text_config")
    kind = CONFIG_MAPPING[family.model_type] if text is None else CONFIG_MAPPING[f"{family.model_type}_text"]
    known = {item.name for item in fields(kind)} | set(kind.attribute_map)
    common = {key: value for key, value in COMMON.items() if key in known}
    if text is None:
        overrides = {**common, **overrides}
    else:
        overrides["text_config"] = {**common, **text}
    return AutoConfig.for_model(family.model_type, **overrides)


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The tiny model called ``name`` in evaluation mode, with the random weights of ``seed``."""
    family, config = _family(name), tiny_config(name)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    builder: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    choice = {} if family.attn is None else {"attn_implementation": family.attn}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = builder.from_config(config, dtype=dtype, **choice)
    _draw_weights(model, seed)
    model.train(False)
    return model


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter values of a size at which attention, gains and biases all show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        for leaf, weight in module.named_parameters(recurse=False):
            spread = _spread(path, module, leaf, weight)
            if spread is not None:
                mean, std = spread
                weight.copy_(torch.randn(weight.shape, generator=generator).mul_(std).add_(mean))


def _spread(path: str, module: nn.Module, leaf: str, weight: nn.Parameter) -> tuple[float, float] | None:
    """Mean and standard deviation to draw one parameter with; None leaves it as it is."""
    if leaf == "sinks":
        return 2.0, 1.0
    if isinstance(module, nn.Embedding):
        return 0.0, 1.0 / float(getattr(module, "embed_scale", 1.0))
    kind = type(module).__name__
    if weight.ndim == 1 or "bias" in leaf or "Norm" in kind:
        # transformers starts these at 0 or 1; a norm's gain may be the weight itself or 1 + the weight
        start = weight.flatten()
        if not bool((start == start[:1]).all()):
            return None
        mean = 0.0 if kind == "NemotronLayerNorm1P" else float(start[0].bfloat16())
        if leaf == "weight" and _QK_NORM.search(path):
            # gemma3n and gemma4 do not divide the scores by sqrt(head_dim) = 4; their norms make up for it
            mean += QK_GAIN / 2 - 1 if kind in ("Gemma3nRMSNorm", "Gemma4RMSNorm") else QK_GAIN - 1
        return mean, 0.1
    gain = QK_GAIN if _QK_PROJ.search(path) else 1.0
    transposed = getattr(module, "is_transposed", False) or isinstance(module, Conv1D)
    return 0.0, gain / math.sqrt(weight.shape[-2 if transposed else -1])
