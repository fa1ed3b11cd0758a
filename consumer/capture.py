"""The step on a GPU: compiled parts, the faster attention, everything in one CUDA graph. The only file that captures.

Owns the graph and its memory pool. Inputs are the tensors of the TrainStep, which never move: packs are copied into
them, checkpoints too. The eager twin is the same `on_device`, run line by line. A capture that fails leaves the eager
path in place, with one line that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from consumer.attention_choice import choose
from consumer.drafter import Pieces, heads, rms_norm, spread, without_anchors
from consumer.step import TrainStep

WARM_UP_RUNS = 3
Say = Callable[[str], None]


def prepare(
    step: TrainStep,
    compile_parts: bool,
    cuda_graph: bool,
    say: Say,
    attention: Literal["auto", "flex", "intervals"] = "auto",
) -> bool:
    """Make `step.run` fast on its GPU; returns whether it replays a graph. Weights and counters stay as they are.

    With compile_parts the pieces between the products and the attention are compiled, one by one (regional: seconds,
    not minutes) and `attention` is taken, "auto" the faster one as measured now (attention_choice.py); without,
    attention is dense and takes Q x (T + Q) memory. `say` hears of what did not work.
    """
    step.execute, step.execute_micro = step.on_device, step.micro_on_device
    if compile_parts:
        step.drafter.pieces = compiled_pieces()
        choice = choose(step, attention, say)
        step.attention, step.attention_note = choice.make, f"{choice.name} {choice.measured_ms or ''}".strip()
    if not cuda_graph:
        return False
    try:
        step.execute = captured(step, step.on_device).replay
        if step.carried is not None:
            step.execute_micro = captured(step, step.micro_on_device).replay
    except Exception as error:  # any failure of the capture, whatever its type, has the same remedy
        torch.cuda.synchronize()
        reason = (str(error) or repr(error)).splitlines()[0]
        say(f"capture of the training step failed, going on without a CUDA graph (slower, same results): {reason}")
        return False
    return True


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


def captured(step: TrainStep, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture `work` of `step` and return the graph; trial runs before it compile and leave no trace in the state.

    With several ranks their reduction is part of the graph, and all ranks capture at the same time. Only this thread is
    held to what a capture allows then: NCCL's watchdog goes on looking at its events.
    """
    stream, step.side_stream = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    step.armed.zero_()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        mode = "global" if step.reduction is None else "thread_local"
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            work()
    finally:
        step.armed.fill_(1.0)
        if step.carried is not None:
            step.carried.zero()
    return graph
