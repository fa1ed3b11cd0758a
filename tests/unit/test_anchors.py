"""Anchors and block layout: the worked examples by number, and what must not depend on chance."""

from __future__ import annotations

import math

import pytest
import torch

from consumer.anchors import (
    NO_LABEL,
    Anchors,
    candidates,
    lay_out_blocks,
    positions_in_document,
    random_keys,
    select_anchors,
)
from consumer.loss import LossRule, slot_weights

MASK = 7


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


def one_document(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(tokens, dtype=torch.uint8), torch.zeros(tokens, dtype=torch.int32)


def at(*positions: int) -> Anchors:
    return Anchors(torch.tensor(positions), torch.ones(len(positions), dtype=torch.bool))


def test_p04_slot_k_predicts_the_token_at_anchor_plus_k():
    ids = torch.arange(100, 140, dtype=torch.int32)
    blocks = lay_out_blocks(at(5), ids, *one_document(40), 4, MASK)
    assert blocks.input_ids.tolist() == [[105, MASK, MASK, MASK]]
    assert blocks.labels.tolist() == [[NO_LABEL, 106, 107, 108]]
    weights = slot_weights(LossRule(gamma=7.0), 3, torch.device("cpu")) * blocks.valid[0, 1:]
    assert [0.0, *weights.tolist()] == pytest.approx([0, 1, 0.8669, 0.7515], abs=5e-5)
    assert math.exp(-14 / 7) == pytest.approx(0.1353, abs=5e-5)


def test_p05_slots_beyond_the_document_carry_nothing():
    ids, (mask, start) = torch.arange(20, dtype=torch.int32), one_document(20)
    start[10:] = 10  # another document follows: its ids must never be labels
    blocks = lay_out_blocks(at(6, 8, 9), ids, mask, start, 4, MASK)
    assert blocks.valid.sum(1).tolist() == [3, 1, 0]
    assert blocks.labels.tolist() == [[-1, 7, 8, 9], [-1, 9, -1, -1], [-1, -1, -1, -1]]
    assert candidates(mask, start, 4)[:10].tolist() == [True] * 9 + [False]


def test_an_unsupervised_token_silences_its_own_slot_only():
    mask, start = one_document(10)
    mask[4] = 0
    blocks = lay_out_blocks(at(3), torch.arange(10, dtype=torch.int32), mask, start, 4, MASK)
    assert blocks.valid.tolist() == [[False, False, True, True]]


def test_positions_count_from_the_start_of_the_document():
    start = torch.tensor([0, 0, 0, 3, 3, 3, 3, -1, -1], dtype=torch.int32)
    assert positions_in_document(start).tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0]
    mask = (start >= 0).to(torch.uint8)
    blocks = lay_out_blocks(at(4), torch.arange(9, dtype=torch.int32), mask, start, 4, MASK)
    assert blocks.positions.tolist() == [[1, 2, 3, 4]]


def test_p07_budget_above_the_candidates_uses_each_once():
    mask, start = one_document(12)
    mask[6:] = 0  # positions 0..4 have a supervised successor
    anchors = select_anchors(mask, start, 8, 4, 0, random_keys(number(0), number(1), 12))
    assert anchors.position[anchors.keep].tolist() == [0, 1, 2, 3, 4]
    assert (~anchors.keep).sum() == 3
    assert anchors.position[~anchors.keep].tolist() == [11, 11, 11]


def test_p07_short_documents_get_their_floor():
    start = torch.zeros(1000, dtype=torch.int32)
    for first in range(900, 1000, 10):  # one long document and ten short ones
        start[first : first + 10] = first
    mask = torch.ones(1000, dtype=torch.uint8)
    anchors = select_anchors(mask, start, 64, 4, 3, random_keys(number(5), number(1), 1000))
    owners = start[anchors.position]
    assert all(int((owners == first).sum()) >= 3 for first in range(900, 1000, 10))
    assert int((owners == 0).sum()) >= 3
    assert bool(anchors.keep.all())


def test_p07_a_budget_below_all_floors_is_shared_in_turns():
    start = (torch.arange(100, dtype=torch.int32) // 10) * 10
    mask = torch.ones(100, dtype=torch.uint8)
    anchors = select_anchors(mask, start, 10, 4, 3, random_keys(number(5), number(1), 100))
    assert sorted(start[anchors.position].tolist()) == list(range(0, 100, 10))


def test_g05_draws_differ_and_repeat_with_the_seed():
    draws = [random_keys(number(3), number(step), 256).argsort()[:16].tolist() for step in range(3)]
    again = [random_keys(number(3), number(step), 256).argsort()[:16].tolist() for step in range(3)]
    other = [random_keys(number(4), number(step), 256).argsort()[:16].tolist() for step in range(3)]
    assert draws == again
    assert len({tuple(draw) for draw in draws}) == 3
    assert draws != other


def test_the_draw_is_uniform():
    counts = torch.zeros(64)
    mask, start = one_document(64)
    for step in range(3000):
        anchors = select_anchors(mask, start, 8, 4, 0, random_keys(number(1), number(step), 64))
        counts[anchors.position[anchors.keep]] += 1
    expected = 3000 * 8 / 63  # the last position is no candidate
    chi_square = float(((counts[:63] - expected) ** 2 / expected).sum())
    assert chi_square < 110  # 62 degrees of freedom: mean 62, deviation 11
    assert counts[63] == 0
