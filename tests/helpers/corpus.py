"""A corpus of token arrays in memory, and a pack maker over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.load import config_from
from producer.corpus.schedule import Schedule
from producer.rows import Pack, PackMaker
from producer.trunk import Target


class FakeDocument(NamedTuple):
    """A document as the corpus hands it out."""

    ids: np.ndarray[Any, Any]
    loss_mask: np.ndarray[Any, Any]


class FakeCorpus:
    """Documents in memory; all tokens are supervised."""

    def __init__(self, documents: Sequence[np.ndarray[Any, Any]]) -> None:
        self.documents = [np.asarray(ids, dtype=np.int32) for ids in documents]
        self.lengths = [len(ids) for ids in self.documents]

    def __getitem__(self, number: int) -> FakeDocument:
        ids = self.documents[number]
        return FakeDocument(ids, np.ones(len(ids), dtype=np.uint8))


def random_documents(lengths: Sequence[int], vocab_size: int = 264) -> FakeCorpus:
    """Documents of random tokens, always the same."""
    generator = np.random.Generator(np.random.PCG64(1))
    return FakeCorpus([generator.integers(4, vocab_size, size=length) for length in lengths])


def maker_of(corpus: FakeCorpus, target: Target, pack_tokens: int, *overrides: str) -> tuple[PackMaker, int]:
    """A pack maker over one epoch, and the number of packs."""
    config = config_from({}, [f"pack.tokens={pack_tokens}", *overrides])
    schedule = Schedule(corpus.lengths, "digest", 0, 1, pack_tokens)
    return PackMaker(corpus, schedule, target, config), schedule.num_packs  # type: ignore[arg-type]


def all_packs(maker: PackMaker, num_packs: int) -> list[Pack]:
    """Make every pack of the schedule, in the order they are handed on."""
    made: list[Pack] = []
    following = 0
    while len(made) < num_packs:
        take = min(maker.room, num_packs - following)
        maker.add(range(following, following + take))
        following += take
        made += maker.advance()
    return made
