"""A run that is interrupted goes on as if nothing had happened, and one that would go on wrongly is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from consumer.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from tests.helpers.tiny_run import Tiny

SETTINGS = {
    "training.epochs": 4, "training.max_steps": 100, "training.log_every_steps": 1, "checkpoint.every_steps": 10,
    "checkpoint.keep": 20, "optimizer.warmup_share": 0.1, "optimizer.lr": 6e-4, "pack.window_packs": 1,
    "evaluation.enabled": "false", "training.steps_per_pack": 1,
}  # fmt: skip
"""One pack at a time is read, so that packs come in the order of their ids whenever a run begins."""
NEVER = 10**9


def words(**more: object) -> list[str]:
    settings = SETTINGS | more
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[tuple[Tiny, Tiny]]:
    made = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        made.append(Tiny(tmp_path / name, f"resume-{name}-{os.getpid()}"))
    yield made[0], made[1]
    for run in made:
        if run.process is not None and run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            run.process.communicate(timeout=60)


def step(tiny: Tiny, number: int) -> Checkpoint:
    return read_checkpoint(tiny.dir / "checkpoints" / f"step-{number}")


def saved_steps(tiny: Tiny) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in (tiny.dir / "checkpoints").glob("step-*")}


def assert_equal(first: Checkpoint, second: Checkpoint) -> None:
    assert first.trained == second.trained
    for one, two in ((first.drafter(), second.drafter()), (first.state(), second.state())):
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert (tensor.double() - two[name].double()).abs().max() < 1e-6, name


def assert_complete(saved: Checkpoint) -> None:
    """It holds what a resume needs."""
    state = saved.state()
    assert {"step", "updates", "seed"} <= state.keys()
    assert {name.split(".")[0] for name in state} >= {"exp_avg", "exp_avg_sq"}
    assert int(state["step"]) == saved.step
    wanted = {"identity", "config", "config_digest", "data_digest", "template", "generation", "trained"}
    assert wanted <= saved.meta.keys()
    assert saved.meta["template"]["kwargs"] == {}
    assert all(torch.isfinite(tensor).all() for tensor in saved.drafter().values())


@pytest.mark.slow
def test_killed_and_resumed_weights_moments_and_learning_rates_equal_an_unbroken_run(runs: tuple[Tiny, Tiny]) -> None:
    """Case T-06: everything is killed at once after step 50; weights to 1e-6, each step's learning rate the same."""
    unbroken, broken = runs
    unbroken.launch(*words(), hold_at=NEVER)
    code, out = unbroken.end()
    assert code == 0, out
    assert_complete(step(unbroken, 90))
    broken.launch(*words(), hold_at=70)
    broken.wait_for_step(52)
    broken.kill_everything()
    stopped = newest_checkpoint(broken.dir / "checkpoints", print)
    assert stopped is not None
    assert 40 <= stopped.step < 100
    broken.launch(*words())
    code, out = broken.end()
    assert code == 0, out
    assert f"resumed | step={stopped.step}" in broken.log("drafter0")
    both = set.intersection(*(saved_steps(run) for run in runs))
    assert both >= {0, *range(10, stopped.step + 1, 10), 100}
    for number in both:
        assert_equal(step(unbroken, number), step(broken, number))
    rates = [{line["step"]: line["lr"] for line in run.metrics("drafter")} for run in runs]
    assert rates[0].keys() == rates[1].keys() == set(range(1, 101))
    assert all(rates[0][number] == pytest.approx(rates[1][number], abs=1e-12) for number in rates[0])
    assert rates[1][50] == pytest.approx(3.5209e-4, abs=1e-8)
    assert rates[1][51] == pytest.approx(3.4175e-4, abs=1e-8)


def test_one_document_and_two_targets_are_enough(runs: tuple[Tiny, Tiny]) -> None:
    """Case D-14: one target has nothing to do, and the run finishes."""
    run, _ = runs
    (run.folder / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]}\n'
    )
    devices = {"target.devices": "[cpu, cpu]", "data.heldout_documents": 0, "training.epochs": 1}
    run.launch(*words(**devices))
    code, out = run.end()
    assert code == 0, out
    assert step(run, 1).trained == {0}
