"""One side of the pipeline under measurement: the real program, with random weights and random documents put in.

    python -m benchmarks.pipeline_sides target|drafter --run-dir RUN --rank 0

Everything that costs time in a run is the product's own: loop, target, ring, transfer, staging, step. Replaced are what
reads weights and documents from disk, and the writing of checkpoints. A side stops at gates, files in the run folder:
a target before its first pack (gate.target); a drafter before it measures its own step alone (gate.alone, result in
alone.json) and before it takes its first pack (gate.drafter).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline_shapes import SHAPES, RandomDocuments, random_drafter, random_head, random_model, schedule_of

GATE_POLL_S = 0.02
WARM_UP_STEPS, ALONE_STEPS = 4, 16


def wait_for(gate: Path) -> None:
    """Wait until the file is there; leave if the benchmark has ended."""
    gate.with_name(f"at.{gate.name}").touch()
    while not gate.exists():
        if os.getppid() == 1:
            raise SystemExit(1)
        time.sleep(GATE_POLL_S)


def replace_in_target(run_dir: Path) -> None:
    """Put random documents and weights into the target process."""
    from producer import loop, setup

    shape = SHAPES[json.loads((run_dir / "shape.json").read_text())]
    make_target = setup.make_target

    def gated(description: Any, config: Any, device: torch.device, log: Any, _load: Any, memory: Any) -> Any:
        target = make_target(description, config, device, log, lambda: random_model(shape, device), memory)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        wait_for(run_dir / "gate.target")
        return target

    replacements = {
        "Documents": lambda _folder: RandomDocuments(shape),
        "schedule_of": lambda corpus, *_more: schedule_of(shape, corpus.lengths),
        "make_target": gated,
    }
    for name, value in replacements.items():
        setattr(loop, name, value)


def replace_in_drafter(run_dir: Path) -> None:
    """Put random weights into the drafter process, and let it measure its step alone first."""
    from consumer import loop

    class Gated(loop.Trainer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            if self.pack.input_ids.is_cuda:
                torch.cuda.empty_cache()
            wait_for(run_dir / "gate.alone")
            (run_dir / "alone.json").write_text(json.dumps({"step_s": step_alone(self.step)}))
            wait_for(run_dir / "gate.drafter")

        def save(self) -> None:
            return None

    replacements = {
        "Trainer": Gated,
        "make_drafter": lambda config, plan, device, _log, **_more: random_drafter(config, plan, device),
        "make_head": random_head,
    }
    for name, value in replacements.items():
        setattr(loop, name, value)


def step_alone(step: Any) -> float:
    """Seconds per step on a made-up pack, by the host's clock over ALONE_STEPS steps."""
    pack = step.pack
    tokens = pack.input_ids.shape[0]
    pack.input_ids.random_(0, step.shape.vocab_size - 1)
    pack.loss_mask.fill_(1)
    pack.doc_start.copy_(torch.arange(tokens) // max(1, tokens // 8) * max(1, tokens // 8))
    pack.features.normal_()
    for number in range(WARM_UP_STEPS + ALONE_STEPS):
        if number == WARM_UP_STEPS:
            _synchronize(pack.features)
            began = time.perf_counter()
        step.run()
    _synchronize(pack.features)
    return (time.perf_counter() - began) / ALONE_STEPS


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def main() -> int:
    """Start the side named on the command line, as its own program would start."""
    role, *rest = sys.argv[1:]
    sys.argv[1:] = rest
    run_dir = Path(rest[rest.index("--run-dir") + 1])
    if role == "target":
        replace_in_target(run_dir)
        from producer.__main__ import main as start
    else:
        replace_in_drafter(run_dir)
        from consumer.__main__ import main as start
    return start()


if __name__ == "__main__":
    raise SystemExit(main())
