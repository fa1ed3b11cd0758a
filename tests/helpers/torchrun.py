"""Start two drafter ranks as `torchrun --nproc-per-node 2 -m consumer` does, feed them, and look at what they leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.run_files import from_ranges, read_journals
from shm_ring.errors import RingStopped
from tests.helpers.fed_ring import fed_ring
from tests.helpers.logged import end_all, start, stop
from tests.helpers.tiny_run import LIMIT_S, Tiny

NUM_PACKS = 41  # odd: one rank has none in the last step
SETTINGS = ("training.devices=[cpu, cpu]", "evaluation.enabled=false", "checkpoint.every_steps=8")


def train_all_by_torchrun(tiny: Tiny, environment: Mapping[str, str]) -> str:
    """Train NUM_PACKS packs; returns the log. Raises AssertionError with the whole log, RingLive if a rank stays."""
    log = tiny.folder / "torchrun.log"
    elastic = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with fed_ring(tiny, SETTINGS, NUM_PACKS) as ring:
        started = start(
            [*elastic, "-m", "consumer", "--run-dir", str(tiny.dir)], log, {"OMP_NUM_THREADS": "1", **environment}
        )
        try:
            while ring.published < NUM_PACKS:
                ring.publish(stop=lambda: started.poll() is not None)
            ring.writer.finish()
        except RingStopped:
            pass  # it has left; its log says why
        except BaseException:
            stop(started)
            raise
        said = end_all([started], [log], LIMIT_S)
    final = json.loads((tiny.dir / "final.json").read_text())
    assert final["packs_trained"] == NUM_PACKS
    assert final["steps"] == (NUM_PACKS + 1) // 2
    trained = json.loads((Path(final["checkpoint"]) / "checkpoint.json").read_text())["trained"]
    assert from_ranges(trained) == read_journals(tiny.dir, 0) == frozenset(range(NUM_PACKS))
    assert said.count(" | left | ") == 2, said
    return said
