"""Small things that both sides do with a device: values go there without a wait, and events mark its time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to `device`; page-locked on the way to a GPU, so that nobody waits."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def marks_of(device: torch.device) -> Callable[[], torch.cuda.Event] | None:
    """Return what marks the time of `device`: on a GPU an event in the current stream; None: the host's clock does."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return lambda: stream.record_event(torch.cuda.Event(enable_timing=True))
