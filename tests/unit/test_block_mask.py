"""The dense mask, which is the reference: worked examples, and FlexAttention's tables against torch's own."""

from __future__ import annotations

import pytest
import torch

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from consumer.anchors import Anchors
from consumer.attention import block_mask_of
from consumer.block_mask import closed_form_tables, dense_mask, intervals


def shape_of(block_size: int = 4, window: int = 8, causal: bool = True) -> DrafterShape:
    return DrafterShape(
        8, 8, 2, 1, 1, 8, 1, block_size, (SLIDING, FULL), window, causal, 1e-6, 1e4, 0, 9
    )  # fmt: skip


def test_p09_window_8_block_4_anchor_20_sees_13_to_19():
    anchors = Anchors(torch.tensor([20]), torch.tensor([True]))
    mask = dense_mask(anchors, torch.zeros(30, dtype=torch.int32), shape_of(), SLIDING)
    assert mask[0, :30].nonzero().flatten().tolist() == list(range(13, 20))
    assert mask[3, :30].nonzero().flatten().tolist() == list(range(16, 20))


def test_p09_a_window_smaller_than_the_block_is_refused():
    with pytest.raises(ValueError, match="sliding_window must be at least the block size 16, got 8"):
        shape_of(block_size=16, window=8)


def test_p02_documents_of_1_3_2_tokens_are_block_diagonal():
    start = torch.tensor([0, 1, 1, 1, 4, 4], dtype=torch.int32)
    anchors = Anchors(torch.tensor([0, 3, 5]), torch.ones(3, dtype=torch.bool))
    mask = dense_mask(anchors, start, shape_of(2), FULL)
    assert [row.nonzero().flatten().tolist() for row in mask[::2, :6]] == [[], [1, 2], [4]]
    own = mask[:, 6:].to(torch.int8)
    assert torch.equal(own, torch.block_diag(*[torch.ones(2, 2, dtype=torch.int8)] * 3))


def test_p08_an_unused_block_sees_itself_only():
    anchors = Anchors(torch.tensor([5, 29]), torch.tensor([True, False]))
    mask = dense_mask(anchors, torch.zeros(30, dtype=torch.int32), shape_of(causal=False), SLIDING)
    assert mask[4:, :34].sum() == 0
    assert bool(mask[4:, 34:].all())


@pytest.mark.parametrize("causal", [True, False])
def test_causality_inside_the_block_concerns_sliding_layers_only(causal):
    anchors = Anchors(torch.tensor([5]), torch.tensor([True]))
    start = torch.zeros(8, dtype=torch.int32)
    shape = shape_of(causal=causal)
    inside = dense_mask(anchors, start, shape, SLIDING)[:, 8:]
    assert torch.equal(inside, torch.ones(4, 4).tril().bool() if causal else torch.ones(4, 4).bool())
    assert bool(dense_mask(anchors, start, shape, FULL)[:, 8:].all())


def test_tables_equal_those_of_torch_create_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    start = torch.zeros(300, dtype=torch.int32)
    start[120:280], start[280:] = 120, -1
    anchors = Anchors(torch.tensor([3, 50, 119, 125, 200, 279, 299]), torch.tensor([True] * 6 + [False]))
    for kind in (SLIDING, FULL):
        mask = dense_mask(anchors, start, shape_of(16, 40), kind)
        theirs = create_block_mask(lambda _b, _h, q, k, mask=mask: mask[q, k], None, None, *mask.shape, device="cpu")
        seen = intervals(anchors, start, shape_of(16, 40), kind)
        ours = closed_form_tables(seen, mask.shape[1])
        for name in ours._fields:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        block_mask = block_mask_of(seen, mask.shape[1])
        assert block_mask.shape[-2:] == theirs.shape[-2:]
        query, key = torch.meshgrid(torch.arange(mask.shape[0]), torch.arange(mask.shape[1]), indexing="ij")
        assert torch.equal(block_mask.mask_mod(None, None, query, key), mask)


def test_g03_tables_of_all_packs_have_one_shape():
    shapes = set()
    for boundary in (10, 100, 250):
        start = torch.zeros(300, dtype=torch.int32)
        start[boundary:] = boundary
        anchors = Anchors(torch.tensor([3, boundary + 20]), torch.tensor([True, True]))
        tables = closed_form_tables(intervals(anchors, start, shape_of(), SLIDING), 308)
        shapes.add(tuple((tuple(table.shape), table.dtype) for table in tables))
    assert len(shapes) == 1
