"""How fast is one side of a configuration, alone? `python -m evaluation.calibrate target|drafter CONFIG`.

The real side on the device that the launcher gives its first process (ops/balance.py starts this): the target reads
packs of random documents whose lengths are log-normal (median 600), the drafter trains on one made-up pack. Measured
for half of CALIBRATE_S, setting up apart. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from configs.load import load_config
from configs.run_files import RANDOM_WEIGHTS
from configs.schema import Config
from consumer.capture import prepare
from consumer.selfcheck import make_up
from consumer.setup import make_drafter, make_head, step_dtype
from consumer.staging import allocate_pack
from consumer.step import TrainStep
from producer.corpus.schedule import Schedule
from producer.prepare import slot_spec
from producer.rows import PackMaker
from producer.setup import make_target
from producer.target import TargetDescription, describe_target, load_tokenizer
from producer.target_source import find_target

CALIBRATE_S = 20.0
_MEDIAN, _SIGMA, _SHORTEST, _DOCUMENTS = 600, 1.0, 16, 2000
TARGET = "target"


class _Log:
    """Stands for the log of a process; nothing of it is kept."""

    def __call__(self, event: str, **values: Any) -> None:
        """Write a line to standard error, where the launcher's user sees it."""
        fields = " ".join(f"{key}={value}" for key, value in values.items())
        sys.stderr.write(f"calibrate | {event} | {fields}\n")


def rate_of(role: str, config: Config, device: torch.device) -> float:
    """Measure one side on `device`, in tokens per second."""
    folder = find_target(config.target.model, config.target.revision, lambda _line: None)
    tokenizer = load_tokenizer(folder.path)
    on_gpu = device.type == "cuda"
    target = describe_target(folder.path, config.target.model, config.target, tokenizer, on_gpu)
    if role == TARGET:
        return _target_rate(config, target, device)
    size = config.drafter.draft_vocab_size
    plan = {
        "target": target.as_dict(),
        "target_origin": RANDOM_WEIGHTS if config.target.random_weights else folder.origin,
        "draft_vocab": None if size is None or size >= target.vocab_size else list(range(size)),
    }
    return _drafter_rate(config, target, plan, device)


class _Document(NamedTuple):
    ids: Any
    loss_mask: Any


class _Documents:
    """Random documents, always the same."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        generator = np.random.default_rng(0)
        drawn = generator.lognormal(np.log(min(_MEDIAN, tokens / 4)), _SIGMA, _DOCUMENTS)
        self.lengths: list[int] = np.clip(drawn.astype(int), _SHORTEST, tokens).tolist()
        self._vocabulary = vocabulary

    def __getitem__(self, number: int) -> _Document:
        generator = np.random.default_rng(number)
        ids = generator.integers(1, self._vocabulary - 1, self.lengths[number], dtype=np.int32)
        return _Document(ids, np.ones(len(ids), dtype=np.uint8))


def _target_rate(config: Config, description: TargetDescription, device: torch.device) -> float:
    target = make_target(description, config, device, _Log())  # type: ignore[arg-type]  # looks like a Log
    documents = _Documents(config.pack.tokens, description.vocab_size)
    schedule = Schedule(documents.lengths, "0" * 64, 0, 1, config.pack.tokens)
    maker = PackMaker(documents, schedule, target, config)  # type: ignore[arg-type]  # looks like a corpus
    ids = iter(range(10**9))

    def one_round() -> int:
        maker.add(next(ids) % schedule.num_packs for _ in range(maker.room))
        return sum(pack.num_tokens for pack in maker.advance())

    return _rate(one_round, device)


def _drafter_rate(config: Config, target: TargetDescription, plan: dict[str, Any], device: torch.device) -> float:
    log: Any = _Log()
    dtype = step_dtype(config.training.precision, device)
    drafter = make_drafter(config, plan, device, log)
    pack = allocate_pack(slot_spec(config, target, "0" * 64), device)
    anchors = config.anchors.model_copy(update={"num": config.anchors.choices[0]})
    step = TrainStep(
        drafter, make_head(plan, dtype, device), pack, anchors, config.loss, config.optimizer, 10**6, 0, dtype
    )
    if device.type == "cuda":
        prepare(step, config.training.compile, config.training.cuda_graph, lambda line: log("capture", detail=line))
    make_up(step)

    def one_pack() -> int:
        for _ in range(config.training.steps_per_pack):
            step.run()
        return config.pack.tokens

    return _rate(one_pack, device)


def _rate(work: Callable[[], int], device: torch.device) -> float:
    """Tokens per second of `work`, which returns its tokens, after a first round that warms up."""
    while not work():
        pass
    _wait(device)
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < CALIBRATE_S / 2:
        tokens += work()
        _wait(device)
    return tokens / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure the side named on the command line; the last line printed is its rate."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.calibrate")
    parser.add_argument("role", choices=(TARGET, "drafter"))
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device(os.environ.get("DFLASH_DEVICE", "cpu"))
    print(json.dumps(rate_of(arguments.role, load_config(arguments.config, arguments.set), device)))


if __name__ == "__main__":
    main()
