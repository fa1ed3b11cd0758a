"""Atomic loads, stores and compare-and-swap on shared memory, and the futex doorbell.

libatomic is reached through ctypes.PyDLL: the same symbols on x86-64 and aarch64, real acquire and release order, and
no GIL hand-over (a call costs about half a microsecond; a slot takes hundreds). numpy and struct promise no order at
all, which is harmless on x86-64 and wrong on aarch64.
A doorbell is a 32-bit counter. FUTEX_WAKE_OP adds one to it inside the kernel and wakes the waiters, so that any number
of processes may ring it; the waiter reads the bell, looks at the slots, and sleeps only if the bell still has that
value.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import time
from collections.abc import Sequence

from shm_ring.errors import MissingLibrary

ACQUIRE, RELEASE, ACQ_REL = 2, 3, 4  # the values of __ATOMIC_* in GCC's ABI

_FUTEX_WAIT, _FUTEX_WAKE_OP = 0, 5
_WAKE_OP_ADD_ONE = 1 << 28 | 1 << 12  # op ADD, compare EQ, operand 1, compare with 0
_ALL_WAITERS = 0x7FFFFFFF
_FUTEX2_SIZE_U32 = 2
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_SYS_FUTEX_WAITV = 449  # one number on every architecture, Linux 5.16
_WAITV_MAX = 128
_NO_FUTEX_SLEEP_S = 200e-6
_ROTATE_S = 0.010  # without futex_waitv: about 1.3 % of a core, against 6 % at 2 ms

_log = logging.getLogger("shm_ring")


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


class _Waiter(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def load_libatomic(name: str = "libatomic.so.1") -> ctypes.PyDLL:
    """Open libatomic and declare the functions used here.

    Raises MissingLibrary with the install command.
    """
    try:
        lib = ctypes.PyDLL(name)
    except OSError as why:
        raise MissingLibrary(
            f"shm_ring needs {name} for atomic operations and cannot load it ({why}); "
            "install it: 'apt-get install libatomic1' (Debian, Ubuntu) or 'dnf install libatomic' (RHEL family)"
        ) from None
    for bits, kind in ((4, ctypes.c_uint32), (8, ctypes.c_uint64)):
        load = getattr(lib, f"__atomic_load_{bits}")
        load.restype, load.argtypes = kind, (ctypes.c_void_p, ctypes.c_int)
        store = getattr(lib, f"__atomic_store_{bits}")
        store.restype, store.argtypes = None, (ctypes.c_void_p, kind, ctypes.c_int)
    add = lib.__atomic_fetch_add_4
    add.restype, add.argtypes = ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int)
    swap = lib.__atomic_compare_exchange_8
    swap.restype = ctypes.c_bool
    swap.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
    return lib


def _futex_number() -> int:
    machine = platform.machine()
    if machine not in _SYS_FUTEX:
        raise MissingLibrary(f"shm_ring runs on {' and '.join(_SYS_FUTEX)}; this machine is {machine}")
    return _SYS_FUTEX[machine]


_lib = load_libatomic()
_load_4, _load_8 = _lib.__atomic_load_4, _lib.__atomic_load_8
_store_4, _store_8 = _lib.__atomic_store_4, _lib.__atomic_store_8
_fetch_add_4, _swap_8 = _lib.__atomic_fetch_add_4, _lib.__atomic_compare_exchange_8
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_futex_nr = ctypes.c_long(_futex_number())
_waitv_nr = ctypes.c_long(_SYS_FUTEX_WAITV)
_missing: set[str] = set()  # kernel interfaces found absent; each is reported once


def load_u64(address: int) -> int:
    """Read an aligned 64-bit word with acquire order."""
    return int(_load_8(address, ACQUIRE))


def store_u64(address: int, value: int) -> None:
    """Write an aligned 64-bit word with release order."""
    _store_8(address, value, RELEASE)


def load_u32(address: int) -> int:
    """Read an aligned 32-bit word with acquire order."""
    return int(_load_4(address, ACQUIRE))


def store_u32(address: int, value: int) -> None:
    """Write an aligned 32-bit word with release order."""
    _store_4(address, value, RELEASE)


def swap_u64(address: int, expected: int, desired: int) -> bool:
    """Replace `expected` by `desired` in one step, acquire and release; False if the word held something else."""
    seen = ctypes.c_uint64(expected)
    return bool(_swap_8(address, ctypes.byref(seen), desired, ACQ_REL, ACQUIRE))


def _absent(interface: str, what_instead: str) -> None:
    if interface not in _missing:
        _missing.add(interface)
        _log.warning("ring | interface_missing | interface=%s instead=%s", interface, what_instead)


def ring_bell(address: int) -> None:
    """Add one to the doorbell at `address` and wake every process that waits for it."""
    if "futex" not in _missing:
        bell = ctypes.c_void_p(address)
        if _syscall(_futex_nr, bell, _FUTEX_WAKE_OP, _ALL_WAITERS, None, bell, _WAKE_OP_ADD_ONE) >= 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
            raise OSError(ctypes.get_errno(), "FUTEX_WAKE_OP failed on a doorbell")
        _absent("futex", f"sleeps of {_NO_FUTEX_SLEEP_S * 1e6:.0f}_us")
    _fetch_add_4(address, 1, ACQ_REL)


def wait_bells(bells: Sequence[tuple[int, int]], limit_s: float) -> None:
    """Sleep until one of the (address, value seen) doorbells moved on, a signal came, or `limit_s` passed.

    May return early; the caller looks again. Holds no GIL while it sleeps.
    """
    if limit_s <= 0:
        return
    if "futex" in _missing or not bells:
        time.sleep(min(limit_s, _NO_FUTEX_SLEEP_S))
    elif len(bells) == 1:
        _wait_one(*bells[0], limit_s)
    elif "futex_waitv" in _missing or len(bells) > _WAITV_MAX or not _wait_many(bells, limit_s):
        turn = int(time.monotonic() / _ROTATE_S) % len(bells)
        _wait_one(*bells[turn], min(limit_s, _ROTATE_S))


def _wait_one(address: int, value: int, limit_s: float) -> None:
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    code = _syscall(
        _futex_nr, ctypes.c_void_p(address), _FUTEX_WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0
    )
    if code < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        _absent("futex", f"sleeps of {_NO_FUTEX_SLEEP_S * 1e6:.0f}_us")


def _wait_many(bells: Sequence[tuple[int, int]], limit_s: float) -> bool:
    """Wait on several doorbells at once (Linux 5.16); False where the kernel cannot."""
    waiters = (_Waiter * len(bells))(*[_Waiter(value, address, _FUTEX2_SIZE_U32, 0) for address, value in bells])
    end_ns = time.monotonic_ns() + int(limit_s * 1e9)
    end = _Timespec(*divmod(end_ns, 1_000_000_000))
    clock = ctypes.c_int(time.CLOCK_MONOTONIC)
    code = _syscall(_waitv_nr, waiters, ctypes.c_uint(len(bells)), ctypes.c_uint(0), ctypes.byref(end), clock)
    if code < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        _absent("futex_waitv", f"rotation_of_{_ROTATE_S * 1e3:.0f}_ms")
        return False
    return True
