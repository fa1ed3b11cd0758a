"""A checkpoint of a random drafter for a target on disk, as the training loop writes it, without a run."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from configs.drafter_shape import drafter_shape, shape_as_dict
from configs.schema import Config
from consumer.checkpoint import Contents, save_checkpoint
from consumer.drafter import Drafter
from consumer.frozen_head import init_from_target
from producer.target import describe_target


def save_drafter(
    folder: Path,
    target: Path,
    drafter: dict[str, object],
    vocabulary: list[int] | None = None,
    like_target: bool = False,
    taps: list[int] | None = None,
) -> Path:
    """Write folder/step-7 and return it; `drafter` are settings of the section of that name, `taps` layer ids."""
    config = Config.model_validate(
        {
            "target": {"model": str(target), "num_taps": 3, "target_layer_ids": taps, "dtype": "float32"},
            "drafter": drafter,
            "pack": {"tokens": 256},
        }
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    described = describe_target(target, "tiny", config.target, tokenizer, on_gpu=False).as_dict()
    made = Drafter(drafter_shape(config.drafter, described, vocabulary))
    made.reset_parameters(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:  # norms that are all one would hide one that is left out
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
            else:
                parameter.mul_(4)
    if like_target:
        init_from_target(made, target)
    meta = {
        "shape": shape_as_dict(made.shape),
        "target": described,
        "draft_vocab": vocabulary,
        "data_digest": "0" * 64,
        "generation": 0,
        "train_seconds": 1.0,
        "config": config.model_dump(mode="json"),
    }
    contents = Contents(7, made.state_dict(), {"step": torch.tensor(7)}, frozenset({0, 1}), meta)
    return save_checkpoint(folder, contents)
