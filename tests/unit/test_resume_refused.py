"""What a checkpoint is bound to: another target, other taps, packs or data are refused with both values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.drafter_shape import drafter_shape, tensor_shapes
from configs.load import ConfigError, config_from
from configs.resume import conflicts
from configs.schema import Config, DrafterConfig, TargetConfig
from consumer.checkpoint import Contents, save_checkpoint
from consumer.export.facts import DrafterFacts
from consumer.export.folder import write_export
from consumer.resume import identity_of
from ops.changes import change_on_restart
from ops.telemetry import Log
from producer.prepare import prepare
from producer.target import describe_target
from tests.helpers.tiny_target import make_tokenizer, save_target, write_chats


class Run:
    """A run folder with a checkpoint of some steps, and preparations of changed configurations."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "r"
        self.target = save_target(folder / "target")
        self.run_dir.mkdir(parents=True)
        write_chats(folder / "chats.jsonl", 20)

    def config(self, *overrides: str) -> Config:
        raw: dict[str, Any] = {
            "target": {"model": str(self.target), "target_layer_ids": [1, 4]},
            "data": {"sources": [{"path": str(self.folder / "chats.jsonl")}]},
            "pack": {"tokens": 128},
        }
        return config_from(raw, overrides)

    def prepare(self, *overrides: str) -> dict[str, Any]:
        return prepare(self.run_dir, self.config(*overrides), Log("prepare", 0), on_gpu=False)

    def save(self, step: int, plan: dict[str, Any]) -> None:
        meta = {"identity": identity_of(self.config(), plan)}
        weights = {"w": torch.ones(1)}
        contents = Contents(step, weights, {"s": torch.ones(1)}, frozenset({0}), meta)
        save_checkpoint(self.run_dir / "checkpoints", contents)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = Run(tmp_path_factory.mktemp("bound"))
    plan = made.prepare()
    made.save(0, plan)
    made.save(7, plan)
    return made


@pytest.mark.parametrize(
    ("override", "name", "values"),
    [
        ("target.target_layer_ids=[1,5]", "target.target_layer_ids", ("[1, 4]", "[1, 5]")),
        ("pack.tokens=256", "pack.tokens", ("128", "256")),
        ("run.seed=3", "run.seed", ("0", "3")),
        ("data.heldout_documents=4", "data", ("20 documents", "16 documents")),
        ("drafter.block_size=8", "drafter: block_size", ("16", "8")),
        ("drafter.layout=mixed", "drafter: layer_types", ("sliding_attention", "full_attention")),
        ("drafter.draft_vocab_size=64", "drafter: draft_vocab_size", ("None", "64")),
    ],
)
def test_a_change_that_would_be_silently_wrong_is_refused(
    run: Run, override: str, name: str, values: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run.prepare(override)
    (line,) = [line for line in caught.value.problems if line.startswith(f"{name}: ")]
    assert "step-7 was trained with" in line
    assert all(value in line for value in values)
    assert caught.value.exit_code == 2


def test_another_target_of_the_same_name_is_refused_and_a_moved_one_is_not(run: Run, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(run.target, moved)
    assert run.prepare(f"target.model={moved}")["target"]["path"] == str(moved)
    weights = run.target / "model.safetensors"
    kept = weights.read_bytes()
    try:
        save_file(load_file(weights), weights, {"format": "pt", "made": "by another"})
        with pytest.raises(ConfigError, match=r"target\.model"):
            run.prepare()
    finally:
        weights.write_bytes(kept)


def test_hyperparameters_and_numbers_of_processes_may_change(run: Run) -> None:
    more = ["optimizer.lr=1e-5", "loss.gamma=3", "loss.decay=dpace", "anchors.num=9", "training.epochs=3"]
    plan = run.prepare(*more, "target.devices=[cpu, cpu]", "training.devices=[cpu, cpu]")
    assert plan["num_packs"] > 0


def test_another_drafter_is_refused_before_the_data_are_read(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"^drafter: block_size: \S+/step-7 was trained with 16, this run has 8; "):
        run.prepare("drafter.block_size=8", "data.sources=[{path: /nowhere.jsonl}]")
    with pytest.raises(ConfigError, match="drafter shape: 3 heads, 2 kv heads"):
        run.prepare("drafter.num_attention_heads=3", "data.sources=[{path: /nowhere.jsonl}]")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported drafter of one layer, from the taps [1, 4]."""
    folder = tmp_path_factory.mktemp("export")
    target = describe_target(
        save_target(folder / "target"), "t", TargetConfig(target_layer_ids=(1, 4)), make_tokenizer(), on_gpu=False
    )
    shape = drafter_shape(DrafterConfig(num_layers=1), target.as_dict(), None)
    facts = DrafterFacts(shape, (1, 4), "float32", 512, 1, (2,), 0, 6)
    weights = {name: torch.zeros(size) for name, size in tensor_shapes(shape).items()}
    for name in ("zlab", "speculators"):
        write_export(folder / name, name, facts, weights, {}, {})
    return folder


@pytest.mark.parametrize("name", ["zlab", "speculators"])
def test_initial_weights_that_cannot_be_are_refused_before_the_data_are_read(
    name: str, export: Path, tmp_path: Path
) -> None:
    fresh, folder = Run(tmp_path), export / name

    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            fresh.prepare("data.sources=[{path: /nowhere.jsonl}]", *overrides)
        (line,) = caught.value.problems
        return line

    one_layer, other_taps = "drafter.num_layers=1", "target.target_layer_ids=[1, 5]"
    (tmp_path / "empty").mkdir()
    for path, got in ((tmp_path / "none", "no such folder"), (tmp_path / "empty", "a folder without them")):
        assert refused(f"drafter.init_from={path}") == (
            f"drafter.init_from: {path}: expected an exported drafter's folder (config.json, *.safetensors), got {got}"
        )
    ours = f"drafter.init_from={folder}"
    assert "its layers.1.input_layernorm.weight is none, this run's drafter has [64]" in refused(ours)
    assert "its fc.weight is [64, 128], this run's drafter has [64, 192]" in refused(
        ours, one_layer, "target.target_layer_ids=[1, 2, 4]"
    )
    assert "learnt from layers [1, 4], this run taps [1, 5]" in refused(ours, one_layer, other_taps)
    assert fresh.prepare(ours, one_layer)["num_packs"] > 0


def test_initial_weights_are_not_looked_for_where_a_checkpoint_has_the_weights(run: Run) -> None:
    assert run.prepare("drafter.init_from=/nowhere")["num_packs"] > 0


def test_initial_weights_alone_bind_nothing(tmp_path: Path) -> None:
    other = Run(tmp_path)
    other.save(0, other.prepare())
    assert other.prepare("pack.tokens=256")["num_packs"] > 0


def test_names_that_one_side_lacks_are_no_conflict() -> None:
    assert conflicts({"a": 1, "old": 2}, {"a": 1, "new": 3}, "step-1") == []
    assert conflicts({"a": [1]}, {"a": (1,)}, "step-1") == []
    assert len(conflicts({"a": 1, "b": 2}, {"a": 2, "b": 3}, "step-1")) == 2


def test_a_restart_of_the_drafter_takes_hyperparameters_and_refuses_the_rest_with_both_values(
    run: Run, tmp_path: Path
) -> None:
    config = run.config()
    kept = ["optimizer.lr=1e-5", "loss.gamma=2", "anchors.num=3", "loss.decay=none"]
    changed = change_on_restart(tmp_path, config, kept, "drafter")
    assert (changed.optimizer.lr, changed.loss.gamma, changed.anchors.num) == (1e-5, 2.0, 3)
    for override, old, new in (
        ("target.target_layer_ids=[1,5]", "[1, 4]", "[1, 5]"),
        ("pack.tokens=256", "128", "256"),
        ("target.model=other", str(run.target), "other"),
        ("data.max_documents=3", "None", "3"),
    ):
        with pytest.raises(ConfigError) as caught:
            change_on_restart(tmp_path, config, [override], "drafter")
        (line,) = caught.value.problems
        assert line.startswith(override.partition("=")[0])
        assert f"from {old} to {new}" in line


def test_the_identity_is_in_the_plan(run: Run) -> None:
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert set(plan["identity"]) == {"target.model", "target.target_layer_ids", "pack.tokens", "data", "run.seed"}
