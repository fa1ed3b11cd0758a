"""How fast is a whole run, started as a user starts it? Any configuration; made for configs/eight_gpus_*.yaml.

    python -m benchmarks.whole_run CONFIG [--set ...] [--seconds 90] [--disturb restart target drafter] --out DIR

Writes random documents (log-normal, median 600 tokens, up to 8192), runs `launch.py CONFIG`, and when the ring has
settled counts what the drafters released. The clock: counters of all rings, asked once a second through `launch.py`'s
own status, from the first to the last answer; times the mean of valid tokens per pack. `--disturb`: then, in the given
order, `restart drafter`, kill -9 of a target, kill -9 of the last drafter; nothing may be lost. The run is stopped
gracefully, and its last checkpoint has to hold each pack once.

Ctrl-C and SIGTERM stop the run and write what was measured so far. A run that fails is named with its last lines;
the exit code is then the launcher's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pipeline_plot import rate
from configs.load import load_config
from configs.run_files import from_ranges, read_plan
from configs.schema import Config
from ops import commands
from ops.errors import OpsError
from ops.gpu import read_gpus
from ops.run import run_folder
from ops.run_folder import last_lines

READY_LIMIT_S = 400.0
SETTLE_S = 5.0
STOP_LIMIT_S = 180.0
DOCUMENTS, MEDIAN, SIGMA, LONGEST = 4000, 600, 1.0, 8192


def write_documents(path: Path, count: int = DOCUMENTS, median: int = MEDIAN) -> None:
    """Write random texts with log-normal lengths; a byte is a token of the byte-level tokenizer. Always the same."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz     .,"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(count):
            length = min(LONGEST, max(16, int(generator.lognormvariate(0.0, SIGMA) * median)))
            file.write(json.dumps({"text": "".join(generator.choices(letters, k=length - 2))}) + "\n")


class RunFailed(Exception):
    """The run ended, or did not get where it should in time."""


class Watched:
    """A run under way: its launcher, its folder, and what was seen of it."""

    def __init__(self, config: Config, process: subprocess.Popen[bytes]) -> None:
        self.config, self.process, self.folder = config, process, run_folder(config)
        self.began = time.monotonic()
        self.samples: list[dict[str, Any]] = []

    def wait_until(self, what: Callable[[dict[str, Any]], bool], limit_s: float = READY_LIMIT_S) -> None:
        """Wait for a state of the run; raises RunFailed if it ends before."""
        give_up = time.monotonic() + limit_s
        while not what(self._status()):
            if (code := self.process.poll()) is not None:
                raise RunFailed(f"the run ended with code {code}")
            if time.monotonic() > give_up:
                raise RunFailed(f"the run did not get there within {limit_s:g} s")
            time.sleep(0.2)

    def _status(self) -> dict[str, Any]:
        """The run's status; empty while its launcher begins, ends, or is too busy to answer."""
        with contextlib.suppress(OpsError):
            if self.folder.exists():
                return commands.status(self.folder)
        return {"processes": [], "rings": []}

    def stop(self) -> None:
        """Stop the run gracefully, if it still goes on; at once at a second Ctrl-C or SIGTERM, or after a while."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_LIMIT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.kill()  # its processes notice, and leave
            self.process.wait()

    def sample(self) -> None:
        """Note counters, occupancy, shares of waiting and use of the machine at this moment."""
        status = commands.status(self.folder)
        rings, processes = status["rings"], status["processes"]
        self.samples.append(
            {
                "at_s": time.monotonic() - self.began,
                "published": sum(ring["published"] for ring in rings),
                "released": sum(ring["released"] for ring in rings),
                "occupancy": sum(ring["occupancy"] for ring in rings),
                "starved_pct": [each["starved_pct"] for each in processes if "starved_pct" in each],
                "blocked_pct": [each["blocked_pct"] for each in processes if "blocked_pct" in each],
                "peers_pct": [each["peers_pct"] for each in processes if "peers_pct" in each],
                "gpus": read_gpus(),
                "host_available_bytes": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            }
        )

    def watch(self, seconds: float) -> list[dict[str, Any]]:
        """Sample once a second for a while; returns those samples."""
        first = len(self.samples)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.sample()
            time.sleep(1.0)
        self.sample()
        return self.samples[first:]


def mean(samples: list[dict[str, Any]], name: str) -> float | None:
    """Mean over time and processes of a list of numbers in each sample."""
    values = [value for sample in samples for value in sample[name] if value is not None]
    return sum(values) / len(values) if values else None


def measure(watched: Watched, seconds: float) -> dict[str, Any]:
    """Count what is released while nothing disturbs."""
    watched.wait_until(lambda status: sum(ring["released"] for ring in status["rings"]) > 2 * _num(status, "drafter"))
    time.sleep(SETTLE_S)
    samples = watched.watch(seconds)
    plan = read_plan(watched.folder)
    tokens_per_pack = plan["pack_fill"] * watched.config.pack.tokens
    first, last = samples[0], samples[-1]
    passed_s = last["at_s"] - first["at_s"]
    released = last["released"] - first["released"]
    slot_bytes = _slot_bytes(watched.folder)
    return {
        "seconds": passed_s,
        "tokens_per_s": released * tokens_per_pack / passed_s,
        "target_tokens_per_s": (last["published"] - first["published"]) * tokens_per_pack / passed_s,
        "starved_pct": mean(samples, "starved_pct"),
        "blocked_pct": mean(samples, "blocked_pct"),
        "peers_pct": mean(samples, "peers_pct"),
        "gpu_use_pct": _by_gpu(samples),
        "host_copies_gb_per_s": (last["published"] - first["published"] + released) * slot_bytes / passed_s / 1e9,
        "occupancy": [sample["occupancy"] for sample in samples],
        "tokens_per_pack": tokens_per_pack,
    }


def disturb(watched: Watched, what: str) -> float:
    """Restart the drafters, or kill -9 the last process of a side; returns the seconds until packs flow again."""
    began = time.monotonic()
    if what == "restart":
        commands.restart(watched.folder, "drafter", [], READY_LIMIT_S)
    else:
        processes = commands.status(watched.folder)["processes"]
        victim = [each for each in processes if each["role"] == what][-1]
        os.kill(victim["pid"], signal.SIGKILL)
        watched.wait_until(lambda status: _process(status, victim["name"]).get("state") == "restarting", 30)
        watched.wait_until(lambda status: _process(status, victim["name"]).get("state") == "running")
    _flows_again(watched)
    watched.sample()
    return time.monotonic() - began


def _flows_again(watched: Watched) -> None:
    before = sum(ring["released"] for ring in commands.status(watched.folder)["rings"])
    watched.wait_until(lambda status: sum(ring["released"] for ring in status["rings"]) > before + 4)


def check_records(folder: Path) -> dict[str, Any]:
    """Compare the last checkpoint with the journals: packs of the last life are in it, each once."""
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    meta = json.loads((newest / "checkpoint.json").read_text())
    trained = from_ranges(meta["trained"])
    lines = [json.loads(line) for path in folder.glob("journal.*.jsonl") for line in path.read_text().splitlines()]
    last_life = [line["pack_id"] for line in lines if line["generation"] == meta["generation"]]
    return {
        "packs_in_the_weights": len(trained),
        "packs_of_the_last_life": len(last_life),
        "twice_in_the_last_life": len(last_life) - len(set(last_life)),
        "begun_but_not_in_the_weights": len(set(last_life) - trained),
    }


def _num(status: dict[str, Any], role: str) -> int:
    return sum(process["role"] == role for process in status["processes"])


def _process(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next((process for process in status["processes"] if process["name"] == name), {})


def _slot_bytes(folder: Path) -> int:
    from shm_ring import SlotSpec

    return SlotSpec.from_json(read_plan(folder)["slot_spec"]).slot_bytes


def _by_gpu(samples: list[dict[str, Any]]) -> dict[str, float]:
    uses: dict[str, list[float]] = {}
    for sample in samples:
        for gpu in sample["gpus"]:
            if gpu["use_pct"] is not None:
                uses.setdefault(str(gpu["index"]), []).append(gpu["use_pct"])
    return {index: sum(values) / len(values) for index, values in uses.items()}


def draw(watched: Watched, result: dict[str, Any], path: Path) -> None:
    """Draw rate and occupancy over time, disturbances included."""
    from importlib import import_module

    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, (rates, slots) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 1))
    at_s = [sample["at_s"] for sample in watched.samples]
    tokens = [sample["released"] * result["tokens_per_pack"] for sample in watched.samples]
    rates.plot(at_s, [each / 1e3 for each in rate(at_s, tokens)])
    rates.set(ylabel="thousand tokens/s, over 4 s", ylim=(0, None), title=watched.config.run.name)
    slots.step(at_s, [sample["occupancy"] for sample in watched.samples], where="post")
    slots.set(xlabel="s", ylabel="occupancy (slots)", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _write(file: Path, result: dict[str, Any]) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    """Run, measure, disturb, stop, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--disturb", nargs="*", choices=("restart", "target", "drafter"), default=[])
    parser.add_argument("--only-write", action="store_true", help="write the documents and leave, for a dry run")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--median", type=int, default=MEDIAN)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = load_config(arguments.config, arguments.set)
    write_documents(Path(config.data.sources[0].path), arguments.documents, arguments.median)
    if arguments.only_write:
        return 0
    command = [
        sys.executable,
        "launch.py",
        arguments.config,
        *(word for each in arguments.set for word in ("--set", each)),
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is below "finally" is done
    said = arguments.out / "launch.log"
    with said.open("wb") as log:  # a session of its own: the terminal's Ctrl-C is passed on by stop(), once
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    watched = Watched(config, process)
    result: dict[str, Any] = {"run": config.run.name, "targets": len(config.target.devices)}
    result["drafters"] = len(config.training.devices)
    file = arguments.results or arguments.out / f"{config.run.name}.json"
    try:
        _measure_all(watched, arguments, result, file)
    except KeyboardInterrupt:
        result["failed"] = "interrupted"
        return 130
    except (RunFailed, OpsError) as error:
        result["failed"], code = str(error), process.poll()
        watched.stop()
        lines = "\n".join(f"    {line}" for line in last_lines(said))
        print(f"{error}; the last lines of {said}:\n{lines}", file=sys.stderr)
        return code if code is not None and code > 0 else 4
    finally:
        watched.stop()
        _write(file, result)
    print(json.dumps({key: value for key, value in result.items() if key != "occupancy"}))
    return 0


def _measure_all(watched: Watched, arguments: argparse.Namespace, result: dict[str, Any], file: Path) -> None:
    """Measure, disturb, stop and check; `result` has at each moment what is known."""
    result |= measure(watched, arguments.seconds)
    result["back_after_s"] = {}
    for what in arguments.disturb:
        _write(file, result)  # the time may run out
        result["back_after_s"][what] = round(disturb(watched, what), 1)
    _write(file, result)
    watched.stop()
    result["records"] = check_records(watched.folder)
    draw(watched, result, arguments.out / f"{watched.config.run.name}.png")


if __name__ == "__main__":
    raise SystemExit(main())
