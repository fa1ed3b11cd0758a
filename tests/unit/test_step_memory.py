"""The memory estimate against measured peaks (one H200, torch 2.11, captured step, bfloat16 over float32 masters)."""

from __future__ import annotations

import pytest

from consumer.memory import estimate

SHAPE_27B = {
    "parameters": 1782641920, "hidden": 5120, "intermediate": 17408, "num_layers": 5, "heads_width": 5120,
    "kv_width": 1024, "num_taps": 5, "block_rows": 8192, "pack_tokens": 8192, "embedding_rows": 248320,
    "head_rows": 248320, "tied": False, "value_bytes": 2, "landing": False,
}  # fmt: skip


@pytest.mark.parametrize(("chunk_rows", "measured_gb"), [(2048, 43.24), (8192, 46.10)])
def test_it_is_within_5_percent_of_the_measured_peak(chunk_rows, measured_gb):
    found = estimate(**SHAPE_27B, chunk_rows=chunk_rows)
    assert found.total_bytes / 1e9 == pytest.approx(measured_gb, rel=0.05)


def test_the_line_names_every_part_and_the_parts_add_up():
    found = estimate(**SHAPE_27B, chunk_rows=2048)
    assert found.total_bytes == sum(vars(found).values())
    for part in ("weights", "optimizer", "frozen", "pack", "activations", "logits"):
        assert f"{part} " in str(found)


def test_t12_whole_logits_would_cost_more_than_chunks():
    whole, chunks = (estimate(**SHAPE_27B, chunk_rows=rows).total_bytes for rows in (10**9, 512))
    assert whole - chunks > 2e9


def test_a_second_copy_of_the_pack_is_counted():
    with_landing = estimate(**(SHAPE_27B | {"landing": True}), chunk_rows=2048)
    without = estimate(**SHAPE_27B, chunk_rows=2048)
    assert with_landing.total_bytes - without.total_bytes == pytest.approx(8192 * 5 * 5120 * 2, rel=0.01)
