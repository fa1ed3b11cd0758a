"""Journal, trained packs, todo and checkpoints: what is remembered over a crash, and what is refused."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.run_files import from_ranges, read_journals, read_trained, to_ranges
from consumer.checkpoint import CheckpointError, keep_newest, newest_checkpoint, read_checkpoint, save_checkpoint
from consumer.journal import Journal, begin_generation
from producer.todo import Todo
from shm_ring import Field, Ring, SlotSpec, ring_name

SPEC = SlotSpec(fields=(Field("input_ids", "int32", (16,)),), meta={})


@given(st.sets(st.integers(0, 60)))
def test_ranges_round_trip(numbers: set[int]) -> None:
    ranges = to_ranges(numbers)
    assert from_ranges(ranges) == numbers
    assert all(first <= last for first, last in ranges)
    assert all(after[0] > before[1] + 1 for before, after in pairwise(ranges))


def test_a_pack_that_comes_twice_is_known(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, begin_generation(tmp_path, {0, 1}), {0, 1})
    assert 1 in journal
    assert 2 not in journal
    journal.begin(2, step=8)
    assert 2 in journal
    assert journal.trained == {0, 1}
    journal.finish(2)
    assert journal.trained == {0, 1, 2}
    journal.close()


def test_the_journal_counts_by_generation_and_survives_a_torn_line(tmp_path: Path) -> None:
    first = Journal(tmp_path, 0, begin_generation(tmp_path, ()), ())
    first.begin(3, step=0)
    first.close()
    second = Journal(tmp_path, 0, begin_generation(tmp_path, ()), ())
    second.begin(5, step=0)
    second.close()
    with (tmp_path / "journal.0.jsonl").open("a") as file:
        file.write('{"pack_id": 9, "st')
    assert read_journals(tmp_path, 0) == {3}
    assert read_journals(tmp_path, 1) == {5}
    trained = read_trained(tmp_path)
    assert trained is not None
    assert trained.generation == 1


@pytest.fixture
def ring() -> Ring:  # type: ignore[misc]
    name = ring_name(f"test-todo-{os.getpid()}", 0)
    made = Ring.create(name, SPEC, num_slots=4)
    yield made
    made.unlink()
    made.close()


def test_a_producer_makes_what_is_neither_trained_nor_in_its_ring(tmp_path: Path, ring: Ring) -> None:
    todo = Todo(tmp_path, ring, num_packs=10, rank=0, world=2)
    assert not todo.refresh()  # no drafter has started yet
    with ring.writer() as writer:
        slot = writer.acquire(timeout_s=5)
        writer.publish(slot, pack_id=4, epoch=0, num_tokens=1, num_documents=1)
        journal = Journal(tmp_path, 0, begin_generation(tmp_path, {0}), {0})
        journal.begin(6, step=1)
        assert todo.refresh()
        assert todo.take(10) == [2, 8]
        assert not todo.refresh()
        journal.close()
        begin_generation(tmp_path, {0, 2})  # pack 6 was journalled but its weights are lost
        assert todo.refresh()
        assert todo.take(10) == [6, 8]


def save(folder: Path, step: int, value: float = 1.0) -> Path:
    weights = {"fc.weight": torch.full((2, 2), value)}
    return save_checkpoint(folder, step, weights, {"step": torch.tensor(step)}, frozenset(range(step)), {"note": "x"})


def test_a_checkpoint_round_trips(tmp_path: Path) -> None:
    save(tmp_path, 7)
    found = newest_checkpoint(tmp_path, print)
    assert found is not None
    assert (found.step, found.trained, found.meta["note"]) == (7, frozenset(range(7)), "x")
    assert torch.equal(found.drafter()["fc.weight"], torch.ones(2, 2))
    assert int(found.state()["step"]) == 7


@pytest.mark.parametrize("damage", ["marker", "missing", "changed"])
def test_a_damaged_checkpoint_is_rejected_with_its_reason_and_the_older_one_is_used(
    damage: str, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    if damage == "marker":
        (newest / "complete.json").unlink()
    elif damage == "missing":
        (newest / "state.safetensors").unlink()
    else:
        (newest / "checkpoint.json").write_text(json.dumps({"step": 2, "trained": []}))
    said: list[str] = []
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert "rejected" in said[0]
    with pytest.raises(CheckpointError):
        read_checkpoint(newest)


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fc\.weight is not finite"):
        save(tmp_path, 3, value=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_retention_keeps_the_newest_and_the_initial_weights(tmp_path: Path) -> None:
    for step in (0, 5, 10, 15, 100):
        save(tmp_path, step)
    (tmp_path / ".step-7.123").mkdir()
    keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-100", "step-15"]


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match="10 bytes free"):
        save(tmp_path, 2)
    found = newest_checkpoint(tmp_path, print)
    assert found is not None
    assert found.step == 1
