"""The ring's protocol as a small state machine, searched breadth first with a crash possible before every step.

One producer and M consumers share S slot words, S payloads of two halves, and two cursor cells; a crash takes a
process's registers and leaves only shared memory and its journal. Sequential consistency is assumed: weak memory is
argued in docs/ring.md. Steps carry the names of the kill points of the code. `bug` seeds one of BUGS.

    words     ((seq, consumer, state), ...)      halves  ((first, second), ...)     cells  (seq, seq), TORN in writing
    producer  (pc, slot, seq)                    consumers  ((pc, slot, seq), ...)  journals  (frozenset of seqs, ...)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

FREE, READY, HELD = 0, 1, 2
TORN = -1
BUGS = ("one cursor cell", "claim without CAS", "release clears seq", "HELD turned READY")
DEAD, IDLE, DONE = "dead", "idle", "done"

T = TypeVar("T")
Process = tuple[str, int, int]


class State(NamedTuple):
    """Everything; hashable."""

    words: tuple[tuple[int, int, int], ...]
    halves: tuple[tuple[int, int], ...]
    cells: tuple[int, int]
    producer: Process
    consumers: tuple[Process, ...]
    journals: tuple[frozenset[int], ...]
    crashes: int


class Violation(Exception):
    """An invariant that does not hold, with the trace that leads there."""


def put(items: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """Return the tuple with one item replaced."""
    return (*items[:index], value, *items[index + 1 :])


class Model:
    """The protocol for given sizes."""

    def __init__(self, num_slots: int, num_consumers: int, num_packs: int, crashes: int, bug: str = "") -> None:
        """Set the sizes and the seeded bug."""
        if bug and bug not in BUGS:
            raise ValueError(bug)
        self.num_packs, self.bug = num_packs, bug
        self.start = State(
            words=((0, 0, FREE),) * num_slots, halves=((0, 0),) * num_slots, cells=(0, 0), producer=(DEAD, 0, 0),
            consumers=((DEAD, 0, 0),) * num_consumers, journals=(frozenset(),) * num_consumers, crashes=crashes,
        )  # fmt: skip

    def cell_of(self, seq: int) -> int:
        """Index of the cursor cell of a seq."""
        return 0 if self.bug == "one cursor cell" else seq & 1

    # -- the producer

    def producer_steps(self, s: State) -> Iterator[State]:
        """Yield the states after one step of the producer."""
        pc, slot, seq = s.producer
        if pc == DEAD:
            last = max(word[0] for word in s.words)
            if last and s.cells[self.cell_of(last)] != last:  # invariant 4
                raise Violation(f"the cursor of seq {last} is lost: cells {s.cells}")
            yield s._replace(producer=(IDLE if last < self.num_packs else DONE, 0, last + 1))
        elif pc == IDLE:
            for index, word in enumerate(s.words):
                if word[2] == FREE:
                    yield s._replace(producer=("after_acquire", index, seq))
        elif pc == "after_acquire":
            yield s._replace(halves=put(s.halves, slot, (seq, s.halves[slot][1])), producer=("after_half", slot, seq))
        elif pc == "after_half":
            yield s._replace(
                halves=put(s.halves, slot, (s.halves[slot][0], seq)), producer=("before_publish", slot, seq)
            )
        elif pc == "before_publish":
            yield s._replace(cells=self.with_cell(s, seq, TORN), producer=("in_cursor", slot, seq))
        elif pc == "in_cursor":
            yield s._replace(cells=self.with_cell(s, seq, seq), producer=("after_cursor", slot, seq))
        elif pc == "after_cursor":
            after = (IDLE, 0, seq + 1) if seq < self.num_packs else (DONE, 0, seq)
            yield s._replace(words=put(s.words, slot, (seq, 0, READY)), producer=after)

    def with_cell(self, s: State, seq: int, value: int) -> tuple[int, int]:
        """Return the cells with that of `seq` written."""
        first, second = put(s.cells, self.cell_of(seq), value)
        return first, second

    # -- a consumer

    def consumer_steps(self, s: State, c: int) -> Iterator[State]:
        """Yield the states after one step of consumer c."""
        pc, slot, seq = s.consumers[c]

        def at(name: str, index: int = slot, number: int = seq) -> tuple[Process, ...]:
            return put(s.consumers, c, (name, index, number))

        if pc == DEAD:
            yield self.attach(s, c)
        elif pc == IDLE:
            yield from self.claim(s, c)
        elif pc == "seen":  # only with the bug "claim without CAS"
            yield s._replace(words=put(s.words, slot, (seq, c, HELD)), consumers=at("after_claim"))
        elif pc in ("after_claim", "read_half"):
            if s.halves[slot][pc == "read_half"] != seq:  # invariant 1
                raise Violation(f"consumer {c} reads {s.halves[slot]} in the slot of seq {seq}")
            yield s._replace(consumers=at("read_half" if pc == "after_claim" else "read"))
        elif pc == "read":
            if seq not in s.journals[c] and any(seq in journal for journal in s.journals):  # invariant 3
                raise Violation(f"seq {seq} is committed by two journals")
            yield s._replace(journals=put(s.journals, c, s.journals[c] | {seq}), consumers=at("before_release"))
        elif pc == "before_release":
            kept = 0 if self.bug == "release clears seq" else seq
            yield s._replace(words=put(s.words, slot, (kept, 0, FREE)), consumers=at(IDLE, 0, 0))

    def attach(self, s: State, c: int) -> State:
        """Return the state after consumer c came back to life."""
        words = s.words
        if self.bug == "HELD turned READY":
            words = tuple((w[0], 0, READY) if w[1:] == (c, HELD) else w for w in words)
        return s._replace(words=words, consumers=put(s.consumers, c, (IDLE, 0, 0)))

    def claim(self, s: State, c: int) -> Iterator[State]:
        """Yield the states in which consumer c got its own HELD slots back, else one of the READY ones."""
        own = [(i, w[0]) for i, w in enumerate(s.words) if w[1:] == (c, HELD)]
        for index, seq in own:
            yield s._replace(consumers=put(s.consumers, c, ("after_claim", index, seq)))
        if own:
            return
        for index, (seq, _, state) in enumerate(s.words):
            if state == READY and self.bug == "claim without CAS":
                yield s._replace(consumers=put(s.consumers, c, ("seen", index, seq)))
            elif state == READY:
                words = put(s.words, index, (seq, c, HELD))
                yield s._replace(words=words, consumers=put(s.consumers, c, ("after_claim", index, seq)))

    # -- the whole

    def steps(self, s: State) -> Iterator[tuple[str, State]]:
        """Yield every step of every process, then every crash."""
        for after in self.producer_steps(s):
            yield f"producer {s.producer[0]}", after
        for c in range(len(s.consumers)):
            for after in self.consumer_steps(s, c):
                yield f"consumer {c} {s.consumers[c][0]}", after

    def crashes(self, s: State) -> Iterator[tuple[str, State]]:
        """Yield every crash."""
        if s.crashes == 0:
            return
        if s.producer[0] != DEAD:
            yield "producer dies", s._replace(producer=(DEAD, 0, 0), crashes=s.crashes - 1)
        for c, consumer in enumerate(s.consumers):
            if consumer[0] != DEAD:
                yield (
                    f"consumer {c} dies",
                    s._replace(consumers=put(s.consumers, c, (DEAD, 0, 0)), crashes=s.crashes - 1),
                )

    def check(self, before: State, after: State) -> None:
        """Raise Violation if a step broke an invariant that can be seen from its two ends."""
        for old, new in zip(before.words, after.words, strict=True):
            if new[0] < old[0]:  # invariant 5
                raise Violation(f"the seq of a word fell from {old[0]} to {new[0]}")
        busy = [slot for pc, slot, _ in after.consumers if pc not in (DEAD, IDLE, "seen")]
        if after.producer[0] not in (DEAD, IDLE, DONE):
            busy.append(after.producer[1])
        if len(busy) != len(set(busy)):  # invariant 2
            raise Violation("a slot has two users")
        if any(word[2] not in (FREE, READY, HELD) for word in after.words):  # invariant 7
            raise Violation("a word is in no state")

    def check_end(self, s: State) -> None:
        """Raise Violation if nothing can move and not everything was delivered."""
        delivered = sorted(seq for journal in s.journals for seq in journal)
        if delivered != list(range(1, self.num_packs + 1)):  # invariant 6
            raise Violation(f"at rest with {delivered} of {self.num_packs} delivered")


def search(model: Model) -> tuple[int, int]:
    """Visit every reachable state; return (states, states at rest). Raises Violation with its trace."""
    came_from: dict[State, tuple[State, str] | None] = {model.start: None}
    queue, at_rest = deque([model.start]), 0
    while queue:
        state = queue.popleft()
        try:
            moved = False
            for name, after in model.steps(state):
                moved = True
                model.check(state, after)
                if after not in came_from:
                    came_from[after] = state, name
                    queue.append(after)
            if not moved:
                at_rest += 1
                model.check_end(state)
        except Violation as why:
            raise Violation(f"{why}\n" + "\n".join(trace(came_from, state))) from None
        for name, after in model.crashes(state):
            if after not in came_from:
                came_from[after] = state, name
                queue.append(after)
    return len(came_from), at_rest


def trace(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    """Return the steps that lead to a state."""
    names = []
    while (link := came_from[state]) is not None:
        state, name = link
        names.append(name)
    return names[::-1]
