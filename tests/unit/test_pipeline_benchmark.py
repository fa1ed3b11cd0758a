"""benchmarks/pipeline.py: how rates are taken from the ring's counters, and what the summary calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pipeline import PARTS, Sample, packs_per_s, phase_shares, summary_of
from benchmarks.pipeline_plot import rate
from benchmarks.pipeline_shapes import SHAPES, RandomDocuments, make_run, schedule_of
from producer.target import TargetDescription

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def samples_of(times: list[float], counts: list[int]) -> list[Sample]:
    return [Sample(at, count, max(0, count - 2), 1, 0.0, 0.0) for at, count in zip(times, counts, strict=True)]


def test_a_rate_runs_from_the_first_change_of_a_counter_to_the_last() -> None:
    samples = samples_of([0, 1, 2, 3, 4, 5, 9], [4, 4, 5, 5, 6, 7, 7])
    assert packs_per_s(samples, "published") == pytest.approx((7 - 5) / (5 - 2))
    assert packs_per_s(samples[:4], "published") == 0.0


def test_where_the_time_of_each_side_went_comes_from_the_metrics_of_those_seconds(tmp_path: Path) -> None:
    lines = [{"time": at, "role": role, "spent_s": spent} for at, role, spent in (
        (1.0, "drafter", {"starved": 90.0}),
        (2.0, "drafter", {"step": 3.0, "starved": 1.0}), (3.0, "drafter", {"step": 3.0, "starved": 1.0}),
        (3.0, "target", {"forward": 2.0}), (9.0, "drafter", {"starved": 90.0}),
    )]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"time": 3.0, "ro')
    shares = phase_shares([tmp_path, tmp_path / "nothing"], 1.5, 5.0)
    assert shares == {"drafter": {"step": 75.0, "starved": 25.0}, "target": {"forward": 100.0, "blocked": 0.0}}


def test_the_plots_rate_is_over_the_last_seconds() -> None:
    found = rate([0.0, 2.0, 4.0, 6.0], [0.0, 200.0, 400.0, 1000.0])
    assert found[1:] == pytest.approx([100.0, 100.0, 200.0])


def test_the_summary_has_the_names_that_others_read() -> None:
    part = {"tokens_per_s": 2.0, "efficiency": 0.5, "starved_pct": 3.0, "blocked_pct": 4.0}
    summary = summary_of(dict.fromkeys(PARTS, part) | {"setup": {"seconds": 1.0}})
    for key in ("8b.tokens_per_s", "8b.efficiency", "27b.tokens_per_s", "27b.efficiency", "27b_hybrid.tokens_per_s",
                "8b.threads_twin_tokens_per_s", "8b_shared.tokens_per_s", "starved_pct", "blocked_pct"):  # fmt: skip
        assert key in summary
    assert summary_of({"8b": {"failed": "out of memory"}}) == {}


def test_the_stored_result_agrees_with_its_own_runs() -> None:
    stored = json.loads((RESULTS / "pipeline_h200x2_2026-11-30.json").read_text())
    assert summary_of(stored["runs"]) == stored["summary"]
    assert stored["runs"]["8b"]["seconds"] >= 60


@pytest.mark.parametrize("name", ["8b", "27b", "27b_hybrid", "tiny"])
def test_each_shapes_run_folder_can_be_made_and_its_packs_are_full(name: str, tmp_path: Path) -> None:
    config, plan = make_run(tmp_path / name, name, name, on_gpu=False)
    target = TargetDescription.from_dict(plan["target"])
    assert target.target_layer_ids == SHAPES[name].taps
    assert config.pack.tokens == SHAPES[name].tokens
    schedule = schedule_of(SHAPES[name], RandomDocuments(SHAPES[name]).lengths)
    assert schedule.num_packs == plan["num_packs"]
    assert plan["pack_fill"] >= 0.97
