"""What node 0 knows of all hosts, and what it therefore tells each of them. No sockets, no clock of its own: testable.

Every host sends a Beat twice a second with everything about itself, and gets a Word back. So nothing has to be
remembered over a crash: a node 0 that comes back learns all of it from the next beats. Drafter processes of all hosts
live and end together: one such common time is a `life`, with a number and a port of its own where its ranks meet. It is
over when any host says so or falls silent; the next begins when every host's drafters are gone and its data is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

PROTOCOL = 1
JOIN_S = 30.0
SILENT_S = 10.0

Phase = Literal["joining", "preparing", "prepared", "finished", "stopping", "failed"]
LEAVING = ("finished", "stopping", "failed")


class Beat(BaseModel):
    """What a host says about itself."""

    model_config = ConfigDict(extra="forbid")

    protocol: int = PROTOCOL
    run: str
    node: int
    num_nodes: int
    host: str
    pid: int
    config: str
    """Digest of the configuration, less what may differ between hosts (folder, devices, threads)."""
    num_targets: int
    num_drafters: int
    phase: Phase = "joining"
    reason: str = ""
    exit_code: int = 0
    data: str = ""
    """Digest of what preparation found; empty before."""
    life: int = 0
    """Latest life of the drafters that this host has started."""
    over: bool = False
    """Whether that life has ended here: a drafter died, or all have left."""
    down: bool = True
    """Whether no drafter process is left here."""
    status: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """For messages: node 1 (gpu-b)."""
        return f"node {self.node} ({self.host})"


class Word(BaseModel):
    """What a host is told."""

    model_config = ConfigDict(extra="forbid")

    protocol: int = PROTOCOL
    verdict: Literal["wait", "go", "stop", "fail"]
    reason: str = ""
    exit_code: int = 0
    complete: bool = False
    """Whether every host is there."""
    life: int = 0
    over: bool = True
    port: int = 0
    num_targets: list[int] = []
    """Of each node, in order."""
    num_drafters: list[int] = []
    others: list[dict[str, Any]] = []
    """Status of each other host."""


@dataclass
class _Known:
    beat: Beat
    at: float
    lost: bool = False


@dataclass
class HostTable:
    """The hosts of one run. `free_port` gives a port of node 0's host; `lost_limit_s`: longest wait for a lost host."""

    num_nodes: int
    began: float
    lost_limit_s: float
    free_port: Callable[[], int]
    life: int = 0
    over: bool = True
    port: int = 0
    _known: dict[int, _Known] = field(default_factory=dict)
    _turned_away: dict[int, str] = field(default_factory=dict)
    _counts: tuple[list[int], list[int]] | None = None

    def hear(self, beat: Beat, now: float) -> Word:
        """Take in a beat and answer it."""
        refusal = self._refusal(beat)
        if refusal:
            self._turned_away |= {} if beat.node in self._known else {beat.node: refusal}
            return Word(verdict="fail", reason=refusal, exit_code=2)
        before = self._known.get(beat.node)
        if before and self._is_taken(before, beat, now):
            reason = f"--node-rank {beat.node} is taken by {before.beat.name}, pid {before.beat.pid}"
            return Word(verdict="wait", reason=reason)
        if before and (before.beat.host, before.beat.pid) != (beat.host, beat.pid):
            self.over = True  # it was started anew, so its old drafters are gone
        self._known[beat.node] = _Known(beat, now)
        if beat.life == self.life and beat.over:
            self.over = True
        return self.word(beat.node, now)

    @staticmethod
    def _is_taken(before: _Known, beat: Beat, now: float) -> bool:
        another = (before.beat.host, before.beat.pid) != (beat.host, beat.pid)
        return another and now - before.at < SILENT_S / 2 and before.beat.phase not in LEAVING

    def _refusal(self, beat: Beat) -> str:
        if beat.num_nodes != self.num_nodes or not 0 <= beat.node < self.num_nodes:
            mine = f"node 0 was started with --nnodes {self.num_nodes}"
            return (
                f"{beat.name}: --nnodes {beat.num_nodes} --node-rank {beat.node}, but {mine}; use one number of nodes"
            )
        first, same = self._known.get(0), self._known.get(beat.node)
        if first and beat.run != first.beat.run:
            return (
                f"{beat.name}: run {beat.run!r}, but node 0 runs {first.beat.run!r}; each run needs a port of its own"
            )
        if first and beat.config != first.beat.config:
            name = first.beat.name
            return f"{beat.name}: its configuration differs from {name}'s; use the same file and --set on all hosts"
        if same and (same.beat.host, same.beat.pid) != (beat.host, beat.pid):
            counts = (same.beat.num_targets, same.beat.num_drafters)
            if self._counts and counts != (beat.num_targets, beat.num_drafters):
                return (
                    f"{beat.name}: came back with {beat.num_targets} targets and {beat.num_drafters} drafters, it had "
                    f"{counts[0]} and {counts[1]}; stop all hosts and start them again"
                )
        return ""

    def word(self, node: int, now: float) -> Word:
        """Say what a host should do now."""
        word = self._word(now)
        word.life, word.over = self.life, self.over
        word.others = [
            {"node": known.beat.node, "host": known.beat.host, "lost": known.lost, **known.beat.status}
            for number, known in sorted(self._known.items())
            if number != node
        ]
        return word

    def _word(self, now: float) -> Word:
        missing = [number for number in range(self.num_nodes) if number not in self._known]
        beats = [known.beat for _, known in sorted(self._known.items())]
        failed = next((beat for beat in beats if beat.phase == "failed"), None)
        if failed:
            return Word(verdict="fail", reason=f"{failed.name}: {failed.reason}", exit_code=failed.exit_code or 4)
        stopping = next((beat for beat in beats if beat.phase == "stopping"), None)
        if stopping:
            return Word(verdict="stop", reason=f"{stopping.name} was asked to stop")
        if missing:
            return self._without(missing, now)
        lost = self._lost(now)
        if lost:
            return lost
        unready = [beat.name for beat in beats if not beat.data]
        if unready:
            return Word(verdict="wait", reason=f"preparing: {', '.join(unready)}", complete=True)
        other = next((beat for beat in beats if beat.data != beats[0].data), None)
        if other:
            reason = f"{other.name}: its data or target differs from {beats[0].name}'s; all hosts need the same files"
            return Word(verdict="fail", reason=reason, exit_code=3)
        return self._go(beats)

    def _without(self, missing: list[int], now: float) -> Word:
        if self._turned_away:
            return Word(verdict="fail", reason="; ".join(self._turned_away.values()), exit_code=2)
        names = ", ".join(f"node {number}" for number in missing)
        if now - self.began <= JOIN_S:
            return Word(verdict="wait", reason=f"waiting for {names}")
        return Word(
            verdict="fail",
            reason=f"{names} did not join within {JOIN_S:g} s; start launch.py there with the same --rdzv and its "
            "--node-rank, and check that its host reaches this address and port",
            exit_code=4,
        )

    def _lost(self, now: float) -> Word | None:
        """Notice silent hosts: the life is over, and the others wait for them to come back."""
        for known in self._known.values():
            known.lost = now - known.at > SILENT_S and known.beat.phase not in LEAVING
        lost = [known for known in self._known.values() if known.lost]
        if not lost:
            return None
        self.over = True
        silent_s = max(now - known.at for known in lost)
        names = ", ".join(known.beat.name for known in lost)
        if silent_s > self.lost_limit_s:
            return Word(verdict="fail", reason=f"{names}: silent for {silent_s:.0f} s; given up", exit_code=4)
        return Word(
            verdict="wait",
            reason=f"{names}: silent for {silent_s:.0f} s; training goes on when it is started again",
            complete=True,
        )

    def _go(self, beats: list[Beat]) -> Word:
        counts = ([beat.num_targets for beat in beats], [beat.num_drafters for beat in beats])
        self._counts = self._counts or counts
        if self.over and all(beat.down for beat in beats) and not any(beat.phase in LEAVING for beat in beats):
            self.life = 1 + max(self.life, *(beat.life for beat in beats))
            self.over = False
            self.port = self.free_port()
        return Word(
            verdict="go",
            complete=True,
            port=self.port,
            num_targets=counts[0],
            num_drafters=counts[1],
        )
