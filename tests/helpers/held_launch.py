"""launch.py whose processes stand still until a test lets them go on: nothing ends before a test has acted.

`python -m tests.helpers.held_launch CONFIG ...`; files named in the environment hold it while they are there:

  HOLD_FILE         drafters are paused, as by `launch.py pause`, from the step on that is written in the file (as far
                    as their metrics show steps); they also give the disk the time that each checkpoint takes, so that
                    a slow one leaves none out
  HOLD_PREPARATION  preparation does not begin

SILENT_S is how long launchers of other hosts may say nothing. The rest is the real thing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import consumer.__main__
import launch
from ops import host_table, hosts
from ops.control import Control
from ops.supervisor import Modules


class HeldControl(Control):
    """Paused from a step on, while a file is there."""

    @classmethod
    def start(cls, run_dir: Path | str, role: str, rank: int = 0) -> Control:
        """Start as usual; what is slow to import is patched after that."""
        control = super().start(run_dir, role, rank)
        from consumer.saver import Saver

        is_busy = Saver.busy

        def busy(self: Saver) -> bool:
            if self._thread is not None and Path(os.environ["HOLD_FILE"]).exists():
                self._thread.join()
            return bool(is_busy.fget(self))  # type: ignore[attr-defined]

        Saver.busy = property(busy)  # type: ignore[assignment,method-assign]
        return control

    @property
    def paused(self) -> bool:
        """Whether to stand still, asked for or held."""
        return super().paused or self._is_held

    @property
    def _is_held(self) -> bool:
        try:
            return bool(self._state.get("step", 0) >= int(Path(os.environ["HOLD_FILE"]).read_text()))
        except FileNotFoundError:
            return False


def prepare() -> int:
    """Wait, then prepare."""
    from producer.prepare import main

    while Path(os.environ["HOLD_PREPARATION"]).exists():
        time.sleep(0.05)
    return main()


def start() -> int:
    """Launch: with the two in place of the real ones."""
    if silent_s := os.environ.get("SILENT_S"):
        hosts.SILENT_S = host_table.SILENT_S = float(silent_s)
    here = "tests.helpers.held_launch"
    held = {"prepare": here} if "HOLD_PREPARATION" in os.environ else {}
    return launch.main(modules=Modules(drafter=here, **held))


if __name__ == "__main__":
    if not os.environ.get("DFLASH_LAUNCHER"):
        raise SystemExit(start())
    if "--rank" not in sys.argv:  # started by a launcher, and no drafter
        raise SystemExit(prepare())
    consumer.__main__.Control = HeldControl  # type: ignore[misc]
    raise SystemExit(consumer.__main__.main())
