"""Choosing the number of anchors by starvation: the rule, what is left out of the measurement, resume, and a step that
draws another number from one step to the next.
"""

from __future__ import annotations

import pytest
import torch

from configs.load import ConfigError, config_from
from configs.schema import AnchorsConfig
from consumer.anchor_size import AnchorSize, next_size
from consumer.capture import each_size
from consumer.distributed import Offer, Turn
from consumer.memory import estimate_of
from evaluation.facts import auto_line
from tests.unit.test_step import step_of
from tests.unit.test_step_memory import TARGET_27B

SIZES = (512, 768, 1024, 1536)
AUTO = AnchorsConfig(num="auto", sizes=SIZES, review_steps=10)


def turn(elapsed_s: float, *starved_s: float, pause: int = 0) -> Turn:
    return Turn(tuple(Offer(1, 0, pause, 0, int(elapsed_s * 1e3), int(1e3 * one)) for one in starved_s))


def settle(chooser: AnchorSize, share: float, first: int = 0, steps: int = 200) -> list[int]:
    """Sizes after each step of 1 s in which all ranks starve for `share` of the time."""
    sizes = []
    for step in range(first, first + steps):
        chooser.hear(step, turn(step, share * step))
        sizes.append(chooser.size)
    return sizes


def starved_at(size: int, made_per_s: float, fixed_s: float, per_anchor_s: float) -> float:
    """Share of time a drafter waits, whose step takes a fixed time and some for each anchor."""
    return max(0.0, 1 - made_per_s * (fixed_s + per_anchor_s * size))


@pytest.mark.parametrize("starved", [0.0, 0.01, 0.019])
def test_a_drafter_that_hardly_waits_goes_one_size_down_to_the_smallest(starved: float) -> None:
    assert [next_size(SIZES, size, starved) for size in SIZES] == [512, 512, 768, 1024]


def test_a_larger_size_is_taken_only_where_it_leaves_time_to_spare() -> None:
    assert next_size(SIZES, 512, 0.36) == 512  # 0.64 * 1.5 = 0.96
    assert next_size(SIZES, 512, 0.37) == 768
    assert next_size(SIZES, 1024, 0.37) == 1536
    assert next_size(SIZES, 1536, 0.99) == 1536


@pytest.mark.parametrize("fixed_s", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("made_per_s", [0.5, 1.0, 2.0, 3.0, 3.9])
def test_it_comes_to_rest_whatever_the_rates(made_per_s: float, fixed_s: float) -> None:
    for size in SIZES:
        for _ in range(2 * len(SIZES)):
            size = next_size(SIZES, size, starved_at(size, made_per_s, fixed_s, 4e-4))
        assert next_size(SIZES, size, starved_at(size, made_per_s, fixed_s, 4e-4)) == size


def test_it_rises_while_packs_are_waited_for_and_falls_when_they_are_not() -> None:
    chooser = AnchorSize(AUTO)
    assert settle(chooser, 0.9)[-1] == 1536
    assert settle(chooser, 0.0, first=200)[-1] == 512


def test_the_first_steps_and_those_after_a_change_are_not_measured() -> None:
    sizes = settle(AnchorSize(AUTO), 0.9)
    assert [sizes.index(size) for size in SIZES] == [0, 20, 41, 62]


def test_a_pause_is_no_measurement() -> None:
    chooser = AnchorSize(AUTO, 1536)
    for step in range(20):
        chooser.hear(step, turn(step, 0.5 * step))
    for _ in range(3):
        chooser.hear(20, turn(500, 10, pause=1))  # idle, but not for lack of packs
    assert chooser.hear(21, turn(501, 10.5)) is None
    assert settle(chooser, 0.5, first=22)[-1] == 1536


@pytest.mark.parametrize("paused", [False, True])
def test_in_the_middle_of_a_step_nothing_changes_but_a_pause_is_heard(paused: bool) -> None:
    chooser = AnchorSize(AUTO)
    for step in range(20):
        chooser.hear(step, turn(step, 0.9 * step))
    assert chooser.hear(20, turn(20, 18), in_a_step=True) is None
    if paused:
        assert chooser.hear(20, turn(500, 18, pause=1), in_a_step=True) is None
    change = chooser.hear(20, turn(520, 18) if paused else turn(20, 18))
    assert (change is None) == paused, "the time of a pause is no measurement, wherever it began"


def test_every_rank_concludes_the_same_from_the_one_that_waits_longest() -> None:
    first, second = AnchorSize(AUTO), AnchorSize(AUTO)
    changes = []
    for step in range(21):
        heard = turn(step, 0.0, 0.8 * step)
        changes.append((first.hear(step, heard), second.hear(step, heard)))
    assert all(one == other for one, other in changes)
    change = changes[-1][0]
    assert change is not None
    assert (change.before, change.now, change.starved_pct) == (512, 768, 80.0)


def test_resume_begins_with_the_recorded_size_or_the_next_smaller_one() -> None:
    assert AnchorSize(AUTO).size == 512
    assert AnchorSize(AUTO, 1024).size == 1024
    assert AnchorSize(AUTO, 1000).size == 768
    assert AnchorSize(AUTO, 8).size == 512
    assert AnchorSize(AnchorsConfig(num=300), 1024).size == 300


def test_a_number_is_never_changed() -> None:
    assert set(settle(AnchorSize(AnchorsConfig(num=64, review_steps=1)), 0.9)) == {64}


def test_the_number_of_anchors_may_change_between_steps_and_the_loss_stays_a_mean_per_weight() -> None:
    few, many = step_of(lr=1e-9), step_of(lr=1e-9)
    many.num_anchors = 48
    weights, losses = [], []
    for step in (few, many):
        for _ in range(30):
            step.run()
            assert step.draw_anchors().position.shape == (step.num_anchors,)
            weights.append(float(step.latest[2]))
        losses.append(float(step.metrics()["loss"]))  # type: ignore[arg-type]
    assert sum(weights[30:]) > 2 * sum(weights[:30])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    few.num_anchors = 48
    few.run()
    many.run()
    assert float(few.latest[2]) == float(many.latest[2])


def test_each_size_is_gone_through_from_the_largest_and_the_steps_own_is_set_again() -> None:
    step = step_of()
    step.anchor_sizes = (4, 8, 12)
    step.num_anchors = 8
    assert list(each_size(step, lambda: step.num_anchors).items()) == [(12, 12), (8, 8), (4, 4)]
    with pytest.raises(ZeroDivisionError):
        each_size(step, lambda: 1 // 0)
    assert step.num_anchors == 8


def test_more_anchors_contain_the_fewer_ones_of_the_same_seed() -> None:
    step = step_of()
    few = step.draw_anchors().position
    step.num_anchors = 24
    assert torch.isin(few, step.draw_anchors().position).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["anchors.num=many"], "anchors.num: expected a whole number from 1 on, or auto, got 'many'"),
        (["anchors.num=0"], "anchors.num: expected a whole number from 1 on, or auto, got 0"),
        (["anchors.num=1024", "pack.tokens=1024"], "anchors.num: expected at most 1023 (pack.tokens 1024 hold no more"),
        (["anchors.num=auto", "pack.tokens=1024"], "ascending numbers from 1 to 1023 (pack.tokens 1024 hold no more"),
        (["anchors.num=auto", "anchors.sizes=[64, 32]"], "got [64, 32]; set anchors.sizes, or anchors.num to a number"),
        (["anchors.num=auto", "anchors.sizes=[64, 64]"], "ascending numbers"),
        (["anchors.num=auto", "anchors.sizes=[64]"], "anchors.sizes"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from({}, settings)
    (line,) = refused.value.problems
    assert words in line


def test_sizes_that_are_not_used_refuse_nothing_and_a_small_pack_lowers_the_default() -> None:
    assert config_from({"pack": {"tokens": 128}}).anchors.choices == (127,)
    assert config_from({"pack": {"tokens": 513}}).anchors.choices == (512,)
    assert config_from({"pack": {"tokens": 128}, "anchors": {"num": 9}}).anchors.choices == (9,)


def test_memory_is_estimated_for_the_largest_and_plan_names_all() -> None:
    config = config_from({"anchors": {"num": "auto", "sizes": list(SIZES)}})
    largest = config_from({"anchors": {"num": 1536}})
    assert estimate_of(config, TARGET_27B) == estimate_of(largest, TARGET_27B)
    (line,) = auto_line(config)
    assert "begins with 512 and chooses among 512, 768, 1024 or 1536 every 50 steps" in line
    assert auto_line(largest) == []
