"""Start-up check of a captured step, on made-up data: does the graph compute what the eager lines compute, and follow
its inputs? Every claim that fails is one line. All state is put back afterwards.

Source of the claims: graphs in public trainers that trained with a frozen learning rate, stale inputs or other numbers
than their eager twin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.run_files import write_atomically
from configs.schema import Config
from consumer.step import TrainStep

STEPS = 3
NOISE_FACTOR = 3.0


def self_check(step: TrainStep, tolerance: float) -> list[str]:
    """Compare step.execute with step.on_device; returns the claims that failed, empty when all is well.

    `tolerance`: largest relative difference of a loss between both, 1e-3 in bfloat16; more only where the eager lines
    differ that much from themselves (dense attention on a GPU adds up its gradients in any order, and Adam's first
    updates are as large for a gradient of rounding errors as for any other).
    """
    saved = [(tensor, tensor.clone()) for tensor in _state(step)]
    pack = [value for value in vars(step.pack).values() if value is not None]
    saved += [(tensor, tensor.clone()) for tensor in pack]

    def restore() -> None:
        for tensor, value in saved[: len(saved) - len(pack)]:
            tensor.copy_(value)
        step.number.zero_()  # a run that is resumed at its end would have a learning rate of 0

    try:
        make_up(step)
        restore()
        return [claim for claim, holds in _claims(step, tolerance, restore) if not holds]
    finally:
        for tensor, value in saved:
            tensor.copy_(value)


def bytes_of_check(step: TrainStep) -> int:
    """What the check keeps beside the step: its state, and the weights once more. Eager steps come on top."""
    return sum(tensor.nbytes for tensor in [*_state(step), *step.flat.stored])


def facts_of_check(config: Config, plan: Mapping[str, Any], world: int) -> str:
    """Digest of everything that the outcome depends on: the code of the step, configuration, shapes, torch, GPU."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted([*root.glob("consumer/*.py"), *root.glob("gpu/*.py")]):
        digest.update(path.read_bytes())
    shapes = {key: plan[key] for key in ("target", "slot_spec")}
    shapes["draft_vocab"] = len(plan["draft_vocab"] or ())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    facts = [config.model_dump(mode="json"), shapes, world, torch.__version__, gpu]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


def was_passed(mark: Path, facts: str) -> bool:
    """Whether the check was passed with the same facts before."""
    try:
        return mark.read_text() == facts
    except OSError:
        return False


def note_passed(mark: Path, facts: str) -> None:
    """Note that it was; a file that cannot be written costs a check later."""
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(mark, facts)


def _claims(step: TrainStep, tolerance: float, restore: Callable[[], None]) -> list[tuple[str, bool]]:
    eager = _losses(step, step.on_device)
    restore()
    again = _losses(step, step.on_device)
    restore()
    fast = _losses(step, step.execute)
    restore()
    worst, noise = _difference(eager, fast), _difference(eager, again)
    same = worst <= max(tolerance, NOISE_FACTOR * noise) and _difference(eager[:1], fast[:1]) <= tolerance
    claims = [(f"{STEPS} eager steps and {STEPS} replays give the same losses: {eager} and {fast}", same)]
    before = [buffer.clone() for buffer in step.flat.stored]
    step.lr_factor.zero_()
    still = _losses(step, step.execute)
    claims.append(("a learning rate of 0 leaves the weights unchanged", _equal(before, step.flat.stored)))
    claims.append((f"each step draws other anchors: losses {still} with weights that stay", len(set(still)) == STEPS))
    restore()
    step.execute()
    claims.append(("a learning rate above 0 changes the weights", not _equal(before, step.flat.stored)))
    restore()
    step.pack.features.neg_()  # not a scale: the context is normed
    changed = _losses(step, step.execute)
    claims.append((f"another pack gives another loss: {fast[0]} and {changed[0]}", fast[0] != changed[0]))
    return claims


def _equal(before: list[Tensor], now: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, now, strict=True))


def _difference(wanted: list[float], found: list[float]) -> float:
    """Largest relative difference; not a number counts as infinite."""
    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(wanted, found, strict=True)]
    return max(value if math.isfinite(value) else math.inf for value in differences)


def _losses(step: TrainStep, run: Callable[[], None]) -> list[float]:
    losses = []
    for _ in range(STEPS):
        run()
        _, loss, weight = step.latest.tolist()
        losses.append(loss / max(weight, 1e-20))
    return losses


def _state(step: TrainStep) -> list[Tensor]:
    moments = [step.adamw.exp_avg, step.adamw.exp_avg_sq, *([step.muon.momentum] if step.muon else [])]
    return [*step.flat.stored, *moments, *step.device_counters()]


def make_up(step: TrainStep) -> None:
    """Fill the pack with two documents of random tokens and features."""
    pack, tokens = step.pack, step.pack.input_ids.shape[0]
    generator = torch.Generator(pack.input_ids.device).manual_seed(1)
    top = min(step.shape.vocab_size, step.head.head.shape[0])
    pack.input_ids.random_(0, top, generator=generator)
    pack.loss_mask.fill_(1)
    pack.doc_start.zero_()
    pack.doc_start[tokens // 2 :] = tokens // 2
    pack.features.normal_(generator=generator)
    if pack.final_hidden is not None:
        pack.final_hidden.normal_(generator=generator)
