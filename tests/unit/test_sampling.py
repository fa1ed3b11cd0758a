"""Sampled decoding is lossless: whatever is drafted, tokens come out with the target's distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from evaluation.sampling import accept, draw, probabilities, widened

NUM_DRAWS = 20_000
VOCABULARY, DRAFTED = 5, 2


def z_scores(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], total: int) -> list[float]:
    return [(counts[key] - total * p) / math.sqrt(total * p * (1 - p)) for key, p in expected.items() if 0 < p < 1]


@pytest.mark.parametrize("reduced", [False, True])
def test_accepted_and_corrected_tokens_have_the_targets_distribution(reduced: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    p = probabilities(torch.randn(DRAFTED + 1, VOCABULARY, generator=generator) * 1.5, 0.8)
    ids = torch.tensor([0, 2, 3]) if reduced else None
    q = probabilities(torch.randn(DRAFTED, 3 if reduced else VOCABULARY, generator=generator) * 1.5, 0.8)
    wide = widened(q, ids, VOCABULARY)
    first: Counter[tuple[int, ...]] = Counter()
    second: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(NUM_DRAWS):
        rows = draw(q, generator)
        drafted = rows if ids is None else ids[rows]
        run, following = accept(drafted, wide, p, generator)
        tokens = [*drafted[:run].tolist(), following]
        accepted += run
        first[tuple(tokens[:1])] += 1
        if len(tokens) > 1:  # the second token, given that the first was accepted: its own row of p
            second[tuple(tokens[1:2])] += 1
    expected_1 = {(token,): float(p[0, token]) for token in range(VOCABULARY)}
    expected_2 = {(token,): float(p[1, token]) for token in range(VOCABULARY)}
    assert max(map(abs, z_scores(first, expected_1, NUM_DRAWS))) < 4.5
    assert max(map(abs, z_scores(second, expected_2, second.total()))) < 4.5
    share = float(torch.minimum(p[0], wide[0]).sum())  # the chance that the first drafted token is accepted
    assert second.total() / NUM_DRAWS == pytest.approx(share, abs=0.015)
    assert 0 < accepted < DRAFTED * NUM_DRAWS


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    p = probabilities(torch.randn(3, VOCABULARY, generator=generator), 1.0)
    for _ in range(200):
        run, _ = accept(draw(p[:2], generator), p[:2], p, generator)
        assert run == 2


def test_a_low_temperature_is_greedy() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]])
    assert probabilities(logits, 0.01).argmax() == 1
    assert float(probabilities(logits, 0.01)[0, 1]) > 0.999
