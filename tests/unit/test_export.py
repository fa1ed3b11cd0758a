"""Exported drafters: every field and tensor of both formats, what they refuse, and the way back without loss."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

import launch
from configs.drafter_shape import tensor_shapes
from configs.load import ConfigError
from configs.schema import Config, TargetConfig
from consumer.checkpoint import read_checkpoint
from consumer.drafter import rotation
from consumer.export import speculators, zlab
from consumer.export.facts import ExportError
from consumer.export.folder import read_export, write_export
from consumer.export.identity import identify
from consumer.export.probe import probe_input, training_logits
from consumer.export.source import export_checkpoint, facts_of
from consumer.setup import make_drafter
from producer.target import describe_target
from tests.helpers.drafter_checkpoint import save_drafter
from tests.helpers.export_facts import facts_named
from tests.helpers.tiny_target import make_tokenizer, save_target

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"num_layers": 2, "block_size": 8, "layout": "full"},
    "mixed": {"num_layers": 2, "block_size": 8, "layout": "mixed", "sliding_window": 24},
    "sliding": {"num_layers": 2, "block_size": 8, "layout": "sliding", "sliding_window": 24},
    "both_ways": {"num_layers": 2, "block_size": 8, "layout": "sliding", "sliding_window": 24, "sliding_causal": False},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def checkpoints(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save_drafter(folder / name, target, settings) for name, settings in LAYOUTS.items()}


def header(folder: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {key: (list(file.get_slice(key).get_shape()), file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", ["mixed", "full", "reduced"])
@pytest.mark.parametrize("made", [zlab, speculators])
def test_config_json_is_the_golden_file_whatever_the_installed_transformers_would_emit(made: Any, name: str) -> None:
    kind = made.__name__.rpartition(".")[2]
    if (kind, name) == ("zlab", "reduced"):
        pytest.skip("the z-lab format has no reduced vocabulary; its refusal is tested below")
    golden = json.loads((GOLDEN / f"{kind}_{name}.json").read_text())
    assert json.loads(json.dumps(made.to_config(facts_named(name)))) == golden


@pytest.mark.parametrize("name", ["mixed", "full"])
@pytest.mark.parametrize("made", [zlab, speculators])
def test_reading_a_config_back_gives_the_facts(made: Any, name: str) -> None:
    facts = facts_named(name)
    read = made.from_config(json.loads(json.dumps(made.to_config(facts))), "here")
    if name == "full":  # a window that no layer uses is not written
        facts = replace(facts, shape=replace(facts.shape, sliding_window=read.shape.sliding_window))
        read = replace(read, shape=replace(read.shape, sliding_causal=facts.shape.sliding_causal))
    assert read == facts


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", ["zlab", "speculators"])
def test_export_and_import_lose_nothing(
    target: Path, checkpoints: dict[str, Path], tmp_path: Path, layout: str, name: str
) -> None:
    folder, _ = export_checkpoint(checkpoints[layout], name, tmp_path / "out", dtype="float32")
    found = read_export(folder)
    original = read_checkpoint(checkpoints[layout])
    assert found.format == name
    for key, tensor in original.drafter().items():
        assert torch.equal(found.tensors[key], tensor), key
    config = Config.model_validate(
        {
            "target": {"model": str(target), "num_taps": 3},
            "drafter": LAYOUTS[layout] | {"init_from": str(folder)},
            "pack": {"tokens": 256},
        }
    )
    said: dict[str, Any] = {}
    plan = {"target": original.meta["target"], "draft_vocab": None}
    drafter = make_drafter(config, plan, torch.device("cpu"), lambda _event, **facts: said.update(facts))  # type: ignore[arg-type]
    given = probe_input(drafter.shape)
    head = torch.randn(5, 64)
    embedding = torch.randn(264, 64)
    before = training_logits(found.drafter(), given, embedding, head)
    assert float((training_logits(drafter, given, embedding, head) - before).abs().max()) == 0.0
    assert said["differing"] == "nothing"


@pytest.mark.parametrize("name", ["zlab", "speculators"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_trained_tensors_are_stored_in_the_type_that_config_json_states(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, dtype: str
) -> None:
    folder, _ = export_checkpoint(checkpoints["full"], name, tmp_path / "out", dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    stored = header(folder)
    shapes = tensor_shapes(read_export(folder).facts.shape)
    assert {key: tuple(shape) for key, (shape, _) in stored.items()} == shapes
    assert len(stored) == 11 * 2 + 3
    assert not any("embed" in key or "lm_head" in key for key in stored)
    assert {kind for _, kind in stored.values()} == {{"float32": "F32", "bfloat16": "BF16"}[dtype]}
    inner = config if name == "zlab" else config["transformer_layer_config"]
    assert {config["dtype"], config["torch_dtype"], inner["dtype"], inner["torch_dtype"]} == {dtype}
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = (folder / "model.safetensors").stat().st_size
    assert abs(size - parameters * (4 if dtype == "float32" else 2)) < 4096
    warned = "loads a float32 drafter in float16" in (folder / "README.md").read_text()
    assert warned is ((name, dtype) == ("zlab", "float32"))


def test_the_type_defaults_to_the_targets_stored_one_and_is_never_null(
    checkpoints: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    stored = json.loads((target / "config.json").read_text())["dtype"]
    assert facts_of(read_checkpoint(checkpoints["full"]), target).dtype == stored
    folder, _ = export_checkpoint(checkpoints["full"], "zlab", tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored
    assert "Not validated in float16" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["zlab", "speculators"])
def test_eight_slots_are_seven_speculative_tokens_everywhere(
    checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder, lines = export_checkpoint(checkpoints["full"], name, tmp_path / "out")
    text = (folder / "README.md").read_text()
    assert set(re.findall(r'num_speculative_tokens"?\W+(\d+)', text + "\n".join(lines))) == {"7"}
    if name == "speculators":
        config = json.loads((folder / "config.json").read_text())
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    else:
        assert "--speculative-num-draft-tokens 8" in text  # SGLang counts the anchor


def test_a_target_with_partial_rotation_gives_a_draft_config_without_it(tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=264, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25},
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    settings = TargetConfig.model_validate({"model": str(tmp_path), "target_layer_ids": [1], "dtype": "float32"})
    described = describe_target(tmp_path, "partial", settings, tokenizer, on_gpu=False)
    assert described.rope_theta == 5e6
    shape = replace(facts_named("reduced").shape, rope_theta=described.rope_theta, draft_vocab_size=None)
    facts = replace(facts_named("reduced"), shape=shape, draft_vocab=None)
    for written in (zlab.to_config(facts), speculators.to_config(facts)["transformer_layer_config"]):
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e6
        assert "partial_rotary_factor" not in json.dumps(written)
    assert rotation(torch.arange(3), shape.head_dim, 5e6).sin[1].unique().numel() == shape.head_dim // 2


def test_the_target_is_named_and_another_one_is_told_apart(
    checkpoints: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    folder, _ = export_checkpoint(checkpoints["full"], "zlab", tmp_path / "out")
    identity = read_export(folder).facts.identity
    assert identity is not None
    described = read_checkpoint(checkpoints["full"]).meta["target"]
    assert identity == identify(target, "tiny", None, described)
    assert all(len(value) == 64 for key, value in identity.as_dict().items() if key.endswith("sha256"))
    other = replace(identity, vocab_size=300, tokenizer_sha256="0" * 64, chat_template_sha256="")
    lines = identity.differences(other)
    assert len(lines) == 2
    assert "vocab_size" in lines[0]
    assert "tokenizer_sha256" in lines[1]
    assert identity.differences(replace(identity, name="elsewhere", revision="v2")) == []


def test_a_reduced_vocabulary_travels_in_speculators_tensors_alone(target: Path, tmp_path: Path) -> None:
    vocabulary = [2, 9, 40, 77, 200]
    saved = save_drafter(tmp_path / "saved", target, LAYOUTS["full"], vocabulary)
    with pytest.raises(ExportError, match="--format speculators"):
        export_checkpoint(saved, "zlab", tmp_path / "z")
    assert not (tmp_path / "z").exists()
    folder, _ = export_checkpoint(saved, "speculators", tmp_path / "s", dtype="float32")
    stored = header(folder)
    assert stored["d2t"] == ([5], "I64")
    assert stored["t2d"] == ([264], "BOOL")
    assert stored["lm_head.weight"] == ([5, 64], "F32")
    assert read_export(folder).facts.draft_vocab == tuple(vocabulary)


def test_a_mix_of_causal_sliding_and_full_layers_warns_in_the_speculators_format(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    _, lines = export_checkpoint(checkpoints["mixed"], "speculators", tmp_path / "s")
    assert any("vLLM" in line and line.startswith("warning") for line in lines)
    _, lines = export_checkpoint(checkpoints["mixed"], "zlab", tmp_path / "z")
    assert not any(line.startswith("warning") for line in lines)
    assert "causal" not in json.loads((tmp_path / "z" / "config.json").read_text())["dflash_config"]


@pytest.mark.parametrize("name", ["zlab", "speculators"])
def test_taps_are_exported_in_the_order_of_the_layers_since_servers_join_them_so(
    target: Path, tmp_path: Path, name: str
) -> None:
    saved = save_drafter(tmp_path / "saved", target, LAYOUTS["full"], taps=[3, 1, 2])
    folder, _ = export_checkpoint(saved, name, tmp_path / "out", dtype="float32")
    found = read_export(folder)
    assert found.facts.target_layer_ids == (1, 2, 3)
    states = dict(zip((1, 2, 3), torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)), strict=True))
    learnt = torch.cat([states[3], states[1], states[2]], dim=-1) @ read_checkpoint(saved).drafter()["fc.weight"].T
    served = torch.cat([states[1], states[2], states[3]], dim=-1) @ found.tensors["fc.weight"].T
    torch.testing.assert_close(served, learnt)


def test_the_last_layer_as_a_tap_warns_where_sglang_is_meant(target: Path, tmp_path: Path) -> None:
    saved = save_drafter(tmp_path / "saved", target, LAYOUTS["full"], taps=[0, 2, 5])
    for name, warned in (("zlab", True), ("speculators", False)):
        folder, lines = export_checkpoint(saved, name, tmp_path / name)
        assert any(line.startswith("warning") and "SGLang" in line for line in lines) is warned
        assert ("last layer" in (folder / "README.md").read_text()) is warned


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5}}, "plain rotation"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
            "plain rotation",
        ),
        ({"rope_theta": None, "rope_parameters": None}, "no rope_theta"),
        ({"dflash_config": {"mask_token_id": 17}}, "target_layer_ids is missing"),
        ({"dflash_config": {"mask_token_id": 17, "target_layer_ids": [1, 14, 30]}}, "expected distinct ids in 0..29"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"is_causal": True}, "is_causal"),
    ],
)
def test_what_this_drafter_does_not_compute_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    config = zlab.to_config(facts_named("full")) | change
    with pytest.raises(ExportError, match=re.escape(words)) as refused:
        zlab.from_config(config, "config.json")
    assert len(str(refused.value).splitlines()) == 1


def test_others_files_rely_on_what_transformers_leaves_out() -> None:
    config = zlab.to_config(replace(facts_named("full"), shape=replace(facts_named("full").shape, head_dim=128)))
    for key in ("head_dim", "identity", "training_facts", "torch_dtype", "rope_scaling"):
        config.pop(key, None)
    assert zlab.from_config(config, "here").shape.head_dim == 128


def test_initial_weights_from_another_shape_or_other_taps_are_refused(
    checkpoints: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    folder, _ = export_checkpoint(checkpoints["full"], "zlab", tmp_path / "out")
    described = read_checkpoint(checkpoints["full"]).meta["target"]
    for settings, taps, words in (
        ({"num_layers": 3, "block_size": 8, "layout": "full"}, [1, 2, 3], "num_layers 2 for 3"),
        ({"num_layers": 2, "block_size": 8, "layout": "full"}, [0, 2, 4], "set target.target_layer_ids"),
    ):
        config = Config.model_validate(
            {
                "drafter": settings | {"init_from": str(folder)},
                "target": {"model": str(target)},
                "pack": {"tokens": 256},
            }
        )
        plan = {"target": described | {"target_layer_ids": taps}, "draft_vocab": None}
        with pytest.raises(ConfigError, match=re.escape(words)):
            make_drafter(config, plan, torch.device("cpu"), lambda *_a, **_k: None)  # type: ignore[arg-type]


def test_the_command_refuses_in_one_line(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    for words, line in (
        ([str(checkpoints["full"]), "--out", str(tmp_path / "taken")], "exists and is not empty"),
        ([str(checkpoints["full"]), "--out", str(tmp_path / "taken" / "file")], "exists and is no folder"),
        ([str(checkpoints["full"]), "--out", str(tmp_path / "taken" / "file" / "o")], "cannot be written: Not a dir"),
        ([str(checkpoints["full"]), "--out", str(tmp_path / "o"), "--target", str(tmp_path / "no")], "is not there"),
        (["no-run", "--out", str(tmp_path / "o"), "--folder", str(tmp_path)], "no run 'no-run'"),
    ):
        assert launch.main(["export", *words]) == 2
        err = capsys.readouterr().err
        assert line in err
        assert len(err.splitlines()) == 1
    assert launch.main(["export", str(checkpoints["full"]), "--out", str(tmp_path / "good")]) == 0
    assert "num_speculative_tokens = 7" in capsys.readouterr().out


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_weights_are_as_readable_as_the_other_files(tmp_path: Path, umask: int) -> None:
    facts = facts_named("full")
    weights = {name: torch.zeros(shape) for name, shape in tensor_shapes(facts.shape).items()}
    before = os.umask(umask)
    try:
        folder = write_export(tmp_path / "out", "zlab", facts, weights, {}, {"README.md": "text"})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors", "README.md"), 0o666 & ~umask)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    facts = facts_named("full")
    weights = {name: torch.zeros(shape) for name, shape in tensor_shapes(facts.shape).items()}
    weights["norm.weight"][3] = float("nan")
    with pytest.raises(ExportError, match=r"norm.weight is not finite"):
        write_export(tmp_path / "out", "zlab", facts, weights, {}, {})
    assert not (tmp_path / "out").exists()
