"""Errors of ops: one line for the user each, with the exit code that the program leaves with (docs/operations.md)."""

from __future__ import annotations


class OpsError(Exception):
    """Base of everything that ops raises on purpose; the message is one line, where, what and what to do."""

    exit_code = 4


class RunMissing(OpsError):
    """There is no such run."""

    exit_code = 2


class RunTaken(OpsError):
    """The name, or the role of a process, is in use by a living one."""

    exit_code = 2


class NotRunning(OpsError):
    """Nobody answers because nobody is there."""

    exit_code = 2


class NoAnswer(OpsError):
    """The process lives but did not answer in time."""


class Refused(OpsError):
    """The process answered, and the answer is no."""

    exit_code = 2


class NoResource(OpsError):
    """The machine lacks something: a device, a folder, memory."""

    exit_code = 5


class ChildFailed(OpsError):
    """A process of the run left with an error that a restart would not mend; carries its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
