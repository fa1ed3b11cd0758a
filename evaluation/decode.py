"""The DFlash decoding loop, greedy: propose a block, verify it with the target, accept the leading matches plus one.

Lossless: whatever proposes, the tokens are the target's own greedy text. Accepted length counts the bonus token, so it
is 1.0 for a drafter that is never right and B for one that always is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from evaluation.proposers import Proposer
from evaluation.verifier import Verifier


@dataclass(frozen=True)
class Decoded:
    """Per prompt: the new tokens, and the accepted length of every round."""

    tokens: list[list[int]]
    accepted: list[list[int]]

    @property
    def accept_len(self) -> float:
        """Mean accepted length over all rounds of all prompts."""
        rounds = list(chain.from_iterable(self.accepted))
        return sum(rounds) / max(1, len(rounds))


def decode(verifier: Verifier, proposer: Proposer, prompts: list[list[int]], max_new_tokens: int) -> Decoded:
    """Decode `prompts` together until each has `max_new_tokens` tokens or an end-of-text token.

    The first token of each comes from reading the prompt and is no round. Rows that are done stay in the batch but no
    longer count; their rounds and tokens are dropped.
    """
    features, anchor_R = verifier.prefill(prompts)
    texts = [[*prompt, int(token)] for prompt, token in zip(prompts, anchor_R, strict=True)]
    accepted: list[list[int]] = [[] for _ in prompts]
    ends = set(verifier.description.eos_token_ids)
    done = [_is_done(text, prompt, ends, max_new_tokens) for text, prompt in zip(texts, prompts, strict=True)]
    while not all(done):
        starts = torch.tensor([len(text) - 1 for text in texts], device=verifier.device)
        drafts = proposer.propose(texts, features)
        anchors = torch.tensor([text[-1] for text in texts], device=verifier.device)
        block = torch.cat([anchors[:, None], drafts], dim=1)
        greedy, taps = verifier.verify(block, starts)
        run_R = torch.cumprod((drafts == greedy[:, :-1]).long(), dim=1).sum(1)
        verifier.keep(run_R + 1, block.shape[1])
        for row, run in enumerate(run_R.tolist()):
            new = [*drafts[row, :run].tolist(), int(greedy[row, run])]
            features[row] = torch.cat([features[row], taps[row, : run + 1]])
            cut = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
            if not done[row]:
                accepted[row].append(cut)
            texts[row].extend(new)
            done[row] = done[row] or _is_done(texts[row], prompts[row], ends, max_new_tokens)
    return Decoded(
        [_trim(text[len(p) :], ends, max_new_tokens) for text, p in zip(texts, prompts, strict=True)], accepted
    )


def _is_done(text: list[int], prompt: list[int], ends: set[int], max_new_tokens: int) -> bool:
    new = text[len(prompt) :]
    return len(new) >= max_new_tokens or any(token in ends for token in new)


def _trim(new: list[int], ends: set[int], max_new_tokens: int) -> list[int]:
    """Cut after the first end token and at the limit: by place, never by value (a prompt may contain any token)."""
    cut = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
    return new[: min(cut, max_new_tokens)]
