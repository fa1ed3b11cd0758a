"""How long is one training step of the drafter, and where does the time go? One GPU, random data on the device.

    python -m benchmarks.drafter_step --shape 27b --variant captured --out DIR      one measurement, one JSON line
    python -m benchmarks.drafter_step_all --out DIR --results FILE                  everything, about 6 minutes

The clock runs from the start of one step to the start of the next (CUDA events; steps for 4 s so that every variant
meets a warm chip at its power limit, then 20), with the pack already on the device. Variants: `captured` is what
training runs (and, in the same process, `fp8`: the same with `precision: fp8`); `eager` the same lines launched one by
one; `old` a twin of the pipeline that this one replaced (two create_block_mask calls a step, nothing compiled but the
attention, eight values read by the host each step); `speculators` that project's 0.9.0 model, loss and optimizer with
its trainer's defaults (drafter_step_speculators.py; in the same process two variants in its favour). bfloat16 products,
float32 masters, AdamW, clip 1.
Data: documents of 2048 tokens, all supervised; K = 5 taps, L = 5 sliding layers of window 2048, B = 16.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.drafter_step_profile import breakdown
from configs.drafter_shape import SLIDING, DrafterShape
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer.capture import prepare
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from consumer.selfcheck import self_check
from consumer.staging import PackTensors
from consumer.step import TrainStep
from gpu.products import measured

WARM_UP_S, STEPS = 4.0, 20
LAYERS, TAPS, BLOCK, WINDOW, DOCUMENT = 5, 5, 16, 2048, 2048
DEVICE = torch.device("cuda", 0)


class Size(NamedTuple):
    """One target's drafter."""

    hidden: int
    intermediate: int
    num_heads: int
    vocab: int
    tokens: int
    anchors: int


SIZES = {
    "0.6b": Size(1024, 3072, 16, 151936, 4096, 256),
    "8b": Size(4096, 12288, 32, 151936, 8192, 512),
    "27b": Size(5120, 17408, 40, 248320, 8192, 512),
}


def shape_of(size: Size) -> DrafterShape:
    """The drafter of a size: 8 kv heads of 128, window 2048."""
    return DrafterShape(
        size.hidden, size.intermediate, LAYERS, size.num_heads, 8, 128, TAPS, BLOCK, (SLIDING,) * LAYERS,
        WINDOW, True, 1e-6, 1e6, size.vocab - 1, size.vocab,
    )  # fmt: skip


def products_tflop(size: Size, as_executed: bool) -> float:
    """Matrix products of one step in TFLOP, attention left out: 3 for trained weights, 2 for the frozen head and fc.

    as_executed: what this project computes: no slot 0 in the head and behind the last layer's attention, where nothing
    reads it, and in the first layer's q, k, v one row for all mask slots; else as everyone counts.
    """
    rows, kv = size.anchors * BLOCK, 2 * 8 * 128
    heads = size.num_heads * 128
    used = size.anchors * (BLOCK - 1) if as_executed else rows
    behind = size.hidden * heads + 3 * size.hidden * size.intermediate
    ahead = size.hidden * (heads + kv)
    first = size.anchors + 1 if as_executed else rows
    layers = (first + (LAYERS - 1) * rows) * ahead + LAYERS * size.tokens * size.hidden * kv
    layers += ((LAYERS - 1) * rows + used) * behind
    fc = size.tokens * TAPS * size.hidden**2
    return 2e-12 * (3 * layers + 2 * fc + 2 * used * size.hidden * size.vocab)


def make_pack(size: Size, seed: int = 0) -> PackTensors:
    """Random tokens and features in documents of 2048 tokens."""
    torch.manual_seed(seed)
    index = torch.arange(size.tokens, device=DEVICE)
    return PackTensors(
        torch.randint(0, size.vocab - 1, (size.tokens,), device=DEVICE, dtype=torch.int32),
        torch.ones(size.tokens, device=DEVICE, dtype=torch.uint8),
        (index // DOCUMENT * DOCUMENT).to(torch.int32),
        torch.randn(size.tokens, TAPS * size.hidden, device=DEVICE, dtype=torch.bfloat16),
    )


def make_step(size: Size, chunk_rows: int = 2048) -> TrainStep:
    """A training step with random weights, in bfloat16 over float32 masters."""
    torch.manual_seed(0)
    with DEVICE:
        drafter = Drafter(shape_of(size))
    embedding = (torch.randn(size.vocab, size.hidden, device=DEVICE) * 0.02).to(torch.bfloat16)
    head = FrozenHead(embedding, (torch.randn(size.vocab, size.hidden, device=DEVICE) * 0.02).to(torch.bfloat16))
    return TrainStep(
        drafter, head, make_pack(size), AnchorsConfig(num=size.anchors), LossConfig(gamma=7.0, chunk_rows=chunk_rows),
        OptimizerConfig(), 1000, 0, dtype=torch.bfloat16,
    )  # fmt: skip


def timed(run: Callable[[], Any]) -> dict[str, Any]:
    """Time steps with events: median, spread, all of them, and the host's clock over all."""
    wait_for_turn()
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    began = time.perf_counter()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - began) * 1e3 / STEPS
    runs = [a.elapsed_time(b) for a, b in pairwise(events)]
    return {
        "step_ms": statistics.median(runs),
        "min_ms": min(runs),
        "max_ms": max(runs),
        "wall_ms": wall_ms,
        "runs_ms": [round(run, 3) for run in runs],
    }


def wait_for_turn() -> None:
    """Let measurements started together compile at the same time and measure one after another.

    STEP_TURN names a file that is locked from here to the end of the process.
    """
    turn = os.environ.get("STEP_TURN")
    if not turn or _turn:
        return
    _turn.append(Path(turn).open("w"))  # noqa: SIM115 - the lock lasts until the process ends
    fcntl.flock(_turn[0], fcntl.LOCK_EX)


_turn: list[Any] = []


def memory() -> dict[str, float]:
    """Peak memory in GB (1e9 bytes)."""
    return {
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


def ours(size: Size, variant: str, chunk_rows: int, picture: Path | None, attention: Any) -> list[dict[str, Any]]:
    """Measure this project's step; a captured one in 8 bits too."""
    step = make_step(size, chunk_rows)
    if variant == "old":
        from benchmarks.drafter_step_old import as_before

        run = as_before(step)
        run()  # compiles
        return [_measured(step, run, picture)]
    began = time.perf_counter()
    lines: list[str] = []
    prepare(step, True, False, lines.append, attention, tune=False)
    step.run()  # kernels are compiled while others measure
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    wait_for_turn()
    results = []
    for in_float8 in (False, True) if variant == "captured" else (False,):
        step.drafter.use_float8(in_float8)
        began = time.perf_counter()
        replays = prepare(step, True, variant == "captured", lines.append, attention)
        took_s = time.perf_counter() - began
        result = _measured(step, step.run, None if in_float8 else picture)
        result |= {
            "variant": "fp8" if in_float8 else variant,
            "compile_s": round(compile_s, 1),
            "prepare_s": round(took_s, 1),
            "replays": replays,
            "said": lines,
            "attention": step.attention_note,
            "products_ms": measured(),
            "after_capture_gb": torch.cuda.memory_reserved() / 1e9,
        }
        if replays:
            try:
                result["failed_checks"] = self_check(step, 1e-3)
            except torch.OutOfMemoryError as error:  # others' weights lie on the same GPU
                result["failed_checks"] = [f"not done: {str(error).splitlines()[0]}"]
        results.append(result)
        step.execute = step.on_device  # lets go of the graph and its memory, before the next has its turn
        torch.cuda.empty_cache()
    return results


def _measured(step: TrainStep, run: Callable[[], Any], picture: Path | None) -> dict[str, Any]:
    result = timed(run)
    metrics = step.metrics()
    result |= memory() | {"loss": metrics["loss"], "skipped_steps": metrics["skipped_steps"]}
    return result | {"breakdown": breakdown(run, picture)}


def measure(name: str, variant: str, chunk_rows: int, picture: Path | None, attention: str) -> list[dict[str, Any]]:
    """One measurement, or two, with what is needed to read it."""
    size = SIZES[name]
    if variant == "speculators":
        from benchmarks.drafter_step_speculators import speculators

        results = speculators(name, size, shape_of(size))
    else:
        results = ours(size, variant, chunk_rows, picture, attention)
    nominal, executed = products_tflop(size, False), products_tflop(size, variant != "speculators")
    return [
        {"variant": variant}
        | result
        | {
            "shape": name,
            "tokens_per_s": size.tokens / result["step_ms"] * 1e3,
            "products_tflop": nominal,
            "products_tflop_executed": executed,
            "tflops": nominal / result["step_ms"] * 1e3,
            "tflops_executed": executed / result["step_ms"] * 1e3,
            "config": size._asdict() | {"chunk_rows": chunk_rows},
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda},
        }
        for result in results
    ]


def main() -> None:
    """Measure one variant at one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, required=True)
    parser.add_argument("--variant", choices=("captured", "eager", "old", "speculators"), default="captured")
    parser.add_argument("--chunk-rows", type=int, default=LossConfig().chunk_rows)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--attention", choices=("auto", "flex", "intervals"), default="auto")
    parser.add_argument("--picture", type=Path, help="draw the profile into this file")
    arguments = parser.parse_args()
    results = measure(arguments.shape, arguments.variant, arguments.chunk_rows, arguments.picture, arguments.attention)
    for result in results:
        path = arguments.out / f"step_{arguments.shape}_{result['variant']}.json"
        path.write_text(json.dumps(result, indent=1))
        long = ("runs_ms", "breakdown", "config", "versions")
        print(json.dumps({key: value for key, value in result.items() if key not in long}), flush=True)
        print(json.dumps(result.get("breakdown", {}).get("kinds_ms")), result.get("breakdown", {}).get("busy_pct"))


if __name__ == "__main__":
    main()
