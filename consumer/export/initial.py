"""An exported drafter, of this project or others, as initial weights (`drafter.init_from`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from configs.drafter_shape import SLIDING, DrafterShape, tensor_shapes
from consumer.drafter import Drafter
from consumer.export.facts import ExportError
from consumer.export.folder import read_export


@torch.no_grad()
def init_from_export(drafter: Drafter, folder: Path, target_layer_ids: tuple[int, ...]) -> list[str]:
    """Copy every weight of the drafter in `folder`; returns what differs in arithmetic, for the log.

    Raises ExportError where a tensor has another shape or the taps are other layers: then nothing would be left of
    what was learnt.
    """
    found = read_export(folder)
    wanted = tensor_shapes(drafter.shape)
    if tensor_shapes(found.facts.shape) != wanted:
        other = found.facts.shape
        names = [name for name in vars(other) if getattr(other, name) != getattr(drafter.shape, name)]
        pairs = ", ".join(f"{name} {getattr(other, name)} for {getattr(drafter.shape, name)}" for name in names)
        raise ExportError(f"{folder}: its tensors have other shapes than this run's drafter ({pairs})")
    if found.facts.target_layer_ids != target_layer_ids:
        raise ExportError(
            f"{folder}: learnt from layers {list(found.facts.target_layer_ids)}, this run taps "
            f"{list(target_layer_ids)}; "
            "set target.target_layer_ids to them"
        )
    state = drafter.state_dict()
    for name, tensor in found.tensors.items():
        state[name].copy_(tensor)
    mine, theirs = _arithmetic(drafter.shape), _arithmetic(found.facts.shape)
    return [f"{name}: {theirs[name]} there, {mine[name]} here" for name in mine if theirs[name] != mine[name]]


def _arithmetic(shape: DrafterShape) -> dict[str, Any]:
    """What the same weights may be used with differently."""
    return {
        "block_size": shape.block_size,
        "layer_types": shape.layer_types,
        "causal in the block": [shape.causal_of(kind) for kind in shape.layer_types],
        "window": shape.sliding_window if SLIDING in shape.layer_types else None,
        "rope_theta": shape.rope_theta,
        "mask_token_id": shape.mask_token_id,
        "rms_eps": shape.rms_eps,
    }
