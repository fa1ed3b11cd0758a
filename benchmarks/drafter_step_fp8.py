"""Does `precision: fp8` learn as bfloat16 does? 300 steps of a task that can be learnt, against the noise of seeds.

    python -m benchmarks.drafter_step_fp8 --results FILE                          a minute on one GPU
    python -m benchmarks.drafter_step_fp8 --target FOLDER --texts FILE --device cpu --results FILE     real features

Made-up task: each of 512 tokens has one successor, which follows it in five cases of six; features are a fixed random
vector of the token and noise. A drafter of two layers (hidden 1024, block 8) learns the chain from the anchor and the
context. Real one: SmolLM2-135M's features of conversations ({"messages": [...]} a line), a drafter of five layers with
random initial weights, block 8. A CPU computes 8 bits as a GPU does, rounding and scales alike, sums in float32.
A seed sets initial weights and anchors; the packs are the same for all. Accepted means: the mean loss of the last 50
steps in 8 bits differs from that in bfloat16, seeds averaged, by no more than the bfloat16 seeds among themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accepted_length import LAYER_IDS
from benchmarks.accepted_length_measure import Reader
from benchmarks.accepted_length_sweep import BASE, Bench, Sizes
from configs.drafter_shape import SLIDING, DrafterShape
from configs.schema import AnchorsConfig, Config, LossConfig, OptimizerConfig
from consumer.capture import prepare
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from consumer.staging import PackTensors
from consumer.step import TrainStep

STEPS, LAST, EVERY, PACKS = 300, 50, 10, 16
TOKENS, HIDDEN, VOCAB, USED, TAPS, DOCUMENT = 2048, 1024, 8192, 512, 3, 512
REAL = Sizes(tokens=1024, packs=150, steps=STEPS)
REAL_ANCHORS = 32


def make_packs(device: torch.device) -> list[PackTensors]:
    """Packs of the chain, from one generator."""
    generator = torch.Generator().manual_seed(7)
    successor = torch.randperm(USED, generator=generator)
    table = torch.randn(USED, TAPS * HIDDEN, generator=generator)
    place = torch.arange(TOKENS)
    packs = []
    for _ in range(PACKS):
        jump = torch.rand(TOKENS, generator=generator) < 1 / 6
        ids = torch.randint(0, USED, (TOKENS,), generator=generator)
        for t in range(1, TOKENS):
            if not jump[t]:
                ids[t] = successor[ids[t - 1]]
        features = table[ids] + torch.randn(TOKENS, TAPS * HIDDEN, generator=generator)
        tensors = (ids.int(), torch.ones(TOKENS, dtype=torch.uint8), (place // DOCUMENT * DOCUMENT).int(), features)
        packs.append(PackTensors(*(value.to(device) for value in tensors)))
    return packs


def real_task(
    target: Path, texts: Path, device: torch.device, dtype: torch.dtype
) -> tuple[TrainStep, list[PackTensors]]:
    """A step of SmolLM2-135M's drafter, and the packs of real features."""
    reader = Reader(str(target), LAYER_IDS, device, torch.float32)
    bench = Bench(reader, target, texts, device, dtype, LAYER_IDS, REAL)
    change: dict[str, dict[str, Any]] = {"drafter": {"init": "random"}, "anchors": {"num": REAL_ANCHORS}}
    config = Config.model_validate({name: part | change.get(name, {}) for name, part in BASE.items()})
    pack = PackTensors(**{name: value.clone() for name, value in vars(bench.packs[0]).items()})
    step = TrainStep(
        Drafter(bench.shape_of(config)).to(device), bench.head, pack, config.anchors, config.loss, config.optimizer,
        STEPS, 0, dtype,
    )  # fmt: skip
    return step, bench.packs


def make_step(device: torch.device, dtype: torch.dtype) -> TrainStep:
    """A step over an empty pack."""
    shape = DrafterShape(
        HIDDEN, 2816, 2, 8, 4, 128, TAPS, 8, (SLIDING, SLIDING), DOCUMENT, True, 1e-6, 1e4, VOCAB - 1, VOCAB
    )
    generator = torch.Generator().manual_seed(8)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5 for _ in range(2))
    pack = PackTensors(
        torch.zeros(TOKENS, dtype=torch.int32, device=device), torch.ones(TOKENS, dtype=torch.uint8, device=device),
        torch.zeros(TOKENS, dtype=torch.int32, device=device),
        torch.zeros(TOKENS, TAPS * HIDDEN, dtype=dtype, device=device),
    )  # fmt: skip
    return TrainStep(
        Drafter(shape).to(device), FrozenHead(embedding.to(device), head.to(device)), pack, AnchorsConfig(num=128),
        LossConfig(), OptimizerConfig(lr=1e-3), STEPS, 0, dtype,
    )  # fmt: skip


def curve(step: TrainStep, packs: list[PackTensors], seed: int, steps: int) -> list[float]:
    """Train from the seed's initial weights; mean losses of every 10 steps."""
    fresh = Drafter(step.shape)
    fresh.reset_parameters(torch.Generator().manual_seed(seed))
    step.load(fresh.state_dict(), {"step": torch.tensor(0), "updates": torch.tensor(0), "seed": torch.tensor(seed)})
    step.metrics()
    readings = []
    for number in range(steps):
        for name, value in vars(packs[number % len(packs)]).items():
            if isinstance(value, Tensor):
                getattr(step.pack, name).copy_(value)
        step.run()
        if (number + 1) % EVERY == 0:
            readings.append(step.start_reading())
    return [round(float(reading.result()["loss"]), 5) for reading in readings]  # type: ignore[arg-type]


def compare(step: TrainStep, packs: list[PackTensors], steps: int, seeds: int) -> dict[str, Any]:
    """Train with every seed in bfloat16, then in 8 bits."""
    device, said = packs[0].input_ids.device, list[str]()
    curves: dict[str, list[list[float]]] = {}
    for name in ("bfloat16", "fp8"):
        step.drafter.use_float8(name == "fp8")
        if device.type == "cuda":
            prepare(step, compile_parts=True, cuda_graph=True, say=said.append)
        curves[name] = [curve(step, packs, seed, steps) for seed in range(seeds)]
    count = max(1, LAST // EVERY)
    ends = {name: [sum(one[-count:]) / count for one in many] for name, many in curves.items()}
    means = {name: sum(values) / len(values) for name, values in ends.items()}
    noise = max(ends["bfloat16"]) - min(ends["bfloat16"])
    difference = means["fp8"] - means["bfloat16"]
    return {
        "end_loss": ends,
        "start_loss": curves["bfloat16"][0][0],
        "noise": noise,
        "difference": difference,
        "difference_by_seed": [eight - wide for eight, wide in zip(ends["fp8"], ends["bfloat16"], strict=True)],
        "accepted": difference <= noise,
        "curves": curves,
        "said": said,
        "steps": steps,
    }


def main() -> None:
    """Compare and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--target", type=Path, help="folder of SmolLM2-135M, for real features")
    parser.add_argument("--texts", type=Path, help="conversations, with --target")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.target:
        step, packs = real_task(arguments.target, arguments.texts, device, torch.bfloat16)
    else:
        step = make_step(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        packs = make_packs(device)
    found = compare(step, packs, arguments.steps, arguments.seeds)
    arguments.results.write_text(json.dumps(found, indent=1) + "\n")
    print({key: value for key, value in found.items() if key != "curves"}, flush=True)


if __name__ == "__main__":
    main()
