"""Each refusal is one clear line of the right class, and harms nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shm_ring import Board, Field, Reader, Ring, SlotSpec, errors, layout, names, ring_name, shared_memory

ROOT = Path(__file__).resolve().parents[2]
SPEC = SlotSpec((Field("ids", "int32", (16,)),), {"hidden": 5120, "target_layer_ids": [1, 9]})


@pytest.fixture
def run() -> Iterator[str]:
    run = f"refuse.{os.getpid()}.{uuid.uuid4().hex[:6]}"
    yield run
    for name in names.segments_of_run(run):
        shared_memory.unlink(name)


def python(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, check=False,
    )  # fmt: skip


CREATE = "import sys; from shm_ring import *; r = Ring.create(sys.argv[1], SlotSpec.from_json(sys.argv[2]), 2)"


def fingerprint(name: str) -> tuple[Any, ...]:
    info = os.stat(names.SHM_DIR + name)
    return info.st_ino, info.st_size, info.st_mtime_ns, Path(names.SHM_DIR + name).read_bytes()[:65536]


def one_line(message: object) -> bool:
    return "\n" not in str(message) and len(str(message)) < 600


@pytest.mark.parametrize("bad", ["", "a/b", "a" * 65, "a b", "naïve", "a\n", "a\0", "../x"])
def test_a_strange_run_name_is_refused_with_the_rule(bad: str) -> None:
    with pytest.raises(errors.RingName, match="1 to 64 characters"):
        ring_name(bad, 0)


@pytest.mark.parametrize("bad", ["/", "//x", "/a/b", "/" + "x" * 300, "/.", "/..", "/x y", "/x\n"])
def test_a_strange_segment_name_is_refused_with_the_rule(bad: str) -> None:
    with pytest.raises(errors.RingName, match="1 to 128 characters") as caught:
        Ring.create(bad, SPEC)
    assert one_line(str(caught.value).replace("\\n", ""))


def test_the_longest_run_name_works() -> None:
    run = "x" * 52 + uuid.uuid4().hex[:12]
    with Ring.create(ring_name(run, 0), SPEC, 1) as ring:
        ring.unlink()


def test_a_living_name_is_refused_with_its_pid_and_nothing_of_it_changes(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        before = fingerprint(ring.name)
        with pytest.raises(errors.RingLive, match=f"creator pid {os.getpid()}") as caught:
            Ring.create(ring.name, SPEC, 8)
        second = python(CREATE, ring.name, SPEC.to_json())
        assert second.returncode == 1
        assert "RingLive" in second.stderr.splitlines()[-1]
        assert fingerprint(ring.name) == before
        assert one_line(caught.value)
        assert caught.value.exit_code == 2
        assert Ring.clean_run(run) == [(ring.name, f"live, held by creator pid {os.getpid()}")]
        assert fingerprint(ring.name) == before


def test_a_left_over_is_told_apart_and_can_be_resumed_or_cleaned(run: str) -> None:
    name = ring_name(run, 0)
    assert python(f"{CREATE}; import os; os.kill(os.getpid(), 9)", name, SPEC.to_json()).returncode == -signal.SIGKILL
    with pytest.raises(errors.RingStale, match="resume that run, or clean it away") as caught:
        Ring.create(name, SPEC, 2)
    assert one_line(caught.value)
    with Ring.resume(name, SPEC) as ring:
        assert ring.num_slots == 2
        with pytest.raises(errors.RingLive):
            Ring.resume(name, SPEC)
    assert Ring.clean_run(run) == [(name, "removed")]
    assert Ring.find(f"/dflash.{run}.") == []


@pytest.mark.parametrize("point", ["create_empty", "create_before_magic"])
def test_a_half_made_segment_is_refused_and_cleaned(run: str, point: str) -> None:
    name = ring_name(run, 0)
    died = python(CREATE, name, SPEC.to_json(), SHM_RING_KILL_AT=point)
    assert died.returncode == -signal.SIGKILL
    with pytest.raises(errors.RingStale, match="half-made"):
        Ring.open(name)
    with pytest.raises(errors.RingStale, match="half-made"):
        Ring.create(name, SPEC, 2)
    assert Ring.clean_run(run) == [(name, "removed")]


def test_clean_leaves_foreign_names_alone(run: str) -> None:
    foreign = Path(names.SHM_DIR) / f"psm_{uuid.uuid4().hex[:8]}"
    odd = Path(names.SHM_DIR) / f"dflash.{run}.r0.backup"
    try:
        foreign.write_bytes(b"not ours")
        odd.write_bytes(bytes(8))
        assert Ring.clean(f"/{foreign.name}") == []
        assert Ring.clean(f"/dflash.{run}.") == []
        assert foreign.read_bytes() == b"not ours"
        assert odd.exists()
    finally:
        foreign.unlink()
        odd.unlink()


def test_a_run_does_not_clean_another_whose_name_it_begins(run: str) -> None:
    other = Ring.create(ring_name(f"{run}.b", 0), SPEC, 1)
    other.close()
    try:
        assert Ring.clean_run(run) == []
        assert Ring.find(other.name) == [other.name]
    finally:
        assert Ring.clean_run(f"{run}.b") == [(other.name, "removed")]


def test_a_missing_name_lists_what_is_here(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 1) as ring:
        with pytest.raises(errors.RingMissing, match="same container") as caught:
            Ring.open(ring_name(run, 7))
        assert ring.name in str(caught.value)


def test_a_wrong_configuration_lists_both_sides_of_each_differing_key(run: str) -> None:
    other = SlotSpec((Field("ids", "int32", (32,)),), {"hidden": 4096, "target_layer_ids": [1, 9], "extra": True})
    with Ring.create(ring_name(run, 0), SPEC, 1) as ring:
        with pytest.raises(errors.RingMismatch) as caught:
            Ring.open(ring.name, other)
        text = str(caught.value)
        assert "meta.hidden: here 4096, in the ring 5120" in text
        assert "fields.ids.shape: here [32], in the ring [16]" in text
        assert "meta.extra: here true, in the ring absent" in text
        assert "target_layer_ids" not in text
        assert one_line(text)


def test_another_version_says_restart_both_sides(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 1) as ring:
        ring.segment.buffer[8] = 2
        with pytest.raises(errors.RingVersion, match=r"version 2, this program has 1: restart both sides"):
            Ring.open(ring.name)


def test_a_foreign_file_is_refused_by_its_magic(run: str) -> None:
    path = Path(names.SHM_DIR + ring_name(run, 0))
    path.write_bytes(b"\x7fELF" + bytes(8000))
    with pytest.raises(errors.RingCorrupt, match="magic"):
        Ring.open(ring_name(run, 0))


def test_a_board_is_not_opened_as_a_ring(run: str) -> None:
    with Board.create(run, SPEC, 2, uuid.uuid4().bytes) as board:
        assert board.ring_names == [ring_name(run, 0), ring_name(run, 1)]
        with pytest.raises(errors.RingCorrupt, match="magic"):
            Ring.open(board.name)


@pytest.mark.parametrize("cut", [-1, -(2 << 20), 100])
def test_a_cut_or_grown_file_is_refused(run: str, cut: int) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        size = ring.nbytes
        os.truncate(names.SHM_DIR + ring.name, size + cut)
        try:
            with pytest.raises(errors.RingCorrupt, match="segment bytes"):
                Ring.open(ring.name)
        finally:
            os.truncate(names.SHM_DIR + ring.name, size)


def test_a_file_with_holes_is_refused_before_it_becomes_a_bus_error(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        size = ring.nbytes
        os.truncate(names.SHM_DIR + ring.name, size - (2 << 20))
        os.truncate(names.SHM_DIR + ring.name, size)
        with pytest.raises(errors.RingCorrupt, match="holes"):
            Ring.open(ring.name)


def test_a_second_consumer_on_an_id_is_refused_and_takes_no_role(run: str) -> None:
    rings = [Ring.create(ring_name(run, k), SPEC, 2, ring_index=k) for k in range(2)]
    with Reader([rings[1]], consumer_id=1):
        with pytest.raises(errors.RingOwned, match=rf"consumer 1 .* pid {os.getpid()}.* since \d\d:\d\d:\d\d"):
            Reader(rings, consumer_id=1)
        Reader([rings[0]], consumer_id=1).close()
        Reader(rings, consumer_id=2).close()
    for ring in rings:
        ring.unlink()
        ring.close()


def test_a_second_producer_is_refused(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        with ring.writer():
            with pytest.raises(errors.RingOwned, match=f"the producer's role .* pid {os.getpid()}"):
                ring.writer()
            code = "import sys; from shm_ring import *; Ring.open(sys.argv[1]).writer()"
            assert "RingOwned" in python(code, ring.name).stderr.splitlines()[-1]
        ring.writer().close()


def test_a_ring_in_use_is_not_unlinked_and_stays_owned(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        with Reader([ring]), pytest.raises(errors.RingLive, match="consumer 0 pid"):
            ring.unlink()
        assert Ring.clean_run(run)[0][1].startswith("live, held by creator pid")


def test_nobody_attaches_to_a_removed_ring(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        ring.unlink()
        with pytest.raises(errors.RingUsage, match="removed"):
            ring.writer()
        with pytest.raises(errors.RingUsage, match="removed"):
            Reader([ring])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_told_who_owns_the_segment(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 1) as ring:
        code = (
            "import os, sys; from shm_ring import *; os.setgid(65534); os.setuid(65534)\n"
            "name, spec = sys.argv[1], SlotSpec.from_json(sys.argv[2])\n"
            "for act in (lambda: Ring.open(name), lambda: Ring.create(name, spec)):\n"
            "    try: act()\n"
            "    except errors.RingError as why: print(why.exit_code, why)\n"
            "print(Ring.clean('/dflash.'))"
        )
        done = python(code, ring.name, SPEC.to_json())
        first, second, cleaned = done.stdout.splitlines()
        assert first.startswith("2 permission denied")
        assert "uid 0 (root) with mode 0600, this process is uid 65534" in first
        assert second.startswith("2 permission denied")
        assert cleaned == "[]"


def in_small_shm(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, code, *args], capture_output=True, text=True, timeout=300,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small /dev/shm")
def test_a_small_dev_shm_is_refused_with_what_to_do_and_nothing_is_left() -> None:
    code = (
        "import os, sys; from shm_ring import *\n"
        "try: Ring.create('/dflash.small.r0', SlotSpec.from_json(sys.argv[1]), 64)\n"
        "except errors.NoSharedMemory as why: print(why.exit_code, why)\n"
        "print(os.listdir('/dev/shm'))\n"
        "r = Ring.create('/dflash.small.r0', SlotSpec.from_json(sys.argv[1]), 16); print(r.num_slots)"
    )
    done = in_small_shm(code, SPEC.to_json())
    assert done.returncode == 0, done.stderr
    message, listing, fits = done.stdout.splitlines()
    assert message.startswith("5 ring '/dflash.small.r0' needs 0.14 GB in /dev/shm, 0.07 GB free")
    assert "--shm-size=1g" in message
    assert "emptyDir" in message
    assert listing == "[]"
    assert fits == "16"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small /dev/shm")
def test_without_posix_fallocate_the_same_ring_would_be_a_bus_error() -> None:
    code = (
        "import mmap, os; f = os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT); os.ftruncate(f, 134 << 20)\n"
        "m = mmap.mmap(f, 134 << 20); m[:] = bytes(134 << 20)"
    )
    assert in_small_shm(code).returncode == -signal.SIGBUS


def test_fallocate_failing_late_leaves_nothing(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(errors.NoSharedMemory, match="No space left on device"):
        Ring.create(ring_name(run, 0), SPEC, 2)
    assert names.segments_of_run(run) == []


@pytest.mark.parametrize(
    ("limit", "used", "refused"), [("10000000", 6_000_000, True), ("100000000", 6_000_000, False), ("max", 0, False)]
)
def test_the_containers_memory_limit_counts(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: int, refused: bool
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.stat").write_text(f"anon {used // 2}\nfile 99999999\nshmem {used - used // 2}\n")
    monkeypatch.setattr(shared_memory.container_free_bytes, "__defaults__", (tmp_path,))
    with suppress(errors.NoSharedMemory):
        with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
            ring.unlink()
        assert not refused
        return
    assert refused


def test_numbers_outside_the_limits_are_refused(run: str) -> None:
    for slots in (0, layout.MAX_SLOTS + 1):
        with pytest.raises(errors.RingUsage, match="1 to 256 slots"):
            Ring.create(ring_name(run, 0), SPEC, slots)
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        for consumer in (-1, 48):
            with pytest.raises(errors.RingUsage, match=r"0\.\.47"):
                Reader([ring], consumer_id=consumer)
        with pytest.raises(errors.RingUsage, match="distinct"):
            Reader([ring, ring])


@pytest.mark.parametrize("bad", [("a b", "int8", (1,)), ("a", "int4", (1,)), ("a", "int8", (0,))])
def test_a_field_that_cannot_be_is_refused(bad: tuple[str, str, tuple[int, ...]]) -> None:
    with pytest.raises(errors.RingUsage):
        Field(*bad)


def test_meta_that_is_not_json_is_refused() -> None:
    for bad in (float("nan"), {1, 2}, b"x"):
        with pytest.raises(errors.RingUsage, match="not JSON"):
            SlotSpec((Field("a", "int8", (1,)),), {"x": bad})


def test_a_mistyped_kill_point_is_refused() -> None:
    assert "is not a kill point" in python("import shm_ring", SHM_RING_KILL_AT="nowhere").stderr


def test_attaching_and_leaving_never_unlinks(run: str) -> None:
    with Ring.create(ring_name(run, 0), SPEC, 2) as ring:
        inode = os.stat(names.SHM_DIR + ring.name).st_ino
        code = "import sys; from shm_ring import *; print(Ring.open(sys.argv[1], readonly=True).snapshot().free)"
        for _ in range(3):
            assert python(code, ring.name).stdout == "2\n"
        assert os.stat(names.SHM_DIR + ring.name).st_ino == inode
