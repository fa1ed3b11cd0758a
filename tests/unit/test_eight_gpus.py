"""The table of eight GPUs in docs/scaling.md is what its command makes of the named result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.eight_gpus import MARKED, rank_costs, rates_of, section, table

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = {
    "summary": {
        "8b.target_alone_tokens_per_s": 10_000.0, "8b.drafter_alone_tokens_per_s": 30_000.0, "8b.efficiency": 0.97,
        "27b.target_alone_tokens_per_s": 1.0,
    }
}  # fmt: skip
SCALING = {"summary": {"8b.scaling_during": 1.9, "27b.scaling_during": 1.8}}


def test_the_page_is_what_its_command_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = Path("docs/scaling.md").read_text()
    found = MARKED.search(page)
    assert found is not None
    pipeline, flag, scaling = found[1].split()
    assert flag == "--scaling"
    assert found[0] == section(Path(pipeline), Path(scaling))


def test_a_shape_that_was_measured_in_part_is_left_out() -> None:
    assert list(rates_of(PIPELINE)) == ["8b"]


def test_what_the_reduction_costs_is_half_of_what_two_ranks_lose() -> None:
    found = rank_costs(SCALING, ["8b", "27b", "27b_hybrid"])
    assert found == pytest.approx({"8b": 0.05, "27b": 0.1, "27b_hybrid": 0.1})


def test_the_best_split_is_marked_and_slack_is_worded_as_anchors() -> None:
    text = "\n".join(table(PIPELINE, SCALING))
    assert "| 6:2 | **54.1K** | targets 5 % | - |" in text  # 2 x 30K x 0.95 against 6 x 10K, 95 % kept
    assert "| 5:3 | 47.5K | drafters 40 % | 1.7 x |" in text  # 3 x 30K x (1 - 0.05 x 4/3)
    assert "| 7:1 | 28.5K | targets 57 % | - |" in text
    assert text.count("**") == 2
    assert "97 % of the slower side kept at 1:1" in text
