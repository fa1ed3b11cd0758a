"""The house rules, checked by reading the source: layout, who imports whom, sizes, vocabulary."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OURS = ("configs", "shm_ring", "gpu", "ops", "producer", "consumer", "evaluation")
ALLOWED = {  # package -> what it may import of ours
    "shm_ring": set(),
    "configs": set(),
    "ops": {"configs", "shm_ring"},
    "gpu": {"configs"},
    "producer": {"configs", "shm_ring", "gpu", "ops.control", "ops.telemetry"},
    "consumer": {"configs", "shm_ring", "gpu", "ops.control", "ops.telemetry"},
    "evaluation": {"configs", "consumer", "producer"},
}
FORBIDDEN = {  # package -> libraries that it must never import
    "shm_ring": {"torch", "zmq", "transformers", "pydantic", "rich"},
    "configs": {"torch", "zmq", "transformers", "rich"},
    "ops": {"torch", "transformers"},
    "gpu": {"transformers", "rich", "zmq"},
    "producer": {"rich"},
    "consumer": {"rich"},
    "evaluation": {"zmq"},
}
EXCEPTIONS = {("shm_ring/tensors.py", "torch")}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions, but not for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_allowed(name: str, package: str) -> bool:
    return any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[package] | {package})


@pytest.mark.parametrize("package", OURS)
def test_imports_follow_the_table(package: str) -> None:
    wrong = []
    for path in sources(package):
        relative = path.relative_to(REPOSITORY).as_posix()
        names = imports_of(path)
        whole = {name for name in names if name.split(".")[0] in OURS}
        # "from ops import control" names both ops and ops.control: the longer name decides
        leaves = {name for name in whole if not any(other.startswith(name + ".") for other in whole)}
        wrong += [f"{relative} imports {name}" for name in leaves if not is_allowed(name, package)]
        roots = {name.split(".")[0] for name in names}
        wrong += [
            f"{relative} imports {root}" for root in roots & FORBIDDEN[package] if (relative, root) not in EXCEPTIONS
        ]
    assert wrong == []


def test_the_launcher_imports_no_torch_and_no_side_at_import() -> None:
    tree = ast.parse((REPOSITORY / "launch.py").read_text())
    names = {
        name
        for node in tree.body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name.split(".")[0] for name in names} & {
        "torch",
        "transformers",
        "producer",
        "consumer",
        "evaluation",
    } == set()


def test_files_and_functions_stay_small() -> None:
    long = []
    for path in [*sources(*OURS, "benchmarks", "tests"), REPOSITORY / "launch.py"]:
        text = path.read_text()
        relative = path.relative_to(REPOSITORY).as_posix()
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            long.append(f"{relative}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long.append(f"{relative}:{node.lineno} {node.name}: {size} lines")
    assert long == []


BANNED = re.compile(
    r"\b(teacher|student|draft head|aux states?|aux layers?|auxiliary hidden)\b", re.IGNORECASE
)  # architecture: vocabulary; names of other projects' files and keys are quoted where an export needs them


def test_the_vocabulary_is_kept() -> None:
    wrong = []
    for path in sources(*OURS):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if BANNED.search(line) and "vocabulary: quoted" not in line:
                wrong.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    assert wrong == []


def test_each_process_has_its_loop_on_one_screen() -> None:
    for package in ("producer", "consumer"):
        tree = ast.parse((REPOSITORY / package / "loop.py").read_text())
        run = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
        assert (run.end_lineno or 0) - run.lineno < 50


@pytest.mark.parametrize("package", OURS)
def test_public_modules_classes_and_functions_say_what_they_do(package: str) -> None:
    silent = []
    for path in sources(package):
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            silent.append(str(path))
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(REPOSITORY)}: {node.name}")
    assert silent == []
