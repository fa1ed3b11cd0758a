"""The step on a GPU: compiled parts, FlexAttention, and everything in one CUDA graph. The only file that captures.

Owns the graph and its memory pool. Inputs are the tensors of the TrainStep, which never move: packs are copied into
them, checkpoints too. The eager twin is the same `on_device`, run line by line. A capture that fails leaves the eager
path in place, with one line that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from consumer.attention import flex_attention_of, flex_rows
from consumer.drafter import Pieces, heads, rms_norm, spread, without_anchors
from consumer.step import TrainStep

WARM_UP_RUNS = 3
Say = Callable[[str], None]


def prepare(step: TrainStep, compile_parts: bool, cuda_graph: bool, say: Say) -> bool:
    """Make `step.run` fast on its GPU; returns whether it replays a graph. Weights and counters stay as they are.

    With compile_parts the pieces between the products and the attention are compiled, one by one (regional: seconds,
    not minutes); without, attention is dense and takes Q x (T + Q) memory.
    """
    step.execute = step.on_device
    if compile_parts:
        step.drafter.pieces = compiled_pieces()
        options = _flex_options(step)

        def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
            return flex_rows(q, k, v, block_mask, options)

        step.attention = partial(flex_attention_of, flex=torch.compile(flex, dynamic=False))
    if not cuda_graph:
        return False
    try:
        step.execute = captured(step).replay
    except Exception as error:  # any failure of the capture, whatever its type, has the same remedy
        torch.cuda.synchronize()
        reason = (str(error) or repr(error)).splitlines()[0]
        say(f"capture of the training step failed, going on without a CUDA graph (slower, same results): {reason}")
        return False
    return True


def _flex_options(step: TrainStep) -> dict[str, int] | None:
    """Tile sizes of FlexAttention where its defaults were measured to be slower (H200, heads of 128, bfloat16)."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if not hopper or step.shape.head_dim != 128 or step.flat.weights.dtype != torch.bfloat16:
        return None
    forward = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
    backward = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
    return forward | backward | {"bwd_num_warps": 4, "bwd_num_stages": 2}


def compiled_pieces() -> Pieces:
    """Return the functions between the matrix products, fast: kernels of our own, the lighter ones compiled."""
    from consumer import piece_kernels  # Triton is there on a GPU machine only

    compile_one = partial(torch.compile, dynamic=False, fullgraph=True)
    return Pieces(
        rms_norm=compile_one(rms_norm),
        add_norm=piece_kernels.add_norm,
        gated=piece_kernels.gated,
        heads=compile_one(heads),
        spread=compile_one(spread),
        without_anchors=compile_one(without_anchors),
    )


def captured(step: TrainStep) -> torch.cuda.CUDAGraph:
    """Capture `step.on_device` and return the graph; trial runs before it compile and leave no trace in the state."""
    stream, step.side_stream = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    step.armed.zero_()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            step.on_device()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            step.on_device()
    finally:
        step.armed.fill_(1.0)
    return graph
