"""Which target processes feed a drafter: those of its own host, and how many there are over all hosts.

A ring never leaves its host, but pack ids are shared out over the producers of all hosts, so both sides need both
numbers. The launcher sets them in the environment of each process; a process started by hand is on the only host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from configs.schema import Config

TARGETS_ENV = "DFLASH_TARGETS"


class Targets(NamedTuple):
    """Global rank of this host's first target, how many are here, how many there are in all."""

    first: int
    here: int
    total: int

    @property
    def text(self) -> str:
        """Value of TARGETS_ENV."""
        return ":".join(map(str, self))

    @property
    def ranks(self) -> range:
        """Global ranks of this host's targets; their rings are named by them."""
        return range(self.first, self.first + self.here)


def targets_of(config: Config, environment: Mapping[str, str]) -> Targets:
    """Read TARGETS_ENV, or take the configuration's targets to be all there are."""
    text = environment.get(TARGETS_ENV)
    if text is None:
        here = len(config.target.devices)
        return Targets(0, here, here)
    return Targets(*(int(part) for part in text.split(":")))
