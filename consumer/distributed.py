"""Several drafter processes as one: how they meet, agree before each pack, and add up their gradients.

There are two meetings and no other. `exchange`: before each pack every rank says what it has (a pack, nothing yet,
nothing any more) and what was asked of it; all draw the same conclusion from the same numbers, so no rank ever skips a
step that the others make. `reduction`: gradients and sums of each step, over NCCL inside the captured graph while the
backward pass runs, or over gloo after it. What one rank alone may do (save, log) is no meeting.

torchrun's variables mean what they always mean: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. Device and ring consumer follow from the local rank, everything else from the global one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs

from configs.load import ConfigError
from configs.schema import TrainingConfig
from consumer import copy_engines
from consumer.flat import FlatWeights, MakeZeros
from consumer.step import Reduction, TrainStep
from ops.telemetry import Log

RENDEZVOUS_ENV = "DFLASH_RENDEZVOUS_S"
"""Longest wait for all ranks to meet, in seconds; the launcher allows more, since it knows that the others live."""
RENDEZVOUS_S = 30.0
NOTHING_YET, AT_END = -1, -2


class PeerLost(Exception):
    """Another rank has left, does not answer or never came. Exit code 4."""

    exit_code = 4


@dataclass(frozen=True)
class Place:
    """Which of the drafter processes this one is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str], rank: int | None = None) -> Place:
        """Read torchrun's variables; `rank` (the command line's) wins over RANK. Raises ConfigError."""
        found = {name: environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        wrong = {name: text for name, text in found.items() if text and not _whole(text)}
        if wrong:
            raise ConfigError([f"{name}: expected a number, got {text!r}" for name, text in wrong.items()])
        world = int(found["WORLD_SIZE"] or 1)
        place = int(found["RANK"] or 0) if rank is None else rank
        if world > 1 and found["RANK"] is None and rank is None:
            raise ConfigError([f"RANK: expected 0..{world - 1} (WORLD_SIZE={world}), got nothing; use torchrun"])
        if not 0 <= place < world:
            raise ConfigError([f"RANK: expected 0..{world - 1} (WORLD_SIZE={world}), got {place}"])
        return cls(place, world, int(found["LOCAL_RANK"] or place))


class Offer(NamedTuple):
    """What one rank brings to a turn: a pack id, NOTHING_YET or AT_END, and what was asked of it."""

    pack_id: int = NOTHING_YET
    stop: int = 0
    pause: int = 0
    checkpoint: int = 0
    elapsed_ms: int = 0
    starved_ms: int = 0


class Turn(NamedTuple):
    """What all ranks know before they act, each the same: the offers in the order of the ranks."""

    offers: tuple[Offer, ...]

    @property
    def stop(self) -> bool:
        """Whether any rank was asked to stop: all do, after the same step."""
        return any(offer.stop for offer in self.offers)

    @property
    def wait(self) -> bool:
        """Whether nobody may act yet: a rank is paused, or has no pack and more may come."""
        return any(offer.pause or offer.pack_id == NOTHING_YET for offer in self.offers)

    @property
    def checkpoint(self) -> bool:
        """Whether any rank was asked to save."""
        return any(offer.checkpoint for offer in self.offers)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training by rank 0's clock, which all ranks follow."""
        return self.offers[0].elapsed_ms / 1e3

    @property
    def paused(self) -> bool:
        """Whether any rank is paused."""
        return any(offer.pause for offer in self.offers)

    @property
    def starved_s(self) -> tuple[float, ...]:
        """Seconds that each rank has been idle for lack of packs, since its process started."""
        return tuple(offer.starved_ms / 1e3 for offer in self.offers)

    @property
    def packs(self) -> tuple[int, ...]:
        """Ids of the packs at hand, each once, in the order of the ranks."""
        return tuple(dict.fromkeys(offer.pack_id for offer in self.offers if offer.pack_id >= 0))

    def pack_of(self, rank: int) -> int | None:
        """The pack that a rank is to train: its own, unless a lower rank offers the same one."""
        mine = self.offers[rank].pack_id
        earlier = {offer.pack_id for offer in self.offers[:rank]}
        return mine if mine >= 0 and mine not in earlier else None


class Ranks:
    """This process among the drafter processes; with one rank nothing is sent anywhere. A context manager."""

    def __init__(self, place: Place, device: torch.device, timeout_s: float = 600.0) -> None:
        """Meet the other ranks; raises PeerLost that names who is missing. `timeout_s` limits each later meeting."""
        self.rank, self.world, self.local_rank = place.rank, place.world, place.local_rank
        self._on_gpu = device.type == "cuda"
        self.device_group: dist.ProcessGroup | None = None
        """NCCL's group of all ranks; None on CPUs."""
        self._meeting: dist.ProcessGroup | None = None  # where gradients are added up by copies: the ranks' other group
        if self.world > 1:
            limit = timedelta(seconds=timeout_s)
            store = _meet(place)
            with _naming(f"drafter {self.rank}: joining {self.world} ranks"):
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=limit)
            if self.largest(int(self._on_gpu)) != -self.largest(-int(self._on_gpu)):
                raise ConfigError([f"drafter {self.rank}: some drafters are on GPUs, some on CPUs; make them alike"])
            with _naming(f"drafter {self.rank}: joining {self.world} ranks"):
                if self._on_gpu:
                    self.device_group = nccl_group(limit)

    def exchange(self, offer: Offer) -> Turn:
        """Tell every rank this one's offer and return all of them; waits for the slowest. Raises PeerLost."""
        if self.world == 1:
            return Turn((offer,))
        rows = torch.zeros(self.world, len(offer), dtype=torch.int64)
        rows[self.rank] = torch.tensor(offer)
        with _naming(f"drafter {self.rank}: agreeing on the next pack"):
            dist.all_reduce(rows)
        return Turn(tuple(Offer(*row) for row in rows.tolist()))

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        if self.world > 1:
            found = torch.tensor(number)
            with _naming(f"drafter {self.rank}: start-up"):
                dist.all_reduce(found, dist.ReduceOp.MAX)
            return int(found)
        return number

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value (anything small that pickles); the others' is ignored."""
        if self.world == 1:
            return value
        held = [value]
        with _naming(f"drafter {self.rank}: start-up"):
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` by rank 0's."""
        if self.world > 1:
            with _naming(f"drafter {self.rank}: receiving the weights"):
                for tensor in tensors:
                    dist.broadcast(tensor, src=0, group=self.device_group if tensor.is_cuda else None)

    def grads_maker(self, training: TrainingConfig, log: Log) -> MakeZeros:
        """Return what makes a step's gradients, so that `reduction_of` adds them up as `training.gradients` says.

        Where copies do not work, for whatever reason and on whichever rank, all ranks use NCCL, and a line says why.
        """
        self._meeting = None
        if training.gradients != "copies" or self.device_group is None:
            return torch.zeros
        meeting = dist.group.WORLD
        assert meeting is not None
        if why := self._no_copies(training, meeting):
            log("warning", detail=f"training.gradients: copies is not possible ({why}); NCCL adds them up")
            return torch.zeros
        log("gradients", detail="added up by copies between the GPUs")
        self._meeting = meeting
        return copy_engines.symmetric_zeros

    def _no_copies(self, training: TrainingConfig, meeting: dist.ProcessGroup) -> str:
        """Say why gradients cannot be added up by copies here; "" where they can, on all ranks alike."""
        if training.micro_steps > 1:
            return "micro-steps are added up once a step, behind the backward pass"
        if self.largest(int(self.local_rank != self.rank)):
            return "the drafters are on several hosts"
        return copy_engines.refusal(torch.device("cuda", torch.cuda.current_device()), meeting, self.largest)

    def reduction_of(self, step: TrainStep) -> Reduction | None:
        """Make what adds up a step's gradients, from `grads_maker`, over all ranks; None for one rank."""
        if self.world == 1:
            return None
        if self.device_group is None or step.carried is not None:
            return AfterBackward(step.flat, self.device_group)
        if self._meeting is not None:
            return copy_engines.CopyEngines(step.flat, self.device_group, self._meeting)
        return WhileBackward(step.flat, self.device_group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.largest(0)

    def close(self) -> None:
        """Leave the group, on CPUs; with NCCL the process has to end instead, since graphs hold its collectives."""
        if self.world > 1 and self.device_group is None and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error others may be gone, and leaving in order would wait for them
            self.close()


def nccl_group(limit: timedelta, max_ctas: int = 0, high_priority: bool = False) -> dist.ProcessGroup:
    """Make NCCL's group of all ranks. max_ctas: multiprocessors that it may take; 0: as many as it likes."""
    options: Any = None
    if max_ctas or high_priority:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
        options._timeout = limit
    if max_ctas:
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
    group: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=limit, pg_options=options)
    return group


class AfterBackward:
    """One all-reduce of all gradients when the backward pass is over: gloo on CPUs, and with carried micro-steps."""

    def __init__(self, flat: FlatWeights, group: dist.ProcessGroup | None) -> None:
        self._flat, self._group = flat, group

    def begin(self) -> None:
        """Nothing to get ready."""

    def finish(self, sums: Tensor) -> None:
        """Add up; raises PeerLost."""
        with _naming("adding up gradients"):
            dist.all_reduce(self._flat.grads, group=self._group)
            dist.all_reduce(sums, group=self._group)


class WhileBackward:
    """Adds up each product's gradient as soon as it is written, on NCCL's stream, beside the rest of the backward pass.

    Safe inside a capture: every rank's graph holds the same collectives in the same order. Sums are in the gradients'
    own type: one rounding more in bfloat16, which the clip's norm and AdamW then see.
    """

    def __init__(self, flat: FlatWeights, group: dist.ProcessGroup, bucket_bytes: int = 0) -> None:
        """bucket_bytes: neighbouring gradients are sent together once they are so large; 0: each by itself."""
        self._flat, self._group = flat, group
        self._least = bucket_bytes // flat.grads.element_size()
        self._under_way: list[Any] = []
        self._waiting: slice | None = None
        self._sent = 0

    def begin(self) -> None:
        """Listen to the gradients of this backward pass."""
        self._under_way, self._waiting, self._sent = [], None, 0
        self._flat.on_written = self._send

    def finish(self, sums: Tensor) -> None:
        """Add up the rest; the current stream then waits for everything. Raises RuntimeError for a missing gradient."""
        self._flat.on_written = None
        self._flush()
        self._flat.check_announced(self._sent)
        self._start(self._flat.grads[self._flat.num_matrix_elements :])
        self._start(sums)
        for work in self._under_way:
            work.wait()
        self._under_way = []

    def _send(self, part: slice) -> None:
        waiting = self._waiting
        if waiting is not None and waiting.start != part.stop and waiting.stop != part.start:
            self._flush()
            waiting = None
        if waiting is not None:
            part = slice(min(part.start, waiting.start), max(part.stop, waiting.stop))
        self._waiting = part
        if part.stop - part.start >= self._least:
            self._flush()

    def _flush(self) -> None:
        part, self._waiting = self._waiting, None
        if part is not None:
            self._sent += part.stop - part.start
            self._start(self._flat.grads[part])

    def _start(self, tensor: Tensor) -> None:
        self._under_way.append(dist.all_reduce(tensor, group=self._group, async_op=True))


def _meet(place: Place) -> Any:
    """Reach rank 0's store and wait there for every rank; raises PeerLost with the ranks that did not come."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "")
    if not _whole(port):
        raise ConfigError([f"MASTER_PORT: expected a port for {place.world} ranks, got {port!r}; start with torchrun"])
    limit_s = float(os.environ.get(RENDEZVOUS_ENV, RENDEZVOUS_S))
    limit = timedelta(seconds=limit_s)
    agents_own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store by itself
    where = f"{address}:{port}"
    try:
        served_here = place.rank == 0 and not agents_own
        store: Any = TCPStore(address, int(port), is_master=served_here, timeout=limit, wait_for_workers=False)
        store = PrefixStore(f"dflash/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"here/{place.rank}", socket.gethostname())
    except RuntimeError as error:
        raise PeerLost(
            f"drafter {place.rank}: cannot reach rank 0 at {where} within {limit_s:g} s ({_first_line(error)}); "
            "is its host up, is the address right, is the port open?"
        ) from None
    names = [f"here/{rank}" for rank in range(place.world)]
    try:
        store.wait(names, limit)
    except RuntimeError:
        missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise PeerLost(
            f"drafter {place.rank}: rank {', '.join(missing)} did not come to {where} within {limit_s:g} s; see its log"
        ) from None
    return store


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn the backend's error about a broken or silent connection into one line."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"{what}: another drafter has left or does not answer ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:200]


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
