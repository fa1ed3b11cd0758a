"""Long documents taken apart and the rest in one piece give what attending document by document gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from producer import packed, packed_cuda
from producer.corpus.packing import pack_documents
from producer.packed_cuda import STEP, documents_apart

ROW = st.lists(st.integers(1, 700), min_size=1, max_size=8)


@given(ROW, st.sampled_from([None, 128, 512]))
def test_documents_apart_are_leading_long_ones_that_the_row_can_hold_rounded_up(
    lengths: list[int], long_from: int | None
) -> None:
    apart = documents_apart(lengths, long_from)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    assert [(each.start, each.tokens) for each in apart] == list(zip(starts, lengths, strict=True))[: len(apart)]
    for each in apart:
        assert long_from is not None
        assert each.tokens >= long_from
        assert each.read % STEP == 0
        assert each.tokens <= each.read < each.tokens + STEP
        assert each.start + each.read <= sum(lengths)
    if len(apart) < len(lengths) and long_from is not None:
        start, length = starts[len(apart)], lengths[len(apart)]
        assert length < long_from or start + -(-length // STEP) * STEP > sum(lengths)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("lengths", [[300, 200, 130, 40, 26], [128, 128], [520], [140, 150], [40, 300, 7]])
def test_parts_add_up_to_attention_by_document_also_where_cudnn_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lengths: list[int], refused: bool
) -> None:
    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: None) -> Tensor:
        assert (longest, window) == (int(starts.diff().max()), None)
        assert int(starts[-1]) == len(q)
        with monkeypatch.context() as patch:
            patch.setattr(packed.BOUNDS, "lengths", starts.diff().tolist())
            return packed._one_by_one(q, k, v, scale, packed.WHOLE_CONTEXT)

    def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if refused and len(q) > 200:
            raise RuntimeError("no plan for this shape\nmore lines")
        starts = torch.tensor([0, len(q)])
        return varlen(q, k, v, starts, len(q), scale, None)

    monkeypatch.setattr(packed_cuda, "varlen", varlen)
    monkeypatch.setattr(packed_cuda, "dense", dense)
    monkeypatch.setattr(packed_cuda, "LONG_DOCUMENT", 128)
    monkeypatch.setattr(packed_cuda, "_planned", {})
    bounds = packed.Bounds()
    bounds.long_from = 128
    bounds.set(lengths, torch.device("cpu"))
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    ours = [packed_cuda.attend(q, k, v, 0.25, bounds.apart, bounds.rest, bounds.rest_starts) for _ in range(2)]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["long documents | cudnn=refused attention=flash | no plan for this shape"] * (
        refused and bool(bounds.apart)
    )
    monkeypatch.setattr(packed.BOUNDS, "lengths", lengths)
    for each in ours:
        torch.testing.assert_close(each, packed._one_by_one(q, k, v, 0.25, packed.WHOLE_CONTEXT))


def test_a_pack_begins_with_its_longest_document() -> None:
    lengths = [5, 90, 30, 60, 100, 7, 7]
    packs = pack_documents(lengths, range(7), 128)
    assert sorted(document for pack in packs for document in pack) == list(range(7))
    for pack in packs:
        assert [lengths[document] for document in pack] == sorted(
            (lengths[document] for document in pack), reverse=True
        )


def test_a_cpu_takes_no_document_apart() -> None:
    class Config:
        num_attention_heads, hidden_size = 4, 64

    assert packed_cuda.long_from(Config(), torch.bfloat16, torch.device("cpu")) is None
