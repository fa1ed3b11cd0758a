"""Control messages and the two ends that exchange them: Server in each process, ask() for who commands.

Request and reply, each versioned, over a zmq ipc socket. A command is done, or handed over, when its reply is there;
ask() waits no longer than its timeout, and at once says so if nobody serves the socket. Telemetry does not travel here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ops.errors import NoAnswer, NoResource, NotRunning, OpsError, Refused, RunTaken
from ops.locks import FileLock, holder_pid

PROTOCOL = 1
LINGER_MS = 500
TICK_MS = 200
TOUCH_S = 3600.0
_JOIN_S = 5.0


class Request(BaseModel):
    """What one process asks another to do."""

    model_config = ConfigDict(extra="forbid")

    version: int = PROTOCOL
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    command: str
    args: dict[str, Any] = Field(default_factory=dict)


class Reply(BaseModel):
    """The acknowledgement of a request: `data` if it was done, else one line of `error`."""

    model_config = ConfigDict(extra="forbid")

    version: int = PROTOCOL
    id: str
    ok: bool
    error: str = ""
    exit_code: int = 0
    data: dict[str, Any] = Field(default_factory=dict)


Handler = Callable[[Request], dict[str, Any]]


class Server:
    """A daemon thread that answers requests on one ipc socket until close().

    `handle` runs in that thread and returns the reply's data; an OpsError it raises becomes a refusal. `tick` runs in
    the same thread about five times a second.
    """

    def __init__(self, path: Path, handle: Handler, tick: Callable[[], None] | None = None) -> None:
        self.path = path
        self._handle = handle
        self._tick = tick or (lambda: None)
        self._closing = threading.Event()
        self._lock = FileLock(lock_of(path))
        self._thread: threading.Thread | None = None

    def start(self) -> Server:
        """Bind and serve; raises RunTaken if a living process serves this socket, NoResource if it cannot be bound."""
        pid = self._lock.take()
        if pid:
            raise RunTaken(f"{self.path.stem} of this run is already there (pid {pid}); stop it first")
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            socket.bind(f"ipc://{self.path}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._lock.drop()
            why = zmq.strerror(error.errno or 0)
            raise NoResource(f"cannot listen at {self.path} ({why}); set DFLASH_RUNTIME_DIR elsewhere") from None
        self._thread = threading.Thread(target=self._serve, args=(socket,), name=self.path.stem, daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving and remove the socket; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        thread.join(_JOIN_S)
        self._context.term()
        self.path.unlink(missing_ok=True)
        self._lock.drop()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        touch_at = 0.0
        # close() goes on after a while, and its term() ends a call here and then waits for the socket
        with contextlib.closing(socket), contextlib.suppress(zmq.ContextTerminated):
            while not self._closing.is_set():
                if poller.poll(TICK_MS):
                    *route, body = socket.recv_multipart()
                    socket.send_multipart([*route, self._answer(body).encode()])
                self._tick()
                if time.monotonic() >= touch_at:
                    self._lock.touch()
                    touch_at = time.monotonic() + TOUCH_S

    def _answer(self, body: bytes) -> str:
        """Return the reply as JSON; whatever is wrong with a command, or with what comes of it, becomes a refusal."""
        try:
            request = Request.model_validate_json(body)
        except ValidationError as error:
            faults = f"not a control request: {error.error_count()} faults"
            return Reply(id="", ok=False, error=faults, exit_code=2).model_dump_json()
        if request.version != PROTOCOL:
            error_line = f"control protocol {request.version} asked, this process speaks {PROTOCOL}: use one version"
            return Reply(id=request.id, ok=False, error=error_line, exit_code=2).model_dump_json()
        try:
            return Reply(id=request.id, ok=True, data=self._handle(request)).model_dump_json()
        except OpsError as error:
            return Reply(id=request.id, ok=False, error=str(error), exit_code=error.exit_code).model_dump_json()
        except Exception as error:  # the serving thread must outlive a fault in one command; the fault is shown
            with contextlib.suppress(OSError):  # the disk of the log is full
                traceback.print_exc(file=sys.stderr)
            failed = f"{request.command} failed: {error!r}"
            return Reply(id=request.id, ok=False, error=failed, exit_code=4).model_dump_json()


def lock_of(path: Path) -> Path:
    """The lock file that says whether a socket is served."""
    return path.with_suffix(".lock")


def ask(path: Path, command: str, timeout_s: float = 5.0, **args: Any) -> dict[str, Any]:
    """Send a command and return the reply's data.

    Raises NotRunning at once if nobody serves the socket, NoAnswer after `timeout_s`, Refused with the other's words.
    """
    if not holder_pid(lock_of(path)):
        raise NotRunning(f"{path.stem} is not running (nobody serves {path})")
    request = Request(command=command, args=args)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(f"ipc://{path}")
        socket.send(request.model_dump_json().encode())
        if not socket.poll(int(timeout_s * 1000)):
            raise NoAnswer(f"{path.stem} did not answer '{command}' within {timeout_s:g} s; it may be stopped or busy")
        reply = Reply.model_validate_json(socket.recv())
    except ValidationError:
        raise Refused(f"{path.stem} answered in another control protocol; use one version of the program") from None
    finally:
        socket.close()
        context.term()
    if not reply.ok:
        refusal = Refused(reply.error)
        refusal.exit_code = reply.exit_code
        raise refusal
    return reply.data
