"""launch.py with the counting drafter in place of the real one: `python -m tests.helpers.counter_launch CONFIG ...`."""

from __future__ import annotations

import launch
from ops.supervisor import Modules

if __name__ == "__main__":
    raise SystemExit(launch.main(modules=Modules(drafter="tests.helpers.counter_drafter")))
