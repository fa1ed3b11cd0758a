"""The run's shared memory: a ring per producer, the board, and room for a drafter's state between two of its lives;
made before and removed after everything else.

Left-overs of a crashed launch of the same name are removed, not resumed: any producer can make any pack again, and the
journal says which are trained, so all that is lost is the extraction of at most num_slots packs. A drafter's state that
was left for a next life which never came is kept if no checkpoint on disk is as new: the next launch goes on from it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from configs.resume import handover_fault
from configs.run_files import newest_step
from ops.errors import RunTaken
from ops.locks import holder_pid
from ops.paths import runtime_dir
from shm_ring import Board, Ring, SlotSpec, ring_name
from shm_ring.errors import RingMissing
from shm_ring.handover import Handover
from shm_ring.names import SHM_DIR, segments_of_run, state_name
from shm_ring.ring import clean_segments

Say = Callable[[str], None]

_LEAVE_S = 12.0
_POLL_S = 0.1


class Rings:
    """The rings and the board of a run, held by the launcher; a context manager that removes them."""

    def __init__(self, run: str, spec: SlotSpec, num_rings: int, num_slots: int, first: int = 0) -> None:
        """Make them, named by global target rank from `first` on; raises NoSharedMemory if they do not fit."""
        run_id = uuid.uuid4().bytes
        self.rings: list[Ring] = []
        with ExitStack() as undo:
            self.board = Board.create(run, spec, num_rings, run_id)
            undo.callback(_remove, self.board)
            for k in range(first, first + num_rings):
                ring = Ring.create(ring_name(run, k), spec, num_slots=num_slots, ring_index=k, run_id=run_id)
                undo.callback(_remove, ring)
                self.rings.append(ring)
            self._undo = undo.pop_all()

    @property
    def nbytes(self) -> int:
        """Shared memory of all rings."""
        return sum(ring.nbytes for ring in self.rings)

    def __enter__(self) -> Rings:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()


def clean_left_overs(run_dir: Path, say: Say, stopping: Callable[[], bool] = lambda: False) -> None:
    """Remove the segments of a crashed launch of this run; its orphans get some seconds to leave.

    Raises RunTaken with the pids of processes that still use them, or still serve a control socket: one that was
    loading its model when the launcher died has no segment yet. Also for a name that another user has taken.
    """
    give_up, run = time.monotonic() + _LEAVE_S, run_dir.name
    _refuse_name_of_others(run)
    while True:
        found = Ring.clean_run(run)
        removed = [name for name, what in found if what == "removed"]
        live = [f"{name} {what}" for name, what in found if what != "removed"]
        locks = runtime_dir(run_dir).glob("*.lock")
        live += [f"{lock.stem} (pid {pid})" for lock in locks if (pid := holder_pid(lock))]
        if removed:
            say(f"removed {len(removed)} left-over segments of an earlier launch: {', '.join(removed)}")
        if not live:
            break
        if time.monotonic() > give_up or stopping():
            raise RunTaken(
                f"processes of an earlier launch of run {run!r} are still there: {'; '.join(live)}; end them"
            )
        time.sleep(_POLL_S)
    state = Handover.open(run)
    if state is not None:
        if not _is_wanted(state, run_dir, say):
            clean_segments([state_name(run)])
        state.close()


def _refuse_name_of_others(run: str) -> None:
    """Raise RunTaken if another user of this machine has a run of this name."""
    for name in (*segments_of_run(run), state_name(run)):
        with suppress(FileNotFoundError):
            owner = os.stat(SHM_DIR + name).st_uid
            if owner != os.geteuid():
                raise RunTaken(
                    f"run name {run!r} is another user's on this machine ({SHM_DIR}{name} belongs to uid {owner}); "
                    "choose another --name"
                )


@contextmanager
def room_for_state(run_dir: Path, say: Say) -> Iterator[None]:
    """Keep a file in /dev/shm, empty at first, in which a drafter can leave its state; raises RingLive."""
    state = Handover.create(run_dir.name)
    try:
        yield
    finally:
        if not _is_wanted(state, run_dir, say):
            state.remove()
        state.close()


def _is_wanted(state: Handover, run_dir: Path, say: Say) -> bool:
    """Whether the run would go back to an older step without this; said if so."""
    found = state.read()
    if found is None or found[0] <= newest_step(run_dir) or handover_fault(run_dir, *found):
        return False
    say(f"a drafter's state, step {found[0]}, is in {state.path} and not on disk: kept for this run's next drafter "
        "('python launch.py clean' would remove it)")  # fmt: skip
    return True


def _remove(segment: Ring | Board) -> None:
    try:
        segment.unlink()
    except RingMissing:
        pass  # someone cleaned it away already
    finally:
        segment.close()
