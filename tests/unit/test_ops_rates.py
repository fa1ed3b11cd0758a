"""Rates of a ring come from half a minute, also for a picture that is taken once."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from configs.load import config_from
from ops import commands
from ops.commander import ring_values
from ops.draw import frame
from ops.rates import WINDOW_S, Rates
from ops.run_folder import write_config
from ops.view import Viewer
from shm_ring import Field, Ring, SlotSpec, ring_name

SPEC = SlotSpec((Field("input_ids", "int32", (16,)),))


def counters(packs: int) -> dict[str, int]:
    return {"published": packs, "released": packs // 2, "published_bytes": 100 * packs}


def test_rates_are_means_over_the_window_and_unknown_from_one_moment_alone() -> None:
    rates = Rates()
    assert rates.see(0.0, counters(0)) == {"published_per_s": None, "released_per_s": None, "bytes_per_s": None}
    assert rates.see(2.0, counters(8)) == {"published_per_s": 4.0, "released_per_s": 2.0, "bytes_per_s": 400.0}
    for second in range(3, 20):
        found = rates.see(float(second), counters(8))
    assert found["published_per_s"] == round(8 / 19, 3), "a burst and then nothing is not nothing"
    assert rates.see(2.0 + WINDOW_S, counters(8))["published_per_s"] == 0.0


def test_what_was_seen_longest_ago_is_kept_until_the_window_is_full_of_newer_moments() -> None:
    rates = Rates({"at_s": 100.0, **counters(10)})
    assert rates.see(100.0 + WINDOW_S, counters(70))["published_per_s"] == 2.0
    assert rates.earliest["published"] == 10
    for second in range(1, 40):
        rates.see(100.0 + WINDOW_S + second, counters(70))
    assert rates.earliest["published"] == 70


def test_a_single_picture_has_the_rates_that_the_launcher_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / f"rates-{uuid.uuid4().hex}"
    run_dir.mkdir()
    write_config(run_dir, config_from({"run": {"name": run_dir.name}}))
    with Ring.create(ring_name(run_dir.name, 0), SPEC, num_slots=4) as ring:
        with ring.writer() as writer:
            for _ in range(3):
                writer.publish(writer.acquire(timeout_s=1), pack_id=writer.last_seq, num_tokens=16, checksum=0)
        from_files = commands.status_from_files(run_dir)
        with Viewer(run_dir) as viewer:
            assert "rates not known yet" in frame(viewer.look(), viewer.occupancies, 100).plain
        earliest = {"at_s": time.monotonic() - 20.0, **counters(0)}
        told = from_files | {"rings": [ring_values(ring.snapshot()) | {"earliest": earliest}]}
        monkeypatch.setattr("ops.view.commands.status", lambda *_, **__: told)
        with Viewer(run_dir) as viewer:
            (seen,) = viewer.look()["rings"]
            assert 0 < seen["published_per_s"] <= 3 / 20
            assert seen["released_per_s"] == 0.0
        ring.unlink()
