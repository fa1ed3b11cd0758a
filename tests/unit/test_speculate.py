"""The decoding loop, batch 1: lossless whatever is drafted, and the same drafts as the training-side forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from configs.drafter_shape import DrafterShape
from configs.schema import TargetConfig
from evaluation.acceptance import leading_run, walk
from evaluation.decode import decode
from evaluation.drafter_session import DrafterSession
from evaluation.proposers import DrafterProposer
from evaluation.speculate import Limits, Sampling, decode_dflash, decode_plain, decode_tree
from evaluation.subject import Subject, load_subject
from evaluation.target_session import TargetSession
from evaluation.verifier import Verifier
from producer.target import TargetError, describe_target
from tests.helpers.drafter_checkpoint import save_drafter
from tests.helpers.families import make_family
from tests.helpers.tiny_target import make_tokenizer, save_target

CPU = torch.device("cpu")
NEVER = Limits(40, frozenset())
PROMPTS = [[5, 6, 7], [40, 41], [9, 9, 9, 9, 9, 9, 9, 9], [100, 3, 200, 3]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"num_layers": 2, "block_size": 6, "layout": "full"},
    "mixed": {"num_layers": 3, "block_size": 5, "layout": "mixed", "sliding_window": 9},
    "sliding": {"num_layers": 2, "block_size": 6, "layout": "sliding", "sliding_window": 8, "sliding_causal": False},
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def subject_of(target_folder: Path, folder: Path, layout: str, vocabulary: list[int] | None = None) -> Subject:
    return load_subject(save_drafter(folder, target_folder, LAYOUTS[layout], vocabulary), None, CPU)


@pytest.fixture(scope="module")
def subject(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(target_folder, tmp_path_factory.mktemp("drafter"), "mixed")


@pytest.fixture(scope="module")
def target(subject: Subject) -> TargetSession:
    return TargetSession(subject.description, CPU)


class PartlyRight(DrafterSession):
    """Drafts the known text, wrong at every `period`-th place; counts what it was shown."""

    def __init__(self, subject: Subject, text: Sequence[int], start: int, period: int, near_miss: bool = False) -> None:
        super().__init__(subject.drafter, subject.head)
        self.text, self.begin, self.period, self.near_miss = text, start, period, near_miss
        self.seen = 0

    def start(self) -> None:
        self.seen = 0

    def extend(self, features: Tensor) -> None:
        self.seen += len(features)

    def propose(self, anchor: int) -> Tensor:
        assert self.text[self.seen] == anchor  # the context is all tokens before the anchor, no more and no fewer
        logits = torch.zeros(self.shape.block_size - 1, self.shape.vocab_size)
        for slot in range(self.shape.block_size - 1):
            place = self.seen + 1 + slot
            if place < len(self.text):
                right = self.text[place]
                wrong = place % self.period == 0
                logits[slot, (right + 1) % 200] = 8.0 if wrong else 1.0
                logits[slot, right] = (7.5 if self.near_miss else 0.0) if wrong else 8.0
        return logits


@pytest.mark.parametrize("period", [2, 3, 7, 10**9])
def test_greedy_text_is_the_targets_own_and_rounds_count_what_was_right(
    subject: Subject, target: TargetSession, period: int
) -> None:
    for prompt in PROMPTS:
        plain = decode_plain(target, prompt, NEVER)
        text = prompt + plain.tokens
        drafter = PartlyRight(subject, text, len(prompt), period)
        found = decode_dflash(target, drafter, prompt, NEVER)
        assert found.tokens == plain.tokens
        assert sum(found.accepted) == len(found.tokens) - 1  # the first token comes with the prompt

        def run_at(at: int, prompt: list[int] = prompt, text: list[int] = text) -> int:
            places = range(len(prompt) + at + 1, min(len(prompt) + at + subject.drafter.shape.block_size, len(text)))
            return leading_run([0 if place % period == 0 else 1 for place in places], [1] * len(places))

        assert found.accepted == walk(run_at, len(plain.tokens))


@pytest.mark.parametrize("budget", [1, 4, 16, 64])
def test_a_tree_is_lossless_and_saves_what_is_nearly_right(
    subject: Subject, target: TargetSession, budget: int
) -> None:
    for prompt in PROMPTS:
        plain = decode_plain(target, prompt, NEVER)
        drafter = PartlyRight(subject, prompt + plain.tokens, len(prompt), 3, near_miss=True)
        found = decode_tree(target, drafter, prompt, NEVER, budget)
        assert found.tokens == plain.tokens
        if budget >= 16:  # the right token is the second choice where the first is wrong, so whole blocks pass
            assert found.accepted[0] == subject.drafter.shape.block_size


def test_a_real_drafters_tree_is_lossless(subject: Subject, target: TargetSession) -> None:
    drafter = DrafterSession(subject.drafter, subject.head)
    for prompt in PROMPTS:
        plain = decode_plain(target, prompt, NEVER)
        assert decode_dflash(target, drafter, prompt, NEVER).tokens == plain.tokens
        assert decode_tree(target, drafter, prompt, NEVER, 100).tokens == plain.tokens


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_grown_context_gives_the_drafts_of_the_training_side(
    target_folder: Path, tmp_path: Path, layout: str
) -> None:
    subject = subject_of(target_folder, tmp_path, layout)
    shape: DrafterShape = subject.drafter.shape
    features = torch.randn(30, shape.num_taps * shape.hidden, generator=torch.Generator().manual_seed(1))
    session = DrafterSession(subject.drafter, subject.head)
    session.start()
    for first, last in ((0, 7), (7, 8), (8, 8), (8, 30)):
        session.extend(features[first:last])
        text = [*range(60, 60 + last), 77]
        whole = DrafterProposer(subject.drafter, subject.head).propose([text], [features[:last]])[0]
        assert torch.equal(session.propose(77).argmax(-1), whole)


def test_batched_and_single_decoding_accept_the_same(subject: Subject, target: TargetSession) -> None:
    batch = decode(Verifier(subject.description, CPU), DrafterProposer(subject.drafter, subject.head), PROMPTS, 40)
    drafter = DrafterSession(subject.drafter, subject.head)
    for prompt, tokens, accepted in zip(PROMPTS, batch.tokens, batch.accepted, strict=True):
        single = decode_dflash(target, drafter, prompt, NEVER)
        assert single.tokens == tokens
        assert single.accepted[:-1] == accepted[: len(single.accepted) - 1]  # the last round is cut to what was asked


def test_a_reduced_vocabulary_drafts_the_targets_tokens(target_folder: Path, tmp_path: Path) -> None:
    subject = subject_of(target_folder, tmp_path, "full", vocabulary=[2, 9, 40, 77, 200, 201, 210])
    target = TargetSession(subject.description, CPU)
    drafter = DrafterSession(subject.drafter, subject.head)
    for prompt in PROMPTS:
        plain = decode_plain(target, prompt, NEVER)
        assert decode_dflash(target, drafter, prompt, NEVER).tokens == plain.tokens
        assert decode_tree(target, drafter, prompt, NEVER, 8).tokens == plain.tokens


def test_text_that_contains_the_mask_token_keeps_its_length(subject: Subject, target: TargetSession) -> None:
    mask = subject.drafter.shape.mask_token_id
    for prompt in ([mask, 5, mask, 6], [7, mask]):
        plain = decode_plain(target, prompt, NEVER)
        text = [*plain.tokens[:10], mask, *plain.tokens[11:]]
        assert Limits(40, frozenset()).trimmed(0, text) == (text, True)
        drafter = PartlyRight(subject, prompt + plain.tokens, len(prompt), 4)
        assert len(decode_dflash(target, drafter, prompt, NEVER).tokens) == len(plain.tokens) == 40


def test_an_end_token_inside_a_block_ends_the_text_there(subject: Subject, target: TargetSession) -> None:
    prompt = PROMPTS[0]
    plain = decode_plain(target, prompt, NEVER)
    end = plain.tokens[8]
    first = plain.tokens.index(end)
    limits = Limits(40, frozenset({end}))
    drafter = PartlyRight(subject, prompt + plain.tokens, len(prompt), 10**9)
    for found in (
        decode_plain(target, prompt, limits),
        decode_dflash(target, drafter, prompt, limits),
        decode_tree(target, drafter, prompt, limits, 16),
    ):
        assert found.tokens == plain.tokens[: first + 1]


def test_sampled_text_has_the_targets_distribution(subject: Subject, target: TargetSession) -> None:
    """The pair of the first two tokens, which the loop makes in different ways, against plain sampling's odds."""
    prompt, temperature, total = [5, 6, 7], 0.6, 500
    drafter = DrafterSession(subject.drafter, subject.head)
    sampling = Sampling(temperature, torch.Generator().manual_seed(4))
    limits = Limits(2, frozenset())
    counts = Counter(tuple(decode_dflash(target, drafter, prompt, limits, sampling).tokens) for _ in range(total))
    p = torch.softmax(target.start(prompt).logits[-1] / temperature, -1)
    for token in p.topk(3).indices.tolist():
        share = sum(count for pair, count in counts.items() if pair[0] == token)
        assert abs(share - total * p[token]) < 4.5 * float((total * p[token] * (1 - p[token])).sqrt())
        after = torch.softmax(target.start([*prompt, token]).logits[-1] / temperature, -1)
        best = int(after.argmax())
        odds = float(p[token] * after[best])
        assert abs(counts[token, best] - total * odds) < 4.5 * (total * odds * (1 - odds)) ** 0.5


@pytest.mark.parametrize(
    ("family", "tree", "batch"),
    [
        ("mistral", "sliding_attention", "mistral has sliding_attention"),  # a window, and no list of kinds
        ("gemma2", "sliding_attention", "gemma2 has sliding_attention"),  # no SDPA in transformers
        ("gpt_oss", "sliding_attention", "gpt_oss has sliding_attention"),
        ("llava", None, None),  # a wrapper that is no model of text
    ],
)
def test_a_target_of_any_family_decodes_beyond_its_window_and_says_what_it_cannot(
    subject: Subject, tmp_path: Path, family: str, tree: str | None, batch: str | None
) -> None:
    make_family(family).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = TargetConfig.model_validate({"model": family, "target_layer_ids": [0, 2, 4], "dtype": "float32"})
    description = describe_target(tmp_path, family, settings, make_tokenizer(), on_gpu=False)
    target = TargetSession(description, CPU)
    prompt = list(range(10, 40))  # windows are of 16
    limits = Limits(20, frozenset())
    plain = decode_plain(target, prompt, limits)
    drafter = PartlyRight(subject, prompt + plain.tokens, len(prompt), 3)
    assert decode_dflash(target, drafter, prompt, limits).tokens == plain.tokens
    with pytest.raises(TargetError, match=tree) if tree else nullcontext():
        assert decode_tree(target, drafter, prompt, limits, 8).tokens == plain.tokens
    with pytest.raises(TargetError, match=batch) if batch else nullcontext():
        Verifier(description, CPU)


def test_a_hybrid_target_decodes_blocks_and_refuses_trees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=0, num_experts_per_tok=1, mlp_only_layers=[0, 1, 2, 3],
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    folder = tmp_path / "hybrid"
    transformers.Qwen3NextForCausalLM(config).eval().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    settings = TargetConfig.model_validate({"model": str(folder), "target_layer_ids": [0, 1, 2], "dtype": "float32"})
    description = describe_target(folder, "hybrid", settings, make_tokenizer(), on_gpu=False)
    target = TargetSession(description, CPU)
    subject = subject_of(save_target(tmp_path / "plain"), tmp_path / "drafter", "full")
    for prompt in PROMPTS:
        plain = decode_plain(target, prompt, NEVER)
        drafter = PartlyRight(subject, prompt + plain.tokens, len(prompt), 3)
        found = decode_dflash(target, drafter, prompt, NEVER)
        assert found.tokens == plain.tokens
        assert max(found.accepted) == 3
        with pytest.raises(TargetError, match="linear_attention"):
            decode_tree(target, drafter, prompt, NEVER, 8)
