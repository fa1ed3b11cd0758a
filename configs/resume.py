"""What a checkpoint is bound to: resumed with another target, other taps, packs or data, it would be silently wrong.

A pack id means something only with the data, seed and pack size that it was counted with; features only with the taps
and the target. Everything else (learning rate, decay, anchors, loss, numbers of processes) may change at a resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.drafter_shape import DrafterShape, shape_as_dict
from configs.run_files import newest_step, read_trained

Identity = Mapping[str, Any]


def conflicts(saved: Identity, now: Identity, checkpoint: str) -> list[str]:
    """Word each difference between what a checkpoint was trained with and what is asked for now, with both values.

    A name that only one of them has is no difference: an older version did not write it.
    """
    return [
        f"{name}: {checkpoint} was trained with {_shown(saved[name])}, this run has {_shown(now[name])}; "
        "set it back, or start a new run (--name)"
        for name in saved
        if name in now and _plain(saved[name]) != _plain(now[name])
    ]


def with_drafter(identity: Identity, shape: DrafterShape) -> dict[str, Any]:
    """Add the drafter's shape to what a checkpoint is bound to."""
    return {**identity, **{f"drafter: {key}": value for key, value in shape_as_dict(shape).items()}}


def handover_fault(run_dir: Path, step: int, description: Mapping[str, Any]) -> str:
    """Say why a state that a drafter left in memory is not to be used; "" where it is what the run goes on from.

    It has to come from this run folder, from a generation that the folder knows (not from an earlier run of the same
    name), and no checkpoint on disk may be of a later step.
    """
    known, written = read_trained(run_dir), newest_step(run_dir)
    if description.get("run_dir") != str(run_dir.resolve()):
        return f"it was left by a run in {description.get('run_dir')}"
    if known is None or known.generation < description["generation"]:
        return f"it is of generation {description['generation']}, which this run has not reached"
    if step < written:
        return f"it is of step {step}, and a checkpoint of step {written} is on disk"
    return ""


def digest_of(config: Mapping[str, Any]) -> str:
    """SHA-256 of a complete configuration as plain data."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def named(shown: str, digest: str) -> dict[str, str]:
    """A value that is compared by its digest and shown by a name, which may differ where the digest does not."""
    return {"shown": shown, "digest": digest}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return value["digest"]
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return f"{value['shown']} ({value['digest'][:12]})" if isinstance(value, dict) else str(_plain(value))
