"""What the pages say can be done: commands parse, settings exist, links lead somewhere, the recipe fits its run."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

import launch
from configs.load import ConfigError, config_from, load_config
from consumer.export.readme import readme
from evaluation.facts import find_facts
from ops.errors import NoResource
from ops.plan import Machine, plan
from tests.helpers.export_facts import facts_named

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "data" / "README.md"]
RECIPE = ROOT / "docs" / "recipe.md"
CONFIG = ROOT / "configs" / "qwen3.6-27b.yaml"
SHAPE = ROOT / "configs" / "random_targets" / "27b_hybrid"
ANY_SETTING = "section.key=value"
STANDS_FOR = {"CONFIG": "configs/demo.yaml"}
EIGHT = Machine([str(number) for number in range(8)], [141 * 10**9] * 8, 64 * 10**9, 128)


def commands_of(page: Path) -> list[str]:
    """Indented lines of a page that run launch.py, a backslash joining the next one; no comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4}.*?\bpython launch\.py (.*)$", text, re.MULTILINE)
    return [re.sub(r"\s+#.*$", "", line) for line in lines]


def is_setting(word: str) -> bool:
    """Whether a word gives a setting, and not just their form."""
    return "=" in word and ANY_SETTING not in word


def words_of(command: str) -> list[str]:
    """A command as a shell splits it; the brackets of a synopsis and the dots of "and so on" are left out."""
    command = command.replace("--set ...", f"--set {ANY_SETTING}")
    words = (word if is_setting(word) else word.strip("[]") for word in shlex.split(command))
    return [word for word in words if word not in ("", "...")]


def settings_of(command: str) -> Iterator[str]:
    """The settings that a command makes, but the one that only stands for any."""
    words = words_of(command)
    for word, value in itertools.pairwise(words):
        if word == "--set" and is_setting(value):
            yield value


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands are parsed and do nothing; their options are collected here."""
    found: list[Any] = []
    quiet = {name: (lambda options: found.append(options) or 0, *rest) for name, (_, *rest) in launch.COMMANDS.items()}
    monkeypatch.setattr(launch, "COMMANDS", quiet)
    return found


def test_every_command_of_the_pages_parses(parsed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    commands = [(page.name, command) for page in PAGES for command in commands_of(page)]
    assert {"README.md", "recipe.md"} <= {name for name, _ in commands}
    for name, command in commands:
        try:
            code = launch.main([STANDS_FOR.get(word, word) for word in words_of(command)])
        except SystemExit:
            code = 2
        assert code == 0, f"{name}: {command}: {capsys.readouterr().err}"
    assert len(parsed) == len(commands)


def test_every_setting_that_a_page_makes_exists() -> None:
    inline = [text for page in PAGES for text in re.findall(r"`([^`\n]*--set [^`\n]*)`", page.read_text("utf-8"))]
    commands = [*inline, *(command for page in PAGES for command in commands_of(page))]
    made = {setting for command in commands for setting in settings_of(command)}
    assert len(made) > 2
    for setting in made:
        config_from({}, [setting])


def headings_of(page: Path) -> set[str]:
    """What links call the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    lost = []
    for link in links:
        name, _, heading = link.partition("#")
        file = page.parent / name if name else page
        if "://" not in link and not (file.exists() and (not heading or heading in headings_of(file))):
            lost.append(link)
    assert lost == []


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Qwen3.6-27B's: its text model behind the multimodal wrapper, without weights."""
    text = json.loads((SHAPE / "config.json").read_text()) | {"max_position_embeddings": 262144}
    del text["architectures"]
    described = transformers.Qwen3_5Config(text_config=text, architectures=["Qwen3_5ForConditionalGeneration"])
    folder = tmp_path_factory.mktemp("target")
    described.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((SHAPE / name).read_bytes())
    return folder


def test_the_configuration_for_a_real_target_fits_eight_gpus(stand_in: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is a ring?"}\n')
    overrides = [f"target.model={stand_in}", f"data.sources=[{{path: {prompts}}}]"]
    text = "\n".join(plan(load_config(CONFIG, overrides), find_facts, EIGHT))
    for said in (
        "layers 64 (full_attention, linear_attention), of which 62 are run",
        "taps [1, 16, 31, 46, 61]; head its own, 248320 rows; mask token 248070",
        "read packed",
        "ring: 5 of 8 slots of 421.5 MB (8192 tokens), 16.87 GB",  # docs/recipe.md says so too
        "drafter: 1730.2 million parameters, 5 layers (sliding_attention), block size 16",
        *(f"target{number}: GPU {number}," for number in range(5)),
        *(f"drafter{number}: GPU {number + 5}," for number in range(3)),
    ):
        assert said in text, text
    docker = EIGHT._replace(shm_free_bytes=64 << 20)
    with pytest.raises(NoResource, match="--shm-size"):
        plan(load_config(CONFIG, overrides), find_facts, docker)


def test_missing_prompts_are_one_line_before_anything_of_the_target_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(CONFIG)
    with pytest.raises(ConfigError) as no:
        plan(config, lambda _config, _on_gpu: pytest.fail("the target was looked for"), EIGHT)
    assert str(no.value) == f"data.sources: no such file or folder: {config.data.sources[0].path}"


def test_the_recipes_serve_commands_are_those_of_the_export() -> None:
    config, recipe = load_config(CONFIG), RECIPE.read_text(encoding="utf-8")
    assert recipe.count("qwen3.6-27b-dflash") > 1
    exported = readme(facts_named("mixed"), "zlab", "qwen3.6-27b-dflash")
    commands = [line for line in exported.splitlines() if line.startswith("    ")]
    assert len(commands) == 4
    assert [line for line in commands if line not in recipe.splitlines()] == []
    assert facts_named("mixed").shape.block_size == config.drafter.block_size
