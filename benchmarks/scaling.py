"""What do several drafter ranks gain? One process per GPU; each alone, then all with their gradients added up.

    python -m benchmarks.scaling --out DIR --results benchmarks/results/scaling_HARDWARE_DATE.json     on two GPUs
    python -m benchmarks.scaling --quick --out DIR                                                   on a CPU, gloo

All ranks measure at the same time, so the chips are as warm in the baseline as together. Variants of the captured step:
`alone` without any reduction (the baseline: one rank), `after` one all-reduce behind the backward pass, `during` each
product's gradient as soon as it is written, beside the rest of the backward pass (what training runs). The clock: the
host's, over STEPS steps that end with all of the GPU's work, RUNS times; median and all of them. Scaling is ranks times
the time alone over the time together. The pack is random and already on the device (drafter_step.py has the sizes).
Checked before: reduced gradients are the sum of each rank's own, and all ranks hold the same weights at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.drafter_step import SIZES, Size, memory, shape_of
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer.capture import captured, prepare
from consumer.distributed import AfterBackward, Place, Ranks
from consumer.drafter import Drafter
from consumer.frozen_head import random_head
from consumer.staging import PackTensors
from consumer.step import TrainStep
from ops.hosts import free_port

RUNS, STEPS, WARM_UP = 5, 5, 1
QUICK = Size(128, 256, 8, 512, 256, 16)
LIMIT_S = 400


def make_step(size: Size, rank: int, device: torch.device, dtype: torch.dtype) -> TrainStep:
    """The drafter's step at a size: the same weights on each rank, another pack."""
    torch.manual_seed(0)
    with device:
        drafter = Drafter(shape_of(size))
    head = random_head(size.vocab, size.hidden, False, dtype, device)
    generator = torch.Generator(device).manual_seed(rank)
    document = size.tokens // 4
    index = torch.arange(size.tokens, device=device)
    pack = PackTensors(
        torch.randint(0, size.vocab - 1, (size.tokens,), device=device, dtype=torch.int32, generator=generator),
        torch.ones(size.tokens, device=device, dtype=torch.uint8),
        (index // document * document).to(torch.int32),
        torch.randn(size.tokens, 5 * size.hidden, device=device, generator=generator).to(dtype),
    )
    anchors, loss = AnchorsConfig(num=size.anchors), LossConfig(gamma=7.0)
    return TrainStep(drafter, head, pack, anchors, loss, OptimizerConfig(), 1000, 0, dtype=dtype)


def timed(run: Callable[[], None], ranks: Ranks, steps: int) -> dict[str, Any]:
    """Time steps by the host's clock; all ranks begin each run together."""
    runs = []
    for _ in range(RUNS):
        for _ in range(WARM_UP):
            run()
        _synchronize()
        ranks.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            run()
        _synchronize()
        runs.append((time.perf_counter() - began) * 1e3 / steps)
    return {"step_ms": statistics.median(runs), "runs_ms": [round(each, 3) for each in runs]}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gradient_error(step: TrainStep, ranks: Ranks, device: torch.device) -> float:
    """Relative difference of the reduced gradients from the sum of each rank's own, without a trace in the state."""
    group = ranks.device_group if device.type == "cuda" else None
    reduction, step.reduction = step.reduction, None
    step.armed.zero_()
    step.on_device()
    expected = step.flat.grads.float()
    dist.all_reduce(expected, group=group)
    step.reduction = reduction
    step.execute()
    step.armed.fill_(1.0)
    found = step.flat.grads.float()
    return float((found - expected).norm() / expected.norm())


def spread(tensor: Tensor, ranks: Ranks, device: torch.device) -> float:
    """Largest difference of a tensor between ranks."""
    group = ranks.device_group if device.type == "cuda" else None
    highest, lowest = tensor.clone(), tensor.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    return float((highest - lowest).abs().max())


def measure(name: str, size: Size, ranks: Ranks, device: torch.device, steps: int, tune: bool) -> dict[str, Any]:
    """All variants at one size."""
    on_gpu = device.type == "cuda"
    step = make_step(size, ranks.rank, device, torch.bfloat16 if on_gpu else torch.float32)
    said: list[str] = []
    began = time.perf_counter()
    replays = prepare(step, True, True, said.append, tune=tune) if on_gpu else False
    result: dict[str, Any] = {"shape": name, "prepare_s": round(time.perf_counter() - began, 1), "replays": replays}
    result["alone"] = timed(step.run, ranks, steps)
    group = ranks.device_group if on_gpu else None
    reductions = {"after": AfterBackward(step.flat, group), "during": ranks.reduction_of(step)}
    ranks.share(step.shared_state())
    step.adopt()
    for variant, reduction in reductions.items():
        step.execute = step.on_device
        if on_gpu:
            torch.cuda.empty_cache()
        step.reduction = reduction
        if on_gpu:
            step.execute = captured(step, step.on_device).replay
        error = gradient_error(step, ranks, device)
        result[variant] = timed(step.run, ranks, steps) | {"gradient_error": error}
        result[f"scaling_{variant}"] = ranks.world * result["alone"]["step_ms"] / result[variant]["step_ms"]
    metrics = step.metrics()
    result |= {"loss": metrics["loss"], "skipped_steps": metrics["skipped_steps"], "said": said}
    result["weights_differ_by"] = spread(step.flat.masters, ranks, device)
    result |= memory() if on_gpu else {}
    result["tokens_per_s"] = ranks.world * size.tokens / result["during"]["step_ms"] * 1e3
    result["parameters"] = step.flat.size
    return result


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure, and as rank 0 write."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = {"quick": QUICK} if arguments.quick else {name: SIZES[name] for name in arguments.shapes}
    results = []
    with Ranks(Place.read(os.environ), device, timeout_s=LIMIT_S) as ranks:
        for name, size in sizes.items():
            results.append(measure(name, size, ranks, device, 2 if arguments.quick else STEPS, arguments.tune))
            if ranks.rank == 0:
                print(json.dumps({key: value for key, value in results[-1].items() if key != "said"}), flush=True)
                (arguments.out / "scaling.json").write_text(json.dumps(results, indent=1))
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        sys.stdout.flush()
    os._exit(0)  # graphs that hold collectives are not torn down in order


def main() -> int:
    """Start one process per GPU and collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["27b", "8b"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tune", action="store_true", help="measure the algorithms of the products first, as training")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        work(arguments)
    meeting = {
        "WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
    }
    meeting |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "DFLASH_RENDEZVOUS_S": "120"}
    workers = []
    for rank in range(arguments.ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (
            {} if arguments.quick else {"CUDA_VISIBLE_DEVICES": str(rank)}
        )
        command = [sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:]]
        workers.append(subprocess.Popen(command, env=os.environ | meeting | place))
    give_up = time.monotonic() + LIMIT_S
    while any(worker.poll() is None for worker in workers):
        failed = any(worker.poll() not in (None, 0) for worker in workers)
        if failed or time.monotonic() > give_up:
            for worker in workers:
                worker.kill()
        time.sleep(0.2)
    if arguments.results and (arguments.out / "scaling.json").exists():
        runs = json.loads((arguments.out / "scaling.json").read_text())
        summary = {f"{run['shape']}.{key}": run[key] for run in runs for key in ("scaling_during", "scaling_after")}
        arguments.results.write_text(
            json.dumps({"summary": summary, "machine": _machine(), "runs": runs}, indent=1) + "\n"
        )
    return max(worker.returncode != 0 for worker in workers)


def _machine() -> dict[str, Any]:
    found = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return found | {"commit": commit or os.environ.get("COMMIT", "unknown")}


if __name__ == "__main__":
    raise SystemExit(main())
