"""Head and loss: chunks, labels, weights, metrics and sums, against plain autograd and loops."""

from __future__ import annotations

import math

import pytest
import torch

from consumer.loss import LossRule, default_gamma, dpace_weights, head_loss, slot_weights

BLOCKS, SLOTS, HIDDEN, VOCAB = 9, 5, 16, 53


def data(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
    labels = torch.randint(0, VOCAB, (BLOCKS, SLOTS), generator=generator)
    valid = torch.rand(BLOCKS, SLOTS, generator=generator) < 0.8
    labels[2, 3] = -1
    goal = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, dtype=dtype)
    return hidden, head, labels, valid, torch.ones(BLOCKS, dtype=torch.bool), goal


def total(rule, hidden, head, labels, valid, keep, goal):
    terms = head_loss(hidden, head, labels, valid, keep, rule, goal)
    return terms, torch.autograd.grad(terms.loss, hidden)[0]


@pytest.mark.parametrize("decay", ["exponential", "dpace", "none"])
@pytest.mark.parametrize("labels", ["hard", "soft", "target_argmax"])
def test_t12_chunks_of_1_7_and_all_rows_agree(labels, decay):
    given = data()
    results = [total(LossRule(labels, decay, 4.0, 0.5, rows), *given) for rows in (10**6, 7, 1)]
    for terms, gradient in results[1:]:
        for found, wanted in zip(terms, results[0][0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", ["exponential", "dpace", "none"])
@pytest.mark.parametrize("labels", ["hard", "soft", "target_argmax"])
def test_loss_and_gradient_equal_autograd_over_whole_logits(labels, decay):
    hidden, head, target, valid, keep, goal = data(torch.float64)
    rule = LossRule(labels, decay, 4.0, 0.5, 11)
    terms, gradient = total(rule, hidden, head, target, valid, keep, goal)
    log_q, log_p = (hidden @ head.T).log_softmax(-1), (goal @ head.T).log_softmax(-1)
    label = target if labels == "hard" else log_p.argmax(-1)
    carries = valid & (label >= 0)
    cross_entropy = -log_q.gather(-1, label.clamp(min=0)[..., None])[..., 0]
    if decay == "dpace":
        weights = dpace_weights(cross_entropy, carries, 0.5)
    else:
        weights = slot_weights(rule, SLOTS, torch.device("cpu")) * carries
    losses = (log_p.exp() * (log_p - log_q)).sum(-1) if labels == "soft" else cross_entropy
    wanted = (losses * weights.detach()).sum()
    torch.testing.assert_close(terms.loss, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, hidden)[0], rtol=1e-6, atol=1e-9)
    assert float(terms.weight) == pytest.approx(float(weights.sum()))


def test_dpace_equals_its_definition_in_loops():
    generator = torch.Generator().manual_seed(1)
    loss = torch.rand(6, 7, generator=generator) * 4
    valid = torch.rand(6, 7, generator=generator) < 0.7
    found, alpha = dpace_weights(loss, valid, 0.3), 0.3
    for block in range(6):
        reach = []
        for j in range(7):
            product = 1.0
            for i in range(j + 1):
                if valid[block, i]:
                    product *= (1 - alpha) * math.exp(-float(loss[block, i])) + alpha
            reach.append(product if valid[block, j] else 0.0)
        for j in range(7):
            wanted = sum(reach[m] for m in range(j, 7)) if valid[block, j] else 0.0
            assert float(found[block, j]) == pytest.approx(wanted, rel=1e-5)


def test_t01_pattern_right_right_wrong_right_is_an_accepted_length_of_3():
    head = torch.eye(6)
    predicted = torch.tensor([[1, 2, 5, 4], [0, 1, 2, 3]])
    labels = torch.tensor([[1, 2, 3, 4], [5, 1, 2, 3]])
    hidden = torch.nn.functional.one_hot(predicted, 6).float()
    every = torch.ones(2, 4, dtype=torch.bool)
    terms = head_loss(hidden, head, labels, every, torch.tensor([True, True]), LossRule())
    assert float(terms.accept) == 3 + 1
    assert float(terms.blocks) == 2
    assert terms.correct_S.tolist() == [1, 2, 1, 2]
    assert terms.counted_S.tolist() == [2, 2, 2, 2]


def test_accepted_length_is_between_1_and_the_block_size():
    head = torch.eye(6)
    labels = torch.tensor([[1, 2, 3, 4]])
    hidden = torch.nn.functional.one_hot(labels, 6).float()
    every, keep = torch.ones(1, 4, dtype=torch.bool), torch.tensor([True])
    assert float(head_loss(hidden, head, labels, every, keep, LossRule()).accept) == 5
    assert float(head_loss(hidden, head, (labels + 1) % 6, every, keep, LossRule()).accept) == 1


def test_unused_blocks_count_nowhere():
    hidden, head, labels, valid, keep, _ = data()
    valid[4], keep[4], labels[4] = False, False, -1
    terms, gradient = total(LossRule(), hidden, head, labels, valid, keep, None)
    assert float(terms.blocks) == BLOCKS - 1
    assert bool((gradient[4] == 0).all())


def test_a_token_outside_the_draft_vocabulary_is_wrong_and_carries_no_loss():
    hidden, head, labels, valid, keep, _ = data()
    valid[:] = True
    labels[:, 0] = -1
    terms, gradient = total(LossRule(), hidden, head, labels, valid, keep, None)
    assert terms.correct_S[0] == 0
    assert terms.counted_S[0] == BLOCKS
    assert float(terms.accept) == BLOCKS
    assert bool((gradient[:, 0] == 0).all())


def test_soft_labels_without_the_target_state_are_refused():
    hidden, head, labels, valid, keep, _ = data()
    with pytest.raises(ValueError, match="no final_hidden"):
        head_loss(hidden, head, labels, valid, keep, LossRule(labels="soft"))


def test_infinite_logits_of_a_row_without_label_do_not_spread():
    hidden, head, labels, valid, keep, _ = data()
    valid[0], labels[0] = False, -1
    with torch.no_grad():
        hidden[0] = 3e38
    terms, gradient = total(LossRule(), hidden, head, labels, valid, keep, None)
    assert bool(torch.isfinite(terms.loss.detach()))
    assert bool(torch.isfinite(gradient[1:]).all())


def test_t05_sums_do_not_depend_on_how_blocks_are_split():
    hidden, head, labels, valid, keep, _ = data(torch.float64)
    whole, gradient = total(LossRule(), hidden, head, labels, valid, keep, None)
    for split in ([1, 8], [4, 5], [2, 3, 4]):
        sums, grads, at = torch.zeros(2, dtype=torch.float64), [], 0
        for size in split:
            part = slice(at, at + size)
            at += size
            terms, grad = total(
                LossRule(), *(x[part] if x is not head else x for x in (hidden, head, labels, valid, keep)), None
            )
            sums += torch.stack([terms.loss.detach(), terms.weight])
            grads.append(grad)
        torch.testing.assert_close(sums, torch.stack([whole.loss.detach(), whole.weight]), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.cat(grads) / sums[1], gradient / whole.weight, rtol=1e-6, atol=1e-9)


def test_default_gamma_is_the_public_trainers():
    assert [default_gamma(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert default_gamma(2) >= 1.0
