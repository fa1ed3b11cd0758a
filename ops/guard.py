"""Run a module so that it ends with its launcher: `python -m ops.guard MODULE [ARGUMENTS]`.

For preparation and evaluation, which have no control socket. The kernel sends SIGTERM when the launcher ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from ops.control import EXIT_PEER_DIED, die_with_parent, launcher_of


def main() -> None:
    """Arm the signal, check that the launcher has not gone before, and become the module."""
    die_with_parent(signal.SIGTERM)
    pid, _ = launcher_of(os.environ)
    if pid and os.getppid() != pid:
        sys.exit(EXIT_PEER_DIED)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
