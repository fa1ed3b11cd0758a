"""Parity with the programs that people serve with, in their own environments: dflash 0.1.0 (z-lab), speculators 0.9.0.

`pytest -m clients`. What cannot be installed is skipped with pip's reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.load import load_config
from consumer.anchors import Anchors, positions_in_document
from consumer.attention import dense_attention
from consumer.drafter import Drafter
from consumer.export.folder import read_export
from consumer.export.source import export_checkpoint
from consumer.frozen_head import load_frozen_head
from evaluation.drafter_session import DrafterSession
from evaluation.speculate import Limits, decode_dflash, decode_plain
from evaluation.subject import load_subject
from evaluation.target_session import TargetSession
from producer.target_source import find_target
from tests.clients.environment import DFLASH, SPECULATORS, run_client
from tests.helpers.drafter_checkpoint import save_drafter
from tests.helpers.learned_drafter import save_learned_drafter
from tests.helpers.tiny_target import save_target

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
NEW_TOKENS = 28
pytestmark = pytest.mark.clients


def compared_with_zlab(
    export: Path, target: Path, prompts: list[list[int]], tmp_path: Path, limit: int
) -> list[list[int]]:
    """Decode with both; the same tokens, which are the target's own, and the same rounds. Returns ours."""
    subject = load_subject(export, str(target), CPU)
    session, drafter = TargetSession(subject.description, CPU), DrafterSession(subject.drafter, subject.head)
    ends = subject.description.eos_token_ids
    limits = Limits(limit, frozenset(ends))
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    words = [str(export), str(target), str(tmp_path / "prompts.json"), str(tmp_path / "found.json"), str(limit)]
    run_client(DFLASH, "zlab_decode.py", *words, *map(str, ends))
    rounds = []
    for prompt, theirs in zip(prompts, json.loads((tmp_path / "found.json").read_text()), strict=True):
        ours = decode_dflash(session, drafter, prompt, limits)
        assert ours.tokens == theirs["tokens"] == decode_plain(session, prompt, limits).tokens
        assert ours.accepted == theirs["accepted"]
        rounds.append(ours.accepted)
    return rounds


def test_zlab_decodes_our_export_as_we_do_on_the_demo_target(tmp_path: Path) -> None:
    demo = load_config(REPOSITORY / "configs" / "demo.yaml", [])
    target = find_target(demo.target.model, None, print).path
    saved, prompts = save_learned_drafter(
        tmp_path / "saved", target, REPOSITORY / "data" / "demo_chat.jsonl", NEW_TOKENS
    )
    export, _ = export_checkpoint(saved, "zlab", tmp_path / "export", dtype="float32")
    rounds = compared_with_zlab(export, target, prompts, tmp_path, NEW_TOKENS - 4)
    lengths = [length for found in rounds for length in found]
    assert len(set(lengths)) > 1, "every round was alike: the comparison says little"
    assert sum(lengths) / len(lengths) > 1.2


@pytest.mark.parametrize(
    "layout",
    [
        {"layout": "full"},
        {"layout": "mixed", "sliding_window": 9},
        {"layout": "sliding", "sliding_window": 9},
        {"layout": "sliding", "sliding_window": 9, "sliding_causal": False},
    ],
    ids=["full", "mixed", "sliding", "both ways"],
)
def test_zlab_reads_every_layout_as_we_do(tmp_path: Path, layout: dict[str, Any]) -> None:
    target = save_target(tmp_path / "target")
    saved = save_drafter(tmp_path / "saved", target, {"num_layers": 2, "block_size": 6, **layout})
    export, _ = export_checkpoint(saved, "zlab", tmp_path / "export", dtype="float32")
    prompts = [[5, 6, 7], [40, 3, 41], list(range(60, 90))]  # one longer than the window, one with the mask token
    compared_with_zlab(export, target, prompts, tmp_path, 60)


@pytest.mark.parametrize(
    ("layout", "vocabulary"),
    [
        ({"layout": "full"}, None),
        ({"layout": "mixed", "sliding_window": 64}, None),
        ({"layout": "sliding", "sliding_window": 64}, None),
        ({"layout": "sliding", "sliding_window": 64, "sliding_causal": False}, None),
        ({"layout": "full"}, [2, 9, 40, 77, 200, 201]),
    ],
    ids=["full", "mixed", "sliding", "both ways", "reduced vocabulary"],
)
def test_speculators_forward_gives_our_logits(
    tmp_path: Path, layout: dict[str, Any], vocabulary: list[int] | None
) -> None:
    """Contexts stay inside the window: at its edge its mask is wider than z-lab's (consumer/export/speculators.py)."""
    target = save_target(tmp_path / "target")
    saved = save_drafter(tmp_path / "saved", target, {"num_layers": 2, "block_size": 6, **layout}, vocabulary)
    export, _ = export_checkpoint(saved, "speculators", tmp_path / "export", dtype="float32")
    drafter = read_export(export).drafter()
    given = made_up_pack(drafter)
    num_anchors = int(given["loss_mask"][:-6].sum())
    save_file(given, tmp_path / "given.safetensors")
    words = [str(export), str(target), str(tmp_path / "given.safetensors"), str(tmp_path / "found.safetensors")]
    run_client(SPECULATORS, "speculators_forward.py", *words, str(num_anchors))
    found = load_file(tmp_path / "found.safetensors")
    ours = our_logits(drafter, given, target, vocabulary)
    theirs = found["logits"].view(num_anchors, 6, -1)[:, 1:]
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(ours.std()) > 0.1
    if vocabulary is not None:
        assert (found["d2t"] + torch.arange(len(vocabulary))).tolist() == vocabulary


def made_up_pack(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Two documents and padding, as speculators' forward takes them."""
    generator = torch.Generator().manual_seed(2)
    shape, tokens = drafter.shape, 64
    starts = torch.tensor([0] * 34 + [34] * 22 + [-1] * 8)
    index = torch.arange(tokens)
    mask = ((index % 5 != 0) & (starts >= 0)).long()
    return {
        "hidden_states": torch.randn(tokens, shape.num_taps * shape.hidden, generator=generator),
        "input_ids": torch.randint(4, shape.vocab_size, (tokens,), generator=generator),
        "loss_mask": mask,
        "verifier_last_hidden_states": torch.randn(tokens, shape.hidden, generator=generator),
        "document_ids": starts,
        "position_ids": torch.where(starts >= 0, index - starts, 0),
    }


def our_logits(
    drafter: Drafter, given: dict[str, torch.Tensor], target: Path, vocabulary: list[int] | None
) -> torch.Tensor:
    """Logits [A, B-1, V'] of the training-side forward at the same anchors: every supervised token but the last few."""
    shape, starts = drafter.shape, given["document_ids"].int()
    head = load_frozen_head(target, True, torch.float32, CPU)
    head = head if vocabulary is None else head.reduced(vocabulary)
    position = torch.nonzero(given["loss_mask"][: -shape.block_size]).flatten()
    anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))
    ids = torch.full((len(position), shape.block_size), shape.mask_token_id)
    ids[:, 0] = given["input_ids"][position]
    places = given["position_ids"][position][:, None] + torch.arange(shape.block_size)
    with torch.no_grad():
        hidden = drafter(
            head.embedding[ids.flatten()],
            drafter.context(given["hidden_states"]),
            places.flatten(),
            positions_in_document(starts),
            dense_attention(anchors, starts, shape),
            predicted_only=True,
        )
        logits: torch.Tensor = hidden @ head.head.T
    return logits.view(len(position), shape.block_size - 1, -1)
