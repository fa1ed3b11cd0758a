"""How fast does a target read packs, and what does each way of doing it gain? One GPU, no ring, no drafter.

    python -m benchmarks.target_forward --shapes 27b 8b 27b_hybrid --out DIR --results FILE       on one GPU
    python -m benchmarks.target_forward --quick --out DIR                                        on a CPU, tiny

The product's own set-up and PackMaker, random weights and documents (pipeline_shapes.py). WAYS are measured by turns,
ROUNDS times, over the same packs, so that the chip is as warm for each: products by torch.mm or by measured
algorithms, attention of long documents with the others' or apart. The clock: the host's, over forwards that end with
all of the GPU's work; medians, and all rounds; clock and power of the GPU beside. Packs are read once before, so that
nothing is planned or compiled in the measured time. Then one profile: kernel time by kind, share of time with a kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter_step_profile import breakdown
from benchmarks.gpu_clocks import Clocks
from benchmarks.pipeline import facts
from benchmarks.pipeline_shapes import SHAPES, RandomDocuments, Shape, make_run, random_model, schedule_of
from configs.schema import Config
from gpu import products
from producer.packed import BOUNDS
from producer.rows import PackMaker
from producer.setup import make_target
from producer.target import TargetDescription
from producer.trunk import Target

WAYS = {  # name: measured products?, long documents apart?
    "torch.mm, FlashAttention": (False, False),
    "measured products": (True, False),
    "long documents apart": (False, True),
    "both, as runs do it": (True, True),
}
ROUNDS = 3
PACKS = {"27b": 6, "27b_hybrid": 6, "8b": 16}


class Reading:
    """A target that is set up, and the packs it reads."""

    def __init__(self, target: Target, config: Config, shape: Shape, packs: int) -> None:
        self.target, self.config, self.packs = target, config, packs
        self.corpus: Any = RandomDocuments(shape)
        self.schedule = schedule_of(shape, self.corpus.lengths)

    def read(self) -> int:
        """Read the packs; returns their tokens when the GPU is done."""
        maker = PackMaker(self.corpus, self.schedule, self.target, self.config)
        tokens = 0
        for pack_id in range(self.packs):
            maker.add([pack_id])
            for pack in maker.advance():
                tokens += pack.num_tokens
        while len(maker):
            tokens += sum(pack.num_tokens for pack in maker.advance())
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return tokens


@contextlib.contextmanager
def way_of(measured_products: bool, apart: bool) -> Iterator[None]:
    """Read in one of WAYS for a while."""
    long_from = BOUNDS.long_from
    with contextlib.nullcontext() if measured_products else products.set_aside():
        BOUNDS.long_from = long_from if apart else None
        try:
            yield
        finally:
            BOUNDS.long_from = long_from


def measure(reading: Reading, clocks: Clocks) -> dict[str, Any]:
    """Read in all ways by turns; by way: milliseconds a pack of each round, tokens per second, clock and power."""
    took_ms: dict[str, list[float]] = {name: [] for name in WAYS}
    seen: dict[str, list[Any]] = {name: [] for name in WAYS}
    tokens = 0
    for round_ in range(-1, ROUNDS):
        for name, way in WAYS.items():
            with way_of(*way):
                began, at = time.perf_counter(), time.time()
                tokens = reading.read()
                passed_s = time.perf_counter() - began
            if round_ >= 0:  # the first is for planning
                took_ms[name].append(1e3 * passed_s / reading.packs)
                seen[name].append(clocks.means(at, time.time()))
    return {
        name: {
            "ms": round(statistics.median(values), 2),
            "tokens_per_s": round(tokens / reading.packs / statistics.median(values) * 1e3),
            "rounds_ms": [round(value, 2) for value in values],
            "gpu": seen[name],
        }
        for name, values in took_ms.items()
    }


def run_shape(name: str, out: Path, device: torch.device, packs: int, clocks: Clocks) -> dict[str, Any]:
    """Set a target up and measure it."""
    shape = SHAPES[name]
    config, plan = make_run(out / name, f"forward-{name}", name, device.type == "cuda")
    began = time.perf_counter()
    lines: list[str] = []
    log: Any = lambda event, **values: lines.append(f"{event} {values}")  # noqa: E731
    description = TargetDescription.from_dict(plan["target"])
    target = make_target(description, config, device, log, lambda: random_model(shape, device))
    result: dict[str, Any] = {"setup_s": round(time.perf_counter() - began, 1), "log": lines}
    result["long_documents_from"] = BOUNDS.long_from
    reading = Reading(target, config, shape, packs)
    result["ways"] = measure(reading, clocks)
    result["products_ms"] = {key: [round(ms, 4) for ms in pair] for key, pair in products.measured().items()}
    if device.type == "cuda":
        reading.packs = 2
        result["profile"] = breakdown(reading.read, steps=1)
        result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return result


def main() -> int:
    """Measure each shape, and write results down after each: the time may run out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["27b", "8b"], choices=list(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if arguments.quick else arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # products and their workspace are made on the current device
    shapes = ["tiny", "tiny_hybrid"] if arguments.quick else arguments.shapes
    found: dict[str, Any] = {}
    with Clocks(arguments.out / "clocks.csv") as clocks:
        for name in shapes:
            found[name] = run_shape(name, arguments.out, device, PACKS.get(name, 2), clocks)
            products.forget()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            text = json.dumps({**facts(), "shapes": found}, indent=1)
            (arguments.results or arguments.out / "target_forward.json").write_text(text + "\n")
            for way, values in found[name]["ways"].items():
                print(f"{name} | {way} | {values['ms']} ms a pack | {values['tokens_per_s']:,} tokens/s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
