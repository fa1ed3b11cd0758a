"""From configuration and plan to a drafter and its training step: shapes, weights, frozen head. No loop, no ring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from configs.drafter_shape import drafter_shape
from configs.load import ConfigError
from configs.run_files import RANDOM_WEIGHTS
from configs.schema import Config
from consumer import float8
from consumer.drafter import Drafter
from consumer.export.facts import ExportError
from consumer.export.initial import init_from_export
from consumer.frozen_head import FrozenHead, init_from_target, load_frozen_head, random_head
from consumer.memory import estimate_of, require
from ops.telemetry import Log


def step_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Type of weights and activations; auto is float32 on a CPU, bfloat16 on a GPU; fp8 keeps both in bfloat16.

    bfloat16 on a CPU is allowed, but few CPUs are fast at it. Raises ConfigError for fp8 where the device has no such
    products.
    """
    if precision == "fp8" and not float8.supported(device):
        raise ConfigError(
            [f"training.precision: fp8 needs an NVIDIA GPU of capability 8.9 or later, got {device}; use bfloat16"]
        )
    if precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if precision == "float32" else torch.bfloat16


def check_memory(config: Config, plan: dict[str, Any], device: torch.device, log: Log) -> None:
    """Say what the step will take of a GPU's memory, before anything is allocated. Raises TooLarge."""
    if device.type != "cuda":
        return
    draft_vocab = plan["draft_vocab"]
    found = estimate_of(config, plan["target"], None if draft_vocab is None else len(draft_vocab))
    log("memory", estimate=str(found))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    require(found, free_bytes, str(device))


def make_drafter(
    config: Config, plan: dict[str, Any], device: torch.device, log: Log, weights_follow: bool = False
) -> Drafter:
    """Build the drafter with its initial weights, in float32. Raises ConfigError, HeadError, ValueError.

    `weights_follow`: they come from elsewhere, so nothing is read or drawn for them.
    """
    shape = drafter_shape(config.drafter, plan["target"], plan["draft_vocab"])
    with device:
        drafter = Drafter(shape)
    if weights_follow:
        return drafter
    drafter.reset_parameters(torch.Generator().manual_seed(config.run.seed))
    if config.drafter.init_from is not None:
        taps = tuple(plan["target"]["target_layer_ids"])
        try:
            differing = init_from_export(drafter, Path(config.drafter.init_from), taps)
        except ExportError as error:
            raise ConfigError([f"drafter.init_from: {error}"]) from None
        log("initial weights", source=config.drafter.init_from, differing="; ".join(differing) or "nothing")
    elif config.drafter.init == "target_last_layers":
        copied = init_from_target(drafter, Path(plan["target"]["path"]))
        log("initial weights", copied=len(copied), random=len(drafter.state_dict()) - len(copied) - 1)
    return drafter


def make_head(plan: dict[str, Any], dtype: torch.dtype, device: torch.device) -> FrozenHead:
    """Read the target's embedding and head, reduced to the draft vocabulary if there is one. Raises HeadError.

    Where the target's weights are random (target.random_weights), so are these.
    """
    target = plan["target"]
    if plan.get("target_origin") == RANDOM_WEIGHTS:
        head = random_head(target["vocab_size"], target["hidden"], target["tie_word_embeddings"], dtype, device)
        return head if plan["draft_vocab"] is None else head.reduced(plan["draft_vocab"])
    head = load_frozen_head(Path(target["path"]), target["tie_word_embeddings"], dtype, device)
    return head if plan["draft_vocab"] is None else head.reduced(plan["draft_vocab"])
