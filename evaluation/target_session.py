"""The target decoding one prompt: its KV cache grows with every token read and is cropped back to what was accepted.

Unlike verifier.py, which keeps many rows in one batch, this is how a server decodes: batch 1, nothing masked. It also
reads a whole tree of drafted tokens in one pass (ddtree.py). Sliding layers are cropped by transformers' own record of
the past. A recurrent state cannot be cropped: it is put back as it was before the block, and the accepted tokens are
read again (a server keeps the state after each token instead). Neither kind can read a tree, since only attention can
mask a sibling out.

Shapes: n tokens read, C cached tokens, H hidden, K taps, V vocabulary.
"""

from __future__ import annotations

from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from producer.target import TargetDescription, TargetError, find_trunk, layer_kinds
from producer.trunk import load_for_decoding


class Read(NamedTuple):
    """What one pass of the target gives: logits [n, V] after each token, and its taps [n, K*H]."""

    logits: Tensor
    features: Tensor


class TargetSession:
    """A loaded target, head included, with hooks on its taps; `start` begins a prompt, one at a time."""

    def __init__(self, description: TargetDescription, device: torch.device) -> None:
        """Load the target onto `device`."""
        self.description, self.device = description, device
        self.model: Any = load_for_decoding(Path(description.path), getattr(torch, description.dtype), device)
        trunk: Any = find_trunk(self.model)
        self._taken: dict[int, Tensor] = {}
        for number in description.target_layer_ids:
            trunk.layers[number].register_forward_hook(self._hook(number))
        kinds = layer_kinds(trunk.config)
        self.attention = str(trunk.config._attn_implementation)
        self.other_layers = sorted(kinds - {"full_attention"})
        """Kinds of layer that cannot read a tree; empty if all layers can."""
        self._recurrent = bool(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
        self._before: tuple[Any, Tensor] | None = None
        inner = trunk.forward
        self._keyword = "cache" if "cache" in signature(inner).parameters else "past_key_values"
        self._cache: Any = None
        self.passes = 0
        """Passes of the target so far, the reading of prompts included."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self._cache is None else int(self._cache.get_seq_length())

    def refuse_tree(self) -> None:
        """Raise TargetError if the target has layers that cannot read a tree."""
        if self.other_layers:
            raise TargetError(
                f"--tree: {self.description.name} has layers of kind {', '.join(self.other_layers)}, whose state "
                "cannot branch; only targets with full attention everywhere can verify a tree: leave --tree out"
            )
        if self.attention != "sdpa":
            raise TargetError(
                f"--tree: {self.description.name} attends by {self.attention!r} in transformers, and a tree's mask is "
                "known to be exact with 'sdpa' alone: leave --tree out"
            )

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> Read:
        """Forget everything and read a prompt; logits [1, V] after its last token, taps of all its tokens."""
        self._cache = transformers.DynamicCache(config=self.model.config)
        self._cache.activate_past_recording()
        ids = torch.tensor([prompt], device=self.device)
        read = self._run(ids, logits_to_keep=1)
        self._before = None
        self._cache.crop(0)
        return read

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Read:
        """Read [n] tokens after what is cached; `keep` must follow."""
        if self._recurrent:
            self._before = (deepcopy(self._cache), tokens)
        return self._run(tokens[None])

    @torch.inference_mode()
    def read_tree(self, tokens: Tensor, depth: Tensor, visible: Tensor) -> Read:
        """Read a tree [n] in one pass: a node sees the cache and the nodes of its row in `visible` [n, n] (bool).

        depth [n]: 0 for the root; its position is the cache's length plus the depth. `keep_path` must follow.
        """
        past, rows = self.length, tokens.shape[0]
        mask = torch.ones(rows, past + rows, dtype=torch.bool, device=self.device)
        mask[:, past:] = visible
        return self._run(tokens[None], position_ids=(past + depth)[None], attention_mask=mask[None, None])

    @torch.inference_mode()
    def keep(self, length: int) -> None:
        """Crop the cache to its first `length` tokens, which may end inside the last block read."""
        if self._before is None or length == self.length:
            self._cache.crop(length - self.length)
            return
        self._cache, block = self._before
        self._before = None
        self._run(block[None, : length - self.length])
        self._cache.crop(0)

    def keep_path(self, past: int, nodes: Tensor) -> None:
        """After read_tree: keep the first `past` tokens and the tree's `nodes` (ascending, root first)."""
        for layer in self._cache.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                setattr(layer, name, torch.cat([old[..., :past, :], old[..., past:, :].index_select(-2, nodes)], -2))

    def _run(self, ids: Tensor, **extra: Any) -> Read:
        self._taken.clear()
        output = self.model(input_ids=ids, use_cache=True, **{self._keyword: self._cache}, **extra)
        self.passes += 1
        features = torch.cat([self._taken[number] for number in self.description.target_layer_ids], dim=-1)
        return Read(output.logits[0], features[0])

    def _hook(self, number: int) -> Any:
        def take(_module: Any, _inputs: Any, output: Any) -> None:
            self._taken[number] = output[0] if isinstance(output, tuple) else output

        return take
