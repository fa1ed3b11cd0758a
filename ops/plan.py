"""What a configuration would run, and whether it can: `python launch.py plan CONFIG`. Nothing is loaded.

Refuses, in one line with its exit code, what cannot work: a device or a data file that is not there, a GPU or a
/dev/shm too small.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from configs.cores import usable_cores
from configs.facts import Facts
from configs.load import ConfigError, require_sources
from configs.schema import Config
from ops.devices import Map, find_gpus, missing_gpus, place, with_missing
from ops.errors import NoResource
from ops.gpu import read_gpus
from ops.paths import TARGET
from shm_ring.handover import ROOM_SHARE
from shm_ring.layout import ring_bytes, slot_stride

CONTEXT_BYTES = 1.5e9
"""What a process costs on a GPU before its first tensor, with the libraries' workspaces."""

FindFacts = Callable[[Config, bool], Facts]
"""Configuration, whether the target runs on a GPU -> facts (evaluation/facts.py, which may load libraries)."""


class Machine(NamedTuple):
    """What there is to run on. GPU ids as CUDA takes them; bytes of each GPU (0: not known), and free in /dev/shm.

    `disk_free_bytes`: where the run's folder would be; None: not known.
    """

    gpus: list[str]
    gpu_bytes: list[int]
    shm_free_bytes: int
    cores: int
    disk_free_bytes: int | None = None


def this_machine(folder: Path) -> Machine:
    """Look at this machine; GPU memory is known where nvidia-ml-py is installed. `folder`: where runs are kept."""
    shm = os.statvfs("/dev/shm")
    gpus, found = find_gpus(), {str(gpu["index"]): int(gpu["memory_total_bytes"]) for gpu in read_gpus()}
    sizes = [found.get(gpu, 0) for gpu in gpus]
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    disk = shutil.disk_usage(there).free
    return Machine(gpus, sizes, shm.f_bavail * shm.f_frsize, usable_cores(), disk)


def plan(config: Config, find_facts: FindFacts, machine: Machine | None = None) -> list[str]:
    """Word the plan of a configuration. Raises ConfigError, NoResource, and what `find_facts` raises.

    GPUs that are not here are planned with all the same, and a warning: it may run on another machine.
    """
    require_sources(config)
    machine = machine or this_machine(Path(config.run.folder))
    elsewhere = missing_gpus(config, machine.gpus)
    if elsewhere:
        gpus = with_missing(config, machine.gpus)
        machine = machine._replace(gpus=gpus, gpu_bytes=machine.gpu_bytes + [0] * (len(gpus) - len(machine.gpus)))
    places = place(config, machine.gpus, machine.cores)
    missing = [path for source in config.data.sources if (path := _missing(source.path))]
    if missing:
        raise ConfigError([f"data.sources: no such file or folder: {path}" for path in missing])
    facts = find_facts(config, places.of(TARGET)[0].gpu is not None)
    rings = _rings(config, facts.slot_bytes, machine)
    if rings.fault and not elsewhere:
        raise NoResource(rings.fault)
    saved = _checkpoints(config, facts.checkpoint_bytes, machine, rings.num_bytes)
    warnings = [f"{elsewhere}; planned for a machine that has them, a run here is refused"] if elsewhere else []
    warnings += [*filter(None, [rings.fault, *saved[1]]), *places.warnings, *facts.warnings]
    return [
        *facts.target_lines,
        *_device_lines(places),
        rings.line,
        *saved[0],
        *facts.drafter_lines,
        *_memory_lines(places, machine, facts),
        *(f"warning: {line}" for line in warnings),
    ]


def _missing(path: str) -> str:
    """The path of a source that names a file or folder and finds none; else nothing."""
    is_named = path.startswith(("package:", "dataset:"))
    return "" if is_named or Path(path).expanduser().exists() else path


def _device_lines(places: Map) -> list[str]:
    return ["devices:", *(f"  {line.line}" for line in places.placements)]


class _Rings(NamedTuple):
    """What the rings take, and what is wrong with that, if anything."""

    line: str
    num_bytes: int
    fault: str


def _rings(config: Config, slot_bytes: int, machine: Machine) -> _Rings:
    """Count the rings' shared memory: their slots begin at multiples of 2 MiB."""
    num_rings, slots = len(config.target.devices), config.ring.num_slots
    needed, free = num_rings * ring_bytes(slots, slot_bytes), machine.shm_free_bytes
    fault = (
        f"ring: {num_rings} ring(s) of {slots} slots need {_size(needed)} of /dev/shm, {_size(free)} "
        "are free; lower ring.num_slots or pack.tokens, or give the container more (--shm-size)"
    )
    line = (
        f"ring: {num_rings} of {slots} slots of {slot_stride(slot_bytes) / 1e6:.1f} MB ({config.pack.tokens} tokens), "
        f"{_size(needed)} of {_size(free)} free in /dev/shm"
    )
    return _Rings(line, needed, fault if needed > free else "")


def _checkpoints(config: Config, each: int, machine: Machine, rings_bytes: int) -> tuple[list[str], list[str]]:
    """Word what checkpoints take in memory and on disk, and what is too much of it: no run is refused for that.

    On disk: those that are kept, the initial one, and twice one's size must be free to write another.
    """
    keep, free = config.checkpoint.keep, machine.disk_free_bytes
    most = (keep + 1 + 2) * each
    where = f"of {_size(free)} free" if free is not None else "(free: not known)"
    lines = [f"checkpoints: {_size(each)} each; on disk up to {_size(most)} {where} in {config.run.folder} "
             f"(checkpoint.keep {keep}, the initial one, and twice the size while one is written)"]  # fmt: skip
    faults = []
    if free is not None and most > free:
        faults.append(
            f"checkpoints: up to {_size(most)} are needed in {config.run.folder}, {_size(free)} are free: one that "
            "does not fit is not written; lower checkpoint.keep, or set run.folder elsewhere"
        )
    if config.checkpoint.handover:
        lines.append(f"  {_size(each)} of /dev/shm beside the rings: the copy that is written, or handed to a restart")
        if each > ROOM_SHARE * (machine.shm_free_bytes - rings_bytes):
            faults.append(
                f"checkpoints: the rings leave {_size(max(0, machine.shm_free_bytes - rings_bytes))} of /dev/shm, "
                f"{_size(each)} do not fit: copies are made in other memory, and a restart of the drafter goes "
                "through the disk"
            )
    return lines, faults


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
                f"GPU {gpu}: {who} need about {_size(need)} (target {_size(facts.target_bytes)}, {facts.step_line}), "
                f"it has {_size(known[gpu])}; use another GPU, more of them, fewer anchors (anchors.num or sizes) or "
                "a smaller pack.tokens"
            )
        lines.append(f"  GPU {gpu}: {_size(need)}" + (f" of {_size(known[gpu])}" if gpu in known else ""))
    return [
        f"memory: target about {_size(facts.target_bytes)}; {facts.step_line}",
        *(lines or ["  on the CPU: not checked"]),
    ]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
