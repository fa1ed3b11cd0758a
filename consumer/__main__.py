"""Start one drafter process: `python -m consumer --run-dir RUN --rank C`. Started by the launcher, or by hand.

One of several: torchrun's variables say which (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and
`torchrun --nproc-per-node M -m consumer --run-dir RUN` starts M of them by hand. The device comes from DFLASH_DEVICE
("cpu" or "cuda:0"), else it is the GPU of the local rank; the number of CPU threads comes from OMP_NUM_THREADS.
Exit codes: 0 done or told to stop, 2 configuration, 3 data, 4 a peer died, 5 resources.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ops.control import RESTART, Control, OpsError, file_fault
from ops.telemetry import Log, complain


def main() -> int:
    """Run the process named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m consumer", description="One drafter process of a run")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, help="global rank; RANK if left out")
    arguments = parser.parse_args()
    rank = arguments.rank if arguments.rank is not None else _number("RANK")
    log = Log("drafter", rank)
    try:
        control = Control.start(arguments.run_dir, "drafter", rank)  # before anything slow is imported
    except OpsError as error:
        complain(str(error))
        return error.exit_code
    except OSError as error:
        return _without_file(error, rank)
    with control:
        code = _run(arguments.run_dir, rank, control, log)
    on_several_gpus = _number("WORLD_SIZE") > 1 and _device().startswith("cuda")
    if on_several_gpus or control.stop_reason == RESTART:
        sys.stdout.flush()
        os._exit(code)  # NCCL's orderly end waits for every graph that holds its collectives; the next life, for this
    return code


def _without_file(error: OSError, rank: int) -> int:
    """Say which file cannot be used and what to do; raises the error again where a restart may help."""
    fault = file_fault(error)
    if fault is None:
        raise error
    complain(f"drafter {rank}: {fault} and launch again: the run goes on from what is saved")
    return 5


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def _device() -> str:
    """DFLASH_DEVICE, else under torchrun the GPU of the local rank, else the CPU."""
    import torch

    by_rank = f"cuda:{_number('LOCAL_RANK')}" if "RANK" in os.environ and torch.cuda.is_available() else "cpu"
    return os.environ.get("DFLASH_DEVICE", by_rank)


def _run(run_dir: Path, rank: int, control: Control, log: Log) -> int:
    import torch

    from configs.load import ConfigError, load_config
    from consumer.checkpoint import CheckpointError
    from consumer.distributed import PeerLost, Place, Ranks
    from consumer.frozen_head import HeadError
    from consumer.loop import Unstable, run
    from consumer.memory import TooLarge
    from consumer.staging import BadPack
    from consumer.start_clock import StartClock
    from shm_ring.errors import RingError

    clock = StartClock()
    clock.ends("imports")

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    device = torch.device(_device())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        config = load_config(run_dir / "config.yaml")
        with Ranks(Place.read(os.environ, rank), device, config.training.collective_timeout_s) as ranks:
            clock.ends("meeting")
            run(config, run_dir, ranks, device, control, log, clock)
    except PeerLost as error:
        complain(str(error))
        os._exit(error.exit_code)  # a GPU may wait for the lost rank for ever, nor may an orderly end
    except (ConfigError, HeadError, CheckpointError, BadPack, Unstable, RingError, TooLarge) as error:
        complain(str(error))
        return error.exit_code
    except torch.OutOfMemoryError as error:
        complain(f"drafter {rank}: out of GPU memory: {str(error).splitlines()[0]}")
        return 5
    except OSError as error:
        return _without_file(error, rank)
    log("left", reason=control.stop_reason or "done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
