"""The target's embedding and head, frozen: read from the checkpoint's safetensors alone, without building the target.

Also the target's last decoder layers, for initial weights. Suffixes of shapes: V vocabulary, H hidden.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from consumer.drafter import Drafter

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


class HeadError(Exception):
    """The checkpoint lacks what the drafter needs. Exit code 2."""

    exit_code = 2


@dataclass
class FrozenHead:
    """embedding [V, H], head [V', H]. With a reduced vocabulary V' < V, and two maps say which row is which token."""

    embedding: Tensor
    head: Tensor
    draft_to_target: Tensor | None = None  # [V'] int64, ascending token ids
    target_to_draft: Tensor | None = None  # [V] int64, -1 for a token that cannot be drafted

    def reduced(self, token_ids: list[int]) -> FrozenHead:
        """Keep only the head rows of `token_ids` (ascending); source of the two maps: speculators' d2t and t2d."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.head.device)
        back = torch.full((self.embedding.shape[0],), -1, dtype=torch.int64, device=self.head.device)
        back[ids] = torch.arange(len(token_ids), device=self.head.device)
        return FrozenHead(self.embedding, self.head[ids].contiguous(), ids, back)

    def cast(self, dtype: torch.dtype) -> FrozenHead:
        """Return it in another type; tied embedding and head stay one tensor."""
        embedding = self.embedding.to(dtype)
        head = embedding if self.head is self.embedding else self.head.to(dtype)
        return FrozenHead(embedding, head, self.draft_to_target, self.target_to_draft)

    def labels(self, token_ids: Tensor) -> Tensor:
        """Turn token ids into head rows; -1 where the token cannot be drafted, or is -1 (none) itself."""
        if self.target_to_draft is None:
            return token_ids
        return torch.where(token_ids >= 0, self.target_to_draft[token_ids.clamp(min=0)], -1)

    def tokens(self, rows: Tensor) -> Tensor:
        """Turn head rows into token ids."""
        return rows if self.draft_to_target is None else self.draft_to_target[rows]


def random_head(rows: int, hidden: int, tied: bool, dtype: torch.dtype, device: torch.device) -> FrozenHead:
    """Make an embedding and a head [rows, hidden] with random weights, for measurements."""
    generator = torch.Generator(device).manual_seed(0)
    embedding = torch.empty(rows, hidden, dtype=dtype, device=device).normal_(std=0.02, generator=generator)
    if tied:
        return FrozenHead(embedding, embedding)
    return FrozenHead(embedding, torch.empty_like(embedding).normal_(std=0.02, generator=generator))


class CheckpointTensors:
    """Named tensors of a safetensors folder, single file or sharded; reads only what is asked for."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        else:
            self._files = {}
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
        if not self._files:
            raise HeadError(f"{folder}: no *.safetensors file; give the target as safetensors")

    @property
    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._files)

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def find(self, ending: str) -> str | None:
        """Find the tensor whose name is `ending`, behind any prefix; the shortest if there are several."""
        found = [name for name in self._files if name == ending or name.endswith("." + ending)]
        text = [name for name in found if "visual" not in name and "vision" not in name]
        return min(text or found, key=len, default=None)


def load_frozen_head(folder: Path, tied: bool, dtype: torch.dtype | None, device: torch.device) -> FrozenHead:
    """Read embedding and head, in the type they are stored in where dtype is None. Raises HeadError.

    `tied`: the configuration says that the head is the embedding.
    """
    tensors = CheckpointTensors(folder)
    name = tensors.find(EMBEDDING)
    if name is None:
        raise HeadError(f"{folder}: no {EMBEDDING} among its {len(tensors.names)} tensors")
    embedding = tensors.read(name).to(device=device, dtype=dtype)
    head_name = tensors.find(HEAD)
    if head_name is not None:
        return FrozenHead(embedding, tensors.read(head_name).to(device=device, dtype=dtype))
    if not tied:
        raise HeadError(
            f"{folder}: no {HEAD}, and the configuration says that embedding and head are not tied; "
            "a random head could not be learnt from: get the complete checkpoint"
        )
    return FrozenHead(embedding, embedding)


@torch.no_grad()
def init_from_target(drafter: Drafter, folder: Path) -> list[str]:
    """Copy the target's last layers into the drafter's, with fc the identity on the last tap; returns what was copied.

    hidden_norm takes the first copied layer's input norm, since the context skips input_layernorm; so a drafter of one
    layer starts near the target's own last layer, but for q_norm and k_norm where the target has none. Tensors whose
    shape differs (other heads or widths) keep their random weights.
    """
    tensors = CheckpointTensors(folder)
    pattern = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.+)$")
    found: dict[tuple[int, str], str] = {}
    for name in tensors.names:
        match = pattern.match(name)
        if match and "visual" not in name and "vision" not in name:
            found[int(match[1]), match[2]] = name
    if not found:
        raise HeadError(f"{folder}: no decoder layers found for drafter.init: target_last_layers; use random")
    first = max(number for number, _ in found) + 1 - len(drafter.layers)
    copied = []
    sources = {
        ("norm.weight"): tensors.find("norm.weight"),
        "hidden_norm.weight": found.get((first, "input_layernorm.weight")),
    }
    for key, parameter in drafter.state_dict().items():
        match = pattern.match(key)
        source = found.get((first + int(match[1]), match[2])) if match else sources.get(key)
        if source is not None:
            value = tensors.read(source)
            if value.shape == parameter.shape:
                parameter.copy_(value)
                copied.append(key)
    hidden = drafter.shape.hidden
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    return copied
