"""The benchmark of a target's forward: ways are put back as they were, and every way reads the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import target_forward
from benchmarks.gpu_clocks import Clocks
from gpu import products
from producer.packed import BOUNDS


def test_a_way_is_a_way_for_a_while_only(monkeypatch: Any) -> None:
    plans: dict[Any, Any] = {"product": "plan"}
    monkeypatch.setattr(products, "_plans", plans)
    monkeypatch.setattr(BOUNDS, "long_from", 512)
    for measured, apart in target_forward.WAYS.values():
        with target_forward.way_of(measured, apart):
            assert bool(plans) == measured
            assert BOUNDS.long_from == (512 if apart else None)
        assert plans == {"product": "plan"}
        assert BOUNDS.long_from == 512


def test_all_ways_of_a_tiny_target_are_measured(tmp_path: Path) -> None:
    with Clocks(tmp_path / "clocks.csv") as clocks:
        found = target_forward.run_shape("tiny", tmp_path, torch.device("cpu"), 2, clocks)
    assert set(found["ways"]) == set(target_forward.WAYS)
    for way in found["ways"].values():
        assert way["tokens_per_s"] > 0
        assert len(way["rounds_ms"]) == target_forward.ROUNDS
