"""One line of doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, FAULT = "ok", "warning", "fault"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and for a warning or fault what to do."""

    level: str
    what: str
    text: str

    @property
    def line(self) -> str:
        """The line for people."""
        return f"{self.level:7}  {self.what}: {self.text}"
