"""One of two drafter ranks on the CPU: goes through everything that ranks do together and writes down what came out.

`python -m tests.helpers.rank_worker OUT` with torchrun's variables; tests/unit/test_ranks.py reads OUT.RANK.pt.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from consumer.capture import prepare
from consumer.distributed import AT_END, Offer, PeerLost, Place, Ranks, WhileBackward
from consumer.staging import empty_pack
from consumer.step import TrainStep
from tests.helpers.fake_captures import FakeStep, fake_captures
from tests.unit.test_step import overwrite, pack_of, step_of

MEETING_LIMIT_S = 3600.0
"""Far longer than the test waits: a death is heard of because the connection breaks, not because a limit ends."""
SHARES = (0.1, 0.2, 0.8, 1.0)
"""Supervised share of the four packs: their sums of loss weights are far apart."""


def train(step: TrainStep, packs: list[int]) -> torch.Tensor:
    """Two optimizer steps, each over all `packs`; returns the weights."""
    for _ in range(2):
        for place, number in enumerate(packs):
            overwrite(step, pack_of(number, SHARES[number]))
            step.reseed(100 + number)
            step.run() if place + 1 == len(packs) else step.run_micro()
    return step.flat.masters.clone()


def split(ranks: Ranks, mine: dict[int, list[int]]) -> torch.Tensor:
    """Train with the packs split over two ranks."""
    step = step_of(micro_steps=2)
    step.reduction = ranks.reduction_of(step)
    return train(step, mine[ranks.rank])


def without_eligible_packs(ranks: Ranks) -> tuple[torch.Tensor, list[float]]:
    """20 steps in which rank 1 has packs without a supervised token, or none."""
    step, losses = step_of(), []
    step.reduction = ranks.reduction_of(step)
    for _ in range(20):
        if ranks.rank == 1:
            empty_pack(step.pack)
        step.run()
        losses.append(float(step.metrics()["loss"]))  # type: ignore[arg-type]
    return step.flat.masters.clone(), losses


def beside_the_backward_pass(ranks: Ranks) -> list[torch.Tensor]:
    """The same steps with gradients added up after, and during, the backward pass, one by one and in buckets."""
    found = []
    for bucket_bytes in (None, 0, 3000, 10**9):
        step = step_of()
        group = dist.group.WORLD
        assert group is not None
        overlapped = bucket_bytes is not None
        step.reduction = WhileBackward(step.flat, group, bucket_bytes) if overlapped else ranks.reduction_of(step)
        overwrite(step, pack_of(ranks.rank))
        for _ in range(3):
            step.run()
        found.append(step.flat.masters.clone())
    return found


def shared(ranks: Ranks) -> torch.Tensor:
    """Weights after rank 0 has given its own to rank 1."""
    step = step_of()
    step.flat.masters.fill_(float(ranks.rank + 1))
    step.number.fill_(7 if ranks.rank == 0 else 0)
    ranks.share(step.shared_state())
    step.adopt()
    assert step.step == 7
    return step.flat.weights.clone()


def turns(ranks: Ranks) -> list[Any]:
    """What each rank concludes from offers that differ."""
    first, rank = ranks.rank == 0, ranks.rank
    same_pack = ranks.exchange(Offer(pack_id=5, elapsed_ms=1000 if first else 9000))
    one_waits = ranks.exchange(Offer(pack_id=5) if first else Offer())
    at_end = ranks.exchange(Offer(pack_id=6) if first else Offer(AT_END))
    stop = ranks.exchange(Offer(pack_id=7, stop=0 if first else 1))
    paused = ranks.exchange(Offer(pack_id=7, pause=0 if first else 1))
    checkpoint = ranks.exchange(Offer(pack_id=7, checkpoint=0 if first else 1))
    return [
        (same_pack.pack_of(rank), same_pack.packs, same_pack.elapsed_s), one_waits.wait,
        (at_end.wait, at_end.pack_of(rank), at_end.packs), stop.stop, paused.wait, checkpoint.checkpoint,
    ]  # fmt: skip


def captures(ranks: Ranks) -> list[Any]:
    """What `prepare` makes of captures of two sizes that all succeed, or of which rank 1's first or second fails."""
    found: list[Any] = []
    for failing in (None, 0, 1):
        said: list[str] = []
        step = FakeStep()
        with fake_captures(failing if ranks.rank == 1 else None) as done:
            replays = prepare(step, False, True, said.append, agree=ranks.largest)  # type: ignore[arg-type]
        found.append((replays, step.execute == step.on_device, len(done), said))
        ranks.barrier()  # nobody is left behind in another meeting
    return found


def after_a_death(ranks: Ranks) -> str:
    """What rank 0 hears when rank 1 has been killed, in the midst of their meeting or before the next."""
    try:
        ranks.barrier()
        if ranks.rank == 1:
            os.kill(os.getpid(), 9)
        ranks.exchange(Offer())
    except PeerLost as lost:
        return str(lost)
    return ""


def main() -> None:
    """Do everything."""
    torch.set_num_threads(1)
    place = Place.read(os.environ)
    with Ranks(place, torch.device("cpu"), timeout_s=MEETING_LIMIT_S) as ranks:
        found: dict[str, Any] = {
            "whole": train(step_of(micro_steps=4), [0, 1, 2, 3]),
            "split": split(ranks, {0: [0, 1], 1: [2, 3]}),
            "other_split": split(ranks, {0: [0, 2], 1: [1, 3]}),
            "ineligible": without_eligible_packs(ranks),
            "overlapped": beside_the_backward_pass(ranks),
            "shared": shared(ranks),
            "turns": turns(ranks),
            "captures": captures(ranks),
        }
        torch.save(found, f"{sys.argv[1]}.{ranks.rank}.pt")
        found["death"] = after_a_death(ranks)
        torch.save(found, f"{sys.argv[1]}.{ranks.rank}.pt")
    os._exit(0)


if __name__ == "__main__":
    main()
