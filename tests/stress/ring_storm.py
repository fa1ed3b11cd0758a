"""The kill -9 storm: N producers and M consumers, killed at random and at named points, for a given time.

    python tests/stress/ring_storm.py --producers 5 --consumers 3 --seconds 600 --out report.json

Forbidden: a missing pack, a pack journalled twice, a torn payload, seqs of one ring that do not ascend within a life
(oldest pick, redelivered apart), a wrong cursor, a wedge (20 s without progress), an exit that is not 0 or a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ring_workers

from shm_ring import Board, Reader, Ring, atomics, kill_points, layout, ring_name

hand_out = Reader._hand_out
NUM_SLOTS = 6
WEDGE_S = 20.0
PRODUCER_POINTS = (
    "writer_locked", "after_acquire", "after_half", "before_publish", "after_header", "after_cursor", "after_publish",
    "after_bell",
)  # fmt: skip
CONSUMER_POINTS = ("reader_locked", "after_claim", "before_release", "after_release")


@dataclass
class Storm:
    """One storm: its processes and what happened to them."""

    num_producers: int
    num_consumers: int
    seconds: float
    seed: int
    kills_per_s: float
    least: tuple[int, int] = (0, 0)
    """Kills and packs below which it goes on, however long it takes."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.run = f"storm.{os.getpid()}.{uuid.uuid4().hex[:6]}"
        self.folder = Path(tempfile.mkdtemp(prefix="ring_storm"))
        run_id = uuid.uuid4().bytes
        self.board = Board.create(self.run, ring_workers.SPEC, self.num_producers, run_id)
        self.rings = [
            Ring.create(ring_name(self.run, k), ring_workers.SPEC, NUM_SLOTS, k, run_id)
            for k in range(self.num_producers)
        ]
        self.names = [ring.name for ring in self.rings]
        self.living: dict[int, tuple[str, int]] = {}
        self.stopped: dict[int, float] = {}
        self.draining = False

    # -- processes

    def spawn(self, role: str, number: int) -> None:
        """Fork one process; half of the lives before the drain end at a named point."""
        points = PRODUCER_POINTS if role == "producer" else CONSUMER_POINTS
        armed = not self.draining and self.rng.random() < 0.5
        point, passage = self.rng.choice(points), 1 + int(self.rng.expovariate(1 / 40))
        pid = os.fork()
        if pid:
            self.living[pid] = (role, number)
            return
        code = 99
        try:
            if armed:
                kill_points.ARMED, kill_points._name, kill_points._left = True, point, passage
            code = self._child(role, number)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _child(self, role: str, number: int) -> int:
        board = Board.open(self.run)
        if role == "producer":
            ring_workers.produce(self.names[number], 1 << 40, board)
        else:
            pick = "random" if number % 3 == 2 else "oldest"
            ring_workers.consume(self.journal(number), number, self.names, board, pick)
        return 0

    def journal(self, consumer: int) -> Path:
        """Journal of a consumer."""
        return self.folder / f"consumer{consumer}"

    def reap(self) -> None:
        """Collect the dead and start the killed anew."""
        while self.living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            role, number = self.living.pop(pid)
            self.stopped.pop(pid, None)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.counts[f"{role}_deaths"] += 1
                self.spawn(role, number)
            elif status:
                self.faults.append(f"{role} {number} ended with status {os.waitstatus_to_exitcode(status)}")
            elif not self.draining:
                self.faults.append(f"{role} {number} left before the end of the storm")

    def strike(self) -> None:
        """Kill one process, or sometimes all, or stop one for 0.2 s."""
        draw, pids = self.rng.random(), list(self.living)
        if draw < 0.03:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.counts["kill_all"] += 1
        elif draw < 0.10:
            pid = self.rng.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            self.stopped[pid] = time.monotonic() + 0.2
            self.counts["stops"] += 1
        else:
            os.kill(self.rng.choice(pids), signal.SIGKILL)

    def resume_stopped(self, every: bool = False) -> None:
        """Send SIGCONT to those whose time is over."""
        for pid, until in list(self.stopped.items()):
            if every or time.monotonic() >= until:
                del self.stopped[pid]
                os.kill(pid, signal.SIGCONT)

    # -- the storm

    def run_all(self) -> dict[str, object]:
        """Run, drain, judge, and return the report."""
        try:
            for k in range(self.num_producers):
                self.spawn("producer", k)
            for c in range(self.num_consumers):
                self.spawn("consumer", c)
            begun = time.monotonic()
            self._until(lambda: time.monotonic() - begun > self.seconds and self._is_enough(), striking=True)
            self.draining = True
            self.resume_stopped(every=True)
            self.board.request_pause()
            self._until(lambda: not self.living, striking=False)
            self.judge()
        finally:
            for pid in self.living:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.remove()
        return self.report(time.monotonic() - begun)

    def _is_enough(self) -> bool:
        deaths = [self.counts["producer_deaths"], self.counts["consumer_deaths"]]
        packs = sum(ring.snapshot().published for ring in self.rings)
        return all(deaths) and sum(deaths) >= self.least[0] and packs >= self.least[1]

    def _until(self, over: Callable[[], bool], striking: bool) -> None:
        next_strike = last_look = time.monotonic()
        idle_s, progress = 0.0, None  # idle as far as this process itself is awake: it alone starts and resumes others
        while not over() and not self.faults:
            signal.sigtimedwait({signal.SIGCHLD}, 0.005)
            self.reap()
            self.resume_stopped()
            now = time.monotonic()
            if striking and now >= next_strike and self.living:
                self.strike()
                next_strike = now + self.rng.expovariate(self.kills_per_s)
            seen = [ring.snapshot().slots for ring in self.rings]
            idle_s = 0.0 if seen != progress else idle_s + min(now - last_look, 0.1)
            progress, last_look = seen, now
            if idle_s > WEDGE_S:
                self.faults.append("wedged: " + "; ".join(str(ring.snapshot()) for ring in self.rings))

    def judge(self) -> None:
        """Compare the journals with what was published."""
        journalled: Counter[tuple[int, int]] = Counter()
        for c in range(self.num_consumers):
            for ring, redelivered, seq, pack_id, _ in ring_workers.read_journal(self.journal(c)):
                journalled[ring, seq] += 1
                self.counts["redelivered"] += redelivered
                if pack_id != seq - 1:
                    self.faults.append(f"ring {ring} seq {seq} has pack id {pack_id}")
        for k, ring in enumerate(self.rings):
            snapshot = ring.snapshot()
            if snapshot.occupancy:
                self.faults.append(f"ring {k} still holds {snapshot.occupancy} slots")
            seqs = [journalled[k, seq] for seq in range(1, snapshot.published + 1)]
            self.counts["packs"] += len(seqs)
            self.counts["missing"] += seqs.count(0)
            self.counts["double"] += sum(n > 1 for n in seqs)
        self.counts["invented"] = len(journalled) + self.counts["missing"] - self.counts["packs"]
        for what in ("missing", "double", "invented"):
            if self.counts[what]:
                self.faults.append(f"{self.counts[what]} packs {what}")

    def report(self, wall_s: float) -> dict[str, object]:
        """Return the figures as JSON."""
        deaths = self.counts["producer_deaths"] + self.counts["consumer_deaths"]
        return {
            "producers": self.num_producers, "consumers": self.num_consumers, "slots": NUM_SLOTS, "seed": self.seed,
            "wall_s": round(wall_s, 1), "kills": deaths, **dict(sorted(self.counts.items())), "faults": self.faults,
        }  # fmt: skip

    def remove(self) -> None:
        """Leave nothing behind."""
        for ring in self.rings:
            ring.unlink()
            ring.close()
        self.board.unlink()
        self.board.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


class GivesBackHeld(Reader):
    """A seeded bug: gives a redelivered slot back to everyone instead of keeping it for its holder's journal."""

    def _collect_held(self):  # type: ignore[no-untyped-def]
        for slot in super()._collect_held():
            at = slot.segment.words_address + 8 * slot.index
            atomics.store_u64(at, layout.word(slot.header.seq, 0, layout.READY))
        return []


def swap_in_two_steps(address: int, expected: int, desired: int) -> bool:
    """A seeded bug: a claim without compare-and-swap."""
    if atomics.load_u64(address) != expected:
        return False
    atomics.store_u64(address, desired)
    return True


def release_all_early(self: Reader, slot: object) -> object:
    """A seeded bug: the slot is free before its holder has read and journalled it."""
    slot = hand_out(self, slot)  # type: ignore[arg-type]
    atomics.store_u64(slot.segment.words_address + 8 * slot.index, layout.word(slot.header.seq, 0, layout.FREE))
    return slot


def seed_bug(bug: str) -> None:
    """Put a known bug into this process and its children."""
    if bug == "to-ready":
        ring_workers.Reader = GivesBackHeld  # type: ignore[misc]
    elif bug == "no-cas":
        atomics.swap_u64 = swap_in_two_steps
    elif bug == "early-free":
        Reader._hand_out = release_all_early  # type: ignore[method-assign, assignment]


def main() -> int:
    """Parse the arguments, run, print one JSON line; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--producers", type=int, default=1)
    parser.add_argument("--consumers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kills-per-s", type=float, default=10.0)
    parser.add_argument(
        "--least", type=int, nargs=2, default=(0, 0), metavar=("KILLS", "PACKS"), help="go on until then"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bug", choices=["to-ready", "no-cas", "early-free"], help="seed a known bug, to see that the storm finds it"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.bug:
        seed_bug(args.bug)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    storm = Storm(args.producers, args.consumers, args.seconds, args.seed, args.kills_per_s, tuple(args.least))
    line = json.dumps(storm.run_all())
    print(line)
    if args.out:
        args.out.write_text(line + "\n")
    return 1 if storm.faults else 0


if __name__ == "__main__":
    sys.exit(main())
