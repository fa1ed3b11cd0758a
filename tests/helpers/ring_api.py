"""Fixtures and verbs shared by the tests of the ring's writer and reader."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from shm_ring import (
    Field,
    Reader,
    ReadSlot,
    Ring,
    SlotSpec,
    Writer,
    errors,
    ring_name,
)

SPEC = SlotSpec((Field("ids", "int32", (256,)), Field("features", "bfloat16", (256, 8))))
Make = Callable[..., Ring]
PATIENCE_S = 300.0
"""For what comes without fail: a thread or a process may stand still for a while."""


@pytest.fixture
def run() -> str:
    return f"api.{os.getpid()}.{uuid.uuid4().hex[:6]}"


@pytest.fixture
def new_ring(run: str) -> Iterator[Make]:
    made: list[Ring] = []

    def make(num_slots: int = 4) -> Ring:
        made.append(Ring.create(ring_name(run, len(made)), SPEC, num_slots, ring_index=len(made)))
        return made[-1]

    yield make
    for ring in made:
        with suppress(errors.RingError):
            ring.unlink()
        ring.close()
    left = [name for name, what in Ring.clean_run(run) if what != "removed"]
    assert not left, "a test left an end open"


def publish(writer: Writer, *pack_ids: int) -> None:
    for pack_id in pack_ids:
        slot = writer.acquire(timeout_s=PATIENCE_S)
        slot.array("ids")[:] = pack_id
        writer.publish(slot, pack_id=pack_id)


def take(reader: Reader) -> ReadSlot:
    slot = reader.take(timeout_s=PATIENCE_S)
    assert slot is not None
    return slot


def take_ids(reader: Reader, num: int) -> list[int]:
    ids = []
    for _ in range(num):
        slot = take(reader)
        ids.append(slot.header.pack_id)
        reader.release(slot)
    return ids
