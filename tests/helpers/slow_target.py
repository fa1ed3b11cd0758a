"""launch.py whose targets need SLOW_PACK_S more for each forward: `python -m tests.helpers.slow_target CONFIG ...`."""

from __future__ import annotations

import os
import time
from typing import Any

import launch
from ops.supervisor import Modules
from producer.__main__ import main

if __name__ == "__main__":
    if os.environ.get("DFLASH_LAUNCHER"):  # started by a launcher: this is a target
        from producer.trunk import Target

        run = Target._run

        def slowly(self: Target, *arguments: Any, **more: Any) -> Any:
            time.sleep(float(os.environ["SLOW_PACK_S"]))
            return run(self, *arguments, **more)

        Target._run = slowly  # type: ignore[method-assign]
        raise SystemExit(main())
    raise SystemExit(launch.main(modules=Modules(target="tests.helpers.slow_target")))
