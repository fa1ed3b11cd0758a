"""A target with random weights, for measuring speed: the same each time, refused where its weights would matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.load import ConfigError, config_from, load_config
from configs.run_files import RANDOM_WEIGHTS
from consumer.setup import make_head
from producer.target import describe_target
from producer.trunk import random_model
from tests.helpers.tiny_target import make_model, make_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")


def test_weights_are_made_from_a_folder_without_any_and_are_always_the_same(tmp_path: Path) -> None:
    described = make_model().config
    described.architectures = ["LlamaForCausalLM"]
    described.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = config_from({"target": {"model": str(tmp_path), "num_taps": 3, "random_weights": True}})
    target = describe_target(tmp_path, "random", config.target, make_tokenizer(), on_gpu=False)
    first, second = (random_model(target, config.target, CPU).state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    plan = {"target": target.as_dict(), "target_origin": RANDOM_WEIGHTS, "draft_vocab": None}
    head = make_head(plan, torch.float32, CPU)
    assert head.head.shape == (target.vocab_size, target.hidden)
    assert head.head is head.embedding  # tied, as the target's description says
    assert torch.equal(head.head, make_head(plan, torch.float32, CPU).head)


@pytest.mark.parametrize("setting", ["evaluation.enabled=true", "drafter.init=target_last_layers"])
def test_what_needs_real_weights_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"target\.random_weights: there is nothing to evaluate"):
        config_from({"target": {"random_weights": True}}, [setting])


@pytest.mark.parametrize(("targets", "drafters"), [(5, 3), (6, 2), (7, 1)])
def test_the_configurations_for_eight_gpus_use_each_once(targets: int, drafters: int) -> None:
    config = load_config(CONFIGS / f"eight_gpus_{targets}_{drafters}.yaml")
    assert (len(config.target.devices), len(config.training.devices)) == (targets, drafters)
    assert sorted((*config.target.devices, *config.training.devices)) == [f"cuda:{number}" for number in range(8)]
    assert (CONFIGS.parent / config.target.model / "config.json").is_file()
