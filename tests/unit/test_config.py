"""Refusals of the configuration: one line per problem, with the place and the nearest right name."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, config_from, dump_config, load_config
from configs.schema import Config

REPOSITORY = Path(__file__).parents[2]


def problems_of(raw: dict[str, object], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from(raw, overrides)
    return caught.value.problems


def test_unknown_key_names_the_nearest_right_one() -> None:
    assert problems_of({"optimizer": {"learing_rate": 1e-4}})[0].startswith(
        "config: optimizer.learing_rate: unknown key"
    )
    (line,) = problems_of({"optimizer": {"weight_decy": 0.1}})
    assert "did you mean optimizer.weight_decay?" in line


def test_key_one_level_too_high_is_found_in_its_section() -> None:
    (line,) = problems_of({"block_size": 8})
    assert "unknown key" in line
    assert "drafter.block_size" in line


def test_a_boolean_is_not_a_number() -> None:
    assert len(problems_of({"drafter": {"block_size": True}})) == 1
    assert len(problems_of({"optimizer": {"lr": True}})) == 1


def test_scientific_notation_is_read_as_a_number() -> None:
    assert config_from({}, ["optimizer.lr=1e-4"]).optimizer.lr == 1e-4


def test_every_problem_has_its_own_line() -> None:
    lines = problems_of({"drafter": {"block_size": 1, "layout": "round"}, "ring": {"num_slots": "many"}})
    assert len(lines) == 3
    assert all(line.startswith("config: ") and "\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["drafter.sliding_window=8"], "drafter.sliding_window"),
        (["drafter.num_layers=2", "drafter.layer_types=[full_attention]"], "drafter.layer_types"),
        (["loss.labels=soft"], "target.final_hidden"),
        (["ring.min_ready=9", "ring.num_slots=8"], "ring.min_ready"),
    ],
)
def test_impossible_combinations_are_refused(overrides: list[str], words: str) -> None:
    assert words in " ".join(problems_of({}, *overrides))


def test_malformed_override_is_refused() -> None:
    assert "expected section.key=value" in problems_of({}, "optimizer.lr")[0]


def test_missing_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_every_field_is_documented() -> None:
    sections = [field.annotation for field in Config.model_fields.values()]
    undocumented = [
        f"{section.__name__}.{name}"  # type: ignore[union-attr]
        for section in sections
        for name, field in section.model_fields.items()  # type: ignore[union-attr]
        if not field.description
    ]
    assert undocumented == []
