"""verify: a good export passes; one changed setting, tensor or target is found."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import launch
from consumer.export.facts import ExportError
from consumer.export.source import export_checkpoint
from evaluation.parity import verify
from evaluation.subject import load_subject
from tests.helpers.drafter_checkpoint import save_drafter
from tests.helpers.tiny_target import make_tokenizer, save_target

DRAFTER = {"num_layers": 3, "block_size": 5, "layout": "mixed", "sliding_window": 24}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def exports(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    saved = save_drafter(folder / "saved", target, DRAFTER)
    return {name: export_checkpoint(saved, name, folder / name, dtype="float32")[0] for name in ("zlab", "speculators")}


def changed(folder: Path, out: Path, change: dict[str, Any]) -> Path:
    """Copy an export with settings of its config.json replaced; "a.b" is b inside a."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    for key, value in change.items():
        *outer, last = key.split(".")
        place = config
        for name in outer:
            place = place[name]
        place[last] = value
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("name", ["zlab", "speculators"])
def test_an_export_passes_against_its_target(exports: dict[str, Path], target: Path, name: str) -> None:
    findings = verify(exports[name], str(target))
    assert all(finding.good for finding in findings), [finding.line for finding in findings]
    assert any("rotation, window, causality" in finding.text for finding in findings)
    assert any("real hidden states" in finding.text for finding in findings)


@pytest.mark.parametrize("vocabulary", [None, [2, 9, 40, 77, 200]])
def test_an_export_in_another_type_than_the_targets_passes(
    target: Path, tmp_path: Path, vocabulary: list[int] | None
) -> None:
    saved = save_drafter(tmp_path / "saved", target, DRAFTER | {"layout": "full"}, vocabulary)
    name = "zlab" if vocabulary is None else "speculators"
    folder, _ = export_checkpoint(saved, name, tmp_path / "out", dtype="bfloat16")
    findings = verify(folder, str(target))
    assert all(finding.good for finding in findings), [finding.line for finding in findings]


def test_taps_out_of_order_are_learnt_exported_and_verified_but_wrong_in_a_file(target: Path, tmp_path: Path) -> None:
    saved = save_drafter(tmp_path / "saved", target, DRAFTER, taps=[3, 0, 2])
    folder, _ = export_checkpoint(saved, "zlab", tmp_path / "out", dtype="float32")
    findings = verify(folder, str(target))
    assert all(finding.good for finding in findings), [finding.line for finding in findings]
    unsorted = changed(folder, tmp_path / "unsorted", {"dflash_config.target_layer_ids": [3, 0, 2]})
    wrong = [finding.text for finding in verify(unsorted, str(target)) if not finding.good]
    assert len(wrong) == 2
    assert "in the order of the layers" in wrong[0]
    assert wrong[1] == "taps: [0, 2, 3] at export, [3, 0, 2] now"


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0, "rope_parameters.rope_theta": 20000.0},
        {"sliding_window": 23},
        {"is_causal": False},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"dflash_config.mask_token_id": 5},
        {"rms_norm_eps": 1e-2},
        {"block_size": 4, "dflash_config.block_size": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_found(
    exports: dict[str, Path], target: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    findings = verify(changed(exports["zlab"], tmp_path / "changed", change), str(target))
    assert any(not finding.good and "probe" in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("zlab", {"dflash_config.target_layer_ids": [0, 1, 3]}, "taps: "),
        ("speculators", {"aux_hidden_state_layer_ids": [1, 2, 4]}, "taps: "),
        ("zlab", {"layer_types": ["sliding_attention"] * 3}, "windows: "),
        ("zlab", {"rope_theta": 7.0}, "rope_theta: "),
        ("zlab", {"block_size": 6}, "block size: "),
        ("speculators", {"speculators_config.proposal_methods": [{"speculative_tokens": 5}]}, "block size: "),
        ("zlab", {"torch_dtype": "bfloat16"}, "dtype"),
        ("zlab", {"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "dtype"),
        ("zlab", {"vocab_size": 263}, "vocab_size: "),
        ("zlab", {"num_target_layers": 7}, "num_target_layers: "),
    ],
)
def test_what_no_logits_show_is_found(
    exports: dict[str, Path], target: Path, tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    findings = verify(changed(exports[name], tmp_path / "changed", change), str(target))
    assert any(not finding.good and finding.text.startswith(words) for finding in findings), findings


def test_eval_refuses_an_unwritable_folder_before_it_measures(
    exports: dict[str, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["eval", str(exports["zlab"]), "--target", str(target), "--prompts", "none.jsonl"]
    assert launch.main([*words, "--out", str(tmp_path / "file" / "o")]) == 2
    assert "--out: " in capsys.readouterr().err


def test_eval_with_wrong_prompts_leaves_no_empty_folder(
    exports: dict[str, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(exports["zlab"]), "--target", str(target), "--prompts", "none.jsonl"]
    (tmp_path / "kept").mkdir()
    for out in (tmp_path / "new" / "results", tmp_path / "kept"):
        assert launch.main([*words, "--out", str(out)]) == 3
        assert "none.jsonl: no such file" in capsys.readouterr().err
    assert [place.name for place in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("size", "tensor", "words"),
    [
        (4, None, "draft_vocab_size is 4 in config.json, d2t has 5 rows"),
        (264, None, "draft_vocab_size is 264 in config.json, d2t has 5 rows"),
        (5, "lm_head.weight", "draft_vocab_size is 5 in config.json, lm_head.weight has 4 rows"),
        (5, "t2d", "vocab_size is 264 in config.json, t2d has 263 rows"),
    ],
)
def test_a_reduced_vocabulary_of_another_size_than_its_tensors_is_refused(
    target: Path, tmp_path: Path, size: int, tensor: str | None, words: str
) -> None:
    saved = save_drafter(tmp_path / "saved", target, DRAFTER | {"layout": "full"}, [2, 9, 40, 77, 200])
    folder, _ = export_checkpoint(saved, "speculators", tmp_path / "out", dtype="float32")
    other = changed(folder, tmp_path / "other", {"draft_vocab_size": size})
    if tensor is not None:
        tensors = load_file(other / "model.safetensors")
        save_file(tensors | {tensor: tensors[tensor][:-1].clone()}, other / "model.safetensors")
    with pytest.raises(ExportError, match=re.escape(words)):
        verify(other, str(target))


@pytest.mark.parametrize("said", [False, None])
def test_full_layers_that_a_server_would_take_as_causal_are_found(
    target: Path, tmp_path: Path, said: bool | None
) -> None:
    saved = save_drafter(tmp_path / "saved", target, DRAFTER | {"layout": "full"})
    folder, _ = export_checkpoint(saved, "speculators", tmp_path / "out", dtype="float32")
    assert all(finding.good for finding in verify(folder, str(target)))
    other = changed(folder, tmp_path / "other", {"sliding_window_non_causal": said})
    if said is None:
        config = json.loads((other / "config.json").read_text())
        del config["sliding_window_non_causal"]
        (other / "config.json").write_text(json.dumps(config))
    wrong = [finding.text for finding in verify(other, str(target)) if not finding.good]
    assert len(wrong) == 1
    assert "vLLM would serve these layers causal" in wrong[0]


def test_damaged_weights_are_found(exports: dict[str, Path], target: Path, tmp_path: Path) -> None:
    shutil.copytree(exports["zlab"], tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.1.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(tensors, file)
    assert any(not finding.good for finding in verify(tmp_path / "damaged", str(target)))


def test_another_target_is_told_apart(
    exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_target(tmp_path / "other", num_layers=7, hidden=32)
    assert launch.main(["verify", str(exports["zlab"]), "--target", str(other)]) == 2
    shown = capsys.readouterr().out
    assert "WRONG target num_layers: the drafter was trained with 6, this target has 7" in shown
    assert "WRONG target hidden" in shown


def test_another_vocabulary_is_listed_and_no_logits_are_compared(
    exports: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "wider")
    make_tokenizer().save_pretrained(tmp_path / "wider")
    findings = verify(exports["zlab"], str(tmp_path / "wider"))
    wrong = [finding.line for finding in findings if not finding.good]
    assert "WRONG target vocab_size: the drafter was trained with 264, this target has 300" in wrong
    assert not any("probe" in finding.text for finding in findings)


def test_a_folder_without_identity_and_probe_is_checked_as_far_as_it_goes(
    exports: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    folder = changed(exports["zlab"], tmp_path / "foreign", {"target_identity": None})
    (folder / "probe.json").unlink()
    findings = verify(folder, str(target))
    assert all(finding.good for finding in findings)
    assert sum("not" in finding.text and "known" in finding.text for finding in findings) == 1


def test_eval_warns_of_another_target(
    exports: dict[str, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_subject(exports["zlab"], str(target), torch.device("cpu"))
    assert "warning" not in capsys.readouterr().out
    load_subject(exports["zlab"], str(save_target(tmp_path, num_layers=7)), torch.device("cpu"))
    assert "warning: target num_layers: the drafter was trained with 6, this target has 7" in capsys.readouterr().out
