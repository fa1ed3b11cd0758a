"""The measurement while training: the same number as the decoding loop's, from features that the target read once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.load import ConfigError, load_config
from configs.run_files import HELDOUT_PACK
from configs.schema import Config
from consumer.frozen_head import load_frozen_head
from consumer.heldout import HeldoutWatch
from consumer.staging import PackTensors
from consumer.step import TrainStep
from evaluation.drafter_session import DrafterSession
from evaluation.speculate import Limits, decode_dflash, decode_plain
from evaluation.subject import load_subject
from evaluation.target_session import TargetSession
from producer.heldout import write_heldout
from producer.trunk import Target
from tests.helpers.drafter_checkpoint import save_drafter
from tests.helpers.tiny_target import save_target

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [40, 41], [9, 9, 9, 9], [100, 30, 200, 31], [77, 8, 15, 16, 23, 42]]
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run folder with held-out texts that the target wrote, read by it, and a drafter that half knows them."""
    folder = tmp_path_factory.mktemp("run")
    target_folder = save_target(folder / "target")
    settings = {"num_layers": 1, "block_size": 5, "layout": "full"}
    subject = load_subject(save_drafter(folder / "saved", target_folder, settings, like_target=True), None, CPU)
    session = TargetSession(subject.description, CPU)
    limits = Limits(NEW_TOKENS, frozenset())
    answers = [decode_plain(session, prompt, limits).tokens for prompt in PROMPTS]
    rows = [{"prompt_ids": p, "answer_ids": a, "text": ""} for p, a in zip(PROMPTS, answers, strict=True)]
    (folder / "data").mkdir()
    (folder / "data" / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate({"evaluation": {"every_steps": 10}, "data": {"heldout_documents": 5}})
    target = Target(session.model, subject.description.target_layer_ids)
    write_heldout(folder, config, target, 0, lambda *_a, **_k: None)  # type: ignore[arg-type]
    pack = load_file(folder / HELDOUT_PACK)
    learner = Config.model_validate(
        {"anchors": {"num": 64}, "optimizer": {"lr": 4e-3, "schedule": "constant"}, "drafter": settings}
    )
    head = load_frozen_head(target_folder, True, torch.float32, CPU)
    step = TrainStep(
        subject.drafter.float(), head, PackTensors(**pack), learner.anchors, learner.loss, learner.optimizer, 60, seed=0
    )
    for _ in range(60):
        step.run()
    return {"folder": folder, "subject": subject, "session": session, "step": step, "answers": answers, "pack": pack}


def test_it_is_the_number_of_the_decoding_loop(measured: dict[str, Any]) -> None:
    step, session = measured["step"], measured["session"]
    watched = HeldoutWatch(measured["folder"], step.drafter, step.head).measure()
    drafter = DrafterSession(step.drafter, step.head)
    rounds: list[int] = []
    for prompt, answer in zip(PROMPTS, measured["answers"], strict=True):
        decoded = decode_dflash(session, drafter, prompt, Limits(NEW_TOKENS, frozenset()))
        assert decoded.tokens == answer
        rounds += decoded.accepted
    assert watched == pytest.approx(sum(rounds) / len(rounds), abs=0.02)
    assert watched is not None
    assert 1.2 < watched < 5.0  # a drafter that is never or always right would agree whatever the rule


def test_the_file_holds_what_the_target_reads(measured: dict[str, Any]) -> None:
    pack, session = measured["pack"], measured["session"]
    first = len(PROMPTS[0]) + NEW_TOKENS
    read = session.start(pack["input_ids"][:first].tolist())
    torch.testing.assert_close(pack["features"][:first], read.features, atol=1e-4, rtol=1e-4)
    assert pack["loss_mask"][:first].tolist() == [0] * len(PROMPTS[0]) + [1] * NEW_TOKENS
    assert pack["doc_start"][first] == first


def test_measuring_leaves_no_trace_in_the_training(measured: dict[str, Any]) -> None:
    step = measured["step"]
    weights = step.flat.weights.clone()
    pieces = step.drafter.pieces
    HeldoutWatch(measured["folder"], step.drafter, step.head).measure()
    assert torch.equal(step.flat.weights, weights)
    assert step.drafter.pieces is pieces


def test_without_the_file_nothing_is_measured(measured: dict[str, Any], tmp_path: Path) -> None:
    step = measured["step"]
    assert HeldoutWatch(tmp_path, step.drafter, step.head).measure() is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["evaluation.every_steps=15", "data.heldout_documents=4"], "expected a multiple of training.log_every_steps"),
        (["evaluation.every_steps=20"], "needs data.heldout_documents"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, words: list[str], line: str) -> None:
    (tmp_path / "c.yaml").write_text("{}\n")
    with pytest.raises(ConfigError, match=line):
        load_config(tmp_path / "c.yaml", words)
