"""A target that is nowhere, or not whole: one line with whole words, what was tried, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from producer.target_source import TargetNotFound, check_weights, find_target
from tests.helpers.tiny_target import make_model


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


def test_weights_that_are_not_all_there_are_named_before_the_data_are_read(tmp_path: Path) -> None:
    make_model(2).save_pretrained(tmp_path, max_shard_size="100KB")
    check_weights(tmp_path)
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(TargetNotFound, match=f"{first.name} is damaged or not whole"):
        check_weights(tmp_path)
    first.write_bytes(whole)
    second.unlink()
    with pytest.raises(TargetNotFound, match=f"{second.name} is missing, which model.safetensors.index.json names"):
        check_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(TargetNotFound, match="expected a weight_map"):
        check_weights(tmp_path)
    for file in (index, *tmp_path.glob("*.safetensors")):
        file.unlink()
    with pytest.raises(TargetNotFound, match=r"no \*\.safetensors file in it"):
        check_weights(tmp_path)
