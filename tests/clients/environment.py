"""Virtual environments with other projects' packages, beside the torch and transformers that are installed here.

An environment sees this one's packages through a .pth file; only what is missing is installed, without dependencies,
since both clients pin torch and transformers tightly. It is kept in the cache by its list of packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

BUILD_LIMIT_S, RUN_LIMIT_S = 240, 300
SPECULATORS = (
    "speculators==0.9.0", "hs-connectors==0.9.0", "loguru==0.7.3", "pydantic-settings>=2", "python-dotenv>=1",
    "openai<3", "jiter", "distro", "sniffio", "httpx<1", "httpcore<2", "datasets==5.1.0", "dill",
    "multiprocess", "pyarrow", "pandas", "xxhash", "aiohttp", "python-dateutil", "six", "multidict", "yarl",
    "propcache", "aiosignal", "frozenlist", "attrs", "aiohappyeyeballs",
)  # fmt: skip
DFLASH = ("dflash==0.1.0",)


def client_python(packages: tuple[str, ...]) -> Path:
    """Build, or find, the environment with `packages` and return its interpreter; skips where none can be built."""
    parents = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    key = hashlib.sha256("\n".join([*packages, *parents, sys.version]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dflash-ring" / "clients"
    folder = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the tests may be building it
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder, packages, parents)
    return folder / "bin" / "python"


def _build(folder: Path, packages: tuple[str, ...], parents: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=BUILD_LIMIT_S)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "parent.pth").write_text("\n".join(parents) + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-q",
        "--no-deps",
        "--target",
        str(site),
    ]
    try:
        ended = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{packages[0]} was not installed within {BUILD_LIMIT_S} s")
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"{packages[0]} cannot be installed here: {reason[:200]}")
    (folder / "complete").write_text("")


def run_client(packages: tuple[str, ...], script: str, *words: str) -> None:
    """Run a script of tests/clients with the client's interpreter; its output is shown if it fails."""
    command = [str(client_python(packages)), str(Path(__file__).with_name(script)), *words]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # small models: more threads only wait for each other
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, env=environment)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
