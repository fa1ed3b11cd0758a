"""Slot words do not tear, and the test that says so can fail."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from ring_torn import MIN_FLIPS

PROGRAM = Path(__file__).with_name("ring_torn.py")

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to")


def count(kind: str) -> tuple[int, int, int]:
    done = subprocess.run([sys.executable, str(PROGRAM), kind], capture_output=True, text=True, timeout=300, check=True)
    reads, flips, torn = map(int, done.stdout.split())
    assert flips >= MIN_FLIPS, f"only {flips} flips in {reads} reads"
    return reads, flips, torn


@pytest.mark.parametrize("kind", ["aligned", "words"])
def test_a_slot_word_is_never_read_half_written(kind: str) -> None:
    assert count(kind)[2] == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an unaligned access may be a fault elsewhere")
def test_a_word_across_a_cache_line_does_tear() -> None:
    assert count("straddling")[2] > 0
