"""What a trip through the ring costs, beside its twins in the same run. Writes one JSON object with machine and date.

    python benchmarks/ring.py [--quick] [--out benchmarks/results/ring_NAME.json]

Definitions. cycle: acquire + publish + take + release in one process, nothing copied. round trip: 64 bytes there and
back over two links, from before the send to after the receive. slots/s: 64-byte arrays, 64 slots on the way. GB/s:
payload bytes through a copy in and a copy out, by the receiver's clock, after one round through every slot (page
faults); the ceiling is the slower of two processes that each copy between buffers of their own at the same time; a
ratio is to the mean of the ceilings measured right before and right after. wake-up: from right before the filled array
is handed over (publish, put, send), 3 ms after the last one, to the sleeping receiver having it in hand. Each process
is pinned to a core of its own. The first and last word of every transfer are checked, and the whole of the last array.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.ring_links import LINKS, Array, Ceiling, FutexFloor, Link
from shm_ring import Field, Reader, Ring, SlotSpec, errors, ring_name
from shm_ring.names import SHM_DIR

_fork = multiprocessing.get_context("fork")
CORES = sorted(os.sched_getaffinity(0))
MIB = 1 << 20


def pair(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run two functions in two pinned processes that start together; return their results."""
    barrier = _fork.Barrier(2)
    pipes = []
    for index, function in enumerate((first, second)):
        here, there = _fork.Pipe(duplex=False)

        def body(function: Any = function, index: int = index, there: Any = there) -> None:
            os.sched_setaffinity(0, {CORES[index % len(CORES)]})
            there.send(function(barrier))

        process = _fork.Process(target=body)
        process.start()
        there.close()
        pipes.append((here, process))
    results = [here.recv() for here, _ in pipes]
    for _, process in pipes:
        process.join()
    return results[0], results[1]


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": round(statistics.median(values), digits), "min": round(min(values), digits),
            "max": round(max(values), digits)}  # fmt: skip


def cycle_us(runs: int) -> dict[str, float]:
    """Measure acquire, publish, take and release without a copy, on 16 slots."""
    ring = Ring.create(ring_name(f"bench.cycle.{os.getpid()}", 0), SlotSpec((Field("a", "uint64", (8,)),)), 16)
    results = []
    with ring.writer() as writer, Reader([ring]) as reader:
        for run in range(runs + 1):
            begun = time.perf_counter()
            for pack in range(5000):
                writer.publish(writer.acquire(), pack_id=pack)
                slot = reader.take()
                assert slot is not None
                assert slot.header.pack_id == pack
                reader.release(slot)
            if run:
                results.append((time.perf_counter() - begun) / 5000 * 1e6)
    ring.unlink()
    ring.close()
    return spread(results, 1)


def waiting_cpu_percent(seconds: float) -> dict[str, float]:
    """Measure the CPU use of a writer on a full ring and of a reader on an empty one."""
    ring = Ring.create(ring_name(f"bench.wait.{os.getpid()}", 0), SlotSpec((Field("a", "uint64", (8,)),)), 4)
    found = {}
    with ring.writer() as writer, Reader([ring]) as reader:

        def measure(name: str, wait: Callable[[float], object]) -> None:
            before, begun = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            try:
                wait(seconds)
            except errors.RingTimeout:
                after = resource.getrusage(resource.RUSAGE_SELF)
                used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                found[name] = round(100 * used / (time.monotonic() - begun), 2)

        measure("empty", reader.take)
        for pack in range(4):
            writer.publish(writer.acquire(), pack_id=pack)
        measure("full", writer.acquire)
    ring.unlink()
    ring.close()
    return found


def round_trip_us(kind: type[Link], trips: int) -> dict[str, float]:
    """Measure 64 bytes there and back."""
    there, back = kind(64, 4), kind(64, 4)

    def ask(barrier: Any) -> list[float]:
        receive, send = back.receiver(), there.sender()
        barrier.wait()
        array, times = np.zeros(8, np.uint64), []
        for trip in range(trips + 200):
            array[0] = trip
            begun = time.perf_counter()
            send(array)
            receive(array)
            times.append((time.perf_counter() - begun) * 1e6)
            assert array[0] == trip + 1
        return times[200:]

    def answer(barrier: Any) -> None:
        receive, send = there.receiver(), back.sender()
        barrier.wait()
        array = np.zeros(8, np.uint64)
        for _ in range(trips + 200):
            receive(array)
            array[0] += 1
            send(array)

    times = np.array(pair(ask, answer)[0])
    there.close()
    back.close()
    return {"p50": round(float(np.percentile(times, 50)), 1), "p99": round(float(np.percentile(times, 99)), 1)}


def wake_up_us(kind: type[Link], samples: int) -> dict[str, float]:
    """Measure how long a sleeping receiver takes to have what was sent; 3 ms between sends."""
    link = kind(64, 4)

    def send_slowly(barrier: Any) -> list[int]:
        send, array, sent_ns = link.sender(), np.zeros(8, np.uint64), []
        barrier.wait()
        for _ in range(samples):
            time.sleep(0.003)
            sent_ns.append(send(array))
        barrier.wait()
        return sent_ns

    def receive_all(barrier: Any) -> list[int]:
        receive, array = link.receiver(), np.zeros(8, np.uint64)
        barrier.wait()
        had_ns = [receive(array) for _ in range(samples)]
        barrier.wait()
        return had_ns

    sent_ns, had_ns = pair(send_slowly, receive_all)
    times = (np.array(had_ns) - np.array(sent_ns)) / 1e3
    link.close()
    return {"p50": round(float(np.percentile(times, 50)), 1), "p99": round(float(np.percentile(times, 99)), 1)}


def transfer_s(kind: type[Link], num_bytes: int, num_slots: int, transfers: int) -> float:
    """Return the seconds for `transfers` arrays after two warm-up ones; the slower side's clock for the ceiling."""
    link, checked = kind(num_bytes, num_slots), kind is not Ceiling
    warm_up = num_slots + 2 if num_bytes > MIB else 2  # every slot's pages are mapped by then, on both sides

    def timed(move: Callable[[Array], int], barrier: Any, before: Any, after: Any) -> float:
        barrier.wait()
        for number in range(transfers + warm_up):
            if number == warm_up:
                begun = time.perf_counter()
            before(number)
            move(array)
            after(number)
        elapsed = time.perf_counter() - begun
        barrier.wait()
        return elapsed

    array = np.arange(num_bytes // 8, dtype=np.uint64)

    def stamp(number: int) -> None:
        array[0] = array[-1] = number

    def check(number: int) -> None:
        assert not checked or (array[0], array[-1]) == (number, number)

    def nothing(_: int) -> None:
        """Leave the array."""

    def sending(barrier: Any) -> float:
        return timed(link.sender(), barrier, stamp, nothing)

    def receiving(barrier: Any) -> float:
        move = link.receiver()
        array[:] = 0
        elapsed = timed(move, barrier, nothing, check)
        assert not checked or bool((array[1:-1] == np.arange(1, len(array) - 1, dtype=np.uint64)).all())
        return elapsed

    sent, received = pair(sending, receiving)
    link.close()
    return float(received if checked else max(sent, received))


def bandwidth(num_bytes: int, transfers: int, rounds: int) -> dict[str, Any]:
    """Measure every link between two ceilings; GB/s, and the ratio to the mean of the two."""

    def rate(kind: type[Link], num: int) -> float:
        return num_bytes * num / transfer_s(kind, num_bytes, 4, num) / 1e9

    rates: dict[str, list[float]] = {name: [] for name in ("ceiling", *LINKS)}
    ratios: dict[str, list[float]] = {name: [] for name in LINKS}
    for _ in range(rounds):
        before = rate(Ceiling, transfers)
        for name, kind in LINKS.items():
            slow = name in ("mp.Queue of arrays", "pyzmq ipc")
            found = rate(kind, max(2, transfers // 8) if slow else transfers)
            after = rate(Ceiling, transfers)
            rates[name].append(found)
            rates["ceiling"].append(after)
            ratios[name].append(2 * found / (before + after))
            before = after
    report: dict[str, Any] = {name: {"gb_per_s": spread(values)} for name, values in rates.items()}
    for name, values in ratios.items():
        report[name]["of_ceiling"] = spread(values)
    return report


def machine() -> dict[str, Any]:
    """Describe where and with what this ran."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    cpu = models[0].split(":")[1].strip() if models else platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit.stdout.strip(), "cpu": cpu,
        "cores": len(CORES), "kernel": platform.release(), "python": platform.python_version(),
        "load_before": os.getloadavg()[0], "note": "shared machine: trust ratios more than figures",
        "versions": {name: metadata.version(name) for name in ("numpy", "pyzmq", "iceoryx2", "posix_ipc")},
    }  # fmt: skip


def main() -> None:
    """Measure everything and print, or write, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    part = 10 if args.quick else 1
    runs = 2 if args.quick else 7
    before = set(Path(SHM_DIR).glob("iox2_*"))
    result: dict[str, Any] = {"machine": machine(), "cycle_us": cycle_us(runs)}
    result["waiting_cpu_percent"] = waiting_cpu_percent(10 / part)
    waking: dict[str, type[Link]] = {"futex alone (floor)": FutexFloor, **LINKS}
    result["wake_up_us"] = {name: wake_up_us(kind, 1000 // part) for name, kind in waking.items()}
    result["round_trip_us"] = {name: round_trip_us(kind, 5000 // part) for name, kind in LINKS.items()}
    num = 20000 // part
    result["slots_per_s_64_bytes"] = {
        name: spread([num / transfer_s(kind, 64, 64, num) for _ in range(runs)], 0) for name, kind in LINKS.items()
    }
    result["64_mib"] = bandwidth(64 * MIB, max(4, 24 // part), runs)
    result["400_mib"] = bandwidth(400 * MIB, max(3, 8 // part), min(runs, 5))
    for path in set(Path(SHM_DIR).glob("iox2_*")) - before:  # iceoryx2's own management files
        path.unlink(missing_ok=True)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
