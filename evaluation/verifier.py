"""The target in a decoding loop: verifies drafted blocks of several prompts at once, and hands out their taps.

Rows differ in how much is accepted, so the KV cache is never cropped: every block is appended to all rows, and what
was rejected stays in the cache but is masked. Exact for softmax attention; a target with recurrent layers is refused,
because its state cannot be masked.

Shapes: R rows (prompts), C cached columns, B block slots, H hidden, K taps, V vocabulary.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from producer.target import TargetDescription, TargetError, find_trunk, refuse_batches
from producer.trunk import load_for_decoding


class Verifier:
    """The whole target, head included, with hooks on its taps."""

    def __init__(self, description: TargetDescription, device: torch.device) -> None:
        self.description = description
        self.device = device
        self._model: Any = load_for_decoding(Path(description.path), getattr(torch, description.dtype), device)
        trunk: Any = find_trunk(self._model)
        self._trunk = trunk
        refuse_batches(trunk.config, description.name)
        if (attention := trunk.config._attn_implementation) != "sdpa":
            raise TargetError(f"evaluation.enabled: batches need 'sdpa', {description.name} attends by {attention!r}")
        self._taken: dict[int, Tensor] = {}
        for number in description.target_layer_ids:
            trunk.layers[number].register_forward_hook(self._hook(number))
        self._cache: Any = None
        # transformers 5.24 calls the cache so; earlier ones past_key_values
        self._cache_keyword = "cache" if "cache" in signature(trunk.forward).parameters else "past_key_values"
        self._valid_RC = torch.empty(0, 0, dtype=torch.bool)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> tuple[list[Tensor], Tensor]:
        """Read the prompts; returns each row's taps [n, K*H] and the next token of every row [R]."""
        rows, longest = len(prompts), max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        ids = torch.zeros(rows, longest, dtype=torch.int64, device=self.device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        self._cache = transformers.DynamicCache()
        column = torch.arange(longest, device=self.device)
        self._valid_RC = column < lengths[:, None]
        mask = (column[None, :] <= column[:, None])[None] & self._valid_RC[:, None, :]
        mask = mask | torch.eye(longest, dtype=torch.bool, device=self.device)
        hidden = self._run(ids, column.expand(rows, -1), mask)
        last = hidden[torch.arange(rows, device=self.device), lengths - 1]
        features = self._features()
        return [features[row, : len(prompt)] for row, prompt in enumerate(prompts)], self._greedy(last)

    @torch.inference_mode()
    def verify(self, blocks_RB: Tensor, starts_R: Tensor) -> tuple[Tensor, Tensor]:
        """Read blocks (anchor, then drafts) that begin at positions `starts_R`; `keep` must follow.

        Returns the target's greedy token after each slot [R, B], and the slots' taps [R, B, K*H].
        """
        rows, size = blocks_RB.shape
        slot = torch.arange(size, device=self.device)
        inside = (slot[None, :] <= slot[:, None]).expand(rows, -1, -1)
        past = self._valid_RC[:, None, :].expand(-1, size, -1)
        hidden = self._run(blocks_RB, starts_R[:, None] + slot, torch.cat([past, inside], dim=2))
        return self._greedy(hidden), self._features()

    def keep(self, count_R: Tensor, size: int) -> None:
        """Accept the first `count_R` slots of the last block of `size`; the others are masked from now on."""
        accepted = torch.arange(size, device=self.device) < count_R[:, None]
        self._valid_RC = torch.cat([self._valid_RC, accepted], dim=1)

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        self._taken.clear()
        output = self._trunk(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask[:, None],
            use_cache=True,
            **{self._cache_keyword: self._cache},
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _greedy(self, hidden: Tensor) -> Tensor:
        tokens: Tensor = self._model.get_output_embeddings()(hidden).argmax(-1)
        return tokens

    def _features(self) -> Tensor:
        return torch.cat([self._taken[number] for number in self.description.target_layer_ids], dim=-1)

    def _hook(self, number: int) -> Any:
        def take(_module: Any, _inputs: Any, output: Any) -> None:
            self._taken[number] = output[0] if isinstance(output, tuple) else output

        return take
