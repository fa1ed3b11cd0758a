"""The decoding loop that a server runs, one prompt at a time: plain, DFlash (greedy or sampled) and DDTree.

Greedy text is the target's own, whatever is drafted; sampled text has the target's distribution (sampling.py). A
round's accepted length counts the token that the target adds. The last block is no longer than what may still be
written, as z-lab/dflash 0.1.0 has it, so rounds can be compared one by one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from evaluation.ddtree import build_tree
from evaluation.drafter_session import DrafterSession
from evaluation.sampling import accept, draw, probabilities, widened
from evaluation.target_session import TargetSession


@dataclass
class Trace:
    """One decoded prompt: the new tokens, the accepted length of each round, and how long decoding took."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """From the prompt having been read to the last token."""


@dataclass(frozen=True)
class Limits:
    """When a text ends: after so many new tokens, or with an end token."""

    max_new_tokens: int
    ends: frozenset[int]

    def trimmed(self, so_far: int, new: list[int]) -> tuple[list[int], bool]:
        """Cut new tokens after the first end token and at the limit, by place, never by value; tell if that ends it."""
        cut = next((place + 1 for place, token in enumerate(new) if token in self.ends), len(new))
        kept = new[: min(cut, self.max_new_tokens - so_far)]
        return kept, kept[-1] in self.ends or so_far + len(kept) == self.max_new_tokens


@dataclass
class Sampling:
    """Temperature (0: greedy) and where random numbers come from."""

    temperature: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator)

    def choose(self, logits: torch.Tensor) -> int:
        """The target's own next token, from logits [V]."""
        if self.temperature <= 0:
            return int(logits.argmax())
        return int(draw(probabilities(logits, self.temperature)[None], self.generator))


def decode_plain(target: TargetSession, prompt: list[int], limits: Limits, sampling: Sampling | None = None) -> Trace:
    """One token per pass of the target."""
    sampling = sampling or Sampling()
    trace, read = Trace(), target.start(prompt)
    began = _now(target)
    done = False
    while not done:
        kept, done = limits.trimmed(len(trace.tokens), [sampling.choose(read.logits[-1])])
        trace.tokens += kept
        if not done:
            read = target.read(torch.tensor(kept, device=target.device))
            target.keep(target.length)
    trace.seconds = _now(target) - began
    return trace


def decode_dflash(
    target: TargetSession,
    drafter: DrafterSession,
    prompt: list[int],
    limits: Limits,
    sampling: Sampling | None = None,
) -> Trace:
    """Draft a block, verify it in one pass, keep the accepted beginning and the target's token after it."""
    sampling = sampling or Sampling()
    trace, anchor, done = _begin(target, drafter, prompt, limits, sampling)
    began = _now(target)
    while not done:
        past, room = target.length, limits.max_new_tokens - len(trace.tokens)
        logits = drafter.propose(anchor)[:room]
        if sampling.temperature > 0:
            q = probabilities(logits, sampling.temperature)
            drafted = drafter.head.tokens(draw(q, sampling.generator))
        else:
            drafted = drafter.head.tokens(logits.argmax(-1))
        read = target.read(torch.cat([drafted.new_tensor([anchor]), drafted]))
        if sampling.temperature > 0:
            p = probabilities(read.logits, sampling.temperature)
            wide_q = widened(q, drafter.head.draft_to_target, p.shape[-1])
            run, following = accept(drafted, wide_q, p, sampling.generator)
        else:
            wanted = read.logits.argmax(-1)
            run = int(torch.cumprod((drafted == wanted[:-1]).long(), dim=0).sum())
            following = int(wanted[run])
        kept, done = limits.trimmed(len(trace.tokens), [*drafted[:run].tolist(), following])
        target.keep(past + len(kept))
        drafter.extend(read.features[: len(kept)])
        _finish_round(trace, kept)
        anchor = kept[-1]
    trace.seconds = _now(target) - began
    return trace


def decode_tree(
    target: TargetSession, drafter: DrafterSession, prompt: list[int], limits: Limits, budget: int
) -> Trace:
    """Draft a tree of `budget` nodes, verify it in one pass, keep the path that the target takes. Greedy.

    Raises TargetError for a target whose layers cannot read a tree.
    """
    target.refuse_tree()
    trace, anchor, done = _begin(target, drafter, prompt, limits, Sampling())
    began = _now(target)
    while not done:
        past, room = target.length, limits.max_new_tokens - len(trace.tokens)
        tree = build_tree(drafter.propose(anchor)[:room], budget, drafter.head.draft_to_target)
        tokens = torch.tensor([anchor, *tree.tokens], device=target.device)
        depth = torch.tensor([0, *tree.depths], device=target.device)
        read = target.read_tree(tokens, depth, tree.visible().to(target.device))
        wanted = read.logits.argmax(-1).tolist()
        path, following = tree.walk(wanted[1:], wanted[0])
        kept, done = limits.trimmed(len(trace.tokens), [*(tree.tokens[node] for node in path), following])
        nodes = torch.tensor([0, *(node + 1 for node in path)], device=target.device)[: len(kept)]
        target.keep_path(past, nodes)
        drafter.extend(read.features[nodes])
        _finish_round(trace, kept)
        anchor = kept[-1]
    trace.seconds = _now(target) - began
    return trace


def _begin(
    target: TargetSession, drafter: DrafterSession, prompt: list[int], limits: Limits, sampling: Sampling
) -> tuple[Trace, int, bool]:
    """Read the prompt on both sides; its first new token is no round."""
    read = target.start(prompt)
    drafter.start()
    drafter.extend(read.features)
    kept, done = limits.trimmed(0, [sampling.choose(read.logits[-1])])
    return Trace(tokens=kept), kept[-1], done


def _finish_round(trace: Trace, kept: list[int]) -> None:
    trace.tokens += kept
    trace.accepted.append(len(kept))


def _now(target: TargetSession) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
