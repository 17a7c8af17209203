"""The conformance suite of codecs: what comes out is what went in, as near as the codec says, and never nonsense.

::

    class TestMyCodec(CodecTests):
        error = 0.05

        def make(self):
            return MyCodec()

Any test runner that collects ``test_`` methods will do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blend.stores.codecs import Codec, LayerSpec

__all__ = ["CodecTests", "key_like", "value_like"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodecTests:
    """Tests of one codec.

    Attributes:
        error: largest root mean square error of a side that may come of KV like a model's, relative to the root mean
            square of the side. Not looked at where the codec is lossless.
        ratio: how many times smaller bf16 KV like a model's must become.
    """

    error: float = 0.0
    ratio: float = 0.99

    def make(self) -> Codec:
        """The codec."""
        raise NotImplementedError("a subclass says how its codec is made")

    # --- round trip -------------------------------------------------------------------------------

    def test_kv_comes_back(self) -> None:
        for dtype in DTYPES:
            keys, values = key_like().to(dtype), value_like().to(dtype)
            back = self.round_trip(keys, values)
            for name, x, y in zip(("keys", "values"), (keys, values), back, strict=True):
                assert relative(x, y) <= self._allowed(), f"{name} in {dtype} are {relative(x, y):.2%} off"

    def test_every_shape_comes_back(self) -> None:
        """One head, one row, one channel; odd numbers; latents with two widths; no numbers at all; long chunks."""
        shapes = [
            ((1, 1, 1), (1, 1, 1)),
            ((1, 1, 64), (3, 1, 5)),
            ((3, 7, 1), (1, 7, 33)),
            ((1, 65, 24), (1, 65, 8)),
            ((2, 130, 3), (2, 130, 3)),
            ((1, 5, 16), (1, 5, 0)),
            ((0, 5, 16), (1, 0, 16)),
            ((2, 1031, 4), (1, 1031, 2)),
        ]
        for key_shape, value_shape in shapes:
            for dtype in DTYPES:
                keys, values = noise(key_shape).to(dtype), noise(value_shape).to(dtype)
                for x, y in zip((keys, values), self.round_trip(keys, values), strict=True):
                    # Of few numbers, or of noise, no more is asked than that most of the signal is there.
                    assert relative(x, y) < 0.3, f"{tuple(x.shape)} in {dtype} is {relative(x, y):.2%} off"

    def test_a_view_is_coded_like_its_copy(self) -> None:
        keys, values = key_like(), value_like()
        views = keys.transpose(0, 1).contiguous().transpose(0, 1), values.mT.contiguous().mT
        for x, y in zip(self.round_trip(keys, values), self.round_trip(*views), strict=True):
            assert torch.equal(x, y), "strides have changed the numbers"

    def test_kv_of_inference_mode_is_coded(self) -> None:
        with torch.inference_mode():
            layer = key_like(), value_like()
        self.round_trip(*layer)

    # --- numbers at the edge ----------------------------------------------------------------------

    def test_what_is_no_number_comes_back_as_it_was(self) -> None:
        for dtype in DTYPES:
            for odd in (math.nan, math.inf, -math.inf):
                keys, values = key_like().to(dtype), value_like().to(dtype)
                keys[1, 7, 3] = values[0, 5, 2] = odd
                for x, y in zip((keys, values), self.round_trip(keys, values), strict=True):
                    assert torch.equal(y.isnan(), x.isnan()), f"{odd} in {dtype} was lost, or has spread"
                    assert torch.equal(y.isinf() * y.sign(), x.isinf() * x.sign()), f"{odd} in {dtype} was lost"
                    assert relative(x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)) <= self._allowed()

    def test_constants_come_back(self) -> None:
        for dtype in DTYPES:
            for constant in (0.0, 1.0, -37.5):
                x = torch.full((2, 40, 8), constant, dtype=dtype)
                for y in self.round_trip(x, x):
                    assert (y.double() - constant).abs().max() <= abs(constant) * self._allowed(), (
                        f"{constant}, {dtype}"
                    )

    def test_nothing_overflows_or_vanishes(self) -> None:
        for dtype in DTYPES:
            info = torch.finfo(dtype)
            for size in (info.max, info.max / 3, info.tiny * 100):
                unit = noise((2, 50, 8))
                x = (unit / unit.abs().max() * size).to(dtype)
                for y in self.round_trip(x, x):
                    assert relative(x, y) < 0.3, f"numbers up to {size:g} in {dtype} are {relative(x, y):.1%} off"

    def test_one_huge_number_does_not_break_the_rest(self) -> None:
        """As in attention sinks: a row or a channel a hundred times larger than the others."""
        keys, values = key_like(), value_like()
        keys[0, :, 5] += 100.0
        values[:, 0] *= 100.0
        back = self.round_trip(keys, values)
        calm = relative(keys[1:], back[0][1:]), relative(values[:, 1:], back[1][:, 1:])
        assert max(calm) <= 3 * self._allowed(), f"keys are {calm[0]:.2%} off, values {calm[1]:.2%}"

    # --- contract ---------------------------------------------------------------------------------

    def test_kv_of_a_model_becomes_smaller(self) -> None:
        keys, values = key_like().bfloat16(), value_like().bfloat16()
        parts = self.make().encode(keys, values)
        ratio = (keys.nbytes + values.nbytes) / sum(part.nbytes for part in parts.values())
        assert ratio >= self.ratio, f"only {ratio:.2f} times smaller"

    def test_the_same_kv_gives_the_same_bytes(self) -> None:
        one, other = (self.make().encode(key_like(), value_like()) for _ in range(2))
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)

    def test_decoding_leaves_the_parts_alone(self) -> None:
        codec, keys, values = self.make(), key_like(), value_like()
        parts = codec.encode(keys, values)
        before = {name: part.clone() for name, part in parts.items()}
        first = codec.decode(parts, LayerSpec.of(keys, values))
        again = codec.decode(parts, LayerSpec.of(keys, values))
        assert all(torch.equal(parts[name], before[name]) for name in parts), "decoding has written to its input"
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))

    def test_encoding_leaves_the_kv_alone(self) -> None:
        keys, values = key_like(), value_like()
        self.make().encode(keys, values)
        assert torch.equal(keys, key_like())
        assert torch.equal(values, value_like())

    # --- helpers ----------------------------------------------------------------------------------

    def round_trip(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Through the codec; shapes and dtypes are looked at here, and every bit of a lossless one."""
        codec, spec = self.make(), LayerSpec.of(keys, values)
        parts = codec.encode(keys, values)
        assert all(part.device.type == "cpu" for part in parts.values())
        back = codec.decode(parts, spec)
        assert LayerSpec.of(*back) == spec, f"{LayerSpec.of(*back)} came out where {spec} went in"
        if codec.lossless:
            assert all(_same_bits(x, y) for x, y in zip((keys, values), back, strict=True)), "a bit has changed"
        return back

    def _allowed(self) -> float:
        return 0.0 if self.make().lossless else self.error


def key_like(heads: int = 2, rows: int = 130, width: int = 64) -> Tensor:
    """Keys as models have them, fp32: every channel its own size and mean, the mean turned by the position (RoPE)."""
    draw = torch.Generator().manual_seed(1)
    half = width // 2
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    mean = 3 * torch.randn(heads, 1, half, generator=draw)
    waves = torch.cat([mean * angles.cos(), mean * angles.sin()], -1)
    sizes = torch.rand(heads, 1, width, generator=draw) + 0.3
    return waves + sizes * torch.randn(heads, rows, width, generator=draw)


def value_like(heads: int = 2, rows: int = 130, width: int = 64) -> Tensor:
    """Values as models have them, fp32: every row its own size."""
    draw = torch.Generator().manual_seed(2)
    sizes = torch.randn(1, rows, 1, generator=draw).exp() / 4
    return sizes * torch.randn(heads, rows, width, generator=draw)


def noise(shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def relative(x: Tensor, y: Tensor) -> float:
    """Root mean square of the difference, relative to that of ``x``; 0.0 for no numbers."""
    if not x.numel():
        return 0.0
    largest = x.double().abs().max().clamp_min(1e-300)  # so that no square is beyond fp64
    error, size = ((z.double() / largest).square().mean().sqrt() for z in (y.double() - x.double(), x))
    return float(error / size) if size > 0 else float(error)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().reshape(-1).view(torch.uint8), y.contiguous().reshape(-1).view(torch.uint8))
