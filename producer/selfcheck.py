"""Start-up check of a target on two documents of random tokens, before the first pack is made.

1. The taps that go into a pack are, bit for bit, what hooks of our own record in the same forward.
2. Each document, read beside the other, equals itself read alone by the whole, uncompiled model; and read packed, the
   second one does not change when the first does. A recurrent state fades, so that its leak may hide in the noise of
   the first comparison; two packs of one shape have none.
3. The head applied to the final hidden state gives the target's own argmax.
Source of the claims: public reports of states of another document, of normed last layers and of heads left random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpu.device import to_device
from producer.rows import Pack
from producer.target import TargetError
from producer.trunk import Target

LENGTHS = (37, 22)
LONG = 88
"""Tokens of the first document beyond those from which a document is attended apart (packed_cuda.py)."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 2e-2}
"""Mean relative difference of a row that is always allowed; seeing another document makes 0.1 to 1.

62 random layers in bfloat16, compiled and with attention of long documents apart, make 0.073. Packed, a small leak is
what the second comparison is for.
"""
STEADY = 1e-3
"""Difference always allowed between two packs in which only another document changed; a dense target makes 0."""
TIMES_NOISE = 3.0
"""Or this many times what the plain model makes of another shape; 62 random layers in bfloat16 make 0.06 of it."""


class Alone(NamedTuple):
    """One document read by itself."""

    taps: list[Tensor]  # K of [n, H], in list order
    final: Tensor  # [n, H] after the final norm
    noise: list[float]  # K: row_difference to the same document read in a longer row, beside a copy of itself
    unsteady: list[float]  # K: what it changes by in that row when the other does; experts' sizes then change too


def lengths_for(long_from: int | None, row_tokens: int) -> tuple[int, int]:
    """Lengths of documents that are attended in every way that documents of a row of `row_tokens` are."""
    if long_from is None or row_tokens < 2 * long_from:
        return LENGTHS
    return long_from + LONG, LENGTHS[1]


class _Documents:
    """Two random documents, in the form of a corpus; with `other_first`, the first one is another."""

    def __init__(self, target: Target, lengths: Sequence[int], other_first: bool = False) -> None:
        vocab_size = int(target.trunk.config.vocab_size)
        generator = np.random.Generator(np.random.PCG64(7))
        self.ids = [generator.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
        if other_first:
            self.ids[0] = vocab_size - 1 - self.ids[0]

    def __getitem__(self, number: int) -> Any:
        class Document:
            ids = self.ids[number]
            loss_mask = np.ones(len(ids), dtype=np.uint8)

        return Document


@torch.inference_mode()
def alone(target: Target, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Read one document by itself, in one row: its taps [n, H] in list order, and its final hidden state [n, H]."""
    with target.in_rows():
        taps, last = target.forward(to_device(torch.tensor(ids, dtype=torch.int32), target.device).long()[None])
    return [tap[0] for tap in taps], last[0]


def check_target(target: Target, reference: list[Alone], dtype: str, row_tokens: int) -> None:
    """Check claims 1 and 2 for the way `target` reads now; `reference` are the documents alone (`read_alone`).

    `row_tokens`: tokens of the row, or of each row, that is read. Raises TargetError that names document and tap.
    """
    lengths = _lengths(reference)
    corpus: Any = _Documents(target, lengths)
    pack = Pack(0, 0, range(len(lengths)), corpus, row_tokens if target.is_packed else sum(lengths))
    recorded: dict[int, Tensor] = {}
    handles = [
        target.layers[number].register_forward_hook(_recorder(recorded, number)) for number in target.target_layer_ids
    ]
    try:
        _read(target, pack, row_tokens)
    finally:
        for handle in handles:
            handle.remove()
    assert pack.features is not None
    features = pack.features.unflatten(1, (len(target.target_layer_ids), -1))
    for number, (start, end) in pack.spans.items():
        for place, layer in enumerate(target.target_layer_ids):
            where = f"document {number}, tap {place} (output of layer {layer})"
            found = features[start:end, place]
            record = recorded[layer][0, start:end] if target.is_packed else recorded[layer][number, : end - start]
            if not torch.equal(found, record.to(found.device)):
                raise TargetError(f"target self-check: {where}: the pack does not hold what the layer put out")
            difference = row_difference(found, reference[number].taps[place])
            allowed = max(TOLERANCE[dtype], TIMES_NOISE * reference[number].noise[place])
            if not difference <= allowed:
                raise TargetError(
                    f"target self-check: {where}: read beside another document it differs from itself alone by "
                    f"{difference:.3g} of its size (at most {allowed:.3g} in {dtype}); "
                    "target.attention or this target's layers mix documents"
                )
    if target.is_packed:
        _check_steady(target, reference, features, pack.spans[1], row_tokens)


def _check_steady(
    target: Target, reference: list[Alone], features: Tensor, span: tuple[int, int], row_tokens: int
) -> None:
    """Read the pack once more with another first document; `features` [T, K, H] and `span` are of the first reading."""
    corpus: Any = _Documents(target, _lengths(reference), other_first=True)
    pack = Pack(0, 0, range(len(reference)), corpus, row_tokens)
    _read(target, pack, row_tokens)
    assert pack.features is not None
    again = pack.features.unflatten(1, (len(target.target_layer_ids), -1))
    for place, layer in enumerate(target.target_layer_ids):
        change = row_difference(again[slice(*span), place], features[slice(*span), place])
        allowed = max(STEADY, TIMES_NOISE * reference[1].unsteady[place])
        if not change <= allowed:
            raise TargetError(
                f"target self-check: document 1, tap {place} (output of layer {layer}): it changes with the document "
                f"before it by {change:.3g} of its size (at most {allowed:.3g}); this target's layers mix documents"
            )


@torch.inference_mode()
def read_alone(target: Target, lengths: Sequence[int] = LENGTHS) -> list[Alone]:
    """Read both documents alone, twice, in two shapes; to be done before anything is compiled or cut."""
    read = []
    for ids in _Documents(target, lengths).ids:
        taps, final = alone(target, ids.tolist())
        rows = torch.zeros(2, 2 * len(ids), dtype=torch.int64)
        rows[:, : len(ids)] = torch.from_numpy(ids)
        with target.in_rows():
            again, _ = target.forward(rows.to(target.device))
            rows[0] = rows[0].flip(0)
            beside_another, _ = target.forward(rows.to(target.device))
        used = slice(0, len(ids))
        noise = [row_difference(tap[1, used], one) for tap, one in zip(again, taps, strict=True)]
        unsteady = [row_difference(one[1, used], two[1, used]) for one, two in zip(beside_another, again, strict=True)]
        read.append(Alone(taps, final, noise, unsteady))
    return read


@torch.inference_mode()
def check_head(target: Target, model: nn.Module, reference: list[Alone]) -> None:
    """Check claim 3: `model` is the whole target. Raises TargetError. A bare trunk has no head to check."""
    if target.head is None:
        return
    for number, ids in enumerate(_Documents(target, _lengths(reference)).ids):
        row = to_device(torch.from_numpy(ids), target.device).long()[None]
        own = model(input_ids=row, use_cache=False).logits[0].float()
        greedy = target.head(reference[number].final).argmax(-1).to(own.device)
        short = own.amax(-1) - own.gather(1, greedy[:, None])[:, 0]
        size = own.abs().amax(-1).clamp(min=1e-6)
        if not bool((short <= 1e-2 * size).all()):
            wrong = int((short > 1e-2 * size).sum())
            raise TargetError(
                f"target self-check: the head on the final hidden state gives another token than the target's own "
                f"logits at {wrong} of {len(ids)} positions of document {number}; labels from it would be wrong"
            )


def row_difference(one: Tensor, other: Tensor) -> float:
    """Mean over rows of |one - other| / |other|, each row [H] on its own."""
    a, b = one.float(), other.to(one.device).float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)).mean())


def _read(target: Target, pack: Pack, row_tokens: int) -> None:
    """Read the pack's documents as the target is set to, and gather them."""
    if target.is_packed:
        ids = to_device(torch.from_numpy(pack.input_ids), target.device).long()
        taps, last = target.forward_packed(ids, pack.lengths + _rest(row_tokens - pack.num_tokens))
        used = slice(0, pack.num_tokens)
        pack.gather((0, pack.num_tokens), [tap[0, used] for tap in taps], last[0, used], keep_final=False)
        return
    rows = torch.zeros(len(pack.documents), row_tokens, dtype=torch.int64)
    for number, (start, end) in pack.spans.items():
        rows[number, : end - start] = torch.from_numpy(pack.input_ids[start:end])
    taps, last = target.forward(rows.to(target.device))
    for number, (start, end) in pack.spans.items():
        used = slice(0, end - start)
        pack.gather((start, end), [tap[number, used] for tap in taps], last[number, used], keep_final=False)


def _lengths(reference: Sequence[Alone]) -> list[int]:
    return [len(one.final) for one in reference]


def _rest(tokens: int) -> list[int]:
    return [tokens] if tokens else []


def _recorder(recorded: dict[int, Tensor], number: int) -> Any:
    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        recorded[number] = (output[0] if isinstance(output, tuple) else output).clone()

    return record
