"""Broken states stop the run with document and tap, before their pack is published; answers of others are noticed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from ops.telemetry import Phases
from producer.meter import Meter
from producer.rows import Pack
from producer.states import AGREEMENT_SETTLED, SETTLED, BadStates, StateCheck
from tests.helpers.corpus import random_documents

TAPS, HIDDEN = (3, 7, 9), 16
LENGTHS = (12, 30, 9, 25)


def pack_of(scale: float = 1.0, seed: int = 0) -> Pack:
    pack = Pack(0, 0, range(len(LENGTHS)), random_documents(LENGTHS), 96)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    pack.features = torch.zeros(96, len(TAPS) * HIDDEN)
    pack.features[: pack.num_tokens] = scale * torch.randn(pack.num_tokens, len(TAPS) * HIDDEN)
    return pack


def judge(check: StateCheck, pack: Pack) -> None:
    check.judge(check.start(pack))


def spoil(pack: Pack, document: int, tap: int, value: float) -> None:
    assert pack.features is not None
    row = pack.starts[document] + 2
    pack.features[row, tap * HIDDEN : (tap + 1) * HIDDEN if value == 0 else tap * HIDDEN + 1] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_h03_a_bad_row_names_document_tap_and_count(value: float) -> None:
    pack = pack_of()
    spoil(pack, 3, 2, value)
    counts = "0 rows with NaN or Inf and 1 all-zero" if value == 0 else "1 rows with NaN or Inf and 0 all-zero"
    with pytest.raises(BadStates, match=re.escape("document 3, tap 2 (output of layer 9)") + f".*{counts}.* of 25"):
        judge(StateCheck(TAPS, 16.0), pack)


def test_good_packs_pass_and_padding_may_be_zero() -> None:
    check = StateCheck(TAPS, 16.0)
    for seed in range(10):
        judge(check, pack_of(seed=seed))


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_h03_a_size_outside_the_running_band_stops_the_run(factor: float) -> None:
    check = StateCheck(TAPS, 16.0)
    for seed in range(SETTLED // len(LENGTHS)):
        judge(check, pack_of(seed=seed))
    odd = pack_of()
    start, end = odd.spans[2]
    assert odd.features is not None
    odd.features[start:end, HIDDEN : 2 * HIDDEN] *= factor
    with pytest.raises(BadStates, match=re.escape("document 2, tap 1 (output of layer 7)") + ".*an RMS of"):
        judge(check, odd)
    judge(StateCheck(TAPS, None), odd)


def test_one_token_with_massive_activations_is_no_fault() -> None:
    check = StateCheck(TAPS, 4.0)
    for seed in range(8):
        pack = pack_of(seed=seed)
        assert pack.features is not None
        pack.features[0] *= 1e4 if seed == 7 else 1.0
        judge(check, pack)


def test_the_usual_size_may_drift() -> None:
    check = StateCheck(TAPS, 4.0)
    for number in range(60):
        judge(check, pack_of(scale=1.0 + number / 4, seed=number))


class Agreeing:
    """A head whose greedy choice after position p is the pack's next token for the first `share` of all tokens."""

    def __init__(self, pack: Pack, share: float) -> None:
        self.next = torch.from_numpy(np.roll(pack.input_ids, -1)).long()
        self.next[int(share * pack.num_tokens) :] = 0
        assert pack.final_hidden is not None
        pack.final_hidden[:, 0] = torch.arange(len(pack.input_ids), dtype=torch.float32)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(self.next[hidden[:, 0].long()], 264).float()


def checked_agreement(share: float, packs: int) -> StateCheck:
    pack = pack_of()
    pack.final_hidden = torch.zeros(96, HIDDEN)
    check = StateCheck(TAPS, 16.0, Agreeing(pack, share))
    for _ in range(packs):
        judge(check, pack)
    return check


def test_target_agreement_counts_supervised_tokens_that_follow_another_in_their_document() -> None:
    assert StateCheck(TAPS, 16.0).agreement is None
    assert checked_agreement(1.0, 1).agreement == 1.0
    half = checked_agreement(0.5, 1).agreement
    assert half is not None
    assert 0.4 < half < 0.6


class Silent:
    """Stands for metrics, control and ring."""

    occupancy = 0

    def write(self, **values: Any) -> None:
        self.values = values

    def report(self, **_values: Any) -> None:
        pass

    def snapshot(self) -> Silent:
        return self


@pytest.mark.parametrize(("share", "warned"), [(0.2, True), (1.0, False)])
def test_answers_that_the_target_did_not_write_are_warned_about_once(share: float, warned: bool) -> None:
    lines: list[str] = []
    silent: Any = Silent()
    meter = Meter(silent, silent, silent, Phases(), 0.5, lambda event, **facts: lines.append(f"{event} {facts}"))  # type: ignore[arg-type]
    check = checked_agreement(share, 1 + AGREEMENT_SETTLED // (sum(LENGTHS) - len(LENGTHS)))
    for number in range(3):
        meter.packed(number, 76, 0.05, check)
    assert silent.values["target_agreement"] == pytest.approx(check.agreement, abs=1e-4)
    assert silent.values["padding_pct"] == 5.0
    assert len(lines) == warned
    assert all("not produced by this target" in line for line in lines)
