"""A TCP port of a test's own: kept from everybody else, and free for the one server that the test starts there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port that the kernel gives to nobody else meanwhile; until a server listens there, it refuses.

    The socket that keeps it never listens and allows its address to be used again, as servers do who bind a port by
    its number (zmq and torch's store set SO_REUSEADDR).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((address, 0))
        yield int(keeper.getsockname()[1])
