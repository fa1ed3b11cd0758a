"""The twin that the pipeline is measured against: one process, one thread per GPU, queue.Queue(60) between them.

    python -m benchmarks.pipeline_threads --run-dir RUN --seconds 15 --devices cuda:0 cuda:1

The design of the pipeline before this one: both threads share the interpreter's lock; the target runs eagerly in
right-padded rows; its features cross in pageable memory with a copy that waits; the drafter's step is eager, with two
create_block_mask calls and eight values read by the host (benchmarks/drafter_step_old.py). Same documents, same shapes.
Prints one JSON line: tokens per second that were trained on, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter_step_old import as_before
from benchmarks.pipeline_shapes import SHAPES, RandomDocuments, random_drafter, random_head, random_model, schedule_of
from benchmarks.pipeline_sides import wait_for
from configs.load import load_config
from configs.run_files import read_plan
from configs.schema import Config
from consumer.staging import allocate_pack
from consumer.step import TrainStep
from producer.rows import Pack, PackMaker
from producer.trunk import Target
from shm_ring import SlotSpec

QUEUE_PACKS = 60


def produce(maker: PackMaker, num_packs: int, packs: queue.Queue[Any], ended: threading.Event) -> None:
    """Make packs until told to end, and put them into the queue on the host."""
    following = 0
    while not ended.is_set():
        take = min(maker.room, num_packs - following)
        maker.add(range(following, following + take))
        following += take
        for pack in maker.advance():
            assert pack.features is not None
            packs.put((pack, pack.features.cpu()))


def consume(step: TrainStep, run: Callable[[], Any], packs: queue.Queue[Any], trained: list[tuple[float, int]]) -> None:
    """Train on packs from the queue until it gives None; notes when how many tokens were done."""
    pack: Pack
    if step.pack.features.is_cuda:
        torch.cuda.set_device(step.pack.features.device)  # each thread has its own current device
    while (item := packs.get()) is not None:
        pack, features = item
        fields = {"input_ids": pack.input_ids, "loss_mask": pack.loss_mask, "doc_start": pack.doc_start}
        for name, values in fields.items():
            getattr(step.pack, name).copy_(torch.from_numpy(values))
        step.pack.features.copy_(features)
        run()
        trained.append((time.monotonic(), pack.num_tokens))


def prepare(run_dir: Path, devices: list[torch.device]) -> tuple[Config, PackMaker, int, TrainStep]:
    """Make both sides."""
    shape = SHAPES[json.loads((run_dir / "shape.json").read_text())]
    config, plan = load_config(run_dir / "config.yaml"), read_plan(run_dir)
    corpus = RandomDocuments(shape)
    schedule = schedule_of(shape, corpus.lengths)
    target = Target(random_model(shape, devices[0]), shape.taps)
    target.cut()
    maker = PackMaker(corpus, schedule, target, config)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if devices[1].type == "cuda" else torch.float32
    drafter, head = random_drafter(config, plan, devices[1]), random_head(plan, dtype, devices[1])
    pack = allocate_pack(SlotSpec.from_json(plan["slot_spec"]), devices[1])
    step = TrainStep(
        drafter, head, pack, config.anchors, config.loss, config.optimizer, schedule.num_packs, 0, dtype=dtype
    )
    return config, maker, schedule.num_packs, step


def measure(run_dir: Path, devices: list[torch.device], warm_up_s: float, seconds: float) -> dict[str, float]:
    """Run both threads; returns the rate between the first and the last pack trained in the measured time."""
    if devices[1].type == "cuda":
        torch.cuda.set_device(devices[1])
    _, maker, num_packs, step = prepare(run_dir, devices)
    run = as_before(step) if devices[1].type == "cuda" else step.run
    packs: queue.Queue[Any] = queue.Queue(QUEUE_PACKS)
    trained: list[tuple[float, int]] = []
    ended = threading.Event()
    wait_for(run_dir / "gate.threads")
    threads = [
        threading.Thread(target=produce, args=(maker, num_packs, packs, ended)),
        threading.Thread(target=consume, args=(step, run, packs, trained)),
    ]
    for thread in threads:
        thread.start()
    while len(trained) < 2:  # the first step compiles
        time.sleep(0.05)
    time.sleep(warm_up_s)
    first = len(trained) - 1
    time.sleep(seconds)
    last = len(trained) - 1
    waiting = packs.qsize()
    ended.set()
    threads[0].join()
    packs.put(None)
    threads[1].join()
    tokens = sum(num for _, num in trained[first + 1 : last + 1])
    return {"tokens_per_s": tokens / (trained[last][0] - trained[first][0]), "queued_at_end": waiting}


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--devices", nargs=2, type=torch.device, required=True)
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    result = measure(arguments.run_dir, arguments.devices, arguments.warm_up, arguments.seconds)
    (arguments.run_dir / "threads.json").write_text(json.dumps(result))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
