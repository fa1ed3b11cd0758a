"""Read a YAML file and --set overrides into a Config, or say in one line per problem what is wrong.

A problem is worded: where, what is wrong (expected, got), and the nearest right name for an unknown key.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import Config


class ConfigError(Exception):
    """The configuration is refused; `problems` holds one line each. Exit code 2."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class NoSources(ConfigError):
    """The configuration names no data to train on. Exit code 3."""

    exit_code = 3


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read `path` and apply `section.key=value` overrides; raises ConfigError with every problem found."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); give the path of a YAML file"]) from None
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: expected sections (run:, target:, ...), got {type(raw).__name__}"])
    return config_from(raw, overrides, source=str(path))


def config_from(raw: dict[str, Any], overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Validate a nested dictionary with overrides applied; raises ConfigError."""
    for override in overrides:
        apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError([f"{source}: {_line(item)}" for item in error.errors()]) from None


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in `raw`; the value is read as YAML, so lists and null work. Raises ConfigError."""
    name, equals, value = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"--set {override}: expected section.key=value"])
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError([f"--set {override}: the value is not valid YAML"]) from None
    node = raw
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError([f"--set {override}: {key} is a value, not a section"])
        node = child
    node[keys[-1]] = parsed


def require_sources(config: Config) -> None:
    """Refuse a configuration without data, which a run or a plan can do nothing with. Raises NoSources."""
    if not config.data.sources:
        raise NoSources(
            [
                "data.sources: expected at least one source, got none; name a file, a folder or a dataset, such as "
                "--set 'data.sources=[{path: chats.jsonl}]'"
            ]
        )


def dump_config(config: Config) -> str:
    """Write the complete, resolved configuration as YAML; load_config reads it back to an equal Config."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def _line(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{_hint(item['loc'])}"
    if not where:
        return message
    return f"{where}: {message[0].lower()}{message[1:]}, got {item['input']!r}"


def _hint(location: Sequence[int | str]) -> str:
    """Name the nearest right key: in the same section first, then anywhere, there the nearest as a whole path."""
    *section, wrong = (str(part) for part in location)
    named = [part for part in section if not part.isdigit()]  # data.sources.0 is a section like data.sources
    paths = _paths(Config)
    siblings = [path[-1] for path in paths if path[:-1] == named]
    if near := difflib.get_close_matches(wrong, siblings, n=1):
        return f"; did you mean {'.'.join([*section, near[0]])}?"
    near = difflib.get_close_matches(wrong, [path[-1] for path in paths], n=1)
    whole = [".".join(path) for path in paths if path[-1:] == near]
    near = difflib.get_close_matches(".".join([*named, wrong]), whole, n=1, cutoff=0)
    return f"; did you mean {near[0]}?" if near else ""


def _paths(model: type[BaseModel], prefix: Sequence[str] = ()) -> list[list[str]]:
    """Every key as its path of names; those of a list's entries too, without their number."""
    found: list[list[str]] = []
    for name, field in model.model_fields.items():
        found.append([*prefix, name])
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += _paths(part, [*prefix, name])
    return found
