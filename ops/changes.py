"""Which settings may change in a living run, and how: by `set` at once, or by restarting one side with them.

Some only the new process can judge (a type that its device lacks). So a restart's settings are new until the side has
become ready with them; if it refuses them before, those of before are put back (ops/supervisor.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class NewSettings:
    """Settings that one side is restarted with and has not become ready with yet."""

    numbers: tuple[int, ...]
    """Of the restarts that brought them: this one, and earlier ones that did not become ready before it."""
    names: frozenset[str]
    """Processes that are to become ready with them."""
    before: dict[str, Any]
    """What they were, by name."""
    now: dict[str, Any]
    undo: Callable[[dict[str, Any]], None]
    """Gives settings these values again, for the next life; raises OSError."""

    def after(self, earlier: NewSettings | None) -> NewSettings:
        """The same, with those that were new already when these came: what is put back then is what was before both."""
        if earlier is None:
            return self
        numbers, names = (*earlier.numbers, *self.numbers), earlier.names | self.names
        return NewSettings(numbers, names, self.before | earlier.before, earlier.now | self.now, self.undo)


@dataclass(frozen=True)
class Refusal:
    """New settings that a process left with before it was ready; those of before are put back."""

    numbers: tuple[int, ...]
    line: str
    exit_code: int


def in_words(values: dict[str, Any]) -> str:
    """Word settings as `section.key=value, ...`."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )


def values_of(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values that a config has for the settings that overrides name."""
    plain = config.model_dump(mode="json")
    return {key: _value(plain, key) for key in (override.partition("=")[0].strip() for override in overrides)}


def put_back(run_dir: Path, config: Config, values: dict[str, Any]) -> Config:
    """Give settings the values that they had, whatever else has changed meanwhile, and write config.yaml."""
    raw: dict[str, Any] = yaml.safe_load(dump_config(config))
    for key, value in values.items():
        *sections, last = key.split(".")
        node = raw
        for section in sections:
            node = node[section]
        node[last] = value
    changed = config_from(raw, source="what was before")
    write_config(run_dir, changed)
    return changed


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
