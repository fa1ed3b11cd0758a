"""Use and memory of the GPUs, where nvidia-ml-py is installed; nothing otherwise."""

from __future__ import annotations

from typing import Any

_ready: bool | None = None


def read_gpus() -> list[dict[str, Any]]:
    """Return index, use in percent (None where the driver does not say, as with MIG) and memory in bytes of each GPU.

    Empty without nvidia-ml-py, without a driver, and from the first failure on.
    """
    global _ready
    if _ready is False:
        return []
    try:
        import pynvml
    except ImportError:
        _ready = False
        return []
    try:
        if _ready is None:
            pynvml.nvmlInit()
            _ready = True
        return [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        _ready = False
        return []


def _read_gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    except nvml.NVMLError:
        use = None
    return {"index": index, "use_pct": use, "memory_bytes": memory.used, "memory_total_bytes": memory.total}
