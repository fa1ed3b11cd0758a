"""What a drafter goes on from: the state that its former life left in memory, else the newest checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.drafter_shape import drafter_shape
from configs.load import ConfigError
from configs.resume import conflicts, handover_fault, with_drafter
from configs.schema import Config
from consumer.checkpoint import Checkpoint, newest_checkpoint
from consumer.saver import Handed, read_handed
from ops.telemetry import Log
from shm_ring.handover import Handover


def identity_of(config: Config, plan: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint of this run is bound to."""
    return with_drafter(plan.get("identity", {}), drafter_shape(config.drafter, plan["target"], plan["draft_vocab"]))


def find_saved(
    run_dir: Path, identity: dict[str, Any], shared: Handover | None, log: Log
) -> Checkpoint | Handed | None:
    """Return what to go on from; None: start anew. Raises ConfigError where it was trained with something else.

    A state left in memory is taken if it is complete, of this run, and not older than the newest checkpoint; it is
    not hashed, having passed through nothing but this host's memory. A checkpoint is.
    """
    saved: Checkpoint | Handed | None = _handed(run_dir, shared, log)
    if saved is None:
        saved = newest_checkpoint(run_dir / "checkpoints", lambda line: log("checkpoint", detail=line))
    differing = conflicts(saved.meta.get("identity", {}), identity, str(saved.path)) if saved else []
    if saved and differing and not saved.step:
        log("checkpoint", detail=f"{saved.path} holds no training and does not fit: made anew")
        return None
    if differing:
        raise ConfigError(differing)
    return saved


def _handed(run_dir: Path, shared: Handover | None, log: Log) -> Handed | None:
    found = read_handed(shared) if shared is not None else None
    fault = handover_fault(run_dir, found.step, found.meta) if found else ""
    if fault and shared is not None:
        log("hand-over", detail=f"{shared.path} is not used: {fault}")
        shared.begin()
        return None
    return found
