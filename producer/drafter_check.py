"""Whether the target is whole and the drafter that is asked for can start, judged before anything is loaded.

Its shape must be possible, its initial weights must be there and fit, and a checkpoint to go on from must be of the
same drafter, target and packs. Preparation and `python launch.py plan` ask here; the drafter itself looks again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open

from configs.drafter_shape import DrafterShape, drafter_shape, tensor_shapes
from configs.load import ConfigError
from configs.resume import conflicts, with_drafter
from configs.run_files import newest_step
from configs.schema import Config
from producer.target import TargetDescription, read_config, refuse_batches
from producer.target_source import check_weights


def check_drafter(run_dir: Path, config: Config, target: TargetDescription, identity: Mapping[str, Any]) -> None:
    """Refuse a drafter that could not start in `run_dir`, which need not exist. Raises ConfigError.

    identity: what a checkpoint of this run is bound to, as far as it is known.
    """
    try:
        shape = planned_shape(config, target)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    check_resume(run_dir, with_drafter(identity, shape))
    if config.drafter.init_from is not None and newest_step(run_dir) < 1:  # else the weights are the checkpoint's
        check_initial(Path(config.drafter.init_from), shape, target.target_layer_ids)


def check_target(config: Config, folder: Path, needs_weights: bool = True) -> None:
    """Refuse a target whose weights are not all there, or that could not be measured at the end as the run asks.

    needs_weights: False for a plan, which a folder without any will do for. Raises TargetNotFound, TargetError.
    """
    if not config.target.random_weights and (needs_weights or any(folder.glob("*.safetensors"))):
        check_weights(folder)
    if config.evaluation.enabled:
        refuse_batches(read_config(folder).get_text_config(), config.target.model)


def planned_shape(config: Config, target: TargetDescription) -> DrafterShape:
    """The drafter's shape before its reduced vocabulary is chosen: only how many rows it has. Raises ValueError."""
    vocab = config.drafter.draft_vocab_size
    reduced = range(vocab) if vocab is not None and vocab < target.vocab_size else None
    return drafter_shape(config.drafter, target.as_dict(), reduced)


def check_resume(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint that was trained with something else. Raises ConfigError."""
    newest = newest_step(run_dir)
    if newest < 1:  # the initial weights alone bind nothing
        return
    folder = run_dir / "checkpoints" / f"step-{newest}"
    try:
        meta = json.loads((folder / "checkpoint.json").read_text())
    except (OSError, ValueError):  # damaged: the drafter rejects it, takes an older one and looks again
        return
    if differing := conflicts(meta.get("identity", {}), identity, str(folder)):
        raise ConfigError(differing)


def check_initial(folder: Path, shape: DrafterShape, target_layer_ids: Sequence[int]) -> None:
    """Refuse an exported drafter that is not there, or whose tensors or taps are others. Raises ConfigError."""
    found = _tensors_of(folder)
    wanted = tensor_shapes(shape)
    names = [*wanted, *(name for name in found if name.startswith("layers.") and name not in wanted)]
    for name in names:
        if found.get(name) != wanted.get(name):
            there, here = (str(list(sizes[name])) if name in sizes else "none" for sizes in (found, wanted))
            _refuse(folder, f"its {name} is {there}, this run's drafter has {here}; set drafter.* to its shape")
    taps = _taps_of(folder)
    if taps is not None and taps != list(target_layer_ids):
        _refuse(
            folder,
            f"learnt from layers {taps}, this run taps {list(target_layer_ids)}; set target.target_layer_ids to them",
        )


def _tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        got = "a folder without them" if folder.is_dir() else "no such folder"
        _refuse(folder, f"expected an exported drafter's folder (config.json, *.safetensors), got {got}")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            _refuse(folder, f"{file.name} is damaged ({error})")
    return found


def _taps_of(folder: Path) -> list[int] | None:
    """0-based layers whose output was taken; None where config.json does not say, which the drafter will refuse."""
    try:
        config = json.loads((folder / "config.json").read_text())
        after = config.get("aux_hidden_state_layer_ids")  # speculators counts the layers that have run
        taps = config.get("dflash_config", {}).get("target_layer_ids") if after is None else [n - 1 for n in after]
    except (ValueError, TypeError, AttributeError) as error:
        _refuse(folder, f"config.json is not an exported drafter's ({error})")
    return None if taps is None else list(taps)


def _refuse(folder: Path, why: str) -> NoReturn:
    raise ConfigError([f"drafter.init_from: {folder}: {why}"])
