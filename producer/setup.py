"""From a target's folder to a target that is checked, cut after its deepest tap, and as fast as it gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from configs.schema import Config
from ops.telemetry import Log
from producer import packed_recurrent, selfcheck
from producer.linear import measure_products, replace_products, restore_products
from producer.packed import CannotPack
from producer.row_plan import row_length
from producer.target import TargetDescription, TargetError
from producer.trunk import Target, load_model, random_model

Load = Callable[[], nn.Module]
WARM_UP_TOKENS = 512


def make_target(
    description: TargetDescription,
    config: Config,
    device: torch.device,
    log: Log,
    load: Load | None = None,
    memory: Path | None = None,
) -> Target:
    """Load, check and prepare the target. `load`: returns the whole model; None loads `description.path`.

    `memory`: a file of measured products (gpu/products.py), so that a restarted target measures nothing again.

    Raises TargetError where the check fails. Reading packed and compiling are tried first, checked, and given up with
    one line where they do not work.
    """
    make = random_model if config.target.random_weights else load_model
    model = load() if load else make(description, config.target, device)
    target = Target(model, description.target_layer_ids)
    if slow := packed_recurrent.warning(target.layers, device):
        log("warning", detail=slow)
    if config.target.layout != "rows":
        target.tune(config.pack.tokens)
    lengths = selfcheck.lengths_for(target.long_documents_from, config.pack.tokens)
    reference = selfcheck.read_alone(target, lengths)
    selfcheck.check_head(target, model, reference)
    del model

    def check() -> None:
        selfcheck.check_target(target, reference, description.dtype, _shape(target, config, lengths))

    why = _choose_layout(target, config, check)
    if not config.target.final_hidden:
        target.cut()
    may_compile = config.target.compile and device.type == "cuda" and not target.is_spread
    tokens = _shape(target, config, lengths)
    compiled = _compile(target, config, tokens, check, log, memory) if may_compile else False
    log(
        "model loaded",
        model=description.name,
        device=device,
        taps=description.target_layer_ids,
        layers_run=len(target.layers),
        reads="packed" if target.is_packed else f"rows ({why})",
        long_documents_from=target.long_documents_from if target.is_packed else None,
        compiled=compiled,
        check="passed",
    )
    return target


def _shape(target: Target, config: Config, lengths: tuple[int, int]) -> int:
    """Tokens of the row that the check reads: the shape that will be used, so that it is compiled once."""
    return max(config.pack.tokens, sum(lengths)) if target.is_packed else row_length(max(lengths), 1)


def _choose_layout(target: Target, config: Config, check: Callable[[], None]) -> str:
    """Read packed if asked or possible, else in rows; returns why rows. Raises TargetError if neither passes."""
    if config.target.layout == "rows":
        check()
        return "target.layout"
    try:
        target.use_packed()
        check()
        return ""
    except Exception as no:  # a kernel library of another version raises whatever it likes; rows do without it
        known = isinstance(no, CannotPack | TargetError)
        why = str(no) if known else f"{type(no).__name__}: {(str(no) or repr(no)).splitlines()[0]}"
    if config.target.layout == "packed":
        raise TargetError(f"target.layout: packed is not possible ({why}); use auto or rows")
    target.use_rows()
    check()
    return why


def _compile(
    target: Target, config: Config, tokens: int, check: Callable[[], None], log: Log, memory: Path | None
) -> bool:
    """Compile the layers, for one row too where rows are read; a failure leaves the eager ones in place.

    Of a packed target, whose row has `tokens`, the large matrix products are measured as well (linear.py).
    """
    try:
        replaced = replace_products(target, tokens) if target.is_packed else 0
        target.compile()
        if replaced:
            measured = measure_products(target, tokens, lambda what: log("warning", detail=what), memory)
            log("products", layers=replaced, measured=measured)
        check()
        if not target.is_packed:
            one_row = torch.zeros(1, min(WARM_UP_TOKENS, config.pack.tokens), dtype=torch.int64)
            target.forward(one_row.to(target.device))
    except Exception as error:  # any failure of the compiler, whatever its type, has the same remedy
        target.uncompile()
        restore_products(target)
        reason = (str(error) or repr(error)).splitlines()[0]
        log("warning", detail=f"not compiled, going on without target.compile (slower, same states): {reason}")
        return False
    return True
