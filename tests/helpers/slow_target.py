"""launch.py whose target is slow beside its drafters: `python -m tests.helpers.slow_target CONFIG ...`.

Each forward takes until the drafters have waited for packs for STARVED_SHARE of the time since the last (starving.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import launch
from ops.supervisor import Modules
from producer.__main__ import main

STARVED_SHARE = 0.85


def slow_down(run_dir: Path, rank: int) -> None:
    """Let this process's forwards take that long."""
    from producer.trunk import Target
    from shm_ring import Ring, ring_name
    from tests.helpers.starving import Starving

    run, ring = Target._run, Ring.open(ring_name(run_dir.name, rank), readonly=True)
    drafters = Starving(ring, STARVED_SHARE, STARVED_SHARE)

    def slowly(self: Target, *arguments: Any, **more: Any) -> Any:
        drafters.wait()
        return run(self, *arguments, **more)

    Target._run = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("DFLASH_LAUNCHER"):  # started by a launcher: this is a target
        slow_down(Path(sys.argv[sys.argv.index("--run-dir") + 1]), int(sys.argv[sys.argv.index("--rank") + 1]))
        raise SystemExit(main())
    raise SystemExit(launch.main(modules=Modules(target="tests.helpers.slow_target")))
