"""What do several drafter ranks gain? One process per GPU; each alone, then all with their gradients added up.

    python -m benchmarks.scaling --out DIR --results benchmarks/results/scaling_HARDWARE_DATE.json     on two GPUs
    python -m benchmarks.scaling --shapes 8b --try all --out DIR --results FILE            ways to add up, compared
    python -m benchmarks.scaling --quick --out DIR                                                   on a CPU, gloo

Settings (scaling_settings.py): `during` adds up each product's gradient as soon as it is written, beside the rest of
the backward pass (what training runs), `after` all of them in one piece behind it. Each is measured RUNS times, STEPS
steps by turns with `alone`, the same captured step without any reduction, on all ranks at the same time: so the chips
are as warm in the baseline. The clock: the host's, over steps that end with all of the GPU's work; medians, and all
runs. The pack is random and already on the device (drafter_step.py has the sizes).

    scaling              ranks x (mean over ranks of a rank's rate alone)^-1 / (time of a step together): how many
                         average cards the ranks together are worth
    scaling_to_slower    ranks x (the slowest rank's time alone) / (time of a step together): ranks go in step, so no
                         reduction can do better than `ranks` here, and what is missing is its cost alone

Cards of one host differ: each rank's time alone, clock and power are in the results. Checked in the same run: reduced
gradients are the sum of each rank's own, and all ranks hold the same weights after steps from the same state. A setting
that fails or hangs is recorded as such and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.drafter_step import SIZES, Size, memory, shape_of
from benchmarks.gpu_clocks import Clocks
from benchmarks.scaling_settings import SETTINGS, USUAL, Setting, reduction_of
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer.capture import captured, prepare
from consumer.copy_engines import symmetric_zeros
from consumer.distributed import Place, Ranks
from consumer.drafter import Drafter
from consumer.flat import MakeZeros
from consumer.frozen_head import random_head
from consumer.staging import PackTensors
from consumer.step import TrainStep
from ops.hosts import free_port

RUNS, STEPS, WARM_UP = 5, 5, 1
QUICK = Size(64, 128, 8, 256, 128, 8)
LIMIT_S, START_S, SETTING_S = 400, 150, 90
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # no multicast, whatever is tried
FOUND = "found.jsonl"


def make_step(
    size: Size, rank: int, device: torch.device, dtype: torch.dtype, make_grads: MakeZeros = torch.zeros
) -> TrainStep:
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
    return TrainStep(drafter, head, pack, anchors, loss, OptimizerConfig(), 1000, 0, dtype=dtype, make_grads=make_grads)


def scalings(alone_ms: Sequence[float], together_ms: float) -> dict[str, float]:
    """Both scalings (see above) from each rank's time alone and the time of a step together."""
    ranks = len(alone_ms)
    mean_rate = statistics.mean(1 / each for each in alone_ms)
    return {
        "scaling": ranks / mean_rate / together_ms,
        "scaling_to_slower": ranks * max(alone_ms) / together_ms,
    }


class Bench:
    """One rank at one size: the step, and the program of a step alone."""

    def __init__(
        self, shape: str, size: Size, ranks: Ranks, device: torch.device, tune: bool, make_grads: MakeZeros
    ) -> None:
        self.shape, self.size, self.ranks, self.device = shape, size, ranks, device
        self.num_runs, self.num_steps = (RUNS, STEPS) if size is not QUICK else (2, 1)
        self.on_gpu = device.type == "cuda"
        self.step = make_step(size, ranks.rank, device, torch.bfloat16 if self.on_gpu else torch.float32, make_grads)
        self.said: list[str] = []
        began = time.perf_counter()
        self.replays = prepare(self.step, True, True, self.said.append, tune=tune) if self.on_gpu else False
        self.prepare_s = time.perf_counter() - began
        self._captured_alone = self.step.execute

    def alone(self) -> None:
        """Do a step without any reduction."""
        self.step.reduction = None
        self._captured_alone()

    def measure(self, name: str, setting: Setting) -> dict[str, Any]:
        """Measure one setting; the same dictionary on every rank but for what each rank alone knows."""
        step, began = self.step, time.time()
        reduction = reduction_of(setting, step, self.ranks, SETTING_S)
        replay: Callable[[], None] = step.on_device
        if self.on_gpu:
            torch.cuda.empty_cache()
            step.reduction = reduction
            replay = captured(step, step.on_device).replay

        def together() -> None:
            step.reduction = reduction
            replay()

        error = self._gradient_error(together)
        measuring = time.time()
        runs = self._by_turns(together)
        alone_ms = [statistics.median(each["alone_ms"]) for each in runs]
        together_ms = max(statistics.median(each["together_ms"]) for each in runs)
        result: dict[str, Any] = {"shape": self.shape, "setting": name, **setting._asdict()}
        result |= scalings(alone_ms, together_ms)
        result |= {"alone_ms": alone_ms, "together_ms": together_ms, "runs": runs, "measured": [measuring, time.time()]}
        result |= {"gradient_error": error, "weights_differ_by": self._weights_differ_by(together)}
        result |= {"tokens_per_s": self.ranks.world * self.size.tokens / together_ms * 1e3}
        result |= {"prepare_s": round(self.prepare_s, 1), "replays": self.replays, "said": self.said}
        result |= memory() if self.on_gpu else {}
        return result | {"parameters": step.flat.size, "took_s": round(time.time() - began, 1)}

    def _by_turns(self, together: Callable[[], None]) -> list[dict[str, list[float]]]:
        """Milliseconds a step of every run, alone and together by turns; one entry a rank."""
        runs: dict[str, list[float]] = {"alone_ms": [], "together_ms": []}
        for _ in range(self.num_runs):
            runs["alone_ms"].append(self._timed(self.alone))
            runs["together_ms"].append(self._timed(together))
        found: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(found, runs)
        return found

    def _timed(self, run: Callable[[], None]) -> float:
        """Milliseconds a step by the host's clock; all ranks begin together."""
        for _ in range(WARM_UP):
            run()
        _synchronize()
        self.ranks.barrier()
        began = time.perf_counter()
        for _ in range(self.num_steps):
            run()
        _synchronize()
        return round((time.perf_counter() - began) * 1e3 / self.num_steps, 3)

    def _gradient_error(self, together: Callable[[], None]) -> float:
        """Relative difference of the reduced gradients from the sum of each rank's own; the state stays as it is."""
        step, group = self.step, self.ranks.device_group
        step.armed.zero_()
        step.reduction = None
        step.on_device()
        expected = step.flat.grads.float()
        dist.all_reduce(expected, group=group)
        together()
        step.armed.fill_(1.0)
        found = step.flat.grads.float()
        return float((found - expected).norm() / expected.norm())

    def _weights_differ_by(self, together: Callable[[], None]) -> float:
        """Largest difference between ranks after steps together from the same state."""
        self.ranks.share(self.step.shared_state())
        self.step.adopt()
        for _ in range(2):
            together()
        highest, lowest = (self.step.flat.masters.clone() for _ in range(2))
        _reduce(highest, dist.ReduceOp.MAX, self.ranks)
        _reduce(lowest, dist.ReduceOp.MIN, self.ranks)
        return float((highest - lowest).abs().max())


def _reduce(tensor: Tensor, how: Any, ranks: Ranks) -> None:
    dist.all_reduce(tensor, how, group=ranks.device_group)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure, and end without tearing down graphs that hold collectives, which would wait for each other."""
    code = 0
    try:
        measure_all(arguments)
    except Exception:  # whatever a setting does not like: the starter goes on with the next
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def measure_all(arguments: argparse.Namespace) -> None:
    """Measure each SHAPE/SETTING that this rank is told, and as rank 0 append a line for each."""
    place = Place.read(os.environ)
    on_gpu = torch.cuda.is_available() and not arguments.quick
    device = torch.device("cuda", arguments.device) if on_gpu else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    wanted = [tuple(word.split("/")) for word in arguments.worker]
    copies = any(SETTINGS[name].copies for _, name in wanted) and device.type == "cuda"
    make_grads = symmetric_zeros if copies else torch.zeros
    with Ranks(place, device, timeout_s=START_S) as ranks:
        for shape in dict.fromkeys(shape for shape, _ in wanted):
            size = QUICK if arguments.quick else SIZES[shape]
            bench = Bench(shape, size, ranks, device, arguments.tune, make_grads)
            _append(arguments.out, ranks, "")  # a sign of life
            for name in (name for each, name in wanted if each == shape):
                _append(arguments.out, ranks, json.dumps(bench.measure(name, SETTINGS[name])))
            del bench
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _append(out: Path, ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        with (out / FOUND).open("a") as file:
            file.write(f"{line}\n")


class Starter:
    """Starts the ranks for settings that can share a process, watches them, and goes on after one that fails."""

    def __init__(self, arguments: argparse.Namespace, wanted: list[str]) -> None:
        self._arguments, self._out, self._wanted = arguments, Path(arguments.out), wanted
        self._give_up = time.monotonic() + arguments.limit
        self.failed: dict[str, str] = {}
        (self._out / FOUND).write_text("")

    def run(self) -> None:
        """Measure everything that is wanted, as far as time allows."""
        while (pending := self._pending()) and time.monotonic() < self._give_up:
            kind = _process_of(pending[0])
            batch = [word for word in pending if _process_of(word) == kind]
            said = self._start(batch, *kind)
            left = [word for word in batch if word in self._pending()]
            if left:
                self.failed[left[0]] = said
        self.failed |= dict.fromkeys(self._pending(), "no time was left")

    def found(self) -> list[dict[str, Any]]:
        """What has been measured, in the order that it was asked for."""
        lines = [json.loads(line) for line in (self._out / FOUND).read_text().splitlines() if line]
        return sorted(lines, key=lambda line: self._wanted.index(f"{line['shape']}/{line['setting']}"))

    def _pending(self) -> list[str]:
        done = {f"{line['shape']}/{line['setting']}" for line in self.found()} | set(self.failed)
        return [word for word in self._wanted if word not in done]

    def _start(self, batch: list[str], copies: bool, environment: tuple[tuple[str, str], ...]) -> str:
        """Run one process a rank until they end, fail or stand still; returns the end of what they said."""
        arguments = self._arguments
        port = str(free_port("127.0.0.1"))
        shared = {"WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "DFLASH_RENDEZVOUS_S": "120"}
        shared |= {name: os.environ.get(name, value) for name, value in SAFE.items()} | dict(environment)
        flags = [flag for flag in ("--quick", "--tune") if getattr(arguments, flag[2:])]
        workers, logs = [], [self._out / f"rank{rank}.log" for rank in range(arguments.ranks)]
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            place |= {} if copies or arguments.quick else {"CUDA_VISIBLE_DEVICES": str(rank)}  # as the launcher does
            command = [sys.executable, "-m", "benchmarks.scaling", "--out", str(self._out), *flags, "--worker", *batch]
            command += ["--device", str(rank if copies else 0)]
            with log.open("ab") as file:
                file.write(f"--- {' '.join(batch)}\n".encode())
                started = subprocess.Popen(
                    command, env=os.environ | shared | place, stdout=file, stderr=subprocess.STDOUT
                )
            workers.append(started)
        self._watch(workers)
        return "\n".join(f"rank {rank}: {log.read_text(errors='replace')[-1500:]}" for rank, log in enumerate(logs))

    def _watch(self, workers: list[subprocess.Popen[bytes]]) -> None:
        size, patience = 0, time.monotonic() + START_S
        while any(worker.poll() is None for worker in workers):
            if (now_size := (self._out / FOUND).stat().st_size) != size:
                size, patience = now_size, time.monotonic() + SETTING_S
            failed = any(worker.poll() not in (None, 0) for worker in workers)
            if failed or time.monotonic() > min(patience, self._give_up):
                time.sleep(1.0 if failed else 0)  # the other ranks' last words
                for worker in workers:
                    worker.kill()
                    worker.wait()
            time.sleep(0.1)


def _process_of(word: str) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """What the processes of a SHAPE/SETTING are started with."""
    setting = SETTINGS[word.split("/")[1]]
    return setting.copies, setting.environment


def main() -> int:
    """Start one process per GPU and collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["27b", "8b"])
    parser.add_argument("--try", dest="settings", nargs="+", choices=[*SETTINGS, "all"], default=list(USUAL))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything; what is left is not done")
    parser.add_argument("--tune", action="store_true", help="measure the algorithms of the products first, as training")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        work(arguments)
    shapes = ["quick"] if arguments.quick else arguments.shapes
    names = list(SETTINGS) if "all" in arguments.settings else list(dict.fromkeys(arguments.settings))
    starter = Starter(arguments, [f"{shape}/{name}" for shape in shapes for name in names])
    with Clocks(arguments.out / "clocks.csv") as clocks:
        starter.run()
        found = [line | {"gpus": clocks.means(*line["measured"])} for line in starter.found()]
    summary = {
        f"{line['shape']}.{key}_{line['setting']}": line[key]
        for line in found
        for key in ("scaling", "scaling_to_slower")
    }
    print(json.dumps(summary | {f"{word} failed": said[-300:] for word, said in starter.failed.items()}, indent=1))
    if arguments.results:
        whole = {"summary": summary, "machine": _machine(), "runs": found, "failed": starter.failed}
        arguments.results.write_text(json.dumps(whole, indent=1) + "\n")
    return int(bool(starter.failed))


def _machine() -> dict[str, Any]:
    found = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return found | {"commit": os.environ.get("COMMIT") or commit or "unknown"}


if __name__ == "__main__":
    raise SystemExit(main())
