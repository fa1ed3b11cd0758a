"""The memory estimate against measured peaks (one H200, torch 2.11, captured step, bfloat16 over float32 masters)."""

from __future__ import annotations

import pytest

from configs.drafter_shape import drafter_shape
from configs.schema import Config
from consumer.memory import TooLarge, estimate, estimate_of, require

SHAPE_27B = {
    "parameters": 1782641920, "hidden": 5120, "intermediate": 17408, "num_layers": 5, "heads_width": 5120,
    "kv_width": 1024, "num_taps": 5, "block_rows": 8192, "pack_tokens": 8192, "embedding_rows": 248320,
    "head_rows": 248320, "tied": False, "value_bytes": 2, "landing": False,
}  # fmt: skip


SHAPE_8B = SHAPE_27B | {
    "parameters": 1048626432, "hidden": 4096, "intermediate": 12288, "heads_width": 4096, "embedding_rows": 151936,
    "head_rows": 151936,
}  # fmt: skip


@pytest.mark.parametrize(("shape", "measured_gb"), [(SHAPE_27B, 40.75), (SHAPE_8B, 25.15)])
def test_it_is_within_5_percent_of_the_measured_peak(shape, measured_gb):
    assert estimate(**shape, chunk_rows=4096).total_bytes / 1e9 == pytest.approx(measured_gb, rel=0.05)


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


TARGET_27B = {
    "hidden": 5120, "intermediate": 17408, "num_heads": 40, "num_kv_heads": 8, "head_dim": 128, "vocab_size": 248320,
    "target_layer_ids": [1, 16, 31, 46, 61], "tie_word_embeddings": False,
}  # fmt: skip


def test_from_configuration_and_target_it_is_the_same_as_from_numbers():
    config = Config.model_validate({"target": {"model": "x"}, "data": {"sources": [{"path": "x"}]}})
    numbers = SHAPE_27B | {"landing": True, "chunk_rows": config.loss.chunk_rows}
    numbers |= {"num_layers": config.drafter.num_layers, "block_rows": config.anchors.num * config.drafter.block_size}
    assert estimate_of(config, TARGET_27B) == estimate(**numbers | {"pack_tokens": config.pack.tokens})


@pytest.mark.parametrize("rows", [None, 1000])
def test_its_parameters_are_the_drafters(rows):
    config = Config.model_validate(
        {
            "target": {"model": "x"},
            "data": {"sources": [{"path": "x"}]},
            "drafter": {"num_layers": 2, "head_dim": 64, "num_attention_heads": 16, "draft_vocab_size": rows},
        }
    )
    target = TARGET_27B | {"rms_eps": 1e-6, "rope_theta": 1e6, "mask_token_id": 5, "hidden": 256, "intermediate": 512}
    shape = drafter_shape(config.drafter, target, None if rows is None else list(range(rows)))
    found = estimate_of(config, target)
    assert found.weights_bytes == shape.num_parameters * 4
    assert found.frozen_bytes == (248320 + (rows or 248320)) * 256 * 2


def test_t12_a_step_that_cannot_fit_is_refused_with_the_estimate_and_exit_code_5():
    found = estimate(**SHAPE_27B, chunk_rows=2048)
    require(found, found.total_bytes, "cuda:0")
    with pytest.raises(TooLarge, match=r"cuda:0: drafter step: 4\d\.\d GB .*free are 39\.0 GB") as refused:
        require(found, 39 * 10**9, "cuda:0")
    assert refused.value.exit_code == 5
