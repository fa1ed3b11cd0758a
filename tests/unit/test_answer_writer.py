"""The batched greedy writer of the benchmark writes what transformers' generate writes."""

from __future__ import annotations

import torch

from benchmarks.answer_writer import write_answers
from tests.helpers.tiny_target import make_model


def test_answers_are_those_of_generate_one_by_one() -> None:
    model = make_model()
    prompts = [[5, 6, 7], [40, 41], [9] * 9, [100, 30, 200, 31]]
    end = 120  # the second answer reaches it, the others do not
    answers = write_answers(model, prompts, 20, end)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None
        )[0, len(prompt) :].tolist()
        assert answer == (alone[: alone.index(end) + 1] if end in alone else alone)
    assert len({len(answer) for answer in answers}) > 1


def test_sampling_nears_the_greedy_answer_as_the_temperature_falls() -> None:
    torch.manual_seed(0)
    model, prompts = make_model(), [[5, 6, 7], [40, 41]] * 8
    greedy = write_answers(model, prompts, 8, 120)
    assert write_answers(model, prompts, 8, 120, temperature=1e-6) == greedy
    hot = write_answers(model, prompts, 8, 120, temperature=5.0)
    assert len({tuple(answer) for answer in hot}) == len(hot)
