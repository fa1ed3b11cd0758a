"""What a stage says is shown and logged to its last line, whenever it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ops.output import Output
from ops.stage import _follow

LAST_WORDS = "import sys; sys.stdin.readline(); print('the last line')"


class LeavesWhenAsked(subprocess.Popen[bytes]):
    """A process that says its last line and leaves in the very moment in which somebody asks whether it has left."""

    def poll(self) -> int | None:
        if self.returncode is None and self.stdin is not None and not self.stdin.closed:
            self.stdin.write(b"\n")
            self.stdin.close()
            self.wait()
        return super().poll()


def test_a_line_that_comes_with_the_end_is_not_lost(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    command = [sys.executable, "-c", LAST_WORDS]
    with LeavesWhenAsked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        _follow(process, "stage", log, Output(), lambda: False)
    assert log.read_text() == "the last line\n"
