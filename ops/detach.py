"""Start a run in the background: the same command again, in a session of its own, with its console in a file."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ops import commands
from ops.errors import ChildFailed, NoAnswer, OpsError
from ops.run_folder import last_lines

START_LIMIT_S = 60.0
_POLL_S = 0.1


def detach(run_dir: Path) -> str:
    """Start this command without --detach and return once the run is claimed and answers; the caller may then leave.

    Raises ChildFailed with the background launcher's code and its last lines if it leaves before.
    """
    console = run_dir / "logs" / "console.log"
    console.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--detach")]
    with console.open("ab") as out:
        start = out.seek(0, 2)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up:
        code = process.poll()
        if code is not None:
            raise ChildFailed("\n".join(last_lines(console, 20, start)) or f"left with code {code}", code)
        if _answers(run_dir, process.pid):
            process.returncode = 0  # it lives on without us: nothing to reap, nothing to warn of
            name = run_dir.name
            return (
                f"run {name!r} in the background, launcher pid {process.pid}; watch it with: launch.py dashboard {name}"
            )
        time.sleep(_POLL_S)
    raise NoAnswer(f"the launcher (pid {process.pid}) does not answer within {START_LIMIT_S:g} s; see {console}")


def _answers(run_dir: Path, pid: int) -> bool:
    try:
        return bool(commands.command(run_dir, "status")["launcher_pid"] == pid)
    except OpsError:
        return False
