"""A drafter of the demo target that has learnt a few of its answers by heart, in half a minute on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from configs.drafter_shape import drafter_shape, shape_as_dict
from configs.schema import Config
from consumer.checkpoint import Contents, save_checkpoint
from consumer.drafter import Drafter
from consumer.frozen_head import init_from_target, load_frozen_head
from consumer.staging import PackTensors
from consumer.step import TrainStep
from evaluation.prompts import prompt_ids
from evaluation.speculate import Limits, decode_plain
from evaluation.target_session import TargetSession
from producer.target import describe_target

NUM_DOCUMENTS, NUM_STEPS, NUM_COMMON_TOKENS = 3, 40, 4096


def save_learned_drafter(folder: Path, target: Path, chats: Path, new_tokens: int) -> tuple[Path, list[list[int]]]:
    """Write a checkpoint into `folder`; returns it and the prompts whose answers it half knows."""
    config = Config.model_validate(
        {
            "target": {"model": str(target), "dtype": "float32"},
            "drafter": {"num_layers": 1, "block_size": 4, "layout": "full"},
            "anchors": {"num": 96},
            "optimizer": {"lr": 3e-3, "schedule": "constant"},
        }
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    description = describe_target(target, config.target.model, config.target, tokenizer, on_gpu=False)
    lines = chats.read_text().splitlines()[:NUM_DOCUMENTS]
    prompts = [prompt_ids(tokenizer, json.loads(line)["messages"][0]["content"]) for line in lines]
    pack = _pack(TargetSession(description, torch.device("cpu")), prompts, new_tokens)
    shape = drafter_shape(config.drafter, description.as_dict(), None)
    drafter = Drafter(shape)
    init_from_target(drafter, target)
    whole = load_frozen_head(target, True, torch.float32, torch.device("cpu"))
    head = whole.reduced(sorted({*range(NUM_COMMON_TOKENS), *pack.input_ids.tolist()}))  # the whole one takes minutes
    step = TrainStep(drafter, head, pack, config.anchors, config.loss, config.optimizer, NUM_STEPS, seed=0)
    for _ in range(NUM_STEPS):
        step.run()
    meta = {
        "shape": shape_as_dict(shape),
        "target": description.as_dict(),
        "draft_vocab": None,
        "data_digest": "0" * 64,
        "generation": 0,
        "train_seconds": 1.0,
        "config": config.model_dump(mode="json"),
    }
    weights = {name: value.detach().clone() for name, value in drafter.state_dict().items()}
    contents = Contents(NUM_STEPS, weights, {"step": torch.tensor(NUM_STEPS)}, frozenset({0}), meta)
    saved = save_checkpoint(folder, contents)
    return saved, prompts


def _pack(target: TargetSession, prompts: list[list[int]], new_tokens: int) -> PackTensors:
    """The target's own greedy texts end to end, answers supervised, with their taps."""
    ids: list[int] = []
    mask: list[int] = []
    start: list[int] = []
    features = []
    for prompt in prompts:
        text = prompt + decode_plain(target, prompt, Limits(new_tokens, frozenset())).tokens
        start += [len(ids)] * len(text)
        ids += text
        mask += [0] * len(prompt) + [1] * (len(text) - len(prompt))
        features.append(target.start(text).features)
    int32, uint8 = torch.int32, torch.uint8
    return PackTensors(
        torch.tensor(ids, dtype=int32),
        torch.tensor(mask, dtype=uint8),
        torch.tensor(start, dtype=int32),
        torch.cat(features).clone(),
    )
