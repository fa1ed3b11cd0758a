"""Read a YAML file and --set overrides into a Config, or say in one line per problem what is wrong.

A problem is worded: where, what is wrong (expected, got), and the nearest right name for an unknown key.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import Config


class ConfigError(Exception):
    """The configuration is refused; `problems` holds one line each. Exit code 2."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


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
    """Name the nearest right key: in the same section first, then anywhere."""
    wrong = str(location[-1])
    paths = {path.rsplit(".", 1)[-1]: path for path in _paths(Config)}
    section = ".".join(str(part) for part in location[:-1] if not isinstance(part, int))
    near = difflib.get_close_matches(wrong, [key for key, path in paths.items() if path.startswith(section)], n=1)
    near = near or difflib.get_close_matches(wrong, list(paths), n=1)
    return f"; did you mean {paths[near[0]]}?" if near else ""


def _paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _paths(field.annotation, f"{prefix}{name}.")
    return found
