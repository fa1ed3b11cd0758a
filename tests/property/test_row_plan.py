"""Reading in rows: nothing is lost, the oldest pack is served, padding and fill keep their limits on real lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PackConfig
from producer.corpus.schedule import Schedule
from producer.row_plan import SMALLEST_ROW, RowBatch, RowPlan, row_length

DEFAULTS = PackConfig()


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_a_row_length_holds_the_document_and_wastes_at_most_a_step(tokens: int, per_doubling: int) -> None:
    length = row_length(tokens, per_doubling)
    assert length >= tokens
    assert length % SMALLEST_ROW == 0
    assert length - tokens < max(SMALLEST_ROW, 2 * tokens / per_doubling)
    assert row_length(length, per_doubling) == length


def test_there_are_few_row_lengths_per_doubling() -> None:
    assert len({row_length(tokens, 8) for tokens in range(1025, 2049)}) == 8


def read_all(packs: list[list[int]], lengths: list[int], window: int, max_tokens: int) -> list[tuple[RowBatch, int]]:
    """Run a plan to its end; returns each batch with the oldest pack at that time."""
    plan, batches, following = RowPlan(max_tokens, 8), [], 0
    while following < len(packs) or len(plan):
        while len(plan) < window and following < len(packs):
            plan.add(following, [(number, lengths[number]) for number in packs[following]])
            following += 1
        oldest = next(iter(plan._left))
        batches.append((plan.next_batch(), oldest))
    return batches


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 6))
def test_every_document_is_read_once_in_a_row_that_holds_it(packs: list[list[int]], window: int) -> None:
    lengths = [tokens for pack in packs for tokens in pack]
    numbers = iter(range(len(lengths)))
    numbered = [[next(numbers) for _ in pack] for pack in packs]
    batches = read_all(numbered, lengths, window, 256)
    read = sorted(row for batch, _ in batches for row in batch.rows)
    assert read == sorted((pack_id, number) for pack_id, pack in enumerate(numbered) for number in pack)
    for batch, oldest in batches:
        assert len(batch.rows) * batch.row_tokens <= 256 or len(batch.rows) == 1
        assert max(lengths[number] for _, number in batch.rows) <= batch.row_tokens
        assert oldest in {pack_id for pack_id, _ in batch.rows}


def test_an_empty_plan_has_no_batch() -> None:
    with pytest.raises(IndexError):
        RowPlan(64, 8).next_batch()


@pytest.mark.parametrize("sigma", [0.7, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_real_schedule_fills_97_percent_of_packs_and_pads_rows_by_at_most_8(sigma: float, seed: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = np.clip(generator.lognormal(np.log(600), sigma, 3000).astype(int), 16, 8192).tolist()
    schedule = Schedule(lengths, "digest", seed, 1, DEFAULTS.tokens)
    assert schedule.fill() >= 0.97
    packs = [list(schedule.documents(pack_id)) for pack_id in range(schedule.num_packs)]
    batches = [batch for batch, _ in read_all(packs, lengths, DEFAULTS.window_packs, DEFAULTS.tokens)]
    read_tokens = sum(len(batch.rows) * batch.row_tokens for batch in batches)
    assert 1 - sum(lengths) / read_tokens <= 0.08
    assert len({batch.row_tokens for batch in batches}) <= 8 * 7
