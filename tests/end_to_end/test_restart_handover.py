"""`restart drafter` through memory: the run goes on as if nothing had happened, whatever is killed right after."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.run_files import newest_step
from consumer.checkpoint import read_checkpoint
from ops import commands
from ops.errors import Refused
from shm_ring.names import SHM_DIR, state_name
from tests.helpers.tiny_run import LIMIT_S, Tiny, planned_packs

SETTINGS = {
    "training.epochs": 4, "training.log_every_steps": 1, "checkpoint.every_steps": 1000, "checkpoint.keep": 20,
    "optimizer.lr": 6e-4, "pack.window_packs": 1, "evaluation.enabled": "false", "data.heldout_documents": 0,
    "anchors.num": 64, "data.deduplicate": "false",
}  # fmt: skip
"""One pack at a time is read, so that packs come in the order of their ids whenever a drafter begins."""
WORDS = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[tuple[Tiny, Tiny]]:
    made = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        made.append(Tiny(tmp_path / name, f"handover-{name}-{os.getpid()}"))
    yield made[0], made[1]
    for run in made:
        if run.process is not None and run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            run.process.communicate(timeout=60)
        Path(SHM_DIR + state_name(run.name)).unlink(missing_ok=True)


def resumed(run: Tiny) -> list[tuple[int, str]]:
    """Step and place of each resume."""
    lines = [line for line in run.log("drafter0").splitlines() if "| resumed |" in line]
    values = [dict(word.split("=") for word in line.split("| ")[-1].split()) for line in lines]
    return [(int(value["step"]), value["path"]) for value in values]


def test_a_run_restarted_and_killed_in_between_equals_an_unbroken_one(runs: tuple[Tiny, Tiny]) -> None:
    """Three lives begin with a state in memory; the disk takes no checkpoint while the last two of them are killed."""
    unbroken, run = runs
    unbroken.launch(*WORDS)
    code, out = unbroken.end()
    assert code == 0, out
    run.launch(*WORDS, hold_at=60)
    memory, folder = SHM_DIR + state_name(run.name), run.dir / "checkpoints"
    run.wait_for_step(5)
    target = run.pid_of("target")
    commands.restart(run.dir, "drafter", [], LIMIT_S)
    run.wait_for(lambda: resumed(run))
    (first, place), *_ = resumed(run)
    assert place == memory
    run.hold(first + 60)
    run.wait_for(lambda: newest_step(run.dir) == first)  # written by the life after, while it trains

    folder.rename(run.dir / "aside")
    folder.touch()  # no folder: nothing can be saved, so what is handed over next is nowhere else
    with pytest.raises(
        Refused, match=r"^drafter0 refused training.precision=fp8 \(code 2\): .*got cpu; use bfloat16; "
    ):
        commands.restart(run.dir, "drafter", ["training.precision=fp8"], LIMIT_S)
    run.wait_for(lambda: len(resumed(run)) == 2)
    handed = resumed(run)[1]
    assert handed[1] == memory
    assert handed[0] > first
    os.kill(run.pid_of("drafter"), signal.SIGKILL)
    run.wait_for(lambda: len(resumed(run)) == 3)
    assert resumed(run)[2] == handed, "the state that was taken is still there for the life after a crash"
    assert run.pid_of("target") == target

    run.kill_everything()
    folder.unlink()
    (run.dir / "aside").rename(folder)
    run.launch(*WORDS)
    code, out = run.end()
    assert code == 0, out
    assert "kept for this run's next drafter" in out
    assert resumed(run)[3] == handed
    assert not Path(memory).exists()

    last = f"step-{planned_packs(run)}"
    wanted, found = (read_checkpoint(each.dir / "checkpoints" / last) for each in (unbroken, run))
    assert found.trained == wanted.trained == frozenset(range(planned_packs(run)))
    for one, two in ((wanted.drafter(), found.drafter()), (wanted.state(), found.state())):
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_last_checkpoint_that_the_disk_refuses_waits_in_memory_for_the_next_launch(runs: tuple[Tiny, Tiny]) -> None:
    run, _ = runs
    folder = run.dir / "checkpoints"
    run.launch(*WORDS, hold_at=20)
    run.wait_for_step(5)
    run.wait_for_checkpoint(0)
    folder.rename(run.dir / "aside")
    folder.touch()
    run.let_go()
    code, out = run.end()
    assert code == 5, out
    assert "the last checkpoint could not be written" in out
    assert "kept for this run's next drafter" in out

    folder.unlink()
    (run.dir / "aside").rename(folder)
    run.launch(*WORDS)
    code, out = run.end()
    assert code == 0, out
    last = planned_packs(run)
    assert resumed(run)[-1] == (last, SHM_DIR + state_name(run.name)), "all that was trained is there"
    assert read_checkpoint(folder / f"step-{last}").trained == frozenset(range(last))
    run.assert_nothing_left()


def test_with_the_hand_over_off_a_restart_goes_through_the_disk(runs: tuple[Tiny, Tiny]) -> None:
    run, _ = runs
    run.launch(*WORDS, "--set", "checkpoint.handover=false", "--set", "training.epochs=1000")
    run.wait_for_step(5)
    commands.restart(run.dir, "drafter", ["optimizer.lr=1e-4"], LIMIT_S)
    run.wait_for(lambda: resumed(run))
    step, place = resumed(run)[0]
    assert place == str(run.dir / "checkpoints" / f"step-{step}")
    run.wait_for_step(step + 1)
    start = next(line["start"] for line in run.metrics("drafter") if line["step"] == step + 1)
    assert not start["handed_over"]
    assert start["total_s"] == pytest.approx(sum(start[key] for key in start if key.endswith("_s")) - start["total_s"],
                                             abs=0.1)  # fmt: skip
