"""The step on a GPU: compiled parts, the faster attention, everything in one CUDA graph. The only file that captures.

Owns the graphs and the memory pool that they share: one graph for each number of anchors (`anchors.num: auto`), and one
more for micro-steps. They never run at the same time and leave nothing in it, so it is as large as the largest of them
needs, which is captured first; all use the same streams, since memory is reused within a stream only. Inputs are the
tensors of the TrainStep, which never move: packs are copied into them, checkpoints too. The eager twin is the same
`on_device`, run line by line. A capture that fails leaves the eager path in place, with one line that says why.

Several ranks agree after each capture, outside of it, and all go on without a graph where it failed on one: the runs
before the next capture hold collectives, in which the others would wait for a rank that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from consumer.attention_choice import choose, compiled
from consumer.drafter import Pieces, heads
from consumer.step import TrainStep
from gpu.products import tuned

WARM_UP_RUNS = 3
Say = Callable[[str], None]
Agree = Callable[[int], int]
"""Returns the largest of all ranks' numbers; every rank calls it at the same place. `int`: one rank."""
Result = TypeVar("Result")


class Pool(NamedTuple):
    """Memory and the stream that graphs are captured with."""

    handle: Any
    stream: torch.cuda.Stream

    @classmethod
    def new(cls) -> Pool:
        """Make an empty one."""
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream())


class CaptureFailed(Exception):
    """A capture failed on one rank at least, and all ranks know."""


def prepare(
    step: TrainStep,
    compile_parts: bool,
    cuda_graph: bool,
    say: Say,
    attention: Literal["auto", "flex", "intervals"] = "auto",
    tune: bool = True,
    memory: Path | None = None,
    agree: Agree = int,
) -> bool:
    """Make `step.run` fast on its GPU; returns whether it replays a graph. Weights and counters stay as they are.

    With compile_parts the pieces between the products and the attention become kernels, one by one (seconds, not
    minutes), `attention` is taken ("auto": attention_choice.py), and with `tune` the algorithms of the large bfloat16
    products are measured (products.py), or known from the folder `memory`; without, attention is dense and takes
    Q x (T + Q) memory. `say` hears of what did not work.

    Several ranks: all replay graphs, or none. Raises what fails before the capture itself, where the others wait for
    this rank's collectives and nothing but its end lets them go.
    """
    step.execute, step.execute_micro = step.on_device, step.micro_on_device
    if compile_parts:
        step.drafter.pieces = fast_pieces(step.shape.head_dim, len(step.anchor_sizes))
        choice = choose(step, attention, say)
        step.attention, step.attention_note = choice.make, choice.name
        products = memory / "products.json" if memory else None
        if tune and step.flat.weights.dtype == torch.bfloat16:
            found = each_size(step, lambda: _trial(step, lambda: tuned(step.on_device, say, products)))
            step.tuned_products = max(found.values())
    if not cuda_graph:
        return False
    try:
        _capture_all(step, agree)
    except Exception as error:  # any failure of the capture, whatever its type, has the same remedy
        if step.reduction is not None and not isinstance(error, CaptureFailed):
            raise
        torch.cuda.synchronize()
        reason = (str(error) or repr(error)).splitlines()[0]
        say(f"capture of the training step failed, going on without a CUDA graph (slower, same results): {reason}")
        return False
    return True


def each_size(step: TrainStep, work: Callable[[], Result]) -> dict[int, Result]:
    """Do `work` with each number of anchors, the largest first; the step's own is then set again."""
    own, results = step.num_anchors, {}
    try:
        for size in reversed(step.anchor_sizes):
            step.num_anchors = size
            results[size] = work()
    finally:
        step.num_anchors = own
    return results


def _capture_all(step: TrainStep, agree: Agree) -> None:
    """Capture the step with each number of anchors; from then on it replays the graph of the number that is set."""
    torch.cuda.empty_cache()  # what measuring products and an earlier graph held
    pool = Pool.new()
    graphs = each_size(step, lambda: captured(step, step.on_device, pool, agree))
    if step.carried is not None:
        micro = each_size(step, lambda: captured(step, step.micro_on_device, pool, agree))
        step.execute_micro = lambda: micro[step.num_anchors].replay()
    step.execute = lambda: graphs[step.num_anchors].replay()


def fast_pieces(head_dim: int, num_sizes: int = 1) -> Pieces:
    """Return the functions between the matrix products as kernels of our own; other head sizes are compiled."""
    from consumer import piece_kernels  # Triton is there on a GPU machine only

    power_of_two = head_dim & (head_dim - 1) == 0
    return Pieces(
        rms_norm=piece_kernels.rms_norm,
        add_norm=piece_kernels.add_norm,
        gated=piece_kernels.gated,
        heads=piece_kernels.heads if power_of_two else compiled(heads, num_sizes, fullgraph=True),
        spread=piece_kernels.spread,
        without_anchors=piece_kernels.without_anchors,
    )


def captured(
    step: TrainStep, work: Callable[[], None], pool: Pool | None = None, agree: Agree = int
) -> torch.cuda.CUDAGraph:
    """Capture `work` of `step` and return the graph; trial runs before it compile and leave no trace in the state.

    `pool`: shared with other graphs of this step; None: one of its own.

    With several ranks their reduction is part of the graph, and all ranks capture at the same time. Only this thread is
    held to what a capture allows then: NCCL's watchdog goes on looking at its events. Raises CaptureFailed on all.
    """

    def both() -> torch.cuda.CUDAGraph:
        own = pool or Pool.new()
        _warm_up(step, work, own)
        return _on_all_or_none(lambda: _record(step, work, own), agree)

    return _trial(step, both)


def _on_all_or_none(work: Callable[[], Result], agree: Agree) -> Result:
    """Do what each rank does by itself; raises CaptureFailed on every rank if it failed on any."""
    result: list[Result] = []
    why = "it failed on another drafter"
    try:
        result.append(work())
    except Exception as error:  # whatever it is, the others are to know of it first
        why = str(error) or repr(error)
    if agree(int(not result)):
        raise CaptureFailed(why)
    return result[0]


def _warm_up(step: TrainStep, work: Callable[[], None], pool: Pool) -> None:
    stream, step.side_stream = pool.stream, step.side_stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _record(step: TrainStep, work: Callable[[], None], pool: Pool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    mode = "global" if step.reduction is None else "thread_local"
    with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode=mode):
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
