"""launch.py with fake programs in place of the real ones: `python -m tests.helpers.fake_launch CONFIG ...`."""

from __future__ import annotations

import launch
from ops.supervisor import Modules

FAKES = Modules(
    prepare="tests.helpers.fake_prepare",
    target="tests.helpers.fake_target",
    drafter="tests.helpers.fake_drafter",
    evaluation="tests.helpers.fake_heldout",
)

if __name__ == "__main__":
    raise SystemExit(launch.main(modules=FAKES))
