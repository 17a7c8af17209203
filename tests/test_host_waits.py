"""Where the host would wait for a GPU: seen on the CPU, from the calls that ask a tensor for its numbers.

On a GPU every such call stalls the host until all that is queued has run. A request may have a few of them; none may
come once more with every layer. What only shows on a GPU, ``tests/gpu/run.py`` lists.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LlamaConfig

import blend
from blend.hf.attention import SETTING, FusionMask, Reach, attend_whole
from blend.hf.attention.fa4 import _Plan as Fa4Plan
from blend.hf.attention.flex import _block_mask as flex_mask

ROOT = Path(__file__).resolve().parents[1]

ASKS = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"),
    *("nonzero", "unique", "unique_consecutive", "masked_select", "bincount", "argwhere", "is_nonzero"),
    *("tensor", "as_tensor"),  # a list goes over to the device, and the host waits for the copy
}


class Waits(TorchFunctionMode):
    """Counts calls that ask for numbers, by place in our code."""

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.asks(func, args, kwargs):
            self.places[place()] += 1
        return func(*args, **kwargs)

    @staticmethod
    def asks(func, args, kwargs):
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
        if name == "repeat_interleave":
            return isinstance(args[1], torch.Tensor) and "output_size" not in kwargs
        return name in ASKS or (name == "where" and len(args) == 1)


def place():
    """The innermost line of ours; transformers' own are not ours to change."""
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "blend") or file.is_relative_to(ROOT / "rope"):
            return f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        if "transformers" in file.parts:
            return f"transformers/{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def draws(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return lambda count: tuple(torch.randint(3, 256, (count,), generator=generator).tolist())


def small_blender(layers):
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    draw = draws(2)
    return blend.Blender(model, None, background=blend.Background((draw(20), draw(20))), check=False)


def small_prompt():
    draw = draws()
    return blend.Prompt(draw(8), tuple(blend.Chunk(draw(40)) for _ in range(4)), draw(12))


def waits(layers, recipe):
    """Places and counts of one warm request on a model of so many layers."""
    prompt = small_prompt()
    with small_blender(layers) as blender:
        blender.fuse(prompt, **recipe)  # encodes
        with Waits() as seen:
            blender.fuse(prompt, **recipe)
    return seen.places


RECIPES = {
    "default": {"selector": blend.ExpectedError(0.15), "corrector": blend.MeanShift(weight=0.25)},
    "kv-deviation": {"selector": blend.KVDeviation(0.15)},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_wait_comes_once_more_with_every_layer(recipe, monkeypatch):
    monkeypatch.setenv(SETTING, "sdpa")
    does_not_grow(RECIPES[recipe])


def does_not_grow(recipe):
    few, many = waits(3, recipe), waits(7, recipe)
    more = {place: f"{few[place]} -> {many[place]}" for place in many if many[place] > few[place]}
    assert not more, f"these lines ask the device for numbers in every layer: {more}"


@dataclass(frozen=True)
class AsksInEveryLayer(blend.MeanShift):
    """How it must not be done."""

    def plan(self, choice):
        shifting = super().plan(choice)

        def shift(fresh):
            assert float(fresh.fresh_keys.abs().sum()) >= 0
            return shifting(fresh)

        return shift


def test_such_a_wait_is_seen(monkeypatch):
    monkeypatch.setenv(SETTING, "sdpa")
    recipe = {"selector": blend.ExpectedError(0.15), "corrector": AsksInEveryLayer(weight=0.25)}
    with pytest.raises(AssertionError, match=r"correction\.py"):
        does_not_grow(recipe)


NOTHING = torch.device("meta")
"""A device whose tensors have shapes and no numbers: whatever asks for one raises."""


@pytest.mark.parametrize(
    "recipe",
    [
        *RECIPES.values(),
        {"selector": blend.QueryAttention(0.15)},
        {"selector": blend.WeightedDeviation(0.15)},
        {"selector": blend.FirstK(0.15)},
        {"selector": blend.FullReuse()},
        {"selector": blend.FullRecompute()},
    ],
    ids=lambda recipe: recipe["selector"].name,
)
def test_a_request_asks_the_device_for_nothing_but_what_the_report_needs(recipe, monkeypatch):
    """Chunks come from the host; from there on, all that is queued could be queued before any of it has run."""
    monkeypatch.setenv(SETTING, "sdpa")
    prompt = small_prompt()
    with small_blender(3) as blender:
        blender.fuse(prompt, **recipe)
        view = blender.view
        view.model.to(NOTHING)
        view.device = NOTHING
        view.kv_like = tuple((keys.to(NOTHING), values.to(NOTHING)) for keys, values in view.kv_like)
        with pytest.raises(NotImplementedError, match="no data") as asked:
            blender.fuse(prompt, **recipe)
    assert asked.traceback[-1].name == "fused_report"


@pytest.mark.parametrize("reach", [Reach(), Reach(window=40), Reach(chunk=64)], ids=str)
def test_blocks_are_worked_out_without_asking(reach):
    mask = FusionMask(torch.arange(3, 700, 2), 700, Reach())
    query, key = torch.randn(1, 4, 349, 16), torch.randn(1, 2, 700, 16)
    seen = Waits()
    with seen:
        flex_mask(mask, reach)
        Fa4Plan.of(mask, reach, 128)
        attend_whole(query, key, key, mask, scaling=0.25, reach=reach)
    assert not seen.places
