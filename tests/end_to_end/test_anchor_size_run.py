"""`anchors.num: auto` with real drafter processes: two ranks, fed by this test slower than they train, or faster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from consumer.checkpoint import newest_checkpoint
from shm_ring.errors import RingFull, RingStopped
from tests.helpers.fed_ring import FedRing, fed_ring
from tests.helpers.ports import kept_port
from tests.helpers.starving import Starving
from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny, tiny

__all__ = ["tiny"]

SIZES = (32, 48, 64)
SETTINGS = (
    "anchors.num=auto", f"anchors.sizes={list(SIZES)}", "anchors.review_steps=5", "training.devices=[cpu, cpu]",
    "training.log_every_steps=1", "checkpoint.every_steps=10000", "evaluation.enabled=false", "drafter.num_layers=3",
)  # fmt: skip
SLOTS = 64  # packs for 32 steps: twice 10 to review a size, and some
STARVED_SHARE = 0.75  # of the time, of drafters whose target is slow


class Fed:
    """Two drafter processes and the ring that they read, whose producer is the test."""

    def __init__(self, run: Tiny, ring: FedRing, port: int) -> None:
        self.run, self.ring, self.port = run, ring, port
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start both ranks, as torchrun would."""
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DFLASH_RENDEZVOUS_S": str(LIMIT_S)}
        self.processes = []
        for rank in (0, 1):
            command = [sys.executable, "-m", "consumer", "--run-dir", str(self.run.dir)]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (self.run.folder / f"log{rank}").open("ab") as log:
                started = subprocess.Popen(
                    command, cwd=REPOSITORY, env=os.environ | shared | place, stdout=log, stderr=subprocess.STDOUT
                )
            self.processes.append(started)

    def stop(self) -> None:
        """Ask both to stop and wait until they have."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(LIMIT_S) for process in self.processes] == [0, 0], self.log()

    def kill(self) -> None:
        """End both at once."""
        for process in self.processes:
            process.kill()
            process.wait()

    def has_left(self) -> bool:
        """Whether a rank has left by itself."""
        return any(process.poll() is not None for process in self.processes)

    def log(self) -> str:
        """What both have said."""
        return "".join((self.run.folder / f"log{rank}").read_text() for rank in (0, 1))

    def sizes(self, rank: int = 0) -> dict[int, int]:
        """Anchors by step, from the metrics."""
        return {line["step"]: line["anchors"] for line in self.run.metrics("drafter") if line["rank"] == rank}

    def feed(self, rest: Callable[[], None], until: Callable[[], object]) -> None:
        """Publish packs, two at a time and then none while `rest` takes its time, until a condition holds."""
        give_up = time.monotonic() + LIMIT_S
        while not until():
            assert not self.has_left(), self.log()
            assert time.monotonic() < give_up, f"sizes {self.sizes()}\n{self.log()}"
            for _ in range(2):
                self.publish()
            rest()

    def publish(self) -> None:
        """Publish a pack, once there is room."""
        try:
            self.ring.publish(stop=self.has_left)
        except (RingStopped, RingFull) as error:
            raise AssertionError(f"{error}\n{self.log()}") from None


@pytest.fixture
def fed(tiny: Tiny) -> Iterator[Fed]:
    with ExitStack() as stack:
        ring = stack.enter_context(fed_ring(tiny, SETTINGS, 10**6, SLOTS))
        both = Fed(tiny, ring, stack.enter_context(kept_port()))
        stack.callback(both.kill)
        yield both


def test_slow_targets_raise_the_number_of_anchors_fast_ones_lower_it_and_resume_keeps_it(fed: Fed) -> None:
    fed.start()
    slow = Starving(fed.ring.ring, STARVED_SHARE)
    fed.feed(lambda: slow.wait(fed.has_left), lambda: SIZES[-1] in fed.sizes().values())
    fed.stop()
    saved = newest_checkpoint(fed.run.dir / "checkpoints", print)
    assert saved is not None
    assert saved.meta["anchors"] == SIZES[-1]

    fed.processes = []
    while fed.ring.ring.snapshot().free:  # what the drafters need to find out that nothing keeps them waiting
        fed.publish()
    fed.start()
    fed.feed(lambda: None, lambda: list(fed.sizes().values())[-1] == SIZES[0])
    fed.stop()

    sizes = fed.sizes()
    assert sizes[saved.step + 1] == SIZES[-1]  # begun where the checkpoint was
    assert sizes == fed.sizes(rank=1)  # at every step the same on both ranks
    order = [size for step, size in sorted(sizes.items()) if size != sizes.get(step - 1)]
    assert order[0] == order[-1] == SIZES[0]
    assert all(abs(SIZES.index(one) - SIZES.index(next_one)) == 1 for one, next_one in pairwise(order)), order
    assert fed.log().count(" | anchors | ") == len(order) - 1  # one line a change
    for path in fed.run.dir.glob("journal.*.jsonl"):
        entries = [json.loads(line) for line in Path(path).read_text().splitlines()]
        assert {entry["anchors"] for entry in entries} == set(SIZES)
        assert all(entry["anchors"] == sizes[entry["step"] + 1] for entry in entries if entry["step"] + 1 in sizes)
