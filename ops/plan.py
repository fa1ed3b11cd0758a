"""What a configuration would run, and whether it can: `python launch.py plan CONFIG`. Nothing is loaded.

Refuses, in one line with its exit code, what cannot work: a device or a data file that is not there, a GPU or a
/dev/shm too small.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from configs.facts import Facts
from configs.load import ConfigError
from configs.schema import Config
from ops.devices import Map, find_gpus, place
from ops.errors import NoResource
from ops.gpu import read_gpus
from ops.paths import TARGET
from shm_ring.layout import DATA_OFFSET, slot_stride

CONTEXT_BYTES = 1.5e9
"""What a process costs on a GPU before its first tensor, with the libraries' workspaces."""

FindFacts = Callable[[Config, bool], Facts]
"""Configuration, whether the target runs on a GPU -> facts (evaluation/facts.py, which may load libraries)."""


class Machine(NamedTuple):
    """What there is to run on. GPU ids as CUDA takes them; bytes of each GPU (0: not known), and free in /dev/shm."""

    gpus: list[str]
    gpu_bytes: list[int]
    shm_free_bytes: int
    cores: int


def this_machine() -> Machine:
    """Look at this machine; GPU memory is known where nvidia-ml-py is installed."""
    shm = os.statvfs("/dev/shm")
    gpus, found = find_gpus(), {str(gpu["index"]): int(gpu["memory_total_bytes"]) for gpu in read_gpus()}
    sizes = [found.get(gpu, 0) for gpu in gpus]
    return Machine(gpus, sizes, shm.f_bavail * shm.f_frsize, len(os.sched_getaffinity(0)))


def plan(config: Config, find_facts: FindFacts, machine: Machine | None = None) -> list[str]:
    """Word the plan of a configuration. Raises ConfigError, NoResource, and what `find_facts` raises."""
    machine = machine or this_machine()
    places = place(config, machine.gpus, machine.cores)
    missing = [path for source in config.data.sources if (path := _missing(source.path))]
    if missing:
        raise ConfigError([f"data.sources: no such file or folder: {path}" for path in missing])
    facts = find_facts(config, places.of(TARGET)[0].gpu is not None)
    return [
        *facts.target_lines,
        *_device_lines(places),
        *_ring_lines(config, facts.slot_bytes, machine),
        *facts.drafter_lines,
        *_memory_lines(places, machine, facts),
        *(f"warning: {line}" for line in [*places.warnings, *facts.warnings]),
    ]


def _missing(path: str) -> str:
    """The path of a source that names a file or folder and finds none; else nothing."""
    is_named = path.startswith(("package:", "dataset:"))
    return "" if is_named or Path(path).expanduser().exists() else path


def _device_lines(places: Map) -> list[str]:
    return ["devices:", *(f"  {line.line}" for line in places.placements)]


def _ring_lines(config: Config, slot_bytes: int, machine: Machine) -> list[str]:
    """Word the rings. Raises NoResource if /dev/shm has less free than they take."""
    num_rings, slots = len(config.target.devices), config.ring.num_slots
    needed = num_rings * (DATA_OFFSET + slots * slot_stride(slot_bytes))
    if needed > machine.shm_free_bytes:
        raise NoResource(
            f"ring: {num_rings} ring(s) of {slots} slots need {_gb(needed)} of /dev/shm, {_gb(machine.shm_free_bytes)} "
            "are free; lower ring.num_slots or pack.tokens, or give the container more (--shm-size)"
        )
    return [
        f"ring: {num_rings} of {slots} slots of {slot_bytes / 1e6:.1f} MB ({config.pack.tokens} tokens), "
        f"{_gb(needed)} of {_gb(machine.shm_free_bytes)} free in /dev/shm"
    ]


def _memory_lines(places: Map, machine: Machine, facts: Facts) -> list[str]:
    """Word what each process takes, and add it up per GPU. Raises NoResource for a GPU that is too small."""
    needs: dict[str, float] = defaultdict(float)
    for one in places.placements:
        whole = facts.target_bytes if one.role == TARGET else facts.step_bytes
        for gpu in one.gpus:
            needs[gpu] += CONTEXT_BYTES + whole / len(one.gpus)
    known = {gpu: total for gpu, total in zip(machine.gpus, machine.gpu_bytes, strict=True) if total}
    lines = []
    for gpu, need in needs.items():
        if gpu in known and need > known[gpu]:
            who = ", ".join(one.name for one in places.placements if gpu in one.gpus)
            raise NoResource(
                f"GPU {gpu}: {who} need about {_gb(need)} (target {_gb(facts.target_bytes)}, {facts.step_line}), "
                f"it has {_gb(known[gpu])}; use another GPU, more of them, fewer anchors (anchors.num or sizes) or "
                "a smaller pack.tokens"
            )
        lines.append(f"  GPU {gpu}: {_gb(need)}" + (f" of {_gb(known[gpu])}" if gpu in known else ""))
    return [
        f"memory: target about {_gb(facts.target_bytes)}; {facts.step_line}",
        *(lines or ["  on the CPU: not checked"]),
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
