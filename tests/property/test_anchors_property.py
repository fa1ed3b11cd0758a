"""Anchors and mask tables on random packs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from consumer.anchors import lay_out_blocks, random_keys, select_anchors
from consumer.block_mask import closed_form_tables, dense_mask, intervals


@st.composite
def packs(draw):
    """Documents of 1..40 tokens with random masks, then padding."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    padding = draw(st.integers(0, 20))
    start, at = [], 0
    for length in lengths:
        start += [at] * length
        at += length
    start += [-1] * padding
    share = draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    mask = (torch.rand(len(start), generator=generator) < share).to(torch.uint8)
    return mask, torch.tensor(start, dtype=torch.int32)


@settings(max_examples=150, deadline=None)
@given(packs(), st.integers(2, 17), st.integers(1, 70), st.integers(0, 3), st.integers(0, 1000))
def test_anchors_are_sorted_distinct_candidates_and_as_many_as_possible(pack, size, budget, floor, seed):
    mask, start = pack
    tokens = mask.shape[0]
    anchors = select_anchors(mask, start, budget, size, floor, random_keys(torch.tensor(seed), torch.tensor(1), tokens))
    assert anchors.position.shape == anchors.keep.shape == (budget,)
    assert anchors.position.dtype == torch.int64
    assert bool((anchors.position[1:] >= anchors.position[:-1]).all())
    kept = anchors.position[anchors.keep].tolist()
    assert len(set(kept)) == len(kept)
    eligible = [
        t
        for t in range(tokens)
        if mask[t] and start[t] >= 0
        and any(mask[u] and start[u] == start[t] for u in range(t + 1, min(t + size, tokens)))
    ]  # fmt: skip
    assert set(kept) <= set(eligible)
    assert len(kept) == min(budget, len(eligible))
    for document in {int(start[t]) for t in eligible}:
        own = [t for t in eligible if start[t] == document]
        if budget >= floor * len({int(start[t]) for t in eligible}):
            assert len([t for t in kept if start[t] == document]) >= min(len(own), floor)


@settings(max_examples=100, deadline=None)
@given(packs(), st.integers(2, 9), st.integers(1, 40), st.integers(0, 1000))
def test_labels_never_leave_document_and_supervision(pack, size, budget, seed):
    mask, start = pack
    tokens = mask.shape[0]
    ids = torch.arange(1000, 1000 + tokens, dtype=torch.int32)
    anchors = select_anchors(mask, start, budget, size, 0, random_keys(torch.tensor(seed), torch.tensor(1), tokens))
    blocks = lay_out_blocks(anchors, ids, mask, start, size, 7)
    for j in range(budget):
        anchor = int(anchors.position[j])
        for k in range(size):
            at = anchor + k
            wanted = bool(anchors.keep[j]) and k > 0 and at < tokens and bool(mask[at]) and start[at] == start[anchor]
            assert bool(blocks.valid[j, k]) == wanted
            assert int(blocks.labels[j, k]) == (1000 + at if wanted else -1)
        if anchors.keep[j]:
            assert bool(blocks.valid[j].any())


@pytest.mark.parametrize("tile", [128, 16])
def test_g04_tables_equal_the_brute_force_mask_on_200_random_packs(tile):
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        size = (2, 4, 7, 8, 10, 16)[seed % 6]
        tokens, budget, window = pick(40, 400), pick(1, 40), pick(size, 120)
        start, at = torch.full((tokens,), -1, dtype=torch.int32), 0
        while at < tokens - pick(0, 60):
            end = min(tokens, at + pick(1, 150))
            start[at:end], at = at, end
        mask = (torch.rand(tokens, generator=generator) < 0.7).to(torch.uint8)
        keys = random_keys(torch.tensor(seed), torch.tensor(1), tokens)
        anchors = select_anchors(mask, start, budget, size, 0, keys)
        shape = DrafterShape(
            8, 8, 2, 1, 1, 8, 1, size, (SLIDING, FULL), window, bool(seed % 2), 1e-6, 1e4, 0, 9
        )  # fmt: skip
        for kind in (SLIDING, FULL):
            visible = dense_mask(anchors, start, shape, kind)
            assert bool(visible.any(1).all()), "a fully masked row"
            tables = closed_form_tables(intervals(anchors, start, shape, kind), visible.shape[1], tile)
            check_tables(tables, visible, tile)


def check_tables(tables, visible: torch.Tensor, tile: int) -> None:
    """Compare with the tiles of the mask itself: touched, and wholly visible (never where padded)."""
    queries, keys = visible.shape
    padded = torch.nn.functional.pad(visible, (0, -keys % tile, 0, -queries % tile))
    tiles = padded.view(padded.shape[0] // tile, tile, -1, tile)
    full = tiles.all(3).all(1)
    part = tiles.any(3).any(1) & ~full
    for wanted, count, index in (
        (part, tables.kv_num_blocks, tables.kv_indices),
        (full, tables.full_kv_num_blocks, tables.full_kv_indices),
        (part.t(), tables.q_num_blocks, tables.q_indices),
        (full.t(), tables.full_q_num_blocks, tables.full_q_indices),
    ):
        assert count.dtype == index.dtype == torch.int32
        assert count[0, 0].tolist() == wanted.sum(1).tolist()
        order = torch.argsort(wanted.to(torch.int8), dim=1, descending=True, stable=True)
        assert torch.equal(index[0, 0].long(), order)
