"""The step on a GPU: compiled parts, the faster attention, everything in one CUDA graph. The only file that captures.

Owns the graph and its memory pool. Inputs are the tensors of the TrainStep, which never move: packs are copied into
them, checkpoints too. The eager twin is the same `on_device`, run line by line. A capture that fails leaves the eager
path in place, with one line that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from consumer.attention_choice import choose
from consumer.drafter import Pieces, heads
from consumer.products import tuned
from consumer.step import TrainStep

WARM_UP_RUNS = 3
Say = Callable[[str], None]
Result = TypeVar("Result")


def prepare(
    step: TrainStep,
    compile_parts: bool,
    cuda_graph: bool,
    say: Say,
    attention: Literal["auto", "flex", "intervals"] = "auto",
    tune: bool = True,
) -> bool:
    """Make `step.run` fast on its GPU; returns whether it replays a graph. Weights and counters stay as they are.

    With compile_parts the pieces between the products and the attention become kernels, one by one (seconds, not
    minutes), `attention` is taken ("auto": attention_choice.py), and with `tune` the algorithms of the large bfloat16
    products are measured (products.py); without, attention is dense and takes Q x (T + Q) memory. `say` hears of what
    did not work.
    """
    step.execute, step.execute_micro = step.on_device, step.micro_on_device
    if compile_parts:
        step.drafter.pieces = fast_pieces(step.shape.head_dim)
        choice = choose(step, attention, say)
        step.attention, step.attention_note = choice.make, choice.name
        if tune and step.flat.weights.dtype == torch.bfloat16:
            step.tuned_products = _trial(step, lambda: tuned(step.on_device, say))
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


def fast_pieces(head_dim: int) -> Pieces:
    """Return the functions between the matrix products as kernels of our own; other head sizes are compiled."""
    from consumer import piece_kernels  # Triton is there on a GPU machine only

    plain = torch.compile(heads, dynamic=False, fullgraph=True)
    return Pieces(
        rms_norm=piece_kernels.rms_norm,
        add_norm=piece_kernels.add_norm,
        gated=piece_kernels.gated,
        heads=piece_kernels.heads if head_dim & (head_dim - 1) == 0 else plain,
        spread=piece_kernels.spread,
        without_anchors=piece_kernels.without_anchors,
    )


def captured(step: TrainStep, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture `work` of `step` and return the graph; trial runs before it compile and leave no trace in the state.

    With several ranks their reduction is part of the graph, and all ranks capture at the same time. Only this thread is
    held to what a capture allows then: NCCL's watchdog goes on looking at its events.
    """
    return _trial(step, lambda: _captured(step, work))


def _captured(step: TrainStep, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream, step.side_stream = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    mode = "global" if step.reduction is None else "thread_local"
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        work()
    return graph


def _trial(step: TrainStep, work: Callable[[], Result]) -> Result:
    """Do `work` with steps that leave no trace in weights, moments, counters and metrics."""
    step.armed.zero_()
    try:
        return work()
    finally:
        step.armed.fill_(1.0)
        if step.carried is not None:
            step.carried.zero()
