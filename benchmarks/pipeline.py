"""How fast is the whole pipeline, and what does each side lose to the other? Real processes, real ring, two GPUs.

    python -m benchmarks.pipeline --out DIR --results benchmarks/results/pipeline_HARDWARE_DATE.json      on two GPUs
    python -m benchmarks.pipeline --quick --out DIR                                                     on a CPU, tiny

One target process and one drafter process (pipeline_sides.py: random weights, random documents), each side alone
first: the target with a reader that drops its packs, the drafter stepping on a pack it has. Then together. Then, with
the 8B shape, the twin in threads (pipeline_threads.py) and both sides on one GPU.
The clock: packs counted in the ring, polled every 10 ms, from the first change of the counter in the measured time to
the last; times the mean of valid tokens per pack. End to end is what the drafter released. Together is measured after
the ring has settled; efficiency is end to end over the slower side alone. blocked_pct and starved_pct are the devices'
idle time, from both sides' own metrics (spent_s); host_* is the waiting of the hosts, which runs ahead of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pipeline_plot import draw
from benchmarks.pipeline_shapes import make_run
from configs.run_files import Trained, write_trained
from ops.rings import Rings
from ops.telemetry import METRICS_FILE
from shm_ring import Reader, Ring, SlotSpec
from shm_ring.errors import RingTimeout

PARTS = ("8b", "27b", "27b_hybrid", "8b_threads", "8b_shared")
POLL_S = 0.01
SETUP_LIMIT_S = 240.0
HYBRID_LIMIT_S = 150.0  # from the start: its kernels tune themselves for long; it must not disturb the others


class Times(NamedTuple):
    """How long each part is measured, in seconds."""

    alone: float
    settle: float
    together: float
    other: float


_WAITS = {"target": "blocked", "drafter": "starved"}
FULL, QUICK = Times(6, 5, 60.5, 20), Times(1, 0.5, 2, 1)


class Sample(NamedTuple):
    """The ring at one moment."""

    at: float
    published: int
    released: int
    occupancy: int
    blocked_s: float
    starved_s: float


class Run:
    """One run folder and its two sides. Rings are made for the first folder of a run name."""

    def __init__(self, root: Path, name: str, shape: str, gpus: Sequence[str], ring_of: Run | None = None) -> None:
        """`gpus`: CUDA ids of target and drafter; empty for the CPU."""
        self.name, self.folder = name, root / name
        self.folders = [self.folder, *([ring_of.folder] if ring_of else [])]
        """Where sides that use its ring write their metrics."""
        self.run_name: str = ring_of.run_name if ring_of else f"bench-{os.getpid()}-{name}"
        self.gpus = gpus
        self.config, self.plan = make_run(self.folder, self.run_name, shape, bool(gpus))
        self.tokens_per_pack = self.plan["pack_fill"] * self.config.pack.tokens
        self.rings: Rings = ring_of.rings if ring_of else self._make_rings()
        self.sides: dict[str, subprocess.Popen[bytes]] = {}

    def _make_rings(self) -> Rings:
        return Rings(self.run_name, SlotSpec.from_json(self.plan["slot_spec"]), 1, self.config.ring.num_slots)

    @property
    def ring(self) -> Ring:
        """The run's only ring."""
        return self.rings.rings[0]

    def start(self, *roles: str) -> None:
        """Start sides; they stop at their first gates."""
        for role in roles:
            module = ["benchmarks.pipeline_sides", role, "--rank", "0"]
            self._spawn(role, module, self.gpus[0 if role == "target" else 1] if self.gpus else "")

    def start_threads(self, seconds: float) -> None:
        """Start the twin; both GPUs are its own."""
        devices = ["cuda:0", "cuda:1"] if self.gpus else ["cpu", "cpu"]
        module = ["benchmarks.pipeline_threads", "--seconds", str(seconds), "--devices", *devices]
        self._spawn("threads", module, ",".join(self.gpus))

    def _spawn(self, role: str, module: list[str], visible: str) -> None:
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": visible,
            "DFLASH_DEVICE": "cuda:0" if visible else "cpu",
            "OMP_NUM_THREADS": "4" if visible else "1",
        }
        command = [sys.executable, "-m", module[0], *module[1:], "--run-dir", str(self.folder)]
        with (self.folder / f"{role}.log").open("ab") as log:
            self.sides[role] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def open(self, gate: str) -> None:
        """Let the side that waits there go on."""
        (self.folder / f"gate.{gate}").touch()

    def wait_for(self, *files: str, limit_s: float = SETUP_LIMIT_S) -> None:
        """Wait until the files are there. Raises RuntimeError with the log's end if a side has ended."""
        give_up = time.monotonic() + limit_s
        while not all((self.folder / file).exists() for file in files):
            self.check()
            if time.monotonic() > give_up:
                raise RuntimeError(f"{self.name}: {files} not reached in {limit_s:g} s")
            time.sleep(POLL_S)
        time.sleep(POLL_S)

    def check(self) -> None:
        """Raise RuntimeError if a side has ended."""
        for role, process in self.sides.items():
            if process.poll() is not None:
                tail = (self.folder / f"{role}.log").read_text()[-1500:]
                raise RuntimeError(f"{self.name}: {role} ended with {process.returncode}:\n{tail}")

    def end(self, *roles: str) -> None:
        """End sides, at once."""
        for role in roles or tuple(self.sides):
            if (process := self.sides.pop(role, None)) is not None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def sample(run: Run, seconds: float, reader: Reader | None = None) -> list[Sample]:
    """Look at the ring for some seconds; `reader`: take and drop every pack meanwhile."""
    samples: list[Sample] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if reader is None:
            time.sleep(POLL_S)
        else:
            try:
                slot = reader.take(timeout_s=POLL_S)
                if slot is not None:
                    reader.release(slot)
            except RingTimeout:
                pass
        snap = run.ring.snapshot()
        samples.append(
            Sample(time.monotonic(), snap.published, snap.released, snap.occupancy, snap.blocked_s, snap.starved_s)
        )
        run.check()
    return samples


def packs_per_s(samples: list[Sample], counter: str) -> float:
    """Packs per second between the first and the last change of a counter; 0 if it changed less than twice."""
    changes = [
        (after.at, getattr(after, counter))
        for before, after in pairwise(samples)
        if getattr(after, counter) != getattr(before, counter)
    ]
    if len(changes) < 2:
        return 0.0
    (began, first), (ended, last) = changes[0], changes[-1]
    return float((last - first) / (ended - began))


def measure_target_alone(run: Run, times: Times) -> dict[str, float]:
    """Let the target produce for a reader that drops everything."""
    if not (run.folder / "trained.json").exists():
        write_trained(run.folder, Trained(0, frozenset()))
    run.open("target")
    with Reader([run.ring], 0, "oldest", 1, None, 0, run.rings.board) as reader:
        while run.ring.snapshot().released < 3:
            sample(run, POLL_S, reader)
        samples = sample(run, times.alone, reader)
    return {"target_alone_tokens_per_s": packs_per_s(samples, "published") * run.tokens_per_pack}


def measure_drafter_alone(run: Run) -> dict[str, float]:
    """Let the drafter step on a pack it has; the target has filled its ring and waits."""
    run.open("alone")
    run.wait_for("alone.json")
    step_s = json.loads((run.folder / "alone.json").read_text())["step_s"]
    return {"drafter_step_s": step_s, "drafter_alone_tokens_per_s": run.tokens_per_pack / step_s}


def measure_together(run: Run, settle_s: float, seconds: float) -> dict[str, Any]:
    """Measure both sides at once, after the ring has settled."""
    sample(run, settle_s)
    began = time.time()
    samples = sample(run, seconds)
    phases = phase_shares(run.folders, began, time.time())
    passed_s = samples[-1].at - samples[0].at
    released, published = (packs_per_s(samples, counter) for counter in ("released", "published"))
    occupancy = sorted(each.occupancy for each in samples)
    alone = run.folder / "alone.json"
    idle = {"drafter_idle_pct": _idle_pct(alone, samples, passed_s)} if alone.exists() else {}
    waiting = {f"{phase}_pct": phases[role][phase] for role, phase in _WAITS.items() if role in phases}
    return (
        idle
        | waiting
        | {
            "phases_pct": phases,
            "seconds": passed_s,
            "packs": samples[-1].released - samples[0].released,
            "tokens_per_s": released * run.tokens_per_pack,
            "target_tokens_per_s": published * run.tokens_per_pack,
            "host_blocked_pct": 100 * (samples[-1].blocked_s - samples[0].blocked_s) / passed_s,
            "host_starved_pct": 100 * (samples[-1].starved_s - samples[0].starved_s) / passed_s,
            "occupancy_median": occupancy[len(occupancy) // 2],
            "series": _series(samples, run.tokens_per_pack),
        }
    )


def _idle_pct(alone: Path, samples: list[Sample], passed_s: float) -> float:
    """Share of the time in which the drafter had no step to do, by what a step takes alone: a check on starved_pct."""
    step_s = float(json.loads(alone.read_text())["step_s"])
    return 100 * max(0.0, 1 - (samples[-1].released - samples[0].released) * step_s / passed_s)


def phase_shares(folders: Sequence[Path], since: float, until: float) -> dict[str, dict[str, float]]:
    """Where the time of each side went between two moments (Unix time), in percent by phase, from its metrics."""
    spent: dict[str, dict[str, float]] = {}
    for path in (folder / METRICS_FILE for folder in folders):
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # a line that is being written
                record = json.loads(line)
                if since < record["time"] <= until:
                    side = spent.setdefault(record["role"], {_WAITS[record["role"]]: 0.0})
                    for phase, seconds in record["spent_s"].items():
                        side[phase] = side.get(phase, 0.0) + seconds
    wholes = {role: sum(side.values()) for role, side in spent.items()}
    return {
        role: {phase: 100 * seconds / wholes[role] for phase, seconds in side.items()}
        for role, side in spent.items()
        if wholes[role] > 0
    }


def _series(samples: list[Sample], tokens_per_pack: float, every_s: float = 0.5) -> dict[str, list[float]]:
    """Occupancy and both counters over time, thinned, for the plot."""
    kept = samples[:1]
    for each in samples:
        if each.at - kept[-1].at >= every_s:
            kept.append(each)
    return {
        "at_s": [round(each.at - kept[0].at, 3) for each in kept],
        "occupancy": [each.occupancy for each in kept],
        "target_tokens": [(each.published - kept[0].published) * tokens_per_pack for each in kept],
        "drafter_tokens": [(each.released - kept[0].released) * tokens_per_pack for each in kept],
    }


@contextmanager
def made(runs: list[Run]) -> Iterator[None]:
    """End everything and remove the rings, whatever happens."""
    try:
        yield
    finally:
        with ExitStack() as stack:
            for rings in {id(run.rings): run.rings for run in runs}.values():
                stack.enter_context(rings)
            for run in runs:
                run.end()


class Benchmark:
    """All measurements; each that fails is reported, and the others go on."""

    def __init__(self, out: Path, quick: bool, only: Sequence[str], gpus: Sequence[str], together_s: float) -> None:
        """`only`: which of PARTS are measured; 27b_hybrid feeds the drafter of 27b, or is measured alone.

        `gpus`: CUDA ids of target and drafter, which may be the same.
        """
        self.out, self.quick, self.only = out, quick, only
        self.times = QUICK if quick else FULL._replace(together=together_s)
        self.gpus = () if quick else tuple(gpus)
        self.results: dict[str, Any] = {}
        self.runs: list[Run] = []
        self.began = time.monotonic()

    def measure(self) -> None:
        """Set up one shape after the other (they measure their matrix products then), and measure them one by one."""
        first, second, hybrid = ("tiny", "tiny", "tiny_hybrid") if self.quick else ("8b", "27b", "27b_hybrid")
        with made(self.runs):
            eight, dense = self._run("8b", first), self._run("27b", second)
            recurrent = self._run("27b_hybrid", hybrid, ring_of=dense)
            twin = self._run("8b_threads", first, ring_of=eight)
            shared = self._run("8b_shared", first, gpus=self.gpus[1:] * 2, ring_of=eight)
            pairs = [run for run in (dense, eight) if run.name in self.only]
            self._try("setup", lambda: self._set_up(pairs, recurrent))
            for run in pairs:
                self._try(run.name, lambda run=run: self._pair(run, self.times.together))
                run.end(*(["target"] if run is dense else []))
                if run is dense:
                    self._try(recurrent.name, lambda: self._hybrid(recurrent))
                    recurrent.end()
                    dense.end()
            if twin.name in self.only:
                twin.start_threads(self.times.other)
            if shared.name in self.only:
                shared.start("target", "drafter")
            self._try(twin.name, lambda: self._twin(twin, shared))
            twin.end()
            self._try(shared.name, lambda: self._pair(shared, self.times.other, alone=False))

    def _run(self, name: str, shape: str, gpus: Sequence[str] | None = None, ring_of: Run | None = None) -> Run:
        run = Run(self.out, name, shape, self.gpus if gpus is None else gpus, ring_of)
        self.runs.append(run)
        return run

    def _try(self, name: str, measure: Any) -> None:
        if name not in (*self.only, "setup"):
            return
        try:
            self._note(name, measure())
        except Exception as error:
            self._note(name, {"failed": str(error) or repr(error)})

    def _note(self, name: str, found: dict[str, Any]) -> None:
        """Add to a part's results, and write everything down at once: the time may run out."""
        self.results.setdefault(name, {}).update(found)
        shown = {key: value for key, value in self.results[name].items() if key != "series"}
        print(f"{time.monotonic() - self.began:.0f} s | {name} | {json.dumps(shown)}", flush=True)
        (self.out / "pipeline_raw.json").write_text(json.dumps(self.results))

    def _set_up(self, pairs: list[Run], recurrent: Run) -> dict[str, Any]:
        """Start all and wait until they are at their gates; a recurrent target that takes too long is ended."""
        for number, run in enumerate(pairs):
            run.start("target", "drafter")
            if number == len(pairs) - 1 and recurrent.name in self.only:
                recurrent.start("target")
            run.wait_for("at.gate.target", "at.gate.alone")
        if not pairs and recurrent.name in self.only:
            recurrent.start("target")
        try:
            if not recurrent.sides:
                return {"seconds": time.monotonic() - self.began}
            recurrent.wait_for("at.gate.target", limit_s=max(0.0, HYBRID_LIMIT_S - (time.monotonic() - self.began)))
        except RuntimeError:
            recurrent.end()
            raise
        return {"seconds": time.monotonic() - self.began}

    def _pair(self, run: Run, seconds: float, alone: bool = True) -> dict[str, Any]:
        if not run.sides:
            raise RuntimeError(f"{run.name}: not started, since setting up failed")
        run.wait_for("at.gate.target", "at.gate.alone")
        result: dict[str, Any] = self.results.setdefault(run.name, {})
        if alone:
            self._note(run.name, measure_target_alone(run, self.times))
            self._note(run.name, measure_drafter_alone(run))
        else:
            run.open("target")
            run.open("alone")
        run.open("drafter")
        run.wait_for("at.gate.drafter")
        self._note(run.name, measure_together(run, self.times.settle, seconds))
        if alone:
            slower = min(result["target_alone_tokens_per_s"], result["drafter_alone_tokens_per_s"])
            result["efficiency"] = result["tokens_per_s"] / slower
        return result

    def _hybrid(self, run: Run) -> dict[str, Any]:
        """Another target feeds the ring of the 27B drafter, with packs that it has not trained; without it, alone."""
        run.wait_for("at.gate.target", limit_s=1.0)
        if "27b" not in self.only:
            return measure_target_alone(run, self.times)
        write_trained(run.folder, Trained(0, frozenset(range(run.plan["num_packs"] // 2))))
        run.open("target")
        return measure_together(run, self.times.settle + self.times.alone / 2, self.times.other)

    def _twin(self, run: Run, shared: Run) -> dict[str, Any]:
        run.wait_for("at.gate.threads")
        if shared.sides:  # its setting up must be over
            shared.wait_for("at.gate.target", "at.gate.alone")
        run.open("threads")
        run.wait_for("threads.json")
        result: dict[str, Any] = json.loads((run.folder / "threads.json").read_text())
        return result


def summary_of(results: dict[str, Any]) -> dict[str, float]:
    """The plain numbers."""
    summary: dict[str, float] = {}
    for name in PARTS:
        for key in ("tokens_per_s", "efficiency", "target_alone_tokens_per_s", "drafter_alone_tokens_per_s"):
            if key in results.get(name, {}):
                summary[f"{name}.{key}"] = results[name][key]
    for key in ("starved_pct", "blocked_pct", "drafter_idle_pct"):
        for name in ("8b", "27b"):
            if key in results.get(name, {}):
                summary[f"{name}.{key}"] = results[name][key]
        if key in results.get("8b", {}):
            summary[key] = results["8b"][key]
    summary = {key.replace("8b_threads.", "8b.threads_twin_"): value for key, value in summary.items()}
    return {key: round(value, 4) for key, value in summary.items()}


def facts() -> dict[str, Any]:
    """What is needed to read the figures."""
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    return {"hardware": gpu, "gpus": torch.cuda.device_count(), "versions": versions} | {
        "commit": os.environ.get("COMMIT") or commit or "unknown"
    }


def main() -> None:
    """Measure, collect, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny shapes on the CPU, a few seconds each")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="measure these parts")
    parser.add_argument(
        "--gpus", nargs=2, default=("0", "1"), metavar="ID", help="GPU of the target and of the drafter"
    )
    parser.add_argument("--together", type=float, default=FULL.together, help="seconds measured with both sides")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(arguments.out, arguments.quick, arguments.only, arguments.gpus, arguments.together)
    benchmark.measure()
    summary = summary_of(benchmark.results)
    print(json.dumps(summary, indent=1))
    if arguments.results is not None:
        text = json.dumps({"summary": summary, **facts(), "runs": benchmark.results}, indent=1)
        arguments.results.write_text(text + "\n")
        draw(benchmark.results, arguments.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
