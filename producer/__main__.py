"""Start one target process: `python -m producer --run-dir RUN --rank K`. Started by the launcher, or by hand.

The device comes from DFLASH_DEVICE ("cpu" or "cuda:0"), the number of CPU threads from OMP_NUM_THREADS.
Exit codes: 0 done or told to stop, 2 configuration, 3 data, 4 a peer died, 5 resources.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ops.control import Control, OpsError
from ops.telemetry import Log, complain


def main() -> int:
    """Run the process named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m producer", description="One target process of a run")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    log = Log("target", arguments.rank)
    try:
        control = Control.start(arguments.run_dir, "target", arguments.rank)  # before anything slow is imported
    except OpsError as error:
        complain(str(error))
        return error.exit_code
    with control:
        return _run(arguments.run_dir, arguments.rank, control, log)


def _run(run_dir: Path, rank: int, control: Control, log: Log) -> int:
    import torch

    from configs.load import ConfigError, load_config
    from producer.corpus.documents import DataError
    from producer.loop import run
    from producer.states import BadStates
    from producer.target import TargetError
    from shm_ring.errors import RingError, RingStopped

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    device = torch.device(os.environ.get("DFLASH_DEVICE", "cpu"))
    try:
        run(load_config(run_dir / "config.yaml"), run_dir, rank, device, control, log)
    except RingStopped:
        pass
    except (ConfigError, DataError, TargetError, BadStates, RingError) as error:
        complain(str(error))
        return error.exit_code
    except torch.OutOfMemoryError as error:
        complain(f"target {rank}: out of GPU memory: {str(error).splitlines()[0]}")
        return 5
    log("left", reason=control.stop_reason or "done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
