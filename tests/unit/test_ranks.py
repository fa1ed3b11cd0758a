"""Two drafter ranks over gloo: the same update however packs are split, no rank that skips, a death that is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import ConfigError
from consumer import distributed
from consumer.capture import prepare
from consumer.distributed import RENDEZVOUS_ENV, RENDEZVOUS_S, Offer, PeerLost, Place, Ranks
from ops.hosts import JOIN_S
from tests.helpers.fake_captures import FakeStep, fake_captures
from tests.helpers.ports import kept_port

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 1 wrote down (tests/helpers/rank_worker.py)."""
    out = tmp_path_factory.mktemp("ranks") / "found"
    command = [sys.executable, "-m", "tests.helpers.rank_worker", str(out)]
    common = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", RENDEZVOUS_ENV: "300", "WORLD_SIZE": "2"}
    with kept_port() as port:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers = [
            subprocess.Popen(
                command, cwd=REPOSITORY, text=True, stderr=subprocess.PIPE, env=os.environ | common | {"RANK": str(k)}
            )
            for k in range(2)
        ]
        try:
            errors = [worker.communicate(timeout=500)[1] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert [worker.returncode for worker in workers] == [0, -9], "\n".join(errors)
    return [torch.load(f"{out}.{k}.pt") for k in range(2)]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_t05_the_update_does_not_depend_on_how_packs_are_split_over_ranks_and_micro_steps(both) -> None:
    for found in both:
        same(found["split"], found["whole"])
        same(found["other_split"], found["whole"])


def test_m01_a_rank_without_an_eligible_pack_takes_part_and_all_stay_equal(both) -> None:
    (first, first_losses), (second, second_losses) = both[0]["ineligible"], both[1]["ineligible"]
    assert torch.equal(first, second)
    assert len(first_losses) == 20
    assert first_losses == second_losses
    assert first_losses[-1] < first_losses[0]


def test_gradients_added_up_during_the_backward_pass_are_those_added_up_after_it(both) -> None:
    for found in both:
        after, *beside = found["overlapped"]
        assert all(torch.equal(after, each) for each in beside)
    assert torch.equal(both[0]["overlapped"][0], both[1]["overlapped"][0])


def test_rank_0_gives_its_weights_and_step_to_the_others(both) -> None:
    assert float(both[1]["shared"].unique()) == 1.0


def test_all_ranks_draw_the_same_conclusion_from_what_one_of_them_knows(both) -> None:
    (own, waits, end, stop, pause, checkpoint) = both[0]["turns"]
    assert own == (5, (5,), 1.0)  # the lower rank trains a pack that came twice, and rank 0's clock counts
    assert end == (False, 6, (6,))
    assert (waits, stop, pause, checkpoint) == (True,) * 4
    assert both[1]["turns"] == [(None, (5,), 1.0), True, (False, None, (6,)), True, True, True]


def test_a_capture_that_fails_on_one_rank_leaves_all_of_them_without_a_graph_and_none_waiting(both) -> None:
    words = "capture of the training step failed, going on without a CUDA graph (slower, same results): "
    here, there = f"{words}operation not permitted when stream is capturing", f"{words}it failed on another drafter"
    assert both[0]["captures"] == [(True, False, 2, []), (False, True, 1, [there]), (False, True, 2, [there])]
    assert both[1]["captures"] == [(True, False, 2, []), (False, True, 0, [here]), (False, True, 1, [here])]


@pytest.mark.parametrize("alone", [False, True])
def test_what_fails_before_a_capture_ends_a_rank_that_others_wait_for_and_leaves_a_single_one_eager(
    alone: bool,
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    step, said = FakeStep(), []
    with fake_captures(warm_up=out_of_memory):
        if alone:
            step.reduction = None
            assert not prepare(step, False, True, said.append)
            assert said[0].endswith(": no room")
        else:
            with pytest.raises(torch.OutOfMemoryError):
                prepare(step, False, True, said.append, agree=pytest.fail)
    assert step.execute == step.on_device


def test_the_death_of_a_rank_is_noticed_by_the_others_long_before_a_meetings_limit(both) -> None:
    assert "another drafter has left or does not answer" in both[0]["death"]


def test_m05_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store itself is given all the time it needs; only the wait for the others ends at once."""
    waits: list[timedelta] = []

    class ShortWait(distributed.PrefixStore):  # type: ignore[misc]
        def wait(self, names: list[str], limit: timedelta) -> None:
            waits.append(limit)
            super().wait(names, timedelta(seconds=0.1))

    monkeypatch.setattr(distributed, "PrefixStore", ShortWait)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(RENDEZVOUS_ENV, "300")
    with kept_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(PeerLost, match=rf"rank 1, 2 did not come to 127\.0\.0\.1:{port} within 300 s"):
            Ranks(Place(0, 3, 0), CPU)
    assert waits == [timedelta(seconds=300)]


def test_m05_nobody_waits_longer_than_the_40_seconds_promised() -> None:
    assert max(RENDEZVOUS_S, JOIN_S) <= 40  # drafters for each other, and launchers for node 0


def test_m05_an_address_that_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv(RENDEZVOUS_ENV, "1")
    with pytest.raises(PeerLost, match=r"drafter 1: cannot reach rank 0 at 192\.0\.2\.1:29500 within 1 s"):
        Ranks(Place(1, 2, 0), CPU)


def test_torchruns_variables_mean_what_they_always_mean() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Place.read(environment) == Place(5, 8, 1)
    assert Place.read({}) == Place(0, 1, 0)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0..1"),
        ({"WORLD_SIZE": "2"}, "RANK: expected 0..1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK: expected a number, got 'one'"),
    ],
)
def test_variables_that_make_no_sense_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        Place.read(environment)


def test_one_rank_alone_needs_nobody() -> None:
    ranks = Ranks(Place(), CPU)
    assert ranks.exchange(Offer(pack_id=3)).pack_of(0) == 3
    assert ranks.reduction_of(None) is None  # type: ignore[arg-type]
