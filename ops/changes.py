"""Which settings may change in a living run, and how: by `set` at once, or by restarting one side with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.load import ConfigError, config_from, dump_config
from configs.schema import Config
from ops.paths import DRAFTER, TARGET
from ops.run_folder import write_config

LIVE = ("training.log_every_steps", "ring.min_ready", "ring.pick")
_DRAFTER = (
    "optimizer.",
    "loss.",
    "anchors.",
    "training.",
    "checkpoint.",
    "ring.min_ready",
    "ring.pick",
    "ring.max_age",
)
_TARGET = (
    "target.compile",
    "target.attention",
    "target.layout",
    "target.state_band",
    "target.threads",
    "pack.row_buckets",
    "pack.max_row_tokens",
)
_FIXED = ("training.devices", "training.epochs")
RESTARTABLE = {DRAFTER: _DRAFTER, TARGET: _TARGET}


def change(config: Config, overrides: Sequence[str], allowed: Sequence[str], what: str) -> Config:
    """Apply `section.key=value` to a config; raises ConfigError for bad values and for keys outside `allowed`."""
    raw: dict[str, Any] = yaml.safe_load(dump_config(config))
    changed = config_from(raw, overrides, source="--set")
    keys = [override.partition("=")[0].strip() for override in overrides]
    bad = [key for key in keys if not key.startswith(tuple(allowed)) or key in _FIXED]
    if bad:
        may = ", ".join(f"{key}*" if key.endswith(".") else key for key in allowed)
        old, new = config.model_dump(mode="json"), changed.model_dump(mode="json")
        raise ConfigError(
            [
                f"{key}: {what} cannot change it from {_value(old, key)} to {_value(new, key)} (it can change {may}); "
                "start a new run"
                for key in bad
            ]
        )
    return changed


def _value(plain: dict[str, Any], key: str) -> Any:
    for word in key.split("."):
        plain = plain[word]
    return plain


def change_on_restart(run_dir: Path, config: Config, overrides: Sequence[str], role: str) -> Config:
    """Change the settings that one side is restarted with, and write them to config.yaml."""
    if not overrides:
        return config
    changed = change(config, overrides, RESTARTABLE[role], f"a restart of the {role} alone")
    write_config(run_dir, changed)
    return changed


def change_live(run_dir: Path, config: Config, overrides: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Change settings that living processes take over; returns the config (written) and the values by name."""
    changed = change(config, overrides, LIVE, "'set'")
    write_config(run_dir, changed)
    dumped = changed.model_dump(mode="json")
    values = {}
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        values[f"{section}.{key}"] = dumped[section][key]
    return changed, values
