"""Pictures of what a terminal shows, as SVG files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, RenderableType

from ops.errors import NoResource

WIDTH = 110


def write_svg(shown: RenderableType, path: Path, title: str, width: int = WIDTH) -> None:
    """Write what a terminal of `width` columns would show; raises NoResource where it cannot be written."""
    with open("/dev/null", "w") as nowhere:
        recorder = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        recorder.print(shown)
    try:
        path.write_text(recorder.export_svg(title=title), encoding="utf-8")
    except OSError as error:
        raise NoResource(f"{path}: cannot be written ({error.strerror}); give a file in a folder of yours") from None
