"""Accepted lengths of many drafters on the same texts: the target's own greedy ones, read once, walked over.

What the decoding loop accepts on a text that the target wrote follows from the drafts at every position
(evaluation/acceptance.py), so one drafter pass a text measures the plain block and every tree budget. bfloat16 lets
a token in a few hundred fall the other way; `python launch.py eval` decodes for real, beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from benchmarks.answer_writer import write_answers
from configs.schema import TargetConfig
from consumer.anchors import Anchors
from consumer.attention import dense_attention
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from evaluation.acceptance import Acceptance, leading_run, walk
from evaluation.ddtree import MAX_RANKS, grow_tree
from evaluation.drafter_session import DrafterSession
from evaluation.speculate import Limits, decode_dflash
from evaluation.target_session import TargetSession
from producer.target import describe_target, load_tokenizer


class Text(NamedTuple):
    """A prompt with the target's greedy answer: ids, where the answer begins, taps [n, K*H], final hidden [n, H]."""

    ids: list[int]
    start: int
    features: Tensor
    final: Tensor


class Reader:
    """The whole target, for reading texts with their taps and for writing greedy ones."""

    def __init__(self, folder: str, layer_ids: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        """Load it."""
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self.layer_ids, self.device = tuple(layer_ids), device

    @torch.inference_mode()
    def read(self, rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Taps [n, K*H] and final hidden state [n, H] of each row; rows are padded on the right."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        output = self.model.model(ids, use_cache=False, output_hidden_states=True)
        taps = torch.cat([output.hidden_states[number + 1] for number in self.layer_ids], dim=-1)
        final = output.last_hidden_state
        return [(taps[row, : len(given)].clone(), final[row, : len(given)].clone()) for row, given in enumerate(rows)]

    def write(self, prompts: list[list[int]], max_new_tokens: int, temperature: float = 0.0) -> list[list[int]]:
        """The answers, as ids, all in one batch; end of turn included. temperature 0: the greedy ones."""
        return write_answers(self.model, prompts, max_new_tokens, self.tokenizer.eos_token_id, temperature)


class Drafts(NamedTuple):
    """What a drafter proposes at every position of a text's answer: tokens and log-probabilities, [n][B-1][ranks]."""

    tokens: list[list[list[int]]]
    logp: list[list[list[float]]]


@torch.inference_mode()
def drafts_of(drafter: Drafter, head: FrozenHead, text: Text, ranks: int, zero_context: bool = False) -> Drafts:
    """Draft at every position of the answer in one pass, as training does."""
    shape, device = drafter.shape, text.features.device
    ids = torch.tensor(text.ids, device=device)
    position = torch.arange(text.start, len(text.ids) - 1, device=device)
    anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))
    doc_start = torch.zeros(len(text.ids), dtype=torch.int32, device=device)
    block = torch.full((len(position), shape.block_size), shape.mask_token_id, device=device)
    block[:, 0] = ids[position]
    features = torch.zeros_like(text.features) if zero_context else text.features
    hidden = drafter(
        head.embedding[block.flatten()],
        drafter.context(features.to(drafter.fc.weight.dtype)),
        (position[:, None] + torch.arange(shape.block_size, device=device)).flatten(),
        torch.arange(len(text.ids), device=device),
        dense_attention(anchors, doc_start, shape),
        predicted_only=True,
    )
    top = torch.log_softmax((hidden @ head.head.T).float(), dim=-1).topk(ranks, dim=-1)
    sizes = (len(position), shape.block_size - 1, ranks)
    return Drafts(head.tokens(top.indices).view(sizes).tolist(), top.values.view(sizes).tolist())


def plain_rounds(drafts: Drafts, answer: list[int]) -> list[int]:
    """Accepted lengths of the plain block over a text."""
    first = [[slot[0] for slot in block] for block in drafts.tokens]
    return walk(lambda at: leading_run(first[at], answer[at + 1 :]), len(answer))


def tree_rounds(given: tuple[Drafts, list[int], tuple[int, ...]]) -> list[list[int]]:
    """Accepted lengths of DDTree over a text, for each budget; a smaller tree is the larger one's beginning."""
    drafts, answer, budgets = given
    trees: dict[int, Any] = {}

    def run_at(budget: int) -> Callable[[int], int]:
        def run(at: int) -> int:
            if at not in trees:
                trees[at] = grow_tree(drafts.logp[at], drafts.tokens[at], max(budgets))
            return int(trees[at].accepted(answer[at + 1 :], budget))

        return run

    return [walk(run_at(budget), len(answer)) for budget in budgets]


def measure(
    drafter: Drafter,
    head: FrozenHead,
    sets: dict[str, list[Text]],
    budgets: tuple[int, ...] = (),
    workers: int = 1,
    zero_context: bool = False,
) -> dict[str, dict[str, Any]]:
    """Accepted length of every set: the plain block, and DDTree for each budget."""
    found: dict[str, dict[str, Any]] = {}
    size = drafter.shape.block_size
    for name, texts in sets.items():
        ranks = MAX_RANKS if budgets else 1
        drafts = [drafts_of(drafter, head, text, ranks, zero_context) for text in texts]
        answers = [text.ids[text.start :] for text in texts]
        pairs = zip(drafts, answers, strict=True)
        rounds = [length for draft, answer in pairs for length in plain_rounds(draft, answer)]
        found[name] = {"dflash": Acceptance(tuple(rounds), size).as_dict()}
        if budgets:
            jobs = [(draft, answer, budgets) for draft, answer in zip(drafts, answers, strict=True)]
            with get_context("fork").Pool(workers) as pool:
                by_text = pool.map(tree_rounds, jobs, chunksize=1)
            for place, budget in enumerate(budgets):
                all_rounds = tuple(length for text in by_text for length in text[place])
                found[name][f"ddtree {budget}"] = Acceptance(all_rounds, size).as_dict()
    return found


class Decoding:
    """The decoding loop of a server (evaluation/speculate.py) in float32, on the first prompts of each set."""

    def __init__(
        self, folder: Path, layer_ids: Sequence[int], mask_token: int, sets: dict[str, list[Text]], num_prompts: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Load the target once more: for the loop with its cache."""
        tokenizer = load_tokenizer(folder)
        settings = TargetConfig.model_validate(
            {"model": str(folder), "dtype": "float32", "target_layer_ids": list(layer_ids), "mask_token_id": mask_token}
        )
        description = describe_target(folder, folder.name, settings, tokenizer, on_gpu=device.type == "cuda")
        self._target = TargetSession(description, device)
        self._ends = frozenset(description.eos_token_ids)
        self._sets = {name: texts[:num_prompts] for name, texts in sets.items()}

    def measure(self, drafter: Drafter, head: FrozenHead) -> dict[str, dict[str, Any]]:
        """For each set: accepted length by the loop and by walking over the texts, and how many of these came out."""
        session, found = DrafterSession(drafter, head), {}
        for name, texts in self._sets.items():
            answers = [text.ids[text.start :] for text in texts]
            walked = [
                plain_rounds(drafts_of(drafter, head, text, 1), answer)
                for text, answer in zip(texts, answers, strict=True)
            ]
            traces = [
                decode_dflash(self._target, session, text.ids[: text.start], Limits(len(answer), self._ends))
                for text, answer in zip(texts, answers, strict=True)
            ]
            size = drafter.shape.block_size
            by_loop = Acceptance(tuple(chain.from_iterable(trace.accepted for trace in traces)), size)
            found[name] = {
                "prompts": len(texts),
                "accept_len": round(by_loop.mean, 4),
                "rounds": len(by_loop.rounds),
                "walked": round(Acceptance(tuple(chain.from_iterable(walked)), size).mean, 4),
                "same_text": sum(trace.tokens == answer for trace, answer in zip(traces, answers, strict=True)),
            }
        return found


def bigram_rounds(successor: dict[int, int], texts: list[Text], block_size: int) -> Acceptance:
    """Accepted lengths of a bigram table's chain."""
    rounds: list[int] = []
    for text in texts:
        answer = text.ids[text.start :]

        def run(at: int, answer: list[int] = answer) -> int:
            token, count = answer[at], 0
            for wanted in answer[at + 1 : at + block_size]:
                token = successor.get(token, token)
                if token != wanted:
                    break
                count += 1
            return count

        rounds += walk(run, len(answer))
    return Acceptance(tuple(rounds), block_size)
