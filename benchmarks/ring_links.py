"""One-way links with one interface, so that benchmarks/ring.py can compare them: the ring and its twins.

A link is made before the processes fork; `sender()` and `receiver()` are called in the process that uses them. `send`
copies the array into the link (or hands it over), `receive` copies what came into the array: both sides pay their copy.
`send` returns the CLOCK_MONOTONIC nanoseconds right before it hands the filled data over, `receive` those at which it
had the data in hand, before it copied them and gave the slot back: the difference is the link's own wake-up.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shm_ring import Field, Reader, Ring, SlotSpec, atomics, errors, ring_name

Array = npt.NDArray[np.uint64]
Move = Callable[[Array], int]  # nanoseconds: right before handing over, or with the data in hand
_fork = multiprocessing.get_context("fork")
TIMEOUT_S = 60.0


class Link(Protocol):
    """One way from one process to another for arrays of `num_bytes`, with `num_slots` on the way at most."""

    def __init__(self, num_bytes: int, num_slots: int) -> None: ...
    def sender(self) -> Move:
        """Return the function that sends; called once, in the sending process."""

    def receiver(self) -> Move:
        """Return the function that receives; called once, in the receiving process."""

    def close(self) -> None:
        """Remove what the link left."""


class RingLink:
    """shm_ring."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Make a ring."""
        spec = SlotSpec((Field("words", "uint64", (num_bytes // 8,)),))
        self._ring = Ring.create(ring_name(f"bench.{os.getpid()}.{uuid.uuid4().hex[:6]}", 0), spec, num_slots)

    def sender(self) -> Move:
        """Acquire, copy, publish."""
        writer = Ring.open(self._ring.name).writer()

        def send(source: Array) -> int:
            slot = writer.acquire(TIMEOUT_S)
            np.copyto(slot.array("words"), source)
            ready_ns = time.monotonic_ns()
            writer.publish(slot, pack_id=0)
            return ready_ns

        return send

    def receiver(self) -> Move:
        """Take, copy, release."""
        reader = Reader([Ring.open(self._ring.name)])

        def receive(target: Array) -> int:
            slot = reader.take(TIMEOUT_S)
            had_ns = time.monotonic_ns()
            assert slot is not None
            np.copyto(target, slot.array("words"))
            reader.release(slot)
            return had_ns

        return receive

    def close(self) -> None:
        """Remove the ring."""
        with suppress(errors.RingError):
            self._ring.unlink()
        self._ring.close()


class QueueOfArrays:
    """multiprocessing.Queue of arrays: pickled through a pipe."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Make a bounded queue."""
        del num_bytes
        self._queue: Any = _fork.Queue(num_slots)

    def sender(self) -> Move:
        """Put a copy: the queue's thread pickles later, and the caller's array may have changed by then."""

        def send(source: Array) -> int:
            copy, ready_ns = source.copy(), time.monotonic_ns()
            self._queue.put(copy, timeout=TIMEOUT_S)
            return ready_ns

        return send

    def receiver(self) -> Move:
        """Get and copy."""

        def receive(target: Array) -> int:
            array, had_ns = self._queue.get(timeout=TIMEOUT_S), time.monotonic_ns()
            np.copyto(target, array)
            return had_ns

        return receive

    def close(self) -> None:
        """End the queue's thread."""
        self._queue.close()


class QueueOfIndices:
    """Shared memory, and two multiprocessing.Queues of slot indices."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Make the memory with every slot free."""
        self._memory = mmap.mmap(-1, num_bytes * num_slots)
        self._slots = np.frombuffer(self._memory, np.uint64).reshape(num_slots, -1)
        self._ready: Any = _fork.Queue()
        self._free: Any = _fork.Queue()
        for index in range(num_slots):
            self._free.put(index)

    def sender(self) -> Move:
        """Get a free index, copy, put it."""

        def send(source: Array) -> int:
            index = self._free.get(timeout=TIMEOUT_S)
            np.copyto(self._slots[index], source)
            ready_ns = time.monotonic_ns()
            self._ready.put(index)
            return ready_ns

        return send

    def receiver(self) -> Move:
        """Get a ready index, copy, put it back."""

        def receive(target: Array) -> int:
            index, had_ns = self._ready.get(timeout=TIMEOUT_S), time.monotonic_ns()
            np.copyto(target, self._slots[index])
            self._free.put(index)
            return had_ns

        return receive

    def close(self) -> None:
        """End the queues' threads."""
        self._ready.close()
        self._free.close()


class ZmqLink:
    """pyzmq PUSH and PULL over ipc, without pickling and without pyzmq's own copies."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Choose a socket path."""
        del num_bytes
        self._path, self._num_slots = f"/tmp/bench.{os.getpid()}.{uuid.uuid4().hex[:6]}", num_slots

    def sender(self) -> Move:
        """Connect and send; a copy of the source, because zmq sends later."""
        import zmq

        socket: Any = zmq.Context().socket(zmq.PUSH)
        socket.set_hwm(self._num_slots)
        socket.connect(f"ipc://{self._path}")

        def send(source: Array) -> int:
            copy, ready_ns = source.copy(), time.monotonic_ns()
            socket.send(copy, copy=False)
            return ready_ns

        return send

    def receiver(self) -> Move:
        """Bind, receive, copy."""
        import zmq

        socket = zmq.Context().socket(zmq.PULL)
        socket.set_hwm(self._num_slots)
        socket.bind(f"ipc://{self._path}")

        def receive(target: Array) -> int:
            frame, had_ns = socket.recv(copy=False), time.monotonic_ns()
            np.copyto(target, np.frombuffer(frame.buffer, np.uint64))
            return had_ns

        return receive

    def close(self) -> None:
        """Remove the socket."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)


class IceoryxLink:
    """iceoryx2's Python package, publish and subscribe; its receiver polls (with sched_yield), as its API offers."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Choose a service name."""
        self._name, self._num_bytes, self._num_slots = f"bench{uuid.uuid4().hex}", num_bytes, num_slots

    def _service(self) -> tuple[Any, Any]:
        import iceoryx2 as iox

        iox.set_log_level(iox.LogLevel.Error)
        node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        builder = node.service_builder(iox.ServiceName.new(self._name)).publish_subscribe(iox.Slice[ctypes.c_uint8])
        builder = builder.enable_safe_overflow(False).subscriber_max_buffer_size(self._num_slots)
        return node, builder.subscriber_max_borrowed_samples(2).open_or_create()

    def sender(self) -> Move:
        """Loan, copy, send; sending blocks while the subscriber's buffer is full."""
        import iceoryx2 as iox

        node, service = self._service()
        builder = service.publisher_builder().initial_max_slice_len(self._num_bytes)
        publisher = builder.backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered).create()

        def send(source: Array, _keep: Any = node) -> int:
            sample = publisher.loan_slice_uninit(self._num_bytes)
            np.copyto(np.frombuffer(sample.payload().as_memory_view(), np.uint64), source)
            ready_ns = time.monotonic_ns()
            sample.assume_init().send()
            return ready_ns

        return send

    def receiver(self) -> Move:
        """Poll, copy, give the sample back."""
        node, service = self._service()
        subscriber = service.subscriber_builder().create()

        def receive(target: Array, _keep: Any = node) -> int:
            end = time.monotonic() + TIMEOUT_S
            while (sample := subscriber.receive()) is None:
                os.sched_yield()
                assert time.monotonic() < end
            had_ns = time.monotonic_ns()
            np.copyto(target, np.frombuffer(sample.payload().as_memory_view(), np.uint64))
            sample.delete()
            return had_ns

        return receive

    def close(self) -> None:
        """Leave nothing."""


class Ceiling:
    """No link: each process copies between two buffers of its own. The most that any link with two copies could do."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Remember the size."""
        del num_slots
        self._num_words = num_bytes // 8

    def _copier(self, outward: bool) -> Move:
        own = np.ones(self._num_words, np.uint64)

        def copy(array: Array) -> int:
            np.copyto(own, array) if outward else np.copyto(array, own)
            return time.monotonic_ns()

        return copy

    def sender(self) -> Move:
        """Copy the source away."""
        return self._copier(outward=True)

    def receiver(self) -> Move:
        """Copy something into the target."""
        return self._copier(outward=False)

    def close(self) -> None:
        """Leave nothing."""


class FutexFloor:
    """Not a link: one doorbell and one array, no slots. What the kernel's wake-up alone costs; for wake_up only."""

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        """Map a bell and an array."""
        del num_slots
        self._memory = mmap.mmap(-1, 64 + num_bytes)
        self._array = np.frombuffer(self._memory, np.uint64)[8:]
        self._bell: int = np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0]

    def sender(self) -> Move:
        """Copy and ring."""

        def send(source: Array) -> int:
            np.copyto(self._array, source)
            ready_ns = time.monotonic_ns()
            atomics.ring_bell(self._bell)
            return ready_ns

        return send

    def receiver(self) -> Move:
        """Sleep until the bell moved, then copy."""
        seen = 0

        def receive(target: Array) -> int:
            nonlocal seen
            while atomics.load_u32(self._bell) == seen:
                atomics.wait_bells([(self._bell, seen)], 0.1)
            seen += 1
            had_ns = time.monotonic_ns()
            np.copyto(target, self._array)
            return had_ns

        return receive

    def close(self) -> None:
        """Leave nothing."""


LINKS: dict[str, type[Link]] = {
    "slot ring": RingLink,
    "mp.Queue of arrays": QueueOfArrays,
    "shm + mp.Queue of indices": QueueOfIndices,
    "pyzmq ipc": ZmqLink,
    "iceoryx2 py (polling)": IceoryxLink,
}
