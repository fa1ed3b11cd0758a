"""Real processes under kill -9, in bounded time; longer with `-m storm` (RING_STORM_SECONDS, 600 by default)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STORM = Path(__file__).with_name("ring_storm.py")
SHAPES = [(1, 2), (3, 2), (5, 3)]


def storm(producers: int, consumers: int, seconds: float, *more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(STORM), "--producers", str(producers), "--consumers", str(consumers), "--seconds",
         str(seconds), *more],
        capture_output=True, text=True, timeout=seconds + 400, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


LEAST_PACKS = 1001


def assert_clean(report: dict[str, Any], kills: int) -> None:
    assert report["faults"] == []
    assert (report["missing"], report["double"], report["invented"]) == (0, 0, 0)
    assert report["kills"] >= kills, "too few kills to say anything"
    assert report["producer_deaths"] > 0
    assert report["consumer_deaths"] > 0
    assert report["packs"] >= LEAST_PACKS


@pytest.mark.parametrize(("producers", "consumers"), SHAPES)
def test_no_pack_is_lost_doubled_torn_or_out_of_order_under_kill_9(producers: int, consumers: int) -> None:
    least = ("--least", "20", str(LEAST_PACKS))  # a slow machine takes longer
    assert_clean(storm(producers, consumers, 6, "--seed", str(os.getpid()), *least), kills=20)


@pytest.mark.parametrize("bug", ["to-ready", "no-cas", "early-free"])
def test_the_storm_finds_a_seeded_bug(bug: str) -> None:
    assert storm(1, 2, 120, "--bug", bug)["faults"]  # it ends with the first


@pytest.mark.storm
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("producers", "consumers"), SHAPES)
def test_the_long_storm(producers: int, consumers: int) -> None:
    seconds = float(os.environ.get("RING_STORM_SECONDS", "600"))
    report = storm(producers, consumers, seconds, "--seed", str(os.getpid()))
    print(json.dumps(report))
    assert_clean(report, kills=int(2 * seconds))
