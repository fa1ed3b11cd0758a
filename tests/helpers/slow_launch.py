"""launch.py whose preparation takes SLOW_PREPARE_S longer: `python -m tests.helpers.slow_launch CONFIG ...`."""

from __future__ import annotations

import os
import time

import launch
from ops.supervisor import Modules
from producer.prepare import main

if __name__ == "__main__":
    if os.environ.get("DFLASH_LAUNCHER"):  # started by a launcher: this is the preparation
        time.sleep(float(os.environ["SLOW_PREPARE_S"]))
        raise SystemExit(main())
    raise SystemExit(launch.main(modules=Modules(prepare="tests.helpers.slow_launch")))
