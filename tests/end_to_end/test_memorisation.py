"""A drafter must learn a handful of documents by heart, and must need the target's features for it.

A shifted label, a leaking mask or a wrong tap cannot pass both: the first two fail in the real decoding loop, a drafter
that ignores its context fails the second.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from configs.drafter_shape import drafter_shape
from configs.load import load_config
from configs.schema import Config
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead, init_from_target, load_frozen_head
from consumer.staging import PackTensors
from consumer.step import TrainStep
from evaluation.decode import decode
from evaluation.proposers import DrafterProposer
from evaluation.verifier import Verifier
from producer.corpus.chat import ChatTokenizer
from producer.corpus.conversation import Conversation
from producer.target import TargetDescription, describe_target
from producer.target_source import find_target
from producer.trunk import Target, load_model

REPOSITORY = Path(__file__).parents[2]
NUM_DOCUMENTS, NUM_STEPS, NEW_TOKENS = 6, 160, 24
NUM_COMMON_TOKENS = 4096  # low ids are frequent tokens; the whole vocabulary would take most of the time
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config() -> Config:
    overrides = ["anchors.num=96", "optimizer.lr=3e-3", "optimizer.schedule=constant"]
    return load_config(REPOSITORY / "configs" / "demo.yaml", overrides)


@pytest.fixture(scope="module")
def description(config: Config) -> TargetDescription:
    folder = find_target(config.target.model, None, print).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return describe_target(folder, config.target.model, config.target, tokenizer, on_gpu=False)


def shortest_prompts(description: TargetDescription) -> list[list[int]]:
    """Prompts of the demo corpus as token ids, the first ones in the file."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(description.path)
    lines = (REPOSITORY / "data" / "demo_chat.jsonl").read_text().splitlines()[:NUM_DOCUMENTS]
    chats = ChatTokenizer(tokenizer, {})
    documents = [chats.tokenize(Conversation(json.loads(line)["messages"])) for line in lines]
    return [document.ids[: int(np.argmax(document.loss_mask))].tolist() for document in documents]


def pack_of(texts: list[list[int]], prompts: list[list[int]], target: Target) -> PackTensors:
    """Lay the target's own greedy texts end to end, their answers supervised, with their taps."""
    ids, mask, start, features = [], [], [], []
    for text, prompt in zip(texts, prompts, strict=True):
        start += [len(ids)] * len(text)
        ids += text
        mask += [0] * len(prompt) + [1] * (len(text) - len(prompt))
        features.append(torch.cat(target.forward(torch.tensor([text]))[0], dim=-1)[0])
    int32, uint8 = torch.int32, torch.uint8
    stacked = torch.cat(features).clone()
    return PackTensors(
        torch.tensor(ids, dtype=int32), torch.tensor(mask, dtype=uint8), torch.tensor(start, dtype=int32), stacked
    )


def learned(config: Config, description: TargetDescription, pack: PackTensors) -> tuple[Drafter, FrozenHead]:
    drafter = Drafter(drafter_shape(config.drafter, description.as_dict(), None))
    init_from_target(drafter, Path(description.path))
    whole = load_frozen_head(Path(description.path), True, torch.float32, torch.device("cpu"))
    head = whole.reduced(sorted({*range(NUM_COMMON_TOKENS), *pack.input_ids.tolist()}))
    step = TrainStep(drafter, head, pack, config.anchors, config.loss, config.optimizer, NUM_STEPS, seed=0)
    for _ in range(NUM_STEPS):
        step.run()
    return drafter, head


def test_a_handful_of_documents_is_learnt_by_heart_through_the_features(config: Config, description: Any) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    prompts = shortest_prompts(description)
    verifier = Verifier(description, torch.device("cpu"))

    class Wrong:  # proposes the end of text, so that the texts are the target's own
        block_size = config.drafter.block_size

        def propose(self, texts: Any, features: Any) -> torch.Tensor:  # noqa: ARG002
            return torch.full((len(texts), self.block_size - 1), description.mask_token_id)

    plain = decode(verifier, Wrong(), prompts, NEW_TOKENS)
    assert plain.accept_len == 1.0
    texts = [prompt + new for prompt, new in zip(prompts, plain.tokens, strict=True)]
    target = Target(load_model(description, config.target, torch.device("cpu")), description.target_layer_ids)
    pack = pack_of(texts, prompts, target)
    drafter, head = learned(config, description, pack)
    # the last round of a text may reach past the learnt tokens, so decode a little less than was learnt
    limit = NEW_TOKENS - config.drafter.block_size
    by_heart = decode(verifier, DrafterProposer(drafter, head), prompts, limit)
    blind = decode(verifier, DrafterProposer(drafter, head, zero_context=True), prompts, limit)
    assert by_heart.tokens == [new[:limit] for new in plain.tokens] == blind.tokens  # lossless
    assert by_heart.accept_len >= 0.8 * config.drafter.block_size
    assert blind.accept_len <= 0.6 * by_heart.accept_len
