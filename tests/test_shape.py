"""What a config says of a model, against the model itself: KV that is really encoded, products really counted."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, DynamicCache

from blend import Blender, Chunk, ModelNotFound, UnsupportedModel, UnsupportedRotation
from blend.hf.attention import Reach
from blend.hf.shape import LayerShape, model_shape, read_shape
from blend.testing.prompts import tiny_ids
from blend.testing.tiny import FAMILIES, tiny_config, tiny_model

DISTINCT = ("llama_dynamic", "mistral_swa", "qwen2_vl", "mixtral", "gemma3n_text", "gemma4_text", "gpt_neox", "gpt_oss")
DISTINCT += ("deepseek_v3", "llama4_text", "falcon", "bloom")


def counted(model, name, rows):
    """Operations of a prefill of that class with memory, every pair of rows computed."""
    choices = {"attn_implementation": "eager", "experts_implementation": "eager"}  # torch's counter knows all of these
    stock = type(model)._from_config(tiny_config(name), **choices)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        stock(input_ids=torch.tensor([tiny_ids(rows)]), cache=DynamicCache(), use_cache=True, logits_to_keep=1)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_takes_what_its_config_says(name):
    rows = 11
    shape = model_shape(tiny_config(name), torch.float32)
    model = tiny_model(name)
    assert shape.params == sum(p.numel() for p in model.parameters())
    pairs = sum(layer.pair_flops * (rows if layer.alone else rows**2) for layer in shape.layers)
    assert rows * shape.row_flops + pairs + shape.last_flops == counted(model, name, rows)
    with Blender(model, check=False) as blender:
        blender.encode([Chunk(tiny_ids(rows))], system=())
        (key,) = blender.store.keys()
        entry = blender.store.get(key)
        assert shape.row_bytes == entry.nbytes / rows
        assert [layer.reach for layer in shape.layers] == blender.view.reaches
        assert shape.context == blender.view.context


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bytes_follow_the_dtype(dtype):
    shape = model_shape(tiny_config("llama"), dtype)
    assert shape.row_bytes == 4 * 2 * 2 * 16 * dtype.itemsize
    assert shape.weight_bytes == shape.params * dtype.itemsize
    assert not shape.shares_kv


def test_the_dtype_of_the_config_counts():
    config = tiny_config("llama")
    assert model_shape(config).dtype == torch.bfloat16
    config.dtype = torch.float16
    assert model_shape(config).dtype == torch.float16


def test_a_big_model_needs_no_memory():
    """Eight layers as those of a model of 70 billion parameters: 32 KiB a token, two operations per weight."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=8,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    shape = model_shape(config)
    norms_and_embeddings = 17 * 8192 + 2 * 128256 * 8192
    assert shape.params == 8 * 855_654_400 + norms_and_embeddings - 16 * 8192
    assert shape.row_bytes == 32 * 1024
    assert shape.row_flops == 2 * (shape.params - norms_and_embeddings)


def test_experts_cost_only_where_they_are_used():
    shape = model_shape(tiny_config("mixtral"))
    expert = 3 * 64 * 96
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert shape.layers[0].row_flops == 2 * (attention + 64 * 4 + 2 * expert), "router, and two experts of four"


def test_mla_unpacks_what_is_cached():
    layer = model_shape(tiny_config("deepseek_v3")).layers[0]
    assert (layer.keys, layer.values) == ((1, 32), (1, 8)), "the latent, and the part that is rotated"
    assert layer.key_flops == 2 * 32 * 4 * (16 + 16)
    assert model_shape(tiny_config("llama")).layers[0].key_flops == 0


def test_layers_that_share_kv_have_none():
    shape = model_shape(tiny_config("gemma4_text"))
    assert shape.shares_kv
    assert [layer.numbers > 0 for layer in shape.layers] == [True] * 4 + [False] * 2
    assert [layer.alone for layer in shape.layers] == [False] * 4 + [True] * 2, "nothing reads what other rows leave"
    assert all(layer.row_flops > 0 for layer in shape.layers)


def test_what_a_row_sees():
    def seen(reach, start, stop):
        return LayerShape((1, 1), (1, 1), 1.0, 1.0, 1.0, 0.0, reach).seen(start, stop)

    assert seen(Reach(), 0, 4) == 1 + 2 + 3 + 4
    assert seen(Reach(), 2, 4) == 3 + 4
    assert seen(Reach(window=2), 0, 4) == 1 + 2 + 2 + 2
    assert seen(Reach(chunk=2), 1, 5) == 2 + 1 + 2 + 1


def test_a_prefill_in_two_parts_costs_as_much_as_in_one():
    shape = model_shape(tiny_config("gemma2"))
    both = shape.prefill_flops(40) + shape.prefill_flops(60, behind=40)
    assert both == shape.prefill_flops(100) + shape.head_flops


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_folder_with_nothing_but_a_config(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    for name in (tmp_path, str(tmp_path)):
        assert read_shape(name).row_bytes == 512


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no folder with a config\.json"):
        read_shape(tmp_path)
    with pytest.raises(ModelNotFound, match="nowhere is no folder"):
        read_shape(tmp_path / "nowhere")


def test_a_hub_id_without_a_network():
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set"):
        read_shape("someone/no-such-model")


@pytest.mark.parametrize(("name", "message"), [("", "name is empty"), ("a/b/c", "neither a folder here nor a hub id")])
def test_names_that_name_nothing(name, message):
    with pytest.raises(ModelNotFound, match=message):
        read_shape(name)


def test_a_damaged_gguf_file(tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(ModelNotFound, match="cut short"):
        read_shape(file)
    with pytest.raises(ModelNotFound, match=r"absent\.gguf"):
        read_shape(tmp_path / "absent.gguf")


def test_the_bundled_model_by_its_alias(smollm2):
    shape = read_shape("smollm2")
    model, _ = smollm2
    assert (shape.name, shape.dtype, shape.row_bytes) == ("smollm2", torch.bfloat16, 23_040)
    assert shape.params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config", [{"model_type": "no-such-type"}, {"hidden_size": 8}, "not JSON"])
def test_a_config_that_cannot_be_read(config, tmp_path):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises((UnsupportedModel, ModelNotFound), match="config of"):
        read_shape(tmp_path)


@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen3_next", "deepseek_v32"])
def test_models_that_cache_something_else(name):
    with pytest.raises(UnsupportedRotation, match="Use full prefill"):
        model_shape(tiny_config(name))


def test_models_that_are_no_decoders():
    with pytest.raises(UnsupportedModel, match="no decoder-only language model"):
        model_shape(AutoConfig.for_model("t5"))
    with pytest.raises(UnsupportedModel, match="does not run on shapes alone"):
        model_shape(tiny_config("gpt2"))
