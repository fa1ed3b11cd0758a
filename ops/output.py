"""What the launcher says: lines on the console and in logs/launcher.log, and one live line per side.

On a terminal the live lines stand below the events and are redrawn; elsewhere they are printed at 1 s, 10 s and then
every 30 s. A console that goes away (a closed pipe, a lost terminal) silences the launcher but never ends the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

_PLAIN_AT_S = (1.0, 10.0)
_PLAIN_EVERY_S = 30.0


class _Console(Console):
    """A console that falls silent when its reader goes away; rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else the last flush at exit fails again
        os.close(nowhere)


class Output:
    """The launcher's voice. Lines are whole: one write each."""

    def __init__(self, log: Path | None = None, console: Console | None = None) -> None:
        self.console = console or _Console(highlight=False, soft_wrap=True)
        self._log = log
        self._log_failed = False
        self._live: Live | None = None
        self._next_plain = 0
        self._began = time.monotonic()
        self._lines: tuple[str, ...] = ()

    def say(self, text: str, style: str = "") -> None:
        """Print one event line and log it with its time."""
        self.log_only(text)
        self._print(Text(text, style=style))

    def log_only(self, text: str) -> None:
        """Write one line to the launcher's log, not to the console."""
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} launcher | {text}\n")
        except OSError as error:  # a full disk is no reason to lose the run
            if not self._log_failed:
                self._print(Text(f"warning: {self._log}: {error.strerror}; lines are lost there", style="yellow"))
            self._log_failed = True

    def warn(self, text: str) -> None:
        """Print a warning line."""
        self.say(f"warning: {text}", style="yellow")

    def block(self, lines: Sequence[str]) -> None:
        """Print lines of another process's log, indented."""
        for line in lines:
            self._print(Text(f"    {line}", style="dim"))

    def show(self, renderable: RenderableType) -> None:
        """Print anything that rich can draw."""
        self._print(renderable)

    def progress(self, text: str) -> None:
        """Show a passing state: in place on a terminal, nowhere else."""
        if not self.console.is_terminal:
            return
        with self._may_be_gone():
            self.console.file.write(f"\r\x1b[2K{text[: self.console.width - 1]}\r")
            self.console.file.flush()

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep the live lines on the screen while the run goes on."""
        self._began = time.monotonic()
        self._next_plain = 0
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            yield
            return
        live = Live(console=self.console, auto_refresh=False, transient=True)
        with self._may_be_gone():
            live.start()
            self._live = live
        try:
            yield
        finally:
            self._live = None
            with self._may_be_gone():
                live.stop()

    def update(self, lines: Sequence[str]) -> None:
        """Set the live lines, one per side."""
        if self._live is not None:
            with self._may_be_gone():
                width = self.console.width
                shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
                for text in shown:
                    text.truncate(width, overflow="ellipsis")
                self._live.update(Group(*shown), refresh=True)
            return
        age_s = time.monotonic() - self._began
        if age_s < self._plain_time() or not lines:
            return
        while self._plain_time() <= age_s:
            self._next_plain += 1
        for line in lines:
            self.say(line)

    def _plain_time(self) -> float:
        if self._next_plain < len(_PLAIN_AT_S):
            return _PLAIN_AT_S[self._next_plain]
        return _PLAIN_EVERY_S * (self._next_plain - len(_PLAIN_AT_S) + 1)

    def _print(self, renderable: RenderableType) -> None:
        with self._may_be_gone():
            self.console.print(renderable)

    @contextlib.contextmanager
    def _may_be_gone(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # closed pipe, lost terminal, closed file
            self._live = None
            self.console = Console(quiet=True)
