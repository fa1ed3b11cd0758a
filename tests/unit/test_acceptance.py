"""Accepted lengths as numbers."""

from __future__ import annotations

import math

from evaluation.acceptance import Acceptance, leading_run, walk


def test_a_wrong_slot_ends_the_run_whatever_follows() -> None:
    assert leading_run([7, 8, 0, 10], [7, 8, 9, 10]) == 2  # slots 1, 1, 0, 1: two, and the target's own token
    assert walk(lambda _at: leading_run([7, 8, 0, 10], [7, 8, 9, 10]), 100)[0] == 3


def test_positions_histogram_and_mean_describe_the_same_rounds() -> None:
    found = Acceptance((1, 3, 4, 4), block_size=4)
    assert found.mean == 3.0
    assert found.by_position == [0.75, 0.75, 0.5]
    assert found.histogram == [1, 0, 1, 2]
    assert 1 + sum(found.by_position) == found.mean


def test_no_rounds_have_no_mean() -> None:
    assert math.isnan(Acceptance((), 4).mean)


def test_the_last_round_ends_with_the_text() -> None:
    assert walk(lambda _at: 3, 10) == [4, 4, 1]
    assert walk(lambda _at: 0, 4) == [1, 1, 1]
    assert walk(lambda _at: 3, 1) == []
