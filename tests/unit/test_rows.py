"""Packs: every document's states are its own, whichever way it is read, with whatever neighbours."""

from __future__ import annotations

import pytest
import torch

from producer.trunk import Target
from tests.helpers.corpus import all_packs, maker_of, random_documents
from tests.helpers.tiny_target import make_model

LENGTHS = (40, 9, 64, 17, 33, 5, 21, 60, 12, 30, 48, 7)
TAPS = (0, 2, 5)


def target_read(layout: str) -> Target:
    target = Target(make_model(), TAPS)
    if layout == "packed":
        target.use_packed()
    return target


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_h04_each_documents_states_equal_those_of_the_document_alone(layout: str) -> None:
    corpus, alone = random_documents(LENGTHS), Target(make_model(), TAPS)
    maker, num_packs = maker_of(corpus, target_read(layout), 128, "target.final_hidden=true")
    packs = all_packs(maker, num_packs)
    assert sorted(number for pack in packs for number in pack.documents) == list(range(len(LENGTHS)))
    for pack in packs:
        assert pack.features is not None
        assert pack.final_hidden is not None
        assert pack.num_tokens == sum(LENGTHS[number] for number in pack.documents)
        for number, (start, end) in pack.spans.items():
            ids = torch.from_numpy(corpus.documents[number])
            taps, last = alone.forward(ids.long()[None])
            assert torch.equal(torch.from_numpy(pack.input_ids[start:end]), ids)
            assert set(pack.doc_start[start:end].tolist()) == {start}
            assert (pack.features[start:end] - torch.cat(taps, dim=-1)[0]).abs().max() < 1e-4
            assert (pack.final_hidden[start:end] - last[0]).abs().max() < 1e-4
        assert set(pack.doc_start[pack.num_tokens :].tolist()) <= {-1}
        assert not pack.features[pack.num_tokens :].any()
        assert not pack.final_hidden[pack.num_tokens :].any()


def test_packs_are_handed_on_one_by_one_and_the_oldest_is_never_left_behind() -> None:
    corpus = random_documents([10 + number % 50 for number in range(60)])
    maker, num_packs = maker_of(corpus, target_read("rows"), 128, "pack.window_packs=4")
    order = [pack.pack_id for pack in all_packs(maker, num_packs)]
    assert max(abs(place - pack_id) for place, pack_id in enumerate(order)) < 4


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_padding_is_counted(layout: str) -> None:
    corpus = random_documents(LENGTHS)
    maker, num_packs = maker_of(corpus, target_read(layout), 128)
    packs = all_packs(maker, num_packs)
    assert maker.read_tokens == sum(LENGTHS)
    assert 0 < maker.padding < 0.5
    assert (maker.row_tokens == 128 * len(packs)) == (layout == "packed")


def test_a_stop_leaves_unfinished_packs_in_the_window() -> None:
    maker, _ = maker_of(random_documents([36] * 6), target_read("rows"), 128, "pack.max_row_tokens=64")
    maker.add([0, 1])
    assert list(maker.advance()) == []
    assert maker.pack_ids == {0, 1}
    assert maker.room == maker.window - 2


def test_nothing_in_the_window_is_nothing_to_do() -> None:
    maker, _ = maker_of(random_documents([5]), target_read("rows"), 32)
    assert list(maker.advance()) == []
