"""The launchers of a run's hosts, joined: who is there, when the drafters' common life begins and ends, who is lost.

Node 0 listens at the rendezvous address (zmq over TCP); every launcher, its own included, sends it a beat twice a
second from a thread and keeps the answer. Training itself does not pass here: the drafter ranks meet over
torch.distributed, at a port of the same address that node 0 chooses for each life. With one host the same questions are
answered in place. The messages carry no commands but "stop"; still, let only the cluster's own network reach the port.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import zmq
from pydantic import ValidationError

from configs.load import ConfigError
from configs.schema import Config
from ops.errors import ChildFailed, NoAnswer, NoResource
from ops.host_table import JOIN_S, SILENT_S, Beat, HostTable, Phase, Word

BEAT_S = 0.5
REPORT_S = 10.0
_POLL_MS = 100
_ANSWER_MS = 2000
_LEAVE_S = 3.0
_SIOCGIFADDR = 0x8915
Say = Callable[[str], None]


class Life(NamedTuple):
    """One common life of all drafter processes: its number, and where its ranks meet."""

    number: int
    address: str
    port: int
    interface: str


class Fleet(NamedTuple):
    """Where this host stands among all: its first global ranks, and how many there are over all hosts."""

    first_target: int
    num_targets: int
    first_drafter: int
    num_drafters: int


@dataclass(frozen=True)
class HostPlace:
    """Which of the hosts this one is, and where node 0 listens."""

    num_nodes: int
    node: int
    address: str
    port: int


class Hosts(Protocol):
    """What a launcher asks about the other hosts."""

    @property
    def is_first(self) -> bool:
        """Whether this is node 0, which saves, evaluates and sums up."""

    @property
    def fleet(self) -> Fleet:
        """This host among all; known once `wait_for_data` has returned."""

    def life(self) -> Life | None:
        """The drafters' life to start or go on with; None while there is none."""

    def is_over(self, number: int) -> bool:
        """Whether that life has ended somewhere."""

    def report(self, number: int, over: bool, down: bool) -> None:
        """Say how that life stands here: whether it is over, and whether every drafter process is gone."""

    def check(self) -> bool:
        """Return whether another host was asked to stop; raises ChildFailed if one has failed."""

    def stopping(self) -> None:
        """Say that this host was asked to stop, so that all do."""

    def others(self) -> list[dict[str, Any]]:
        """Status of each other host."""

    @property
    def reason(self) -> str:
        """Why the drafters wait for another host; empty if they do not."""


class OneHost:
    """The answers where there is one host."""

    def __init__(self, num_targets: int, num_drafters: int) -> None:
        self._fleet = Fleet(0, num_targets, 0, num_drafters)
        self._life: Life | None = None
        self._ended = 0

    @property
    def is_first(self) -> bool:
        """Always."""
        return True

    @property
    def fleet(self) -> Fleet:
        """All there is."""
        return self._fleet

    def life(self) -> Life | None:
        """The present life; a new one, with a port of its own, once the last is down."""
        number = self._life.number if self._life else 0
        if number == self._ended:
            self._life = Life(number + 1, "127.0.0.1", free_port("127.0.0.1"), "lo")
        return self._life

    def is_over(self, number: int) -> bool:
        """Only this host ends lives."""
        return number <= self._ended

    def report(self, number: int, over: bool, down: bool) -> None:
        """Note the end of a life."""
        if over and down:
            self._ended = number

    def check(self) -> bool:
        """Nobody else."""
        return False

    def stopping(self) -> None:
        """Nobody else."""

    def others(self) -> list[dict[str, Any]]:
        """Nobody else."""
        return []

    @property
    def reason(self) -> str:
        """Nobody to wait for."""
        return ""


class JoinedHosts:
    """This host's thread that beats, and on node 0 also answers. `status` is asked for what the others shall see."""

    def __init__(
        self, place: HostPlace, config: Config, lost_limit_s: float, status: Callable[[], dict[str, Any]]
    ) -> None:
        """Look up addresses and, on node 0, listen; raises ConfigError, NoResource."""
        self.place = place
        self._ip = resolve(place.address)
        self.own_address = address_towards(self._ip, place.port)
        self.interface = interface_of(self.own_address)
        self._lost_limit_s = lost_limit_s
        self._status = status
        self._beat = Beat(
            run=config.run.name, node=place.node, num_nodes=place.num_nodes, host=socket.gethostname(), pid=os.getpid(),
            config=config_digest(config), num_targets=len(config.target.devices),
            num_drafters=len(config.training.devices),
        )  # fmt: skip
        self._word = Word(verdict="wait", reason=f"no answer from {place.address}:{place.port} yet")
        self._heard_at = self._began = time.monotonic()
        self._answered = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if place.node == 0:
            self._listen()

    def _listen(self) -> None:
        place = self.place
        self._table = HostTable(
            place.num_nodes, time.monotonic(), self._lost_limit_s, lambda: free_port(self.own_address)
        )
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 500)
        try:
            self._router.bind(f"tcp://{self._ip}:{place.port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise NoResource(
                f"--rdzv {place.address}:{place.port}: node 0 cannot listen there ({error.strerror or error}); give an "
                "address of node 0's own host and a free port"
            ) from None

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def close(self) -> None:
        """Stop; node 0 first waits a moment until the others have heard the last word."""
        if self._thread.is_alive():
            if self.place.node == 0:
                give_up = time.monotonic() + _LEAVE_S
                while time.monotonic() < give_up and self._others_stay():
                    time.sleep(0.05)
            self._closing.set()
            self._thread.join(5)
        if not self._thread.is_alive():  # else it closes what it uses when it ends
            self._context.destroy(linger=200)

    def _others_stay(self) -> bool:
        return any(not other["lost"] and other.get("leaving") is not True for other in self._now().others)

    # -- what the launcher asks -------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this is node 0."""
        return self.place.node == 0

    @property
    def fleet(self) -> Fleet:
        """This host among all, by the counts that node 0 gave."""
        node, word = self.place.node, self._now()
        return Fleet(
            sum(word.num_targets[:node]), sum(word.num_targets),
            sum(word.num_drafters[:node]), sum(word.num_drafters),
        )  # fmt: skip

    def join(self, say: Say, interrupted: Callable[[], bool]) -> None:
        """Wait until every host is there, at most JOIN_S and a little; raises NoAnswer, ChildFailed, ConfigError."""
        where = f"{self.place.address}:{self.place.port}"
        say(
            f"node {self.place.node} of {self.place.num_nodes} ({self._beat.host}), address {self.own_address} on "
            f"{self.interface or 'an unknown interface'}; node 0 at {where}"
        )
        while not interrupted():
            word = self._now()
            self.check()
            if word.complete:
                say(f"all {self.place.num_nodes} hosts are there")
                return
            if time.monotonic() - self._began > JOIN_S + (5.0 if self._answered else 0.0):
                if self._answered:
                    raise NoAnswer(f"node {self.place.node}: {word.reason}")
                raise NoAnswer(
                    f"node {self.place.node} ({self._beat.host}, {self.own_address}): no answer from node 0 at {where} "
                    f"within {JOIN_S:g} s; is launch.py with --node-rank 0 running there, is the port open?"
                )
            time.sleep(0.05)

    def wait_for_data(self, digest: str, say: Say, interrupted: Callable[[], bool]) -> None:
        """Say that preparation is done, and wait for the other hosts', however long they live and take."""
        self._change(phase="prepared", data=digest)
        next_report = time.monotonic() + REPORT_S
        while not interrupted():
            word = self._now()
            self.check()
            if word.verdict == "go":
                return
            if time.monotonic() > next_report:
                say(f"waiting: {word.reason}")
                next_report = time.monotonic() + REPORT_S
            time.sleep(0.05)

    def life(self) -> Life | None:
        """The life that node 0 gave out, unless it is over."""
        word = self._now()
        if word.verdict != "go" or word.over:
            return None
        return Life(word.life, self._ip, word.port, self.interface)

    def is_over(self, number: int) -> bool:
        """Whether node 0 says so, has a newer life, has never heard of it, or does not answer any more."""
        word = self._now()
        return word.life != number or word.over

    def report(self, number: int, over: bool, down: bool) -> None:
        """Carry it in the next beats."""
        self._change(life=number, over=over, down=down)

    def check(self) -> bool:
        """Return whether a host was asked to stop; raises ChildFailed with the failed host's words."""
        word = self._now()
        if word.verdict == "fail":
            raise ChildFailed(word.reason, word.exit_code)
        return word.verdict == "stop"

    def stopping(self) -> None:
        """Carry it in the next beats."""
        self._change(phase="stopping")

    def preparing(self) -> None:
        """Tell the others."""
        self._change(phase="preparing")

    def leave(self, phase: Phase, reason: str = "", exit_code: int = 0) -> None:
        """Say how this host's launch ends, and wait a moment until node 0 has heard it."""
        self._change(phase=phase, reason=reason.splitlines()[0] if reason else "", exit_code=exit_code, down=True)
        said = time.monotonic()
        while self._thread.is_alive() and self._heard_at <= said + BEAT_S and time.monotonic() < said + _LEAVE_S:
            time.sleep(0.02)

    def others(self) -> list[dict[str, Any]]:
        """Status of each other host, as it last said."""
        return self._now().others

    @property
    def reason(self) -> str:
        """Why there is nothing to do at the moment, if so."""
        word = self._now()
        return word.reason if word.verdict == "wait" else ""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _now(self) -> Word:
        """The last word, or, when node 0 has been silent for too long, one that says so."""
        with self._lock:
            word, silent_s = self._word, time.monotonic() - self._heard_at
        if silent_s <= SILENT_S or not word.complete:
            return word
        if silent_s > self._lost_limit_s:
            reason = f"node 0 at {self.place.address}:{self.place.port}: silent for {silent_s:.0f} s; given up"
            return Word(verdict="fail", reason=reason, exit_code=4)
        reason = f"node 0: silent for {silent_s:.0f} s; training goes on when it is started again"
        others = [other | {"lost": other["lost"] or other["node"] == 0} for other in word.others]
        return Word(verdict="wait", reason=reason, complete=True, others=others)

    def _change(self, **values: Any) -> None:
        with self._lock:
            self._beat = self._beat.model_copy(update=values)

    def _next_beat(self) -> Beat:
        status = self._status()
        with self._lock:
            leaving = {"leaving": True} if self._beat.phase in ("finished", "stopping", "failed") else {}
            return self._beat.model_copy(update={"status": status | leaving})

    def _keep(self, word: Word) -> None:
        with self._lock:
            self._word, self._heard_at, self._answered = word, time.monotonic(), True

    def _run(self) -> None:
        try:
            if self.place.node == 0:
                self._serve()
            else:
                self._talk()
        finally:
            self._context.destroy(linger=200)

    def _serve(self) -> None:
        """Node 0: answer the others, and hear itself."""
        self._keep(self._table.hear(self._next_beat(), time.monotonic()))
        next_beat = time.monotonic() + BEAT_S
        while not self._closing.is_set():
            if self._router.poll(_POLL_MS):
                *route, body = self._router.recv_multipart()
                with contextlib.suppress(zmq.ZMQError):
                    self._router.send_multipart([*route, self._answer(body).model_dump_json().encode()])
            if time.monotonic() >= next_beat:
                self._keep(self._table.hear(self._next_beat(), time.monotonic()))
                next_beat = time.monotonic() + BEAT_S
        self._router.close()

    def _answer(self, body: bytes) -> Word:
        try:
            return self._table.hear(Beat.model_validate_json(body), time.monotonic())
        except ValidationError:
            reason = "node 0 does not understand this host's message; use one version of the program on all hosts"
            return Word(verdict="fail", reason=reason, exit_code=2)

    def _talk(self) -> None:
        """Any other node: beat and keep the answer; a new socket after a silence, so that old beats are forgotten."""
        while not self._closing.is_set():
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://{self._ip}:{self.place.port}")
            while not self._closing.is_set():
                dealer.send(self._next_beat().model_dump_json().encode())
                if not dealer.poll(_ANSWER_MS):
                    break
                with contextlib.suppress(ValidationError):
                    self._keep(Word.model_validate_json(dealer.recv()))
                self._closing.wait(BEAT_S)
            dealer.close()


def host_place(
    nnodes: int | None, node_rank: int | None, rdzv: str | None, environment: Mapping[str, str]
) -> HostPlace | None:
    """Which host this is: from the command line, else from SLURM's or torchrun's variables; None for a single one.

    Raises ConfigError.
    """
    whence = "" if nnodes is not None else " (by the environment; give --nnodes 1 for this host alone)"
    nnodes, node_rank, found = _from_environment(nnodes, node_rank, environment)
    if nnodes is None or nnodes == 1:
        return None
    rdzv = rdzv or found
    if node_rank is None or rdzv is None:
        missing = "--node-rank" if node_rank is None else "--rdzv HOST:PORT (or MASTER_ADDR and MASTER_PORT)"
        raise ConfigError([f"--nnodes {nnodes}{whence}: {missing} is needed too"])
    if nnodes < 1 or not 0 <= node_rank < nnodes:
        raise ConfigError([f"--node-rank: expected 0..{nnodes - 1} (--nnodes {nnodes}{whence}), got {node_rank}"])
    address, colon, port = rdzv.rpartition(":")
    if not colon or not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError([f"--rdzv: expected HOST:PORT, got {rdzv!r}"])
    return HostPlace(nnodes, node_rank, address, int(port))


def _from_environment(
    nnodes: int | None, node_rank: int | None, environment: Mapping[str, str]
) -> tuple[int | None, int | None, str | None]:
    """Fill in what the command line left out. torchrun's own store has MASTER_PORT, so ours is the port after it."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    step = 0
    if nnodes is None and "TORCHELASTIC_RUN_ID" in environment:
        if environment.get("LOCAL_WORLD_SIZE") != "1":
            raise ConfigError(["torchrun: launch.py starts a host's processes itself; use --nproc-per-node 1"])
        nnodes, node_rank, step = _number(environment, "WORLD_SIZE"), _number(environment, "RANK"), 1
    elif nnodes is None and environment.get("SLURM_NNODES", "1") != "1" and "SLURM_NODEID" in environment:
        nnodes, node_rank = _number(environment, "SLURM_NNODES"), _number(environment, "SLURM_NODEID")
    return nnodes, node_rank, f"{address}:{int(port) + step}" if address and port.isdigit() else None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "nothing")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError([f"{name}: expected a number, got {text}; give --nnodes 1 for this host alone"])
    return int(text)


def config_digest(config: Config) -> str:
    """Digest of what must be the same on all hosts: everything but folder, devices and threads."""
    plain = config.model_dump(mode="json")
    del plain["run"]["folder"]
    for section in ("target", "training"):
        del plain[section]["devices"], plain[section]["threads"]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def plan_digest(plan: dict[str, Any]) -> str:
    """Digest of what preparation found, less where this host keeps it."""
    target = {key: value for key, value in plan.get("target", {}).items() if key != "path"}
    plain = [target, *(plan.get(key) for key in ("slot_spec", "data_digest", "num_packs", "draft_vocab"))]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def resolve(address: str) -> str:
    """The IPv4 address of a host name; raises ConfigError."""
    try:
        return socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError([f"--rdzv: {address}: no such host ({error.strerror})"]) from None


def address_towards(address: str, port: int) -> str:
    """This host's own address on the way to another; nothing is sent. Raises NoResource where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise NoResource(f"--rdzv: no way to {address} from here ({error.strerror}); check the network") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name of the network interface that has this IPv4 address; loopback for 127.*, empty if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else ""


def free_port(address: str) -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
