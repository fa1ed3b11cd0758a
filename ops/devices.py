"""Which process runs where: one placement per producer and consumer, each seeing exactly its device.

GPUs are counted without torch or CUDA, so that nothing is initialised in the launcher. A process is given one GPU by
CUDA_VISIBLE_DEVICES and calls it cuda:0 (DFLASH_DEVICE); a target that does not fit is given several ("cuda:0+1"); a
CPU process sees none.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from configs.load import ConfigError
from configs.schema import Config
from ops.paths import DRAFTER, TARGET, label

_SMI_TIMEOUT_S = 20
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-.+")
_CUDA = re.compile(r"cuda:[0-9]{1,4}(\+[0-9]{1,4})*")


@dataclass(frozen=True)
class Placement:
    """One process of the run and its place. `gpu` is what CUDA_VISIBLE_DEVICES gets ("0", "0,1"), None on the CPU."""

    role: str
    rank: int
    gpu: str | None
    threads: int

    @property
    def name(self) -> str:
        """target0, drafter1, ..."""
        return label(self.role, self.rank)

    @property
    def gpus(self) -> list[str]:
        """Ids of its GPUs."""
        return self.gpu.split(",") if self.gpu else []

    @property
    def environment(self) -> dict[str, str]:
        """Variables that pin the process to its place."""
        return {
            "CUDA_VISIBLE_DEVICES": self.gpu or "",
            "DFLASH_DEVICE": "cpu" if self.gpu is None else "cuda:0",
            "OMP_NUM_THREADS": str(self.threads),
        }

    @property
    def line(self) -> str:
        """One line of the printed map."""
        return f"{self.name}: {'cpu' if self.gpu is None else f'GPU {self.gpu}'}, {self.threads} threads"


@dataclass(frozen=True)
class Map:
    """All placements of a run, and what is doubtful about them."""

    placements: tuple[Placement, ...]
    warnings: tuple[str, ...] = field(default=())

    def of(self, role: str) -> tuple[Placement, ...]:
        """Placements of one side."""
        return tuple(place for place in self.placements if place.role == role)

    def starting_at(self, first_target: int, first_drafter: int) -> Map:
        """The same places with global ranks, where hosts before this one have targets and drafters of their own."""
        first = {TARGET: first_target, DRAFTER: first_drafter}
        moved = [replace(each, rank=each.rank + first[each.role]) for each in self.placements]
        return replace(self, placements=tuple(moved))


def find_gpus() -> list[str]:
    """List the ids of the GPUs that this process may use: CUDA_VISIBLE_DEVICES where set, else all of the machine.

    As CUDA reads it, the list ends at the first word that can be none: -1, an empty one, NoDevFiles of SLURM.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return list(takewhile(_GPU.fullmatch, (part.strip() for part in visible.split(","))))
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return [str(number) for number in range(len(list(folder.iterdir())))]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


def place(config: Config, gpus: list[str], cores: int) -> Map:
    """Give every process its device and threads; raises ConfigError for devices that are not there."""
    asked = [(TARGET, rank, text) for rank, text in enumerate(config.target.devices)]
    asked += [(DRAFTER, rank, text) for rank, text in enumerate(config.training.devices)]
    problems = [f"{_key(role)}: {why}" for role, _, text in asked if (why := _problem(text, role))]
    if not config.target.devices or not config.training.devices:
        problems.append("target.devices and training.devices: expected at least one entry each")
    if not problems and (missing := missing_gpus(config, gpus)):
        problems.append(f"{missing}; correct the list or CUDA_VISIBLE_DEVICES, or go to a machine that has them")
    if problems:
        raise ConfigError(problems)
    used = Counter(gpu for _, _, text in asked for gpu in _named(text, gpus))
    placements = []
    for role, rank, text in asked:
        gpu = ",".join(_named(text, gpus)) or None
        if text == "auto" and gpus:
            gpu = min(gpus, key=lambda each: used[each])
            used[gpu] += 1
        placements.append(Placement(role, rank, gpu, threads_of(config, role, cores)))
    _check_drafters([each.gpu for each in placements if each.role == DRAFTER])
    return Map(tuple(placements), (*_warnings(placements, cores), *_type_warnings(config, placements)))


def threads_of(config: Config, role: str, cores: int) -> int:
    """CPU threads of each process of a side: those it is given, else the cores shared out between all processes."""
    given = config.target.threads if role == TARGET else config.training.threads
    return given or max(1, cores // (len(config.target.devices) + len(config.training.devices)))


def missing_gpus(config: Config, gpus: list[str]) -> str:
    """Say in one line which GPUs are asked for and are not among `gpus`; empty if all are there."""
    asked = [(_key(TARGET), config.target.devices), (_key(DRAFTER), config.training.devices)]
    absent = [(key, text) for key, entries in asked for text in entries if max(_numbers(text), default=-1) >= len(gpus)]
    if not absent:
        return ""
    keys, texts = (", ".join(dict.fromkeys(each)) for each in zip(*absent, strict=True))
    seen = f"GPUs {', '.join(gpus)}" if gpus else "no GPU"
    return f"{keys}: {texts} asked, but {len(gpus)} can be used here ({seen})"


def with_missing(config: Config, gpus: list[str]) -> list[str]:
    """`gpus`, and as many more as the configuration asks for: of another machine."""
    entries = [*config.target.devices, *config.training.devices]
    wanted = 1 + max((number for text in entries for number in _numbers(text)), default=-1)
    return gpus + [f"cuda:{number}" if gpus else f"{number}" for number in range(len(gpus), wanted)]


def _check_drafters(gpus: list[str | None]) -> None:
    """Refuse drafters that could not add up their gradients: two on one GPU, or some on GPUs and some on the CPU."""
    shared = next((gpu for gpu in gpus if gpu is not None and gpus.count(gpu) > 1), None)
    if shared is not None:
        raise ConfigError([f"training.devices: {gpus.count(shared)} drafters on GPU {shared}; NCCL takes one a GPU"])
    if None in gpus and any(gpus):
        raise ConfigError(["training.devices: some on GPUs, some on the CPU; drafters train one model together"])


def _key(role: str) -> str:
    return "target.devices" if role == TARGET else "training.devices"


def _named(text: str, gpus: list[str]) -> list[str]:
    """The GPUs that an entry names: one, or several for one target."""
    return [gpus[number] for number in _numbers(text)]


def _numbers(text: str) -> list[int]:
    """The numbers in an entry: of `cuda:1+2`, 1 and 2; none of any other word."""
    return [int(number) for number in text[5:].split("+")] if _CUDA.fullmatch(text) else []


def _problem(text: str, role: str) -> str:
    if text in ("cpu", "auto"):
        return ""
    numbers = _numbers(text)
    if not numbers:
        return f"expected cpu, auto or cuda:N, got {text!r} (several GPUs for one target: cuda:N+M)"
    if len(numbers) > 1 and (role != TARGET or len(set(numbers)) < len(numbers)):
        return f"{text}: only a target goes over several GPUs, each named once"
    return ""


def _warnings(placements: list[Placement], cores: int) -> list[str]:
    warnings = []
    for gpu in dict.fromkeys(gpu for place in placements for gpu in place.gpus):
        sharing = [place.name for place in placements if gpu in place.gpus]
        if len(sharing) > 1:
            warnings.append(f"GPU {gpu} is shared by {', '.join(sharing)}: they compete for its memory and time")
    total = sum(place.threads for place in placements)
    if total > max(cores, len(placements)):
        warnings.append(
            f"{total} threads on {cores} cores: the processes compete; lower target.threads or training.threads"
        )
    return warnings


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 products, by the flags that the kernel lists."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def _type_warnings(config: Config, placements: list[Placement]) -> list[str]:
    """Say that 16-bit arithmetic was asked for on a CPU that emulates it."""
    asked = {TARGET: ("target.dtype", config.target.dtype), DRAFTER: ("training.precision", config.training.precision)}
    slow = {role for role in asked if any(place.role == role and place.gpu is None for place in placements)}
    if cpu_has_bf16():
        return []
    return [
        f"{key}: {value} on a CPU without bfloat16 instructions is emulated, several times slower than float32; "
        "auto takes float32 there"
        for role, (key, value) in asked.items()
        if role in slow and value not in ("auto", "float32")
    ]
