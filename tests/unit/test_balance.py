"""Which N:M measured rates speak for."""

from __future__ import annotations

import pytest

from configs.load import config_from
from ops.balance import EFFICIENCY, RANK_COST, Rates, proposal, splits

DENSE_27B = Rates(14_600.0, 37_800.0)


def test_every_split_of_the_devices_is_judged_by_its_slower_side() -> None:
    found = {split[:2]: split for split in splits(DENSE_27B, 8)}
    assert set(found) == {(targets, 8 - targets) for targets in range(1, 8)}
    five, six, seven = found[5, 3], found[6, 2], found[7, 1]
    assert five.tokens_per_s == pytest.approx(EFFICIENCY * 5 * 14_600)
    assert five.blocked_pct == 0
    assert five.starved_pct == pytest.approx(100 * (1 - 5 * 14_600 / (3 * 37_800 * (1 - RANK_COST * 4 / 3))))
    assert six.tokens_per_s == pytest.approx(EFFICIENCY * 2 * 37_800 * (1 - RANK_COST))
    assert six.starved_pct == 0
    assert seven.tokens_per_s == pytest.approx(EFFICIENCY * 37_800)  # one drafter adds nothing up
    assert splits(DENSE_27B, 8)[0][:2] == (5, 3)


def test_the_proposal_names_the_best_split_and_the_one_asked_for() -> None:
    config = config_from({"target": {"devices": ["cpu"] * 7}, "training": {"devices": ["cpu"]}})
    text = "\n".join(proposal(DENSE_27B, config, 0))
    assert "proposed for 8 devices: 5:3" in text
    assert "the configuration asks for: 7:1" in text
    assert "1.5 times anchors.num (512)" in text
    assert "anchors.num: auto does so by itself" in text


def test_the_proposal_says_how_far_auto_would_go() -> None:
    config = config_from({}, ["anchors.num=auto"])
    lines = proposal(Rates(100.0, 200.0), config, 0)
    assert lines[-1] == "anchors.num: auto would go to about 1024 of 512, 768, 1024, 1536"


def test_one_device_for_each_side_is_the_least() -> None:
    lines = proposal(Rates(100.0, 100.0), config_from({}), 0)
    assert lines[1].startswith("proposed for 2 devices: 1:1  about 95 tokens/s")
