"""What holds for every unit test: its sockets lie in a short folder of its own, however long the temporary path is."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a unix socket's 107 characters."""
    with tempfile.TemporaryDirectory(prefix="sockets-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def runtime_root(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's runs have their sockets; not made yet."""
    folder = short_folder / str(next(_numbers))
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(folder))
    return folder
