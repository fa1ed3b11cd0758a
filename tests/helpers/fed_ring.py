"""A prepared tiny run without a target: its only ring is filled by the test, with random packs, as fast as it likes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from configs.load import load_config
from configs.pack import pack_checksum
from configs.run_files import plan_path
from ops.rings import Rings
from ops.run_folder import write_config
from ops.telemetry import Log
from producer.prepare import prepare
from shm_ring import Ring, SlotSpec, Writer
from tests.helpers.tiny_run import LIMIT_S, Tiny


class FedRing:
    """The ring's producer's end; packs are numbered from 0 on."""

    def __init__(self, ring: Ring, writer: Writer, plan: dict[str, Any]) -> None:
        self.ring, self.writer, self.plan, self.published = ring, writer, plan, 0

    def publish(self, stop: Callable[[], bool]) -> None:
        """Fill the next FREE slot with a pack of one document; raises RingStopped or RingFull."""
        slot = self.writer.acquire(timeout_s=LIMIT_S, stop=stop)
        generator = np.random.default_rng(self.published)
        ids, start, features = (slot.array(name) for name in ("input_ids", "doc_start", "features"))
        ids[:], start[:] = generator.integers(4, 260, len(ids)), 0
        slot.array("loss_mask")[:] = 1
        features[:] = generator.standard_normal(features.shape)
        checksum = pack_checksum(ids.tobytes(), len(ids), tuple(self.plan["target"]["target_layer_ids"]))
        self.writer.publish(slot, pack_id=self.published, num_tokens=len(ids), num_documents=1, checksum=checksum)
        self.published += 1


@contextmanager
def fed_ring(tiny: Tiny, settings: Sequence[str], num_packs: int, num_slots: int = 8) -> Iterator[FedRing]:
    """Prepare the run, say that it has `num_packs` packs, and make its ring."""
    tiny.dir.mkdir(parents=True)
    config = load_config(tiny.config, settings)
    write_config(tiny.dir, config)
    plan = prepare(tiny.dir, config, Log("prepare", 0), False) | {"num_packs": num_packs}
    plan_path(tiny.dir).write_text(json.dumps(plan))
    with (
        Rings(tiny.name, SlotSpec.from_json(plan["slot_spec"]), 1, num_slots) as rings,
        rings.rings[0].writer() as writer,
    ):
        yield FedRing(rings.rings[0], writer, plan)
