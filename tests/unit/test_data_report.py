"""The data report as drawn: nothing that was counted is left out, and the example shows what is supervised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ops.data_report import draw, row_law
from producer.corpus.report import DataReport, SourceShare, histogram

REPORT = DataReport(
    rows=1000, used=900, heldout=40, duplicates_dropped=50, skipped={"empty": 7, "no_assistant": 3},
    first_place={"empty": "a.jsonl:17", "no_assistant": "b.jsonl:4 (why)"}, documents=910, truncated=5, split=6,
    duplicates=55, tokens=100_000, supervised_read=70_000, supervised_cut=1_000, supervised_heldout=3_000,
    supervised_dropped=6_000, supervised_tokens=60_000, notes={"answers cut": 12},
    lengths=[(64, 128, 900), (128, 0, 10)],
    sources=[SourceShare("code", 0.25, 770, 765, 700, 77_000, 77.0, 45.6),
             SourceShare("chat", 1.0, 230, 225, 210, 23_000, 23.0, 54.4)],
    template={"sha256": "abcdef0123456789", "kwargs": {"enable_thinking": False}, "spans": "prefix renders"},
    example=[("ask", False), ("tell", True)], warnings=["look here"],
)  # fmt: skip


def plan(**more: Any) -> dict[str, Any]:
    return {"data_report": REPORT.as_dict() | more, "num_packs": 123, "pack_fill": 0.981}


def test_every_number_of_the_report_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal has 80 columns, whatever is asked
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(width=120, record=True, force_terminal=True)
    console.print(draw(plan()))
    text = console.export_text(clear=False)
    wanted = [
        "1,000 read = 900 used + 40 held out + 50 duplicates dropped + 10 skipped", "910 with 100,000 tokens, 60.0 %",
        "70,000 read = 60,000 offered + 1,000 cut off + 3,000 held out + 6,000 dropped", "5 truncated, 6 split",
        "55 (5.6 %)", "123 over all epochs, 98.1 % full", "abcdef012345, enable_thinking=False", "12 answers cut",
        "a.jsonl:17", "b.jsonl:4 (why)", "77.0", "0.25", "45.6", "54.4", "64 to 127", "128 and more",
        "warning: look here", "asktell",
    ]  # fmt: skip
    assert [words for words in wanted if words not in text] == []
    styled = console.export_text(styles=True)
    assert "\x1b[1;32mtell" in styled  # supervised text has a colour of its own
    assert "\x1b[2mask" in styled


def test_the_numbers_obey_the_laws_and_the_histogram_counts_every_document() -> None:
    assert REPORT.broken_laws() == []
    assert DataReport.from_dict(REPORT.as_dict()) == REPORT
    assert row_law(plan(duplicates_dropped=0)).count("duplicates") == 0
    lengths = np.asarray([1, 31, 32, 33, 5000, 40_000])
    assert histogram(lengths) == [
        (0, 32, 2), (32, 64, 2), (64, 128, 0), (128, 256, 0), (256, 512, 0), (512, 1024, 0), (1024, 2048, 0),
        (2048, 4096, 0), (4096, 8192, 1), (8192, 16384, 0), (16384, 32768, 0), (32768, 0, 1),
    ]  # fmt: skip
