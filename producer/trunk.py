"""The loaded target: its decoder trunk with hooks on the taps, cut after the deepest one, compiled layer by layer.

Knows nothing of packs or rings. Taps are the raw residual stream at the OUTPUT of a decoder layer (z-lab's numbering:
id n = output of layer n, 0-based), taken by forward hooks, never from a hidden_states tuple, whose last entry most
models normalise. The head is not run for features; it is kept only where final_hidden is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, masking_utils

from configs.schema import TargetConfig
from producer import packed, packed_cuda, packed_recurrent
from producer.target import TargetDescription, TargetError, find_trunk


class Target:
    """A frozen trunk with hooks on its taps, read in rows or packed. In evaluation mode."""

    def __init__(self, model: nn.Module, target_layer_ids: Sequence[int], keep_final: bool = True) -> None:
        """Take the trunk out of `model`; without `keep_final`, whatever follows the deepest tap is cut off."""
        trunk: Any = find_trunk(model)
        self.trunk = trunk
        self.head = output_head(model)
        self.layers = cast(nn.ModuleList, trunk.layers)
        self.target_layer_ids = tuple(target_layer_ids)
        self.is_packed = False
        self._recurrent: tuple[packed_recurrent.Recurrent, ...] = ()
        self._row_attention = str(trunk.config._attn_implementation)
        self._taken: dict[int, Tensor] = {}
        for number in self.target_layer_ids:
            self.layers[number].register_forward_hook(self._hook(number))
        if not keep_final:
            self.cut()

    @property
    def device(self) -> torch.device:
        """Where token ids go; with several GPUs, where the embedding is."""
        weight: Tensor = self.trunk.embed_tokens.weight
        return weight.device

    @property
    def last_device(self) -> torch.device:
        """Where a forward ends; with several GPUs, where the deepest layer is."""
        return next(self.layers[-1].parameters()).device

    @property
    def long_documents_from(self) -> int | None:
        """Tokens from which a packed document is attended apart here (packed_cuda.py); None: never."""
        return packed_cuda.long_from(self.trunk.config, self.trunk.embed_tokens.weight.dtype, self.device)

    @property
    def is_spread(self) -> bool:
        """Whether the layers are on several devices; what moves states between them does not compile."""
        return len({parameter.device for parameter in self.layers.parameters()}) > 1

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.trunk.config.hidden_size)

    def cut(self) -> None:
        """Free the layers after the deepest tap, the final norm and the head: nothing needs them for features."""
        del self.layers[max(self.target_layer_ids) + 1 :]
        if hasattr(self.trunk, "norm"):
            self.trunk.norm = nn.Identity()
        self.head = None

    @torch.inference_mode()
    def forward(self, input_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Run right-padded rows [R, n] of token ids through the trunk.

        Returns the taps in list order, each [R, n, H], and the last hidden state [R, n, H] after the final norm
        (meaningful only if nothing was cut). Padding stands right of each row's tokens, so plain causal attention is
        exact without a mask, for softmax and for linear attention.
        """
        return self._run(input_ids)

    @torch.inference_mode()
    def forward_packed(self, input_ids: Tensor, lengths: list[int]) -> tuple[list[Tensor], Tensor]:
        """Run documents of `lengths` tokens laid end to end, [T], through the trunk; returns as `forward`, [1, T, H].

        Needs `is_packed` (see use_packed).
        """
        packed.BOUNDS.set(lengths, self.device)
        with packed_recurrent.by_document(self._recurrent):
            return self._run(input_ids[None], position_ids=packed.BOUNDS.positions.long()[None])

    def _run(self, input_ids: Tensor, **more: Any) -> tuple[list[Tensor], Tensor]:
        self._taken.clear()
        with _no_search_for_packing():
            output = self.trunk(input_ids=input_ids, use_cache=False, **more)
        if len(self._taken) != len(self.target_layer_ids):
            raise TargetError(f"taps: expected {len(self.target_layer_ids)} captured, got {sorted(self._taken)}")
        taps = [self._taken[number] for number in self.target_layer_ids]
        self._taken.clear()
        return taps, output.last_hidden_state

    def _hook(self, number: int) -> Any:
        def take(_module: nn.Module, _inputs: Any, output: Any) -> None:  # returning a value would replace the output
            self._taken[number] = output[0] if isinstance(output, tuple) else output

        return take

    def use_packed(self) -> None:
        """Read by document from now on. Raises CannotPack where the target's layers do not allow it."""
        kinds = getattr(self.trunk.config, "layer_types", None) or [""] * len(self.layers)
        self._recurrent = packed_recurrent.modules_of(self.layers, kinds)
        packed.use(self.trunk.config)
        packed.BOUNDS.long_from = self.long_documents_from
        self.is_packed = True

    def tune(self, tokens: int) -> None:
        """On a GPU, let the kernels of recurrent layers be timed on a pack of `tokens`, before any shorter row.

        What does not work here is left for the start-up check to find, which then chooses rows.
        """
        if self.device.type == "cuda":
            with suppress(Exception):
                packed_recurrent.tune(self.layers, tokens, self.hidden)

    def use_rows(self) -> None:
        """Attend as transformers does, with the implementation that the model was loaded with."""
        self.trunk.config._attn_implementation = self._row_attention
        self.is_packed = False

    @contextmanager
    def in_rows(self) -> Iterator[None]:
        """Read in rows for a moment."""
        was = self.is_packed
        self.use_rows()
        try:
            yield
        finally:
            if was:
                self.use_packed()

    def compile(self, **options: Any) -> None:
        """Compile each layer's forward on its own (regional: seconds, since equal layers share what was compiled).

        The hooks stay outside. Read in rows, a recurrent part of a layer (`linear_attn`) brings its own kernels and
        stays as it is; packed, it compiles with its layer around one operator.
        """
        # rows come in many shapes, a pack in one
        torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
        for layer in self.layers:
            recurrent = getattr(layer, "linear_attn", None)
            if recurrent is not None and not self.is_packed:
                recurrent.forward = torch.compiler.disable(recurrent.forward)
            layer.forward = torch.compile(layer.forward, dynamic=not self.is_packed, **options)

    def uncompile(self) -> None:
        """Undo `compile`."""
        for layer in self.layers:
            for module in (layer, getattr(layer, "linear_attn", None)):
                if module is not None:
                    module.__dict__.pop("forward", None)


@contextmanager
def _no_search_for_packing() -> Iterator[None]:
    """Keep transformers from looking for packed documents in the positions: the host would wait for the answer.

    It costs the whole lead of the host over a GPU at every forward; the answer is known: rows hold one document each,
    and a packed row is cut by its own attention.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def load_model(description: TargetDescription, config: TargetConfig, device: torch.device) -> nn.Module:
    """Load the whole target, head included, onto `device`, or over all visible GPUs if there are several.

    What transformers can load it loads here: sharded or not, quantised by its own configuration, behind a wrapper.
    """
    transformers.utils.logging.disable_progress_bar()  # logs are files
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    model: nn.Module = model_class(description).from_pretrained(
        description.path,
        dtype=getattr(torch, description.dtype),
        attn_implementation=None if config.attention == "auto" else config.attention,
        device_map="auto" if several else {"": device},
    )
    return model.eval().requires_grad_(False)


def load_for_decoding(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load the whole target onto one device as a model of text, also from behind a wrapper; attention is its own kind.

    Where transformers has a text model for a wrapper's checkpoint, that is taken: it counts positions as text does.
    """
    transformers.utils.logging.disable_progress_bar()
    outer = transformers.AutoConfig.from_pretrained(folder)
    kind: Any = transformers.AutoModelForCausalLM
    if type(outer) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(transformers, (outer.architectures or [""])[0], kind)
    model: nn.Module = kind.from_pretrained(folder, dtype=dtype, device_map={"": device})
    return model.eval().requires_grad_(False)


def random_model(description: TargetDescription, config: TargetConfig, device: torch.device) -> nn.Module:
    """Make a target of this architecture with random weights, always the same on one kind of device."""
    torch.manual_seed(0)
    options = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    described = transformers.AutoConfig.from_pretrained(description.path)
    with device:
        model: nn.Module = model_class(description)._from_config(
            described, dtype=getattr(torch, description.dtype), **options
        )
    return model.eval().requires_grad_(False)


def model_class(description: TargetDescription) -> Any:
    """The transformers class named by the checkpoint, else the one for causal language models."""
    return getattr(transformers, description.architecture, transformers.AutoModelForCausalLM)


def output_head(model: nn.Module) -> nn.Module | None:
    """The model's head [V, H], None for a bare trunk."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None
