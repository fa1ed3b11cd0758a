"""docs/complaints.md names tests that exist, and no complaint twice."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "complaints.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named
    assert sorted(named - defined) == []


def test_every_complaint_has_one_row_with_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if re.match(r"\| [A-Z]-\d+ ", line)]
    cases = [row.split("|")[1].strip() for row in rows]
    assert len(cases) == len(set(cases))
    assert [row for row in rows if "`test_" not in row] == []
