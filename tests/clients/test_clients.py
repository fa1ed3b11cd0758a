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
NEW_TOKENS = 20
pytestmark = pytest.mark.clients


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"layout": "full"},
    "mixed": {"layout": "mixed"},
    "sliding": {"layout": "sliding"},
    "both ways": {"layout": "sliding", "sliding_causal": False},
}


def job_of(export: Path, target: Path, prompts: list[list[int]], limit: int) -> dict[str, Any]:
    ends = load_subject(export, str(target), CPU).description.eos_token_ids
    return {
        "export": str(export),
        "target": str(target),
        "prompts": prompts,
        "max_new_tokens": limit,
        "stops": list(ends),
        "out": str(export / "found.json"),
    }


def decoded_by_zlab(jobs: list[dict[str, Any]], folder: Path) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_client(DFLASH, "zlab_decode.py", str(folder / "jobs.json"))


def compared(job: dict[str, Any]) -> list[int]:
    """Decode the same as z-lab did: the same tokens, which are the target's own, and the same rounds, returned."""
    subject = load_subject(Path(job["export"]), job["target"], CPU)
    session, drafter = TargetSession(subject.description, CPU), DrafterSession(subject.drafter, subject.head)
    limits = Limits(job["max_new_tokens"], frozenset(job["stops"]))
    rounds: list[int] = []
    for prompt, theirs in zip(job["prompts"], json.loads(Path(job["out"]).read_text()), strict=True):
        ours = decode_dflash(session, drafter, prompt, limits)
        assert ours.tokens == theirs["tokens"] == decode_plain(session, prompt, limits).tokens
        assert ours.accepted == theirs["accepted"]
        rounds += ours.accepted
    return rounds


def test_zlab_decodes_our_export_as_we_do_on_the_demo_target(tmp_path: Path) -> None:
    demo = load_config(REPOSITORY / "configs" / "demo.yaml", [])
    target = find_target(demo.target.model, None, print).path
    chats = REPOSITORY / "data" / "demo_chat.jsonl"
    saved, prompts = save_learned_drafter(tmp_path / "saved", target, chats, NEW_TOKENS)
    export, _ = export_checkpoint(saved, "zlab", tmp_path / "export", dtype="float32")
    job = job_of(export, target, prompts, NEW_TOKENS - 4)
    decoded_by_zlab([job], tmp_path)
    lengths = compared(job)
    assert len(set(lengths)) > 1, "every round was alike: the comparison says little"
    assert sum(lengths) / len(lengths) > 1.2


def test_zlab_reads_every_layout_as_we_do(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    prompts = [[5, 6, 7], [40, 3, 41], list(range(60, 90))]  # one longer than the window, one with the mask token
    jobs = []
    for name, layout in LAYOUTS.items():
        settings = {"num_layers": 2, "block_size": 6, "sliding_window": 9, **layout}
        saved = save_drafter(tmp_path / name / "saved", target, settings)
        export, _ = export_checkpoint(saved, "zlab", tmp_path / name / "export", dtype="float32")
        jobs.append(job_of(export, target, prompts, 40))
    decoded_by_zlab(jobs, tmp_path)
    for job in jobs:
        compared(job)


def test_speculators_forward_gives_our_logits(tmp_path: Path) -> None:
    """Contexts stay inside the window: at its edge its mask is wider than z-lab's (consumer/export/speculators.py)."""
    target = save_target(tmp_path / "target")
    reduced = [2, 9, 40, 77, 200, 201]
    cases = [(name, layout, None) for name, layout in LAYOUTS.items()] + [("reduced", LAYOUTS["full"], reduced)]
    jobs = []
    for name, layout, vocabulary in cases:
        settings = {"num_layers": 2, "block_size": 6, "sliding_window": 64, **layout}
        saved = save_drafter(tmp_path / name / "saved", target, settings, vocabulary)
        export, _ = export_checkpoint(saved, "speculators", tmp_path / name / "export", dtype="float32")
        given = made_up_pack(read_export(export).drafter())
        save_file(given, tmp_path / name / "given.safetensors")
        jobs.append(
            {
                "export": str(export),
                "target": str(target),
                "given": str(tmp_path / name / "given.safetensors"),
                "num_anchors": int(given["loss_mask"][:-6].sum()),
                "out": str(tmp_path / name / "found.safetensors"),
            }
        )
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_client(SPECULATORS, "speculators_forward.py", str(tmp_path / "jobs.json"))
    for (name, _, vocabulary), job in zip(cases, jobs, strict=True):
        found = load_file(job["out"])
        ours = our_logits(read_export(Path(job["export"])).drafter(), load_file(job["given"]), target, vocabulary)
        theirs = found["logits"].view(job["num_anchors"], 6, -1)[:, 1:]
        assert ours.shape == theirs.shape, name
        assert float((ours - theirs).abs().max()) < 1e-4, name
        assert float(ours.std()) > 0.1, name
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
