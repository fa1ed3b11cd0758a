"""Every interleaving and every crash of small rings, and the proof that the search can find what is wrong."""

from __future__ import annotations

import pytest
from ring_model import BUGS, Model, Violation, search


@pytest.mark.parametrize(
    ("slots", "consumers", "packs", "crashes"), [(1, 1, 4, 3), (2, 1, 4, 3), (1, 2, 3, 2), (2, 2, 3, 2), (2, 2, 4, 1)]
)
def test_no_crash_at_any_step_loses_doubles_tears_or_wedges(
    slots: int, consumers: int, packs: int, crashes: int
) -> None:
    states, at_rest = search(Model(slots, consumers, packs, crashes))
    assert states > 100
    assert at_rest > 0, "no run ever came to its end: nothing was checked there"


@pytest.mark.storm
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("slots", "consumers", "packs", "crashes"), [(2, 2, 4, 3), (3, 2, 4, 2), (2, 3, 4, 2)])
def test_larger_rings_are_searched_by_hand(slots: int, consumers: int, packs: int, crashes: int) -> None:
    print(search(Model(slots, consumers, packs, crashes)))


@pytest.mark.parametrize("bug", BUGS)
def test_the_search_finds_each_seeded_bug(bug: str) -> None:
    with pytest.raises(Violation) as caught:
        search(Model(num_slots=2, num_consumers=2, num_packs=3, crashes=2, bug=bug))
    print(caught.value)
