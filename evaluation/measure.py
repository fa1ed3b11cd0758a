"""`python launch.py eval`: accepted length and speed of a drafter in the decoding loop, by prompt set.

Every method decodes the same prompts, batch 1: plain, DFlash, and DDTree for each node budget. Greedy methods must
write the plain text; the share that does is reported (it can fall below 1 where two tokens tie to the last bit, since
a pass over many tokens rounds differently from a pass over one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from evaluation.acceptance import Acceptance
from evaluation.drafter_session import DrafterSession
from evaluation.prompts import PromptError, load_prompts, prompt_ids
from evaluation.speculate import Limits, Sampling, Trace, decode_dflash, decode_plain, decode_tree
from evaluation.subject import Subject
from evaluation.target_session import TargetSession

Say = Callable[[str], None]
PLAIN, DFLASH = "plain", "dflash"


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    prompts: tuple[str, ...]
    limit: int | None = None
    max_new_tokens: int = 128
    trees: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Method:
    """One method on one prompt set."""

    name: str
    acceptance: Acceptance
    tokens: int
    passes: int
    seconds: float
    same_text_share: float | None = None
    traces: list[Trace] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of decoding, the reading of prompts left out."""
        return self.tokens / self.seconds if self.seconds else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """The numbers as plain JSON data, without the texts."""
        return {
            "method": self.name,
            **self.acceptance.as_dict(),
            "tokens": self.tokens,
            "tokens_per_target_pass": round(self.tokens / max(1, self.passes), 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "same_text_share": self.same_text_share,
        }


def measure(subject: Subject, plan: Plan, device: torch.device, say: Say) -> dict[str, list[Method]]:
    """Decode every prompt set with every method. Raises PromptError, TargetError."""
    sets = {name: load_prompts(name, plan.limit, subject.run_dir) for name in plan.prompts}
    target = TargetSession(subject.description, device)
    if plan.trees:
        target.refuse_tree()
    drafter = DrafterSession(subject.drafter, subject.head)
    return {name: _measure_set(name, prompts, subject, plan, target, drafter, say) for name, prompts in sets.items()}


def _measure_set(
    name: str,
    prompts: Sequence[str | list[int]],
    subject: Subject,
    plan: Plan,
    target: TargetSession,
    drafter: DrafterSession,
    say: Say,
) -> list[Method]:
    kwargs = subject.facts.training.get("chat_template_kwargs") or {}
    ids = fitting(name, [prompt_ids(subject.tokenizer, prompt, kwargs) for prompt in prompts], subject, plan, say)
    limits = Limits(plan.max_new_tokens, frozenset(subject.description.eos_token_ids))
    sampling = Sampling(plan.temperature, torch.Generator(target.device).manual_seed(plan.seed))
    size = subject.drafter.shape.block_size
    methods: dict[str, Callable[[list[int]], Trace]] = {
        PLAIN: lambda prompt: decode_plain(target, prompt, limits, sampling),
        DFLASH: lambda prompt: decode_dflash(target, drafter, prompt, limits, sampling),
    }
    for budget in plan.trees:
        methods[tree_name(budget)] = _tree_method(target, drafter, limits, budget)
    found: list[Method] = []
    for kind, decode in methods.items():
        decode(ids[0])  # once before the clock starts
        method = _gather(kind, [(decode(prompt)) for prompt in ids], size)
        if plan.temperature <= 0 and found:
            same = sum(mine.tokens == other.tokens for mine, other in zip(method.traces, found[0].traces, strict=True))
            method.same_text_share = round(same / len(ids), 4)
        found.append(method)
        say(f"{name}: {kind}: accepted length {method.acceptance.mean:.3f}, {method.tokens_per_s:.1f} tokens/s")
    return found


def fitting(name: str, ids: list[list[int]], subject: Subject, plan: Plan, say: Say) -> list[list[int]]:
    """The prompts that leave room for the new tokens in the target's context; beyond it no text means anything.

    Raises PromptError where none is left.
    """
    context = subject.description.max_position_embeddings
    kept = [prompt for prompt in ids if 0 < len(prompt) <= context - plan.max_new_tokens]
    if not kept:
        raise PromptError(
            f"--prompts {name}: none of {len(ids)} prompts is in the target's context of {context} tokens with "
            f"--max-new-tokens {plan.max_new_tokens}; the longest has {max(map(len, ids))}"
        )
    if len(kept) < len(ids):
        left_out = len(ids) - len(kept)
        say(f"{name}: {left_out} of {len(ids)} prompts left out: empty, or beyond the target's context of {context}")
    return kept


def tree_name(budget: int) -> str:
    """How a tree of `budget` nodes is called in tables."""
    return f"ddtree {budget}"


def _tree_method(
    target: TargetSession, drafter: DrafterSession, limits: Limits, budget: int
) -> Callable[[list[int]], Trace]:
    return lambda prompt: decode_tree(target, drafter, prompt, limits, budget)


def _gather(name: str, traces: list[Trace], block_size: int) -> Method:
    tokens = sum(len(trace.tokens) for trace in traces)
    rounds = tuple(chain.from_iterable(trace.accepted for trace in traces))
    plain = name == PLAIN
    return Method(
        name=name,
        acceptance=Acceptance(tuple([1] * tokens) if plain else rounds, 1 if plain else block_size),
        tokens=tokens,
        passes=tokens if plain else len(rounds) + len(traces),
        seconds=sum(trace.seconds for trace in traces),
        traces=traces,
    )


def as_json(subject: Subject, plan: Plan, found: dict[str, list[Method]], device: torch.device) -> dict[str, Any]:
    """Everything that was measured, as plain JSON data."""
    return {
        "drafter": subject.name,
        "target": subject.description.name,
        "block_size": subject.facts.shape.block_size,
        "dtype": subject.description.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "max_new_tokens": plan.max_new_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "sets": {
            name: {
                "prompts": len(methods[0].traces),
                "methods": [
                    {**method.as_dict(), "speedup": round(method.tokens_per_s / methods[0].tokens_per_s, 4)}
                    for method in methods
                ],
            }
            for name, methods in found.items()
        },
    }
