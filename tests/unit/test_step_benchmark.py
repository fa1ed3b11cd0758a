"""What the step's benchmark counts and reports, as far as it needs no GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.drafter_step import SIZES, products_tflop, shape_of
from benchmarks.drafter_step_all import GROUPS, collect
from benchmarks.drafter_step_profile import busy_pct


def test_products_count_two_operations_a_weight_and_row_three_times_for_trained_weights():
    size = SIZES["8b"]
    rows, tokens = size.anchors * 16, size.tokens
    layer = 4096 * (32 * 128 * 2 + 3 * 12288)
    kv = 4096 * 2 * 8 * 128
    wanted = 3 * 5 * (rows * (layer + kv) + tokens * kv) + 2 * tokens * 5 * 4096**2 + 2 * rows * 4096 * 151936
    assert products_tflop(size, False) == pytest.approx(2e-12 * wanted)


def test_skipped_products_are_not_counted_as_executed():
    for size in SIZES.values():
        assert 0.93 < products_tflop(size, True) / products_tflop(size, False) < 0.98


def test_the_sizes_are_those_of_the_targets():
    billions = {name: round(shape_of(size).num_parameters / 1e9, 2) for name, size in SIZES.items()}
    assert billions == {"0.6b": 0.08, "8b": 1.05, "27b": 1.78}


def test_busy_share_counts_overlap_once_and_gaps_not():
    assert busy_pct([(0, 5), (3, 7), (9, 10)]) == pytest.approx(80.0)


def test_the_summary_has_the_agreed_keys(tmp_path):
    for group in GROUPS:
        for shape, variant in group:
            run = {"shape": shape, "variant": variant, "step_ms": 50.0 if variant == "captured" else 100.0}
            run |= {"tflops": 1.0, "tflops_executed": 0.9, "peak_gb": 3.0, "breakdown": {"busy_pct": 99.0}}
            (tmp_path / f"step_{shape}_{variant}.json").write_text(json.dumps(run))
            if variant == "speculators":
                for other in ("speculators_log_rarely", "speculators_mask_once"):
                    faster = run | {"variant": other, "step_ms": 80.0}
                    (tmp_path / f"step_{shape}_{other}.json").write_text(json.dumps(faster))
    collect(tmp_path, tmp_path / "out.json")
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    for shape in SIZES:
        for key in ("step_ms", "ratio_to_speculators", "tflops", "peak_gb", "peak_gb_speculators"):
            assert f"{shape}.{key}" in summary
        assert summary[f"{shape}.ratio_to_speculators"] == 0.5
        assert summary[f"{shape}.ratio_to_speculators_log_rarely"] == 0.625
        assert summary[f"{shape}.ratio_to_speculators_mask_once"] == 0.625
    assert summary["busy_pct"] == 99.0
