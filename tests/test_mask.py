"""What a fusion mask keeps: edges of blocks, and no whole block; and what the attention over them stands on."""

from __future__ import annotations

import pytest
import torch

from blend.hf.attention import FusionMask, Reach

REACHES = [Reach(), Reach(window=40), Reach(chunk=100)]


def mask_over(total: int, reach: Reach, share: float = 0.15) -> FusionMask:
    generator = torch.Generator().manual_seed(total)
    rows = torch.randperm(total, generator=generator)[: round(share * total)].sort().values
    return FusionMask(rows, total, reach)


@pytest.mark.parametrize("reach", REACHES)
def test_edges_and_common_keys_make_the_whole_block(reach):
    for block in mask_over(900, reach).blocks(size=16):
        rebuilt = torch.full((block.q1 - block.q0, block.k1 - block.k0), torch.nan)
        rebuilt[:, block.common] = 0
        for columns, bias in block.edges(torch.float32):
            assert bool(rebuilt[:, columns].isnan().all()), "an edge covers common keys"
            rebuilt[:, columns] = bias
        assert torch.equal(rebuilt, block.bias(torch.float32))
        assert torch.equal(rebuilt == 0, block.seen)
        assert block.size == block.seen.numel()


def test_what_is_kept_grows_as_the_prompt_does():
    def kept(total: int) -> int:
        edges = (block.edges(torch.bfloat16) for block in mask_over(total, Reach()).blocks())
        return sum(bias.numel() for of_block in edges for _, bias in of_block)

    assert kept(16_384) < 4.5 * kept(4_096), "four times the rows"


def test_blocks_of_two_sizes_are_not_mixed_up():
    mask = mask_over(900, Reach())
    small, large = mask.blocks(size=16), mask.blocks(size=64)
    assert {block.q1 - block.q0 for block in small[:-1]} == {16}
    assert {block.q1 - block.q0 for block in large[:-1]} == {64}
    assert mask.blocks(size=16) is small, "made once"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4099])
def test_softmax_may_write_over_what_it_reads(dtype, width):
    """The matrix products' attention counts on it."""
    scores = torch.randn(33, width, generator=torch.Generator().manual_seed(width)).mul_(9).to(dtype)
    expected = scores.softmax(dim=-1)
    torch.softmax(scores, dim=-1, out=scores)
    assert torch.equal(scores, expected)
