"""The dashboard: its verdict, its lines at any width, and a view that follows rings which come and go."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import config_from
from ops import commands, metrics_reader, view
from ops.draw import BARS, duration, frame, sparkline
from ops.run_folder import write_config
from ops.telemetry import Metrics
from ops.verdict import judge, recent_mean
from ops.view import Viewer
from shm_ring import Field, Reader, Ring, SlotSpec, ring_name

SPEC = SlotSpec((Field("input_ids", "int32", (16,)),))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / f"view-{uuid.uuid4().hex}"
    folder.mkdir()
    write_config(folder, config_from({"run": {"name": folder.name}}))
    yield folder
    Ring.clean_run(folder.name)


def _publish(ring: Ring, count: int) -> None:
    with ring.writer() as writer:
        for _ in range(count):
            slot = writer.acquire(timeout_s=1)
            writer.publish(slot, pack_id=writer.last_seq, num_tokens=16, checksum=0)
            del slot


@pytest.mark.parametrize(
    ("starved", "blocked", "kind"),
    [(40, 2, "target-bound"), (2, 40, "drafter-bound"), (3, 4, "balanced"), (30, 25, "balanced")],
)
def test_the_verdict_follows_who_waits(starved: float, blocked: float, kind: str) -> None:
    verdict = judge(starved, blocked)
    assert verdict.kind == kind
    assert f"starved {starved} %" in verdict.line
    assert f"blocked {blocked} %" in verdict.line
    assert bool(verdict.advice) == (max(starved, blocked) >= 10)


def test_a_run_that_is_over_is_judged_without_advice() -> None:
    verdict = judge(40, 2, is_over=True)
    assert verdict.line == "target-bound: the drafter was starved 40 % of its time, the target blocked 2 %"


def test_without_metrics_of_both_sides_there_is_no_verdict() -> None:
    assert judge(None, 3.0).kind == "unknown"


def test_a_recent_mean_forgets_old_lines_but_not_the_last() -> None:
    lines = [{"time": 1.0, "x": 90}, {"time": 10.0, "x": 10}, {"time": 11.0, "x": 20}, {"time": 12.0, "y": 1}]
    assert recent_mean(lines, "x", since=9.0) == 15
    assert recent_mean(lines, "x", since=99.0) == 20
    assert recent_mean(lines, "z", since=0.0) is None


def test_the_picture_counts_slots_as_the_ring_does(run_dir: Path) -> None:
    with Ring.create(ring_name(run_dir.name, 0), SPEC, num_slots=4) as ring, Viewer(run_dir) as viewer:
        _publish(ring, 3)
        with Reader([ring], consumer_id=2) as reader:
            slot = reader.take(timeout_s=1)
            (seen,) = viewer.look()["rings"]
            assert (seen["occupancy"], seen["ready"], seen["held"], seen["free"]) == (3, 2, 1, 1)
            assert [s["consumer"] for s in seen["slots"] if s["state"] == "HELD"] == [2]
            text = frame(viewer.look(), viewer.occupancies, 100).plain
            assert "ring 0  3/4" in text
            assert sorted(next(line for line in text.splitlines() if "FREE" in line).split()[0]) == [".", "2", "R", "R"]
            assert slot is not None
            reader.release(slot)
            del slot
        ring.unlink()


def test_the_view_follows_a_ring_that_is_made_anew_and_leaves_it_alone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.view.STATUS_EVERY_S", 0.0)
    name = ring_name(run_dir.name, 0)
    with Viewer(run_dir) as viewer:
        assert viewer.look()["rings"] == []
        for packs in (2, 1):
            with Ring.create(name, SPEC, num_slots=4) as ring:
                inode = Path(f"/dev/shm{name}").stat().st_ino
                _publish(ring, packs)
                assert viewer.look()["rings"][0]["published"] == packs
                assert Path(f"/dev/shm{name}").stat().st_ino == inode
                ring.unlink()
            assert viewer.look()["rings"] == []


def test_attaching_and_leaving_five_times_leaves_the_ring_as_it_is(run_dir: Path) -> None:
    name = ring_name(run_dir.name, 0)
    with Ring.create(name, SPEC, num_slots=2) as ring:
        _publish(ring, 1)
        inode = Path(f"/dev/shm{name}").stat().st_ino
        for _ in range(5):
            with Viewer(run_dir) as viewer:
                assert viewer.look()["occupancy"] == 1
        assert Path(f"/dev/shm{name}").stat().st_ino == inode
        ring.unlink()


def test_metrics_appear_in_the_process_lines_and_the_verdict(run_dir: Path) -> None:
    with Metrics(run_dir, "drafter", 0) as drafter, Metrics(run_dir, "target", 0) as target:
        for step in (1, 2, 3):
            drafter.write(step=step, loss=2.5, accept_len=1.75, starved_pct=60.0, accuracy=[0.9, 0.1], lr=1e-3)
            target.write(step=step, pack_id=step, tokens_per_s=12345.0, blocked_pct=1.0)
    with Viewer(run_dir) as viewer:
        picture = viewer.look()
        text = frame(picture, viewer.occupancies, 100).plain
    assert picture["verdict"]["kind"] == "target-bound"
    assert "step 3  loss 2.500  accepted 1.75  lr 1.00e-03" in text
    assert "12,345 tokens/s" in text
    assert "right per slot" in text
    assert "starved 60 %" in text
    assert "unknown" not in text, "a run without a launcher has no uptime and no end ahead"
    assert not picture["verdict"]["advice"]


def _picture() -> dict[str, Any]:
    slots = [{"state": "READY", "consumer": None, "seq": number} for number in range(256)]
    ring = {"name": "/r", "ring_index": 0, "num_slots": 256, "occupancy": 256, "slots": slots, "end_of_data": False,
            "published_per_s": 1.0, "released_per_s": 1.0, "bytes_per_s": 1e9, "attached": []}  # fmt: skip
    process = {"name": "drafter0", "role": "drafter", "state": "running", "pid": 1, "step": 5, "loss": 1.0,
               "restarts": 2, "accept_len": 2.0, "lr": 1e-4, "grad_norm": 1.0, "tokens_per_s": 1e6,
               "starved_pct": 3.0, "anchors": 768}  # fmt: skip
    return {"run": "r", "state": "running", "uptime_s": 3, "eta_s": None, "launcher_pid": 1, "rings": [ring],
            "processes": [process], "gpus": [], "verdict": judge(50, 1).as_dict()}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_every_slot_is_drawn(width: int) -> None:
    text = frame(_picture(), lambda _name: [0, 256] * 500, width).plain
    assert max(len(line) for line in text.splitlines()) <= width
    assert sum(line.split("   .")[0].count("R") for line in text.splitlines() if set(line[2:8]) == {"R"}) == 256
    assert "1,000,000 tokens/s" in text
    assert "2 restarts" in text
    assert "768 anchors" in text


def test_every_end_of_a_ring_shows_its_last_sign_of_life_and_whose_is_not_running_its_state() -> None:
    picture = _picture()
    picture["rings"][0]["attached"] = [
        {"role": "producer", "state": "running", "pid": 7, "heartbeat_age_s": 0.25},
        *({"role": f"consumer {k}", "state": "running", "pid": 8, "heartbeat_age_s": 0.04} for k in range(7)),
        {"role": "consumer 7", "state": "stopped", "pid": 9, "heartbeat_age_s": 12.0},
        {"role": "consumer 8", "state": "dead", "pid": None, "heartbeat_age_s": None},
    ]
    text = frame(picture, lambda _name: [0, 256] * 500, 60).plain
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "  producer last sign 0.2 s ago, consumer 0 0.0 s," in text
    assert text.count("consumer 6 0.0 s") == 1
    assert "  consumer 7: stopped, pid 9, last sign 12.0 s ago" in text
    assert "  consumer 8: dead, pid none\n" in text


def test_a_sparkline_spans_its_history_with_the_newest_at_the_right() -> None:
    assert sparkline([0, 7], 7, 10) == BARS[0] + BARS[7]
    assert sparkline([0] * 50 + [8] * 50, 8, 10) == BARS[0] * 5 + BARS[7] * 5
    assert len(sparkline(range(1000), 1000, 40)) <= 40
    assert sparkline([], 8, 10) == ""


def test_durations_are_worded_by_size() -> None:
    assert [duration(each) for each in (None, 5, 65, 3725)] == ["unknown", "5 s", "1:05", "1:02:05"]


def test_ten_looks_a_second_read_memory_and_once_a_second_the_launcher_and_files(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a look is cheap. The clock is the test's."""
    calls: Counter[str] = Counter()
    now_s = 0.0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return real(*arguments)

        return call

    monkeypatch.setattr(commands, "status", counted("launcher", commands.status))
    monkeypatch.setattr(view, "segments_of_run", counted("names", view.segments_of_run))
    monkeypatch.setattr(view, "read_gpus", counted("GPUs", view.read_gpus))
    for module in (view, metrics_reader):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    with Ring.create(ring_name(run_dir.name, 0), SPEC, num_slots=16) as ring, Viewer(run_dir) as viewer:
        _publish(ring, 9)
        monkeypatch.setattr(viewer._metrics, "_from_file", counted("metrics", viewer._metrics._from_file))
        for look in range(100):
            now_s = look / 10
            assert viewer.look()["occupancy"] == 9
        assert calls == {"launcher": 10, "names": 10, "GPUs": 10, "metrics": 10}
        ring.unlink()
