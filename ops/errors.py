"""Errors of ops: one line for the user each, with the exit code that the program leaves with (docs/operations.md)."""

from __future__ import annotations

import errno

REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it readable and writable",
    errno.EPERM: "make it readable and writable",
    errno.EISDIR: "remove the folder that is in the file's place",
    errno.ENOTDIR: "remove the file that is in a folder's place",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.EIO: "check the disk",
}
"""What a user can do about what the operating system says of a file; the same happens again until it is done."""


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


def file_fault(error: OSError) -> str | None:
    """Word an error about a file that a restart does not mend, with what to do; None where a restart may."""
    remedy = REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    where = error.filename2 or error.filename or "a file of the run"
    return f"{where}: cannot be used ({error.strerror}); {remedy}"


class ChildFailed(OpsError):
    """A process of the run left with an error that a restart would not mend; carries its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
