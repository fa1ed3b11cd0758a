"""Telemetry as it happens: each line of metrics is pushed to the launcher, which publishes it to whoever listens.

    process: O_APPEND write, then PUSH  ->  launcher: PULL, XPUB  ->  dashboard, exporters: SUB

metrics.jsonl stays the record. A message is (topic, where in the file, the line), so a listener that has read the file
up to some byte knows whether a message follows, is known already, or shows a gap, which it reads from the file. A
greeting (the topic alone) answers each subscription, also after a reconnection: what was written before it is in the
file, what is written after it will be sent. So no first message is lost, whoever restarts. Nobody waits for a listener:
what a slow one does not take is dropped, and read from the file. The topic holds the version of all this.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import zmq

from ops.paths import runtime_dir

TOPIC = b"metrics.1"
LINGER_MS = 200
_MOST_WAITING = 1000  # lines, for each end that does not take them
_TICK_MS = 200
_IN, _OUT = "lines.sock", "feed.sock"  # no longer than launcher.sock, which paths leave room for


class Message(NamedTuple):
    """A line and the byte of metrics.jsonl that it begins at; a greeting has neither."""

    start: int
    line: bytes

    @property
    def is_greeting(self) -> bool:
        """Whether this says: from now on you hear everything."""
        return not self.line


class Pusher:
    """A process's end: sends lines to its launcher; does nothing where there is none."""

    def __init__(self, run_dir: Path) -> None:
        path = runtime_dir(run_dir) / _IN
        self._socket: zmq.Socket[bytes] | None = None
        if path.exists():
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.setsockopt(zmq.LINGER, LINGER_MS)
            self._socket.setsockopt(zmq.SNDHWM, _MOST_WAITING)
            self._socket.connect(f"ipc://{path}")

    def send(self, start: int, line: bytes) -> None:
        """Send a line that has been written; returns at once, and drops it if nobody takes lines any more."""
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([TOPIC, start.to_bytes(8, "little"), line], zmq.NOBLOCK)

    def close(self) -> None:
        """Close; waits at most LINGER_MS for what is unsent. May be called twice."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
            self._context.term()


class Feed:
    """The launcher's end: a daemon thread that publishes what it gets. Claim the run first: a bind takes over."""

    def __init__(self, run_dir: Path) -> None:
        folder = runtime_dir(run_dir, create=True)
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._lines = self._bound(zmq.PULL, folder / _IN)
        self._out = self._bound(zmq.XPUB, folder / _OUT)
        self._out.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription is told here, also of a topic that is known
        self._thread = threading.Thread(target=self._serve, name="telemetry", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        socket.bind(f"ipc://{path}")
        return socket

    def close(self) -> None:
        """Stop publishing; may be called twice."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._lines, self._out):
            poller.register(socket, zmq.POLLIN)
        while not self._closing.is_set():
            for socket, _ in poller.poll(_TICK_MS):
                parts = socket.recv_multipart()
                if socket is self._lines:
                    self._out.send_multipart(parts)
                elif parts[0][:1] == b"\1":
                    self._out.send(TOPIC)
        self._lines.close()
        self._out.close()


class Listener:
    """Hears a run's telemetry, also of one that starts later or again. A context manager; for one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._socket.connect(f"ipc://{runtime_dir(run_dir) / _OUT}")

    def receive(self) -> list[Message]:
        """Return what has come, without waiting."""
        found: list[Message] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < _MOST_WAITING:
                _, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
                found.append(Message(int.from_bytes(rest[0], "little"), rest[1]) if rest else Message(0, b""))
        return found

    def wait(self, seconds: float) -> bool:
        """Wait until something has come, at most so long."""
        return bool(self._socket.poll(int(1000 * seconds)))

    def close(self) -> None:
        """Stop listening; may be called twice."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
