"""What an exported drafter says about itself: shape, taps, and the target that it belongs to. No format, no files.

A drafter without its target is worthless, and with another target it looks broken in a way that nothing reports:
low acceptance. So the target's digests travel in every export, and `python launch.py verify` compares them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from configs.drafter_shape import FULL, SLIDING, DrafterShape

NO_DIGEST = ""


class ExportError(Exception):
    """A drafter cannot be exported, or an exported one cannot be read. Exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a drafter belongs to. Digests are SHA-256, "" where the target has no such file."""

    name: str
    revision: str | None
    architecture: str
    num_layers: int
    hidden: int
    vocab_size: int
    rope_theta: float
    config_sha256: str = NO_DIGEST
    tokenizer_sha256: str = NO_DIGEST
    chat_template_sha256: str = NO_DIGEST

    def as_dict(self) -> dict[str, Any]:
        """The identity as plain JSON data."""
        return asdict(self)

    def differences(self, other: TargetIdentity) -> list[str]:
        """List every fact in which `other` is another target; names and unknown digests are no facts."""
        found = []
        for key, mine in self.as_dict().items():
            theirs = getattr(other, key)
            unknown = key.endswith("sha256") and NO_DIGEST in (mine, theirs)
            if key not in ("name", "revision") and not unknown and mine != theirs:
                found.append(f"target {key}: the drafter was trained with {mine}, this target has {theirs}")
        return found


@dataclass(frozen=True)
class DrafterFacts:
    """Everything but the weights. `target_layer_ids` are 0-based layers whose OUTPUT is taken (z-lab's numbering)."""

    shape: DrafterShape
    target_layer_ids: tuple[int, ...]
    dtype: str
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_target_layers: int
    identity: TargetIdentity | None = None
    draft_vocab: tuple[int, ...] | None = None
    training: dict[str, Any] = field(default_factory=dict)
    """How it was trained: steps, longest document, chat template arguments; for the reader, no server needs it."""

    def __post_init__(self) -> None:
        """Refuse a tap list that does not belong to the shape or the target. Raises ExportError."""
        ids, layers = self.target_layer_ids, self.num_target_layers
        if len(ids) != self.shape.num_taps:
            raise ExportError(f"target_layer_ids: {len(ids)} taps, but fc.weight takes {self.shape.num_taps}")
        if len(set(ids)) != len(ids) or not all(0 <= number < layers for number in ids):
            raise ExportError(f"target_layer_ids: expected distinct ids in 0..{layers - 1}, got {list(ids)}")

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens drafted per round: B - 1, since slot 0 is the anchor."""
        return self.shape.block_size - 1

    @property
    def taps_last_layer(self) -> bool:
        """Whether the output of the target's last layer is among the taps."""
        return self.num_target_layers - 1 in self.target_layer_ids

    @property
    def is_mixed(self) -> bool:
        """Whether full and sliding layers occur together."""
        return {FULL, SLIDING} <= set(self.shape.layer_types)
