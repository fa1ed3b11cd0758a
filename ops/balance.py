"""How many devices should each side get, by the rates of both alone? `python launch.py plan CONFIG --calibrate`.

Each side is measured by evaluation/calibrate.py in a process of its own, for ten seconds, on the device of target 0 and
of drafter 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from configs.cores import usable_cores
from configs.load import load_config
from configs.schema import Config
from ops.devices import find_gpus, place
from ops.errors import ChildFailed
from ops.paths import DRAFTER, TARGET

EFFICIENCY = 0.95
"""What is kept of the slower side's rate when both run; the pipeline's measured share is higher (docs/scaling.md)."""
RANK_COST = 0.04
"""Share of a drafter's rate that adding up gradients costs two of them; measured (docs/scaling.md)."""


class Rates(NamedTuple):
    """Tokens per second of one target and of one drafter process, each alone."""

    target: float
    drafter: float


class Split(NamedTuple):
    """Processes of each side, what comes out of them, and how much of its time each side waits."""

    targets: int
    drafters: int
    tokens_per_s: float
    starved_pct: float
    blocked_pct: float

    @property
    def line(self) -> str:
        """One line."""
        return (
            f"{self.targets}:{self.drafters}  about {self.tokens_per_s:,.0f} tokens/s, drafters starved "
            f"{self.starved_pct:.0f} %, targets blocked {self.blocked_pct:.0f} %"
        )


def splits(rates: Rates, num_gpus: int, efficiency: float = EFFICIENCY, rank_cost: float = RANK_COST) -> list[Split]:
    """Every N:M of `num_gpus` devices, the fastest first; of equally fast ones that with more drafters.

    Assumes that rates add up: N targets make N times as much; M drafters train M times as much, less what adding up
    gradients costs: `rank_cost` for two, and for M in proportion to the bytes that each sends and receives, which in a
    ring are 2 (M - 1) / M of all gradients.
    """
    found = []
    for targets in range(1, num_gpus):
        drafters = num_gpus - targets
        made = targets * rates.target
        trained = drafters * rates.drafter * (1.0 - rank_cost * 2 * (drafters - 1) / drafters)
        least = min(made, trained)
        waits = 100 * (1 - least / trained), 100 * (1 - least / made)
        found.append(Split(targets, drafters, efficiency * least, *waits))
    return sorted(found, key=lambda split: (-split.tokens_per_s, -split.drafters))


def proposal(rates: Rates, config: Config, num_gpus: int) -> list[str]:
    """Word the measured rates and which N:M they speak for."""
    asked = (len(config.target.devices), len(config.training.devices))
    lines = [f"measured alone: target {rates.target:,.0f} tokens/s, drafter {rates.drafter:,.0f} tokens/s"]
    total = max(sum(asked), num_gpus, 2)
    ranked = splits(rates, total)
    best = ranked[0]
    lines.append(f"proposed for {total} devices: {best.line}")
    mine = next((split for split in splits(rates, sum(asked)) if split[:2] == asked), None)
    if mine is not None and mine[:2] != best[:2]:
        lines.append(f"the configuration asks for: {mine.line}")
    if best.starved_pct > 10:
        slack = 1 / (1 - best.starved_pct / 100)
        base, *larger = config.anchors.choices
        lines.append(
            f"the targets limit it: with about {slack:.1f} times anchors.num ({base}) or "
            "training.steps_per_pack the drafters would learn more from each pack at the same rate"
        )
        if larger:
            choices = config.anchors.choices
            likely = max(size for size in choices if size <= slack * base)
            lines.append(f"anchors.num: auto would go to about {likely} of {', '.join(map(str, choices))}")
        else:
            lines.append("anchors.num: auto does so by itself, by how long the drafters wait")
    return lines


def calibrated(path: str, overrides: Sequence[str]) -> list[str]:
    """Measure both sides of a configuration and word what follows; raises ConfigError, ChildFailed."""
    config, gpus = load_config(path, overrides), find_gpus()
    places = place(config, gpus, usable_cores())
    rates = []
    for role in (TARGET, DRAFTER):
        settings = [word for override in overrides for word in ("--set", override)]
        done = subprocess.run(
            [sys.executable, "-m", "evaluation.calibrate", role, path, *settings],
            env=os.environ | places.of(role)[0].environment, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ChildFailed(f"calibration of the {role} failed (code {done.returncode}), see above", 5)
        rates.append(float(json.loads(done.stdout.splitlines()[-1])))
    return proposal(Rates(*rates), config, len(gpus))
