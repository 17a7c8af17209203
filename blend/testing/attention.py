"""The conformance suite of attention backends: every one must agree with the written-out specification.

::

    class TestMyBackend(AttentionTests):
        attend = staticmethod(attend_mine)

Any test runner that collects ``test_`` methods will do, and :func:`failures` where there is none. Another device is a
class attribute away. Shape suffixes as in :mod:`blend.hf.attention.eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from blend.hf.attention.eager import attend_eager
from blend.hf.attention.mask import BLOCK_ROWS, FusionMask, Reach

__all__ = ["AttentionTests", "failures"]


class _Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor

    def to(self, dtype: torch.dtype) -> _Inputs:
        return _Inputs(*(x.to(dtype) for x in self))


class AttentionTests:
    """Tests of one attention function.

    Attributes:
        attend: the function under test, with the signature of :func:`blend.hf.attention.eager.attend_eager`.
        limits: largest difference allowed per dtype, relative to the largest number of the result or to 1. Inputs are
            standard normal, and the truth is the specification in float32 on the same (rounded) inputs.
        device: where the tensors are made.
    """

    attend: ClassVar[Callable[..., Tensor]]
    limits: ClassVar[dict[torch.dtype, float]] = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
    device: ClassVar[str] = "cpu"

    # --- head layouts -----------------------------------------------------------------------------

    def test_grouped_heads(self) -> None:
        self._agree(self._inputs(heads=9, kv_heads=3), self._some_rows(150))

    def test_every_head_has_its_own_keys(self) -> None:
        self._agree(self._inputs(heads=4, kv_heads=4), self._some_rows(150))

    def test_all_heads_share_one_key(self) -> None:
        self._agree(self._inputs(heads=4, kv_heads=1), self._some_rows(150))

    def test_values_of_another_width_than_keys(self) -> None:
        for width in (8, 40):
            self._agree(self._inputs(value_dim=width), self._some_rows(150))

    def test_scaling_is_the_one_given(self) -> None:
        self._agree(self._inputs(), self._some_rows(150), scaling=0.7)

    # --- which rows run ---------------------------------------------------------------------------

    def test_one_row(self) -> None:
        for row in (0, 1, 77, 149):
            self._agree(self._inputs(), [row])

    def test_all_rows(self) -> None:
        for total in (1, 2, BLOCK_ROWS, BLOCK_ROWS + 1, 150):
            self._agree(self._inputs(total), range(total))

    def test_runs_and_singles(self) -> None:
        rows = [*range(3, 20), 31, 33, 35, *range(60, 70), 100, *range(141, 150)]
        self._agree(self._inputs(), rows)

    def test_any_rows(self) -> None:
        for seed in range(5):
            self._agree(self._inputs(200, seed=seed), self._some_rows(200, seed=seed))

    def test_row_counts_at_block_borders(self) -> None:
        total = 2 * BLOCK_ROWS + 40
        for count in (border + step for border in (BLOCK_ROWS, 2 * BLOCK_ROWS) for step in (-1, 0, 1)):
            self._agree(self._inputs(total), range(total - count, total))
            self._agree(self._inputs(total), range(count))

    def test_prompts_of_many_blocks(self) -> None:
        """Of the size of a GPU's blocks: rows alone, rows side by side, and gaps, under every reach."""
        inputs = self._inputs(700)
        for rows in ([*self._some_rows(450), *range(500, 700)], [*range(0, 700, 2), 699], [*range(300), 650]):
            for reach in (Reach(), Reach(window=40), Reach(window=200), Reach(chunk=256)):
                self._agree(inputs, rows, reach=reach)

    def test_extras_over_many_blocks(self) -> None:
        sinks = torch.tensor([2.0, -1.0, 0.0, 5.0], device=self.device)
        for rows in ([*self._some_rows(450), *range(500, 700)], range(700)):
            for reach in (Reach(), Reach(window=200)):
                self._agree(self._inputs(700), rows, reach=reach, softcap=5.0, sinks=sinks)

    # --- how far back they see --------------------------------------------------------------------

    def test_sliding_windows(self) -> None:
        for window in (1, 5, 24, BLOCK_ROWS, BLOCK_ROWS + 1, 149, 1000):
            for rows in (self._some_rows(150), range(150)):
                self._agree(self._inputs(), rows, reach=Reach(window=window))

    def test_chunked_windows(self) -> None:
        for chunk in (1, 7, 32, BLOCK_ROWS, 1000):
            for rows in (self._some_rows(150), range(150)):
                self._agree(self._inputs(), rows, reach=Reach(chunk=chunk))

    def test_reach_of_the_call_wins_over_the_masks(self) -> None:
        inputs, rows = self._inputs(), self._rows(self._some_rows(150))
        narrow, wide = FusionMask(rows, 150, Reach(window=9)), FusionMask(rows, 150, Reach())
        query = inputs.query[:, :, rows]
        for mask, reach in ((narrow, None), (narrow, Reach()), (wide, Reach(window=9)), (wide, Reach(chunk=16))):
            # Twice, since a mask may remember the blocks of its first use.
            for _ in range(2):
                self._close(query, inputs.key, inputs.value, mask, scaling=0.25, reach=reach)

    # --- extras -----------------------------------------------------------------------------------

    def test_softcap(self) -> None:
        for softcap in (1.0, 30.0):
            self._agree(self._inputs(), self._some_rows(150), softcap=softcap)
            self._agree(self._inputs(), self._some_rows(150), softcap=softcap, reach=Reach(window=24))

    def test_sinks(self) -> None:
        sinks = torch.tensor([2.0, -1.0, 0.0, 5.0], device=self.device)
        self._agree(self._inputs(), self._some_rows(150), sinks=sinks)
        self._agree(self._inputs(), self._some_rows(150), sinks=sinks, softcap=5.0, reach=Reach(window=24))

    # --- what a caller relies on ------------------------------------------------------------------

    def test_shape_dtype_and_untouched_inputs(self) -> None:
        for dtype in self.limits:
            inputs = self._inputs(heads=9, kv_heads=3, value_dim=40).to(dtype)
            rows = self._rows(self._some_rows(150))
            given = _Inputs(inputs.query[:, :, rows], inputs.key, inputs.value)
            before = [x.clone() for x in given]
            out = type(self).attend(*given, FusionMask(rows, 150, Reach()), scaling=0.25)
            assert out.shape == (1, len(rows), 9, 40), f"the result is {tuple(out.shape)}, not [B, S, Hq, Dv]"
            assert out.dtype == dtype, f"the result is {out.dtype} and the query {dtype}"
            assert all(torch.equal(x, y) for x, y in zip(before, given, strict=True)), "an input was written to"

    def test_strided_inputs(self) -> None:
        """Models hand over transposed views."""
        inputs = self._inputs(heads=9, kv_heads=3)
        strided = _Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
        self._agree(strided, self._some_rows(150))

    def test_no_row_sees_the_future(self) -> None:
        """Other keys and values behind a row change no bit of its result."""
        for dtype in self.limits:
            inputs = self._inputs().to(dtype)
            rows = self._rows(self._some_rows(150))
            query, mask = inputs.query[:, :, rows], FusionMask(rows, 150, Reach())
            for row in (rows[0], rows[len(rows) // 2], rows[-2]):
                key, value = inputs.key.clone(), inputs.value.clone()
                key[:, :, row + 1 :] += 3
                value[:, :, row + 1 :] -= 3
                one = type(self).attend(query, inputs.key, inputs.value, mask, scaling=0.25)
                other = type(self).attend(query, key, value, mask, scaling=0.25)
                seen = rows <= row
                assert torch.equal(one[:, seen], other[:, seen]), f"rows up to {int(row)} changed with what follows"
                assert not torch.equal(one[:, ~seen], other[:, ~seen]), f"rows behind {int(row)} did not change"

    # --- tools ------------------------------------------------------------------------------------

    def _agree(self, inputs: _Inputs, rows: Sequence[int], reach: Reach | None = None, **options: Any) -> None:
        """The function under test agrees with the specification in every dtype."""
        options.setdefault("scaling", 0.25)
        mask = FusionMask(self._rows(rows), inputs.key.shape[2], reach or Reach())
        self._close(inputs.query[:, :, mask.rows_S], inputs.key, inputs.value, mask, **options)

    def _close(self, query: Tensor, key: Tensor, value: Tensor, mask: FusionMask, **options: Any) -> None:
        for dtype, limit in self.limits.items():
            given = _Inputs(query, key, value).to(dtype)
            truth = attend_eager(*given.to(torch.float32), mask, **options)
            off = (type(self).attend(*given, mask, **options).float() - truth).abs().max()
            difference = float(off / truth.abs().max().clamp_min(1.0))
            assert difference <= limit, (
                f"off by {difference:.1e} in {dtype} (limit {limit:.0e}): query {tuple(query.shape)}, key "
                f"{tuple(key.shape)}, {mask.reach}, {options}"
            )

    def _inputs(
        self, total: int = 150, heads: int = 4, kv_heads: int = 2, dim: int = 16, value_dim: int = 16, seed: int = 0
    ) -> _Inputs:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        draws = (torch.randn(1, count, total, width, generator=generator) for count, width in shapes)
        return _Inputs(*(x.to(self.device) for x in draws))

    def _rows(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(list(rows), device=self.device)

    def _some_rows(self, total: int, seed: int = 0) -> list[int]:
        """Two thirds of the rows, the last among them, sorted."""
        generator = torch.Generator().manual_seed(seed)
        chosen: Iterator[int] = iter(torch.randperm(total - 1, generator=generator)[: total * 2 // 3].tolist())
        return sorted({*chosen, total - 1})


def failures(suite: type[AttentionTests]) -> dict[str, str]:
    """Runs every test of a suite; of each that fails, its name and what went wrong, in one line."""
    wrong = {}
    for name in (name for name in dir(suite) if name.startswith("test_")):
        try:
            getattr(suite(), name)()
        except Exception as error:  # a kernel may raise anything, and the other tests are to run all the same
            wrong[name] = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    return wrong
