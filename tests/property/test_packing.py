"""Packing and schedule: nothing is lost, nothing is doubled, and any process computes the same packs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.corpus.packing import pack_documents
from producer.corpus.schedule import Schedule

LENGTHS = st.lists(st.integers(1, 128), min_size=1, max_size=120)


@given(LENGTHS)
def test_every_document_lands_in_exactly_one_pack_that_holds_it(lengths: list[int]) -> None:
    packs = pack_documents(lengths, range(len(lengths)), 128)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in pack) <= 128 for pack in packs)


def test_a_document_longer_than_a_pack_is_an_error() -> None:
    with pytest.raises(ValueError, match="document 1 has 129 tokens"):
        pack_documents([5, 129], [0, 1], 128)


@given(LENGTHS, st.integers(0, 3), st.integers(1, 3))
def test_the_schedule_is_a_pure_function_and_conserves_every_epoch(lengths: list[int], seed: int, epochs: int) -> None:
    one = Schedule(lengths, "digest", seed, epochs, 128)
    two = Schedule(lengths, "digest", seed, epochs, 128)
    assert one.num_packs == sum(one.packs_per_epoch) == two.num_packs
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for pack_id in range(one.num_packs):
        assert one.documents(pack_id) == two.documents(pack_id)
        seen[one.epoch_of(pack_id)].extend(one.documents(pack_id))
    assert all(sorted(documents) == list(range(len(lengths))) for documents in seen.values())
    with pytest.raises(IndexError):
        one.documents(one.num_packs)


def test_another_seed_epoch_or_data_digest_shuffles_differently() -> None:
    lengths = [10] * 200
    orders = [
        Schedule(lengths, "a", 0, 2, 128).documents(0),
        Schedule(lengths, "a", 1, 2, 128).documents(0),
        Schedule(lengths, "b", 0, 2, 128).documents(0),
    ]
    two_epochs = Schedule(lengths, "a", 0, 2, 128)
    orders.append(two_epochs.documents(two_epochs.packs_per_epoch[0]))
    assert len(set(orders)) == len(orders)
