"""Two drafter ranks started by torchrun, as by hand: they train every pack and leave in order."""

from __future__ import annotations

from tests.helpers.tiny_run import Tiny, tiny
from tests.helpers.torchrun import train_all_by_torchrun

__all__ = ["tiny"]


def test_ranks_that_torchrun_starts_train_every_pack_once_and_end(tiny: Tiny) -> None:
    train_all_by_torchrun(tiny, {"DFLASH_DEVICE": "cpu"})
