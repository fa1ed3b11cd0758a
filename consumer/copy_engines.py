"""Gradients of drafters on the GPUs of one host, added up by copies that the GPUs' copy engines make over NVLink.

NCCL's kernels take multiprocessors from the products beside which they run; copies take none. The gradients lie in
memory that the other ranks read (torch.distributed._symmetric_memory, without multicast). Of each part of them a rank
fetches its share from all others, adds it to its own, and then fetches the shares that the others have added up. What
remains on the multiprocessors is the addition, of 1/ranks of a part, and the ranks' waiting for each other.
Shapes: N all parameters in a row, as in flat.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.flat import FlatWeights

Result = TypeVar("Result")
ALIGNED = 64  # elements
TRIAL_SIZE = 1 << 16
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Multicast is not used; each process sees its own GPU alone, so that all of them are number 0."""


def symmetric_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor [size] that other ranks can be given access to. For FlatWeights' gradients."""
    import torch.distributed._symmetric_memory as symmetric

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    made: Tensor = symmetric.empty(size, dtype=dtype, device=device)
    return made.zero_()


class CopyAdder:
    """Adds up parts of a tensor over all ranks, in place, on a stream of its own."""

    def __init__(self, grads: Tensor, meeting: dist.ProcessGroup) -> None:
        """Give all ranks of `meeting` access to `grads` [N], from symmetric_zeros; all ranks do this at once."""
        import torch.distributed._symmetric_memory as symmetric

        self._grads = grads
        symmetric.enable_symm_mem_for_group(meeting.group_name)
        self._handle: Any = symmetric.rendezvous(grads, meeting)
        self._rank, self._world = self._handle.rank, self._handle.world_size
        others = [rank for rank in range(self._world) if rank != self._rank]
        self._theirs = {rank: self._handle.get_buffer(rank, grads.shape, grads.dtype) for rank in others}
        self._stream = torch.cuda.Stream()

    def add_up(self, part: slice) -> None:
        """Begin to add up a part that the current stream has written."""
        shares = shares_of(part, self._world)
        grads, own = self._grads, shares[self._rank]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._handle.barrier(channel=0)  # every rank has written this part
            for theirs in self._theirs.values():
                landed = torch.empty_like(grads[own])
                landed.copy_(theirs[own])
                grads[own].add_(landed)
            self._handle.barrier(channel=0)  # every rank has added up its share
            for rank, theirs in self._theirs.items():
                grads[shares[rank]].copy_(theirs[shares[rank]])

    def wait(self) -> None:
        """Let the current stream wait for everything begun; no rank reads another's gradients any more then."""
        with torch.cuda.stream(self._stream):
            self._handle.barrier(channel=0)
        torch.cuda.current_stream().wait_stream(self._stream)


class CopyEngines:
    """A Reduction: the sum of all ranks' gradients, part by part, beside the backward pass. Safe inside a capture."""

    def __init__(self, flat: FlatWeights, group: dist.ProcessGroup, meeting: dist.ProcessGroup) -> None:
        """`flat.grads` is from symmetric_zeros; `group`, NCCL's, adds up the sums; `meeting`: all ranks, gloo's."""
        self._flat, self._group, self._sent = flat, group, 0
        self._adder = CopyAdder(flat.grads, meeting)

    def begin(self) -> None:
        """Listen to the gradients of this backward pass."""
        self._sent = 0
        self._flat.on_written = self._send

    def finish(self, sums: Tensor) -> None:
        """Add up the rest; the current stream then waits for everything. Raises RuntimeError for a missing gradient."""
        self._flat.on_written = None
        self._flat.check_announced(self._sent)
        self._adder.add_up(slice(self._flat.num_matrix_elements, self._flat.size))
        dist.all_reduce(sums, group=self._group)
        self._adder.wait()

    def _send(self, part: slice) -> None:
        self._sent += part.stop - part.start
        self._adder.add_up(part)


def shares_of(part: slice, world: int) -> list[slice]:
    """Cut a part into one share for each rank, of ALIGNED elements or multiples; the last ones may be empty."""
    share = -(-(part.stop - part.start) // (world * ALIGNED)) * ALIGNED
    starts = [min(part.start + rank * share, part.stop) for rank in range(world + 1)]
    return [slice(*ends) for ends in pairwise(starts)]


def refusal(device: torch.device, meeting: dist.ProcessGroup, largest: Callable[[int], int]) -> str:
    """Add up a small tensor with all ranks; return "" where that works on each of them, else why it does not here.

    `largest` returns the largest of all ranks' numbers: no rank waits for one that has failed already.
    """

    def together(stage: Callable[[], Result]) -> Result:
        """Do a stage, on all ranks; RuntimeError on each of them if it fails on one."""
        why = ""
        try:
            made = stage()
        except Exception as error:  # whatever a driver or a container does not allow
            why = (str(error) or repr(error)).splitlines()[0]
        if largest(int(bool(why))):
            raise RuntimeError(why or "another drafter cannot")
        return made

    try:
        small = together(lambda: symmetric_zeros(TRIAL_SIZE, torch.float32, device))
        adder = together(lambda: CopyAdder(small, meeting))
        together(lambda: _add_up_small(small, adder, dist.get_rank(meeting), dist.get_world_size(meeting)))
    except RuntimeError as error:
        return str(error)
    return ""


def _add_up_small(small: Tensor, adder: CopyAdder, rank: int, world: int) -> None:
    """Add up rank + 1 of every rank; RuntimeError where the sum is another one."""
    small.fill_(rank + 1)
    adder.add_up(slice(0, TRIAL_SIZE))
    adder.wait()
    wanted = world * (world + 1) / 2
    if not bool((small == wanted).all()):
        raise RuntimeError(f"a sum of {wanted:g} came out as {float(small.min()):g} to {float(small.max()):g}")
