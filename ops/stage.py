"""One step of a run that is a process of its own: preparation, evaluation. Shown as it goes, logged, interruptible."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ops.child import child_environment, exit_words, kill_session
from ops.errors import ChildFailed
from ops.output import Output
from ops.paths import log_path

_POLL_S = 0.1
_STOP_S = 5.0


class Interrupted(Exception):
    """The user asked for the end while the stage ran."""


def run_stage(
    name: str,
    command: list[str],
    run_dir: Path,
    environment: dict[str, str],
    out: Output,
    interrupted: Callable[[], bool],
) -> None:
    """Run `python -m COMMAND --run-dir R` to its end, each line shown with its name and appended to logs/NAME.log.

    Raises ChildFailed with the process's exit code, Interrupted if `interrupted` turns true.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.guard", *command, "--run-dir", str(run_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=child_environment(run_dir) | environment,
        start_new_session=True,
    )
    try:
        _follow(process, name, log_path(run_dir, name), out, interrupted)
        if interrupted():
            raise Interrupted
        code = process.wait()
    finally:
        _end(process)
    if code:  # its lines have been shown
        where = f"see above, or {log_path(run_dir, name)}"
        raise ChildFailed(f"{name} ended with {exit_words(code)}; {where}", code if code in (2, 3, 5) else 4)


def _follow(
    process: subprocess.Popen[bytes], name: str, path: Path, out: Output, interrupted: Callable[[], bool]
) -> None:
    """Show and log the output until it ends or the user interrupts.

    A part that ends in a carriage return is progress: it is shown in place on a terminal and not logged.
    """
    assert process.stdout is not None
    rest = b""
    with path.open("ab", buffering=0) as log, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not interrupted():
            has_left = process.poll() is not None  # asked before looking, so that its last lines are not missed
            if not selector.select(0 if has_left else _POLL_S):
                if has_left:
                    break  # a grandchild may keep the pipe open
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            *parts, rest = re.split(rb"(?<=[\r\n])", rest + chunk) if chunk else [rest, b""]
            for part in filter(None, parts):
                text = part.decode(errors="replace").rstrip("\r\n")
                if part.endswith(b"\r"):
                    out.progress(f"{name}: {text.strip()}")
                elif text.strip():
                    with contextlib.suppress(OSError):  # a full disk; the line is shown all the same
                        log.write(f"{text}\n".encode())
                    out.say(f"{name}: {text}")
            if not chunk:
                break


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process that still runs to end, then make it."""
    if process.poll() is None:
        process.terminate()
        give_up = time.monotonic() + _STOP_S
        while process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.02)
        if process.poll() is None:
            kill_session(process.pid)
            process.wait()
    if process.stdout is not None:
        with contextlib.suppress(OSError):
            process.stdout.close()
