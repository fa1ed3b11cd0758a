"""An experiment of benchmarks/scaling.py: gradients added up by copies, which the GPUs' copy engines make over NVLink.

NCCL's kernels take multiprocessors from the products beside which they run; copies take none. The gradients lie in
memory that the other ranks read (torch.distributed._symmetric_memory, without multicast). Of each part of them a rank
fetches its share from all others, adds it to its own, and then fetches the shares that the others have added up. What
remains on the multiprocessors is the addition, of 1/ranks of a part, and the ranks' waiting for each other.
Needs all GPUs visible to each process.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.flat import FlatWeights

ALIGNED = 64  # elements
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def symmetric_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor [size] that other ranks can be given access to. For FlatWeights.make_grads."""
    import torch.distributed._symmetric_memory as symmetric

    os.environ.setdefault(NO_MULTICAST, "1")
    made: Tensor = symmetric.empty(size, dtype=dtype, device=device)
    return made.zero_()


class CopyEngines:
    """A Reduction: the sum of all ranks' gradients, part by part, beside the backward pass. Safe inside a capture."""

    def __init__(self, flat: FlatWeights, group: dist.ProcessGroup, meeting: dist.ProcessGroup) -> None:
        """Give all ranks of `meeting` access to `flat.grads`, from symmetric_zeros; `group`, NCCL's, adds the sums."""
        import torch.distributed._symmetric_memory as symmetric

        self._flat, self._group = flat, group
        symmetric.enable_symm_mem_for_group(meeting.group_name)
        self._handle: Any = symmetric.rendezvous(flat.grads, meeting)
        self._rank, self._world = self._handle.rank, self._handle.world_size
        shape, dtype = flat.grads.shape, flat.grads.dtype
        self._theirs = {k: self._handle.get_buffer(k, shape, dtype) for k in range(self._world) if k != self._rank}
        self._stream = torch.cuda.Stream()

    def begin(self) -> None:
        """Listen to the gradients of this backward pass."""
        self._flat.on_written = self._add_up

    def finish(self, sums: Tensor) -> None:
        """Add up the rest; the current stream waits for that, and no rank reads another's gradients any more then."""
        self._flat.on_written = None
        self._add_up(slice(self._flat.num_matrix_elements, self._flat.size))
        dist.all_reduce(sums, group=self._group)
        with torch.cuda.stream(self._stream):
            self._handle.barrier(channel=0)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _add_up(self, part: slice) -> None:
        share = -(-(part.stop - part.start) // (self._world * ALIGNED)) * ALIGNED
        starts = [min(part.start + k * share, part.stop) for k in range(self._world + 1)]
        shares = [slice(*ends) for ends in pairwise(starts)]
        grads, own = self._flat.grads, shares[self._rank]
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
