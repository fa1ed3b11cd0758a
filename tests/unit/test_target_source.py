"""A target that is nowhere: one line with whole words, what was tried, and what to do."""

from __future__ import annotations

import pytest

from producer.target_source import TargetNotFound, find_target


def test_an_unknown_hub_id_is_one_line_of_whole_words_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    long = "The model does not exist " + "for one reason or another " * 20
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError(long)))
    with pytest.raises(TargetNotFound) as no:
        find_target("no/such-model", None, lambda _line: None)
    line = str(no.value)
    assert "\n" not in line
    assert line.startswith(
        "target.model: no/such-model is nowhere to be had (tried hub cache: OSError: The model does not"
    )
    reason = line.partition("OSError: ")[2].partition(" ...; hub: HF_HUB_OFFLINE is set)")[0]
    assert long.startswith(f"{reason} "), "cut between words"
    assert line.endswith("or give a local folder")
