"""A drafter's state left in /dev/shm: complete or not there, of this run, not older than the disk, removed in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.resume import handover_fault
from configs.run_files import newest_step
from configs.schema import Config, TrainingConfig
from consumer.checkpoint import CheckpointError, Contents, read_checkpoint, save_checkpoint
from consumer.host_copy import copy_all
from consumer.journal import begin_generation
from consumer.resume import find_saved
from consumer.saver import Handed, Saver, read_handed
from consumer.selfcheck import facts_of_check, note_passed, was_passed
from ops.control import RESTART, Control
from ops.rings import clean_left_overs, room_for_state
from ops.telemetry import Log
from shm_ring import Ring, shared_memory
from shm_ring.errors import NoSharedMemory, RingLive
from shm_ring.handover import Handover
from shm_ring.names import SHM_DIR, state_name

META = {"generation": 0, "identity": {"taps": [1, 2]}, "note": "x"}
LOG = Log("drafter", 0)


def ignore(*_: Any, **__: Any) -> None:
    """A log that nobody reads."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / f"handover-{uuid.uuid4().hex}"
    (folder / "checkpoints").mkdir(parents=True)
    begin_generation(folder, ())
    yield folder
    Path(SHM_DIR + state_name(folder.name)).unlink(missing_ok=True)


@pytest.fixture
def shared(run_dir: Path) -> Iterator[Handover]:
    made = Handover.create(run_dir.name)
    yield made
    made.close()


def weights(value: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    drafter = {"fc": torch.full((3, 5), value, dtype=torch.bfloat16), "norm": torch.arange(7.0)}
    return drafter, {"master.fc": torch.full((3, 5), value), "step": torch.tensor(9), "seed": torch.tensor(4)}


def contents(step: int, value: float) -> Contents:
    return Contents(step, *weights(value), frozenset(range(step)), META)


def hand_over(run_dir: Path, shared: Handover, step: int, value: float = 1.5) -> bool:
    saver = Saver(run_dir / "checkpoints", 3, ignore, shared)
    return saver.hand_over(contents(step, value), run_dir)


def on_disk(run_dir: Path, step: int) -> Path:
    return save_checkpoint(run_dir / "checkpoints", contents(step, 1.0))


def test_nothing_is_taken_from_dev_shm_before_a_state_is_written(shared: Handover) -> None:
    info = os.stat(shared.path)
    assert info.st_size == 0
    assert info.st_mode & 0o777 == 0o600
    assert shared.read() is None
    assert read_handed(shared) is None


def test_what_is_handed_over_comes_back_bit_for_bit(run_dir: Path, shared: Handover) -> None:
    assert hand_over(run_dir, shared, 9)
    again = Handover.open(run_dir.name)
    assert again is not None
    found = read_handed(again)
    assert found is not None
    assert (found.step, found.trained, found.meta["note"]) == (9, frozenset(range(9)), "x")
    for wanted, got in zip(weights(1.5), (found.drafter, found.state), strict=True):
        assert wanted.keys() == got.keys()
        assert all(wanted[name].dtype == got[name].dtype and torch.equal(wanted[name], got[name]) for name in wanted)
    again.close()


def test_the_next_life_writes_it_to_disk_and_it_stays_until_then(run_dir: Path, shared: Handover) -> None:
    hand_over(run_dir, shared, 9)
    found = find_saved(run_dir, {"taps": [1, 2]}, shared, LOG)
    assert isinstance(found, Handed)
    saver = Saver(run_dir / "checkpoints", 3, ignore, shared)
    saver.adopt(found)
    assert newest_step(run_dir) == -1
    assert shared.read() is not None
    path = saver.wait()
    assert path == run_dir / "checkpoints" / "step-9"
    assert torch.equal(read_checkpoint(path).state()["master.fc"], torch.full((3, 5), 1.5))
    saver.start(contents(10, 2.5))  # the memory serves this one now
    assert shared.read() is None
    saver.wait()
    assert torch.equal(read_checkpoint(path).state()["master.fc"], torch.full((3, 5), 1.5))


def test_a_checkpoint_that_waits_to_be_written_is_written_before_its_memory_is_used_again(
    run_dir: Path, shared: Handover
) -> None:
    hand_over(run_dir, shared, 9)
    saver = Saver(run_dir / "checkpoints", 3, ignore, shared)
    found = read_handed(shared)
    assert found is not None
    saver.adopt(found)
    saver.start(contents(10, 2.5))
    saver.wait()
    assert torch.equal(read_checkpoint(run_dir / "checkpoints/step-9").drafter()["fc"], weights(1.5)[0]["fc"])
    assert torch.equal(read_checkpoint(run_dir / "checkpoints/step-10").drafter()["fc"], weights(2.5)[0]["fc"])


def test_a_state_that_nothing_was_trained_on_is_handed_on_as_it_lies(run_dir: Path, shared: Handover) -> None:
    """A second restart before the first step: to copy the state over itself would risk the only one there is."""
    assert hand_over(run_dir, shared, 5)
    found = read_handed(shared)
    assert found is not None
    saver = Saver(run_dir / "checkpoints", 3, ignore, shared)
    saver.adopt(found)
    before = Path(shared.path).stat().st_mtime_ns
    assert saver.hand_over(contents(5, 7.0), run_dir)
    assert Path(shared.path).stat().st_mtime_ns == before
    again = read_handed(shared)
    assert again is not None
    assert (again.drafter["fc"] == 1.5).all()


def test_weights_that_are_not_finite_are_not_handed_over(run_dir: Path, shared: Handover) -> None:
    assert not hand_over(run_dir, shared, 9, float("nan"))
    assert shared.read() is None


def test_without_room_the_state_goes_through_the_disk_and_one_line_says_so(
    run_dir: Path, shared: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "shm_free_bytes", lambda: 100)
    with pytest.raises(NoSharedMemory, match="free in /dev/shm"):
        shared.map(99)
    said: list[str] = []
    saver = Saver(run_dir / "checkpoints", 3, lambda event, **values: said.append(f"{event} {values}"), shared)
    assert not saver.hand_over(contents(9, 1.0), run_dir)
    assert len(said) == 1
    assert "a restart of the drafter will go through the disk" in said[0]
    saver.start(contents(9, 1.0))
    assert saver.wait() == run_dir / "checkpoints" / "step-9"


def test_a_description_that_does_not_fit_makes_the_state_go_through_the_disk(
    run_dir: Path, shared: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full tmpfs may take a part of what is written and raise nothing."""
    written = os.pwrite

    def half_of_texts(fd: int, data: bytes, at: int) -> int:
        return written(fd, data[: len(data) // 2] if data[:1] == b"{" else data, at)

    monkeypatch.setattr(os, "pwrite", half_of_texts)
    assert not hand_over(run_dir, shared, 9)
    assert shared.read() is None


def test_a_checkpoint_given_up_for_a_newer_state_is_not_complete(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="given up"):
        save_checkpoint(run_dir / "checkpoints", contents(9, 1.0), lambda: True)
    assert list((run_dir / "checkpoints").iterdir()) == []


DIES_WHILE_FILLING = """
import os, signal, sys, torch
from pathlib import Path
import consumer.saver
from consumer.checkpoint import Contents
from consumer.saver import Saver
from shm_ring.handover import Handover

def half(pairs):
    pairs[0][0].copy_(pairs[0][1])
    os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
saver = Saver(folder / "checkpoints", 3, lambda *a, **k: None, Handover.open(folder.name))
state = {"a": torch.ones(1000), "b": torch.ones(1000)}
if sys.argv[2] == "again":
    assert saver.hand_over(Contents(4, state, {}, frozenset(), {"generation": 0}), folder)
consumer.saver.copy_all = half
saver.hand_over(Contents(5, state, {}, frozenset(), {"generation": 0}), folder)
"""


@pytest.mark.parametrize("what", ["first", "again"])
def test_kill_9_in_the_middle_of_filling_leaves_nothing_that_counts_and_it_is_cleaned(what: str, run_dir: Path) -> None:
    Handover.create(run_dir.name).close()
    died = subprocess.run([sys.executable, "-c", DIES_WHILE_FILLING, str(run_dir), what], check=False, timeout=300)
    assert died.returncode == -signal.SIGKILL
    left = Handover.open(run_dir.name)
    assert left is not None
    assert left.read() is None
    assert os.fstat(left._fd).st_size > 4000
    assert find_saved(run_dir, {}, left, LOG) is None
    left.close()
    clean_left_overs(run_dir, ignore)
    assert Handover.open(run_dir.name) is None


def test_only_a_state_of_this_run_that_is_as_new_as_the_disk_is_taken(run_dir: Path) -> None:
    mine = {"run_dir": str(run_dir.resolve()), "generation": 0}
    assert handover_fault(run_dir, 9, mine) == ""
    assert "was left by a run in /elsewhere" in handover_fault(run_dir, 9, mine | {"run_dir": "/elsewhere"})
    assert "generation 1" in handover_fault(run_dir, 9, mine | {"generation": 1})
    on_disk(run_dir, 9)
    assert handover_fault(run_dir, 9, mine) == ""
    assert "checkpoint of step 9 is on disk" in handover_fault(run_dir, 8, mine)
    (run_dir / "trained.json").unlink()  # a new run of the same name in the same place
    assert handover_fault(run_dir, 9, mine) != ""


def test_an_older_state_is_never_looked_at_again(run_dir: Path, shared: Handover) -> None:
    hand_over(run_dir, shared, 9)
    on_disk(run_dir, 12)
    found = find_saved(run_dir, {"taps": [1, 2]}, shared, LOG)
    assert found is not None
    assert (found.step, found.path.name) == (12, "step-12")
    assert shared.read() is None


def test_a_run_takes_its_state_away_at_the_end_unless_it_is_nowhere_else(run_dir: Path) -> None:
    said: list[str] = []
    for on_the_disk in (8, 9):
        with room_for_state(run_dir, said.append):
            used = Handover.open(run_dir.name)
            assert used is not None
            hand_over(run_dir, used, 9)
            on_disk(run_dir, on_the_disk)
            used.close()
        left = Handover.open(run_dir.name)
        if on_the_disk == 8:
            assert left is not None
            clean_left_overs(run_dir, said.append)  # the next launch keeps it too
            assert left.read() is not None
            left.close()
            assert len(said) == 2
            assert "step 9" in said[0]
        else:
            assert left is None


def test_clean_leaves_a_living_runs_state_alone_and_removes_a_dead_ones(run_dir: Path) -> None:
    shared = Handover.create(run_dir.name)
    hand_over(run_dir, shared, 9)
    with pytest.raises(RingLive):
        Handover.create(run_dir.name)
    ((name, what),) = Ring.clean(state_name(run_dir.name))
    assert "live, held by" in what
    shared.close()
    assert Ring.clean(name) == [(name, "removed")]
    assert Handover.open(run_dir.name) is None


def test_tensors_of_other_types_are_converted_and_views_are_written_in_place() -> None:
    whole = torch.zeros(10)
    copy_all([(whole[2:5], torch.tensor([1, 2, 3], dtype=torch.bfloat16)), (whole[9], torch.tensor(7.0))])
    assert whole.tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 0, 7]


def test_a_stop_after_a_restart_was_asked_for_is_a_stop(run_dir: Path) -> None:
    control = Control(run_dir, "drafter", 0)
    control.stop(RESTART)
    assert control.stop_reason == RESTART
    control.stop("asked")
    assert control.stop_reason == "asked"
    control.stop(RESTART)
    assert control.stop_reason == "asked"


def test_a_start_up_check_stands_for_the_same_configuration_and_shapes_only(tmp_path: Path) -> None:
    mark = tmp_path / "compile_cache" / "self_check"
    plan: dict[str, Any] = {"target": {"hidden": 64}, "slot_spec": "{}", "draft_vocab": None}
    facts = facts_of_check(Config(), plan, 1)
    assert not was_passed(mark, facts)
    note_passed(mark, facts)
    assert was_passed(mark, facts_of_check(Config(), plan, 1))
    changed = Config(training=TrainingConfig(micro_steps=2))
    for other in (
        facts_of_check(changed, plan, 1),
        facts_of_check(Config(), plan, 2),
        facts_of_check(Config(), plan | {"target": {"hidden": 65}}, 1),
    ):
        assert not was_passed(mark, other)
