"""The result of an evaluation as table, JSON and picture."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evaluation.report import write


def result() -> dict[str, Any]:
    def method(name: str, length: float, shares: list[float], same: float | None) -> dict[str, Any]:
        return {
            "method": name, "accept_len": length, "rounds": 10, "accepted_by_position": shares, "histogram": [1] * 4,
            "tokens": 20, "tokens_per_target_pass": length, "tokens_per_s": 10.0 * length, "same_text_share": same,
            "speedup": length,
        }  # fmt: skip

    methods = [method("plain", 1.0, [], None), method("dflash", 2.0, [0.6, 0.3, 0.1], 1.0)]
    methods += [method("ddtree 16", 2.5, [0.7, 0.5, 0.3], 1.0), method("ddtree 64", 2.75, [0.8, 0.6, 0.35], 0.75)]
    found = {"prompts": 4, "methods": methods}
    facts = {"drafter": "mine", "target": "somewhere/tiny", "block_size": 4, "device": "cpu", "temperature": 0.0}
    return facts | {"sets": {"folder/code.jsonl": found}}


def test_table_and_json_hold_every_method(tmp_path: Path) -> None:
    shown = io.StringIO()
    write(result(), tmp_path / "out", Console(file=shown, width=120))
    text = shown.getvalue()
    assert "mine for tiny, B 4, cpu" in text
    assert "code (4)" in text
    for words in ("plain", "dflash", "ddtree 16", "ddtree 64", "2.750", "2.75x", "75 %"):
        assert words in text
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == result()


def test_the_picture_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(result(), tmp_path, Console(file=io.StringIO(), width=120))
    assert (tmp_path / "acceptance.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_the_rest_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = io.StringIO()
    write(result(), tmp_path, Console(file=shown, width=120))
    assert 'no picture: matplotlib is not installed (pip install -e ".[extras]")\n' in shown.getvalue()
    assert (tmp_path / "eval.json").is_file()


def test_brackets_in_names_and_paths_are_shown(tmp_path: Path) -> None:
    shown, found = io.StringIO(), result() | {"drafter": "mine[b]"}
    found["sets"] = {"code[red].jsonl": found["sets"]["folder/code.jsonl"]}
    write(found, tmp_path / "[out]", Console(file=shown, width=200))
    for words in ("mine[b] for tiny", "code[red] (4)", "/[out]/eval.json"):
        assert words in shown.getvalue()
