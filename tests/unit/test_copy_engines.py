"""Gradients added up by copies, as far as that needs no GPU: shares of a part, and what is said where it cannot be."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TrainingConfig
from consumer import copy_engines
from consumer.distributed import Place, Ranks


@given(start=st.integers(0, 10**7), size=st.integers(0, 10**7), world=st.integers(1, 9))
def test_shares_cover_a_part_once_and_begin_at_aligned_places_of_it(start: int, size: int, world: int) -> None:
    shares = copy_engines.shares_of(slice(start, start + size), world)
    assert len(shares) == world
    assert (shares[0].start, shares[-1].stop) == (start, start + size)
    for one, following in pairwise(shares):
        assert one.stop == following.start
    for share in shares:
        assert (share.start - start) % copy_engines.ALIGNED == 0 or share.start == share.stop == start + size


def test_where_memory_cannot_be_shared_all_ranks_learn_why_and_nobody_meets_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        meeting, asked = dist.group.WORLD, []

        def largest(number: int) -> int:
            asked.append(number)
            return number

        assert meeting is not None
        why = copy_engines.refusal(torch.device("cpu"), meeting, largest)
        assert why
        assert "\n" not in why
        assert asked == [1], "the first stage fails, and no other is begun"
        assert copy_engines.refusal(torch.device("cpu"), meeting, lambda _: 1)
    finally:
        dist.destroy_process_group()


def test_on_a_cpu_and_with_one_rank_gradients_lie_where_they_always_do() -> None:
    said: list[str] = []
    with Ranks(Place(), torch.device("cpu")) as ranks:
        training = TrainingConfig(gradients="copies")
        assert ranks.grads_maker(training, lambda event, **_: said.append(event)) is torch.zeros
    assert said == []
