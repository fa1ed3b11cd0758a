"""Refusals of the configuration: one line per problem, with the place and the nearest right name."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, NoSources, config_from, dump_config, load_config, require_sources
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


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("target.device=cpu", "target.devices"),
        ("training.device=cpu", "training.devices"),
        ("checkpoint.every_step=5", "checkpoint.every_steps"),
        ("evaluation.every_step=5", "evaluation.every_steps"),
        ("data.regenerate.batchsize=3", "data.regenerate.batch_size"),
        ("data.sources=[{path: a.jsonl, wight: 2}]", "data.sources.0.weight"),
        ("optimizer.block_size=8", "drafter.block_size"),
    ],
)
def test_the_nearest_right_name_is_looked_for_in_the_same_section_first(override: str, nearest: str) -> None:
    (line,) = problems_of({}, override)
    assert line.endswith(f"unknown key; did you mean {nearest}?")


def test_a_run_needs_a_source_and_a_configuration_alone_does_not() -> None:
    config = config_from({})
    with pytest.raises(NoSources, match=r"data\.sources: expected at least one source, got none") as caught:
        require_sources(config)
    assert caught.value.exit_code == 3
    require_sources(config_from({}, ["data.sources=[{path: a.jsonl}]"]))


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
