"""The dashboard: one screen of a run, drawn from a Viewer's picture as plain styled lines.

Looks at the rings ten times a second (1 ms each) and draws lines, not tables, five times (2 ms): under 3 % of a core.
Where there is no terminal, or a narrow or dumb one, the same facts are printed as plain lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from ops.draw import frame
from ops.picture import WIDTH, write_svg
from ops.run_folder import launcher_pid
from ops.view import Viewer

MIN_WIDTH = 60
LEAVING = frozenset("qQ\x03")
LOOKS_PER_S = 10.0
LOOKS_PER_FRAME = 2
PLAIN_EVERY_S = 10.0


def dashboard(run_dir: Path, once: bool, as_json: bool, svg: Path | None, console: Console | None = None) -> None:
    """Show a run until it ends or the user leaves; one picture with `once`, `as_json` or `svg`."""
    console = console or Console(highlight=False)
    with Viewer(run_dir) as viewer:
        if once or as_json or svg is not None:
            _one_picture(viewer, console, as_json, svg)
        elif not console.is_terminal or console.is_dumb_terminal or console.width < MIN_WIDTH:
            _plain(viewer, console)
        else:
            _screen(viewer, console)


def _one_picture(viewer: Viewer, console: Console, as_json: bool, svg: Path | None) -> None:
    picture = viewer.look()
    if as_json:
        print(json.dumps(picture))
    elif svg is None:
        console.print(frame(picture, viewer.occupancies, console.width), soft_wrap=True)
    else:
        write_svg(frame(picture, viewer.occupancies, WIDTH), svg, f"dflash-ring: run {picture['run']}")
        print(f"wrote {svg}")


def _plain(viewer: Viewer, console: Console) -> None:
    while True:
        alive = launcher_pid(viewer.run_dir)  # asked before looking, so that the last picture is that of the end
        picture = viewer.look(anew=not alive)
        text = frame(picture, viewer.occupancies, max(console.width, MIN_WIDTH))
        console.file.write(text.plain.rstrip("\n") + "\n\n")
        console.file.flush()
        if not alive:
            return
        until = time.monotonic() + PLAIN_EVERY_S
        while time.monotonic() < until and launcher_pid(viewer.run_dir):
            time.sleep(0.2)


def _screen(viewer: Viewer, console: Console) -> None:
    looks = 0
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while launcher_pid(viewer.run_dir):
            picture = viewer.look()
            if looks % LOOKS_PER_FRAME == 0:
                text = frame(picture, viewer.occupancies, console.width, "q or Ctrl-C leaves; the run goes on")
                live.update(text, refresh=True)
            looks += 1
            if pressed(1 / LOOKS_PER_S) & LEAVING:
                break
    console.print(frame(viewer.look(anew=True), viewer.occupancies, console.width))


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits for keys up to a number of seconds and returns them; the terminal is restored."""
    if not sys.stdin.isatty():

        def only_wait(limit_s: float) -> set[str]:
            time.sleep(limit_s)
            return set()

        with contextlib.suppress(KeyboardInterrupt):
            yield only_wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def keys(limit_s: float) -> set[str]:
        ready, _, _ = select.select([fd], [], [], limit_s)
        # all that came: what a buffer of sys.stdin keeps back, select does not see. Nothing: the terminal is gone
        return set(os.read(fd, 1024).decode("latin-1")) or {"q"} if ready else set()

    try:
        tty.setcbreak(fd)
        with contextlib.suppress(KeyboardInterrupt):
            yield keys
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
